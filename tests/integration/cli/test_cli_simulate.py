"""``chrion simulate`` for scenarios with servers."""

from __future__ import annotations

import itertools
import json
import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import chrion
from chrion.cli import console
from chrion.zoo import build
from command_line import Chrion, assert_each_refused, assert_refused
from seams.commands import replace_clock

FIND = ("--find", "servers", "--until", "p99<=5ms")


def test_tables(cli: Chrion) -> None:
    """A bundled scenario prints a table and one line of progress on stderr; ``--details`` adds two tables."""
    words = ("simulate", "table7", "--set", "requests=500")
    code, out, err = cli(*words)
    assert (code, err) == (0, "chrion: simulating table7, 500 requests in each of 4 patterns ...\n")
    assert "table7: 9 models on 1 server" in out
    assert "violations: requests whose execution time alone is above 1.05 x the latency of variant gpu" in out
    assert "By " not in out
    out = cli(*words, "--details")[1]
    assert "By model" in out
    assert "By server" in out
    assert "response time is above 80 ms" in cli(*words, "--set", "slo.latency_ms=80", "--set", "measure=response")[1]


def test_a_long_step_reports_its_progress(cli: Chrion, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where stderr is no terminal, lines about a step are at least 10 s apart."""
    clock = itertools.count(0.0, 6.0)  # each replication takes 6 s
    replace_clock(monkeypatch, console, SimpleNamespace(monotonic=lambda: next(clock), perf_counter=time.perf_counter))
    err = cli("simulate", "table7", "--set", "requests=50", "--replications", "4", "--workers", "1")[2]
    assert [line.rpartition("table7")[2] for line in err.splitlines()] == [" ...", ", 2 of 4 ...", ", 4 of 4 ..."]


def test_intervals_that_are_wider_than_their_figures_are_marked(cli: Chrion) -> None:
    """No share and no time is below zero: such intervals come from too few values, here of two seeds."""
    words = ("simulate", "table7", "--set", "requests=60", "--replications", "2", "--workers", "1")
    out = cli(*words)[1]
    assert "±?: wider than the figure itself" in " ".join(out.split())
    body = json.loads(cli(*words, "--json")[1])["intervals"]
    wide = [name for row in body.values() for name, entry in row.items() if entry["half_width"] > entry["mean"]]
    assert out.count("±?") == len(wide) + 1  # and the legend
    assert {"violations", "p50"} <= {*wide}
    assert all(float(half) <= float(value) for value, half in re.findall(r"([\d.]+)%? ±([\d.]+)", out))


def test_json_and_plot(cli: Chrion) -> None:
    """``--json`` prints one object and nothing else; ``--plot`` writes a picture as well."""
    Path("s.toml").write_text('[workload]\nkind = "csv"\npath = "t.csv"\n')
    Path("t.csv").write_text("time_s,model\n0,baseline\n1,batch-1\n2,baseline\n")
    code, out, _ = cli("simulate", "s.toml", "--json", "--plot", "p.png")
    assert code == 0
    body = json.loads(out)
    assert [pattern["arrivals"] for pattern in body["patterns"]] == [3, 3, 3]
    assert [pattern["loads"] for pattern in body["patterns"]] == [2, 2, 2]
    assert Path("p.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "words",
    [
        ("--replications", "2"),
        ("--sweep", "max_waiting=10,20"),
        ("--find", "rate", "--until", "p99<=5s", "--replications", "2"),
        ("--cells", "2", "--replications", "2"),
    ],
)
def test_all_results_say_where_they_are_from(cli: Chrion, words: tuple[str, ...]) -> None:
    """Hardware whose figures are from a datasheet is named, and JSON has the version and the scenario."""
    Path("s.toml").write_text(
        'patterns = ["gpu"]\n[workload]\nrequests = 200\n[[servers]]\ncount = 2\nhardware = "a10+epyc-16"\n'
    )
    given = ("simulate", "s.toml", "--workers", "1", *words)
    code, out, err = cli(*given)
    assert code == 0, err
    assert "a10+epyc-16: estimated from datasheets: " in out
    found = json.loads(cli(*given, "--json")[1])
    assert (found["version"], found["seed"], found["estimated_hardware"]) == (chrion.__version__, 0, ["a10+epyc-16"])
    assert found["content"]["workload"]["requests"] == 200


def test_equal_replications_are_named(cli: Chrion) -> None:
    """A trace without random execution times is simulated equally for all seeds, which a line says."""
    Path("s.toml").write_text('patterns = ["gpu"]\n[workload]\nkind = "csv"\npath = "t.csv"\n')
    Path("t.csv").write_text("time_s,model\n0,baseline\n1,batch-1\n2,baseline\n")
    words = ("simulate", "s.toml", "--replications", "2", "--workers", "1")
    line = "all replications are equal: seeds change nothing in this scenario"
    assert line in cli(*words, "--set", "variants.gpu.jitter_cv=0")[1]
    assert line not in cli(*words, "--set", "variants.gpu.jitter_cv=0.2")[1]


def test_the_plot_names_the_cost_of_patterns(cli: Chrion) -> None:
    """If servers have a price, the legend has that of an hour."""
    words = ("simulate", "table7", "--set", "requests=500")
    for options, cost in ((("--set", "cost_per_hour=1.5"), True), ((), False)):
        code, _, err = cli(*words, *options, "--plot", "plot.svg", "--force")
        assert code == 0, err
        assert ("1.50 per hour" in Path("plot.svg").read_text()) is cost


def test_sweep(cli: Chrion) -> None:
    """A sweep lists the points of its grid in order; without ``--json``, a table has a column for the swept key."""
    options = ("simulate", "table7", "--set", "requests=100", "--sweep", "gpu_memory_gb=9,12", "--workers", "1")
    code, out, _ = cli(*options, "--sweep", "seed=1,2", "--json", "--plot", "p.png")
    assert code == 0
    values = [point["values"] for point in json.loads(out)["points"]]
    assert values == [{"gpu_memory_gb": memory, "seed": seed} for memory in (9, 12) for seed in (1, 2)]
    assert Path("p.png").exists()
    code, out, _ = cli(*options)
    assert code == 0
    assert "gpu_memory_gb" in out
    assert "memory-optimal" in out
    assert "late models: those with more than 1 % violations" in out
    assert out.startswith("violations: requests whose execution time alone is above 1.05 x the latency of variant gpu")
    assert "±: half the width of the 95 % confidence interval (batch means); ±?: wider than the figure itself" in out
    assert "±" not in cli(*options[:2], "--set", "requests=5", *options[4:])[1]  # too few for intervals
    assert "violations: as each point" in cli(*options[:4], "--sweep", "slo.factor=2,3", "--workers", "1")[1]


def test_bad_input_is_one_line(cli: Chrion) -> None:
    """Bad input ends with exit code 2, one line on stderr and nothing on stdout."""
    Path("planned.toml").write_text('[[models]]\nname = "one"\nvariants.gpu.plan = "nope.json"\n')
    cases: list[tuple[tuple[str, ...], str]] = [
        (("nonesuch.toml",), "scenario 'nonesuch.toml' not found"),
        (("table7", "--set", "rate_per_s=-1"), "workload.rate_per_s: expected a number above 0"),
        (("table7", "--set", "gpu_memory_gb=5"), "needs 1643 MB, the largest server has 1000 MB for models"),
        (("table7", "--sweep", "gpu_memory_gb"), "expected key=value,value"),
        (("table7", "--ray", "local"), "--ray: only a sweep runs on a cluster"),
        (("table7", "--plot", "no/such/folder.png"), "cannot be written"),
        (
            ("table7", "--find", "servers"),
            "--find: --until is missing (for example --find servers --until 'violations<=1%')",
        ),
        (("table7", "--until", "p99<=5ms"), "--until: --find is missing (for example --find rate --until 'p99<=5ms')"),
        (
            ("table7", "--find", "cores", "--until", "p99<=5ms"),
            "--find: expected one of servers, memory, models, rate, found 'cores'",
        ),
        (("table7", "--replications", "1"), "--replications: expected 2 or more, found 1"),
        (
            ("table7", "--replications", "3", "--sweep", "seed=1,2"),
            "--sweep and --replications cannot be combined (for intervals, --replications with one value at a time",
        ),
        (("table7", "--replications", "3", "--export", "r.csv"), "--replications and --export cannot be combined"),
        (("table7", "--keep-warm-up"), "--keep-warm-up: only --find leaves out the warm-up of runs"),
        (("table7", *FIND, "--replications", "1"), "--replications: expected 2 or more, found 1"),
        (("table7", *FIND, "--cells", "2"), "--find and --cells cannot be combined"),
        (("table7", "--cells", "3"), "--cells: expected a divisor of the number of servers of each group, 1"),
        (("table7", *FIND, "--sweep", "seed=1,2"), "--find and --sweep cannot be combined"),
        (("table7", "--sweep", "seed=1,2", "--details"), "--sweep and --details cannot be combined"),
        (("table7", "--sweep", "seed=1,2", "--sweep", "seed=3"), "--sweep: key 'seed' occurs twice"),
        (("azure-capacity",), "https://github.com/Azure/AzurePublicDataset; name it with --set workload.path=FILE"),
        (("planned.toml",), "planned.toml with requests=100: models.one.variants.gpu.plan: nope.json: cannot be read"),
    ]
    rest = ("--set", "requests=100", "--json")
    assert_each_refused(cli, [(("simulate", *words, *rest), about) for words, about in cases])


def test_a_value_of_a_sweep_is_checked_before_the_work_begins(cli: Chrion) -> None:
    """No step is announced before a wrong value is refused."""
    for swept in ("policy=lru,fifo", "gpu_memory_gb=4-8", "eviction=lru,lfux"):
        code, out, err = cli("simulate", "table7", "--sweep", swept)
        assert (code, out) == (2, "")
        assert err.startswith("chrion: error: ")


def test_find(cli: Chrion) -> None:
    """``--find`` prints the bracket of each pattern and the values around it, and all as JSON, and writes them."""
    words = ("simulate", "table7", "--set", "requests=100", "--set", 'patterns=["gpu", "memory-optimal"]', "--find")
    code, out, _ = cli(*words, "servers", "--until", "swapping<=1%", "--json", "--export", "curve.csv")
    assert code == 0
    body = json.loads(out)
    assert (body["unit"], [limit["pattern"] for limit in body["limits"]]) == ("servers", ["gpu", "memory-optimal"])
    assert body["limits"][1]["possible"]["amount"] == body["limits"][1]["certain"]["amount"] == 1
    curves = sum(len(limit["curve"]) for limit in body["limits"])
    assert len(Path("curve.csv").read_text().splitlines()) == 1 + curves
    out = cli(*words, "servers", "--until", "swapping<=1%", "--set", "cost_per_hour=2")[1]
    assert "memory-optimal: 1 server; 1: swapping 0.00% [0.00% to 0.00%], 2.00 an hour" in out
    assert "a to b" not in out, "no limit is a range"
    code, out, _ = cli(*words, "memory", "--until", "violations<=0%")
    assert code == 0
    (reason,) = (line for line in out.splitlines() if line.startswith("gpu: no value"))
    assert reason.startswith("gpu: no value meets violations <= 0.00%; tried: ")
    assert reason.endswith(" GB a GPU; more changes nothing")
    assert "violations: requests whose execution time alone is above 1.05 x the latency of " in out
    assert "memory: gpu_memory_gb, of which 4 GB (reserved_gb) are for contexts and scratch space" in out
    out = cli(*words, "memory", "--until", "violations<=90%", "--replications", "3")[1]
    (reason,) = (line for line in out.splitlines() if line.startswith("gpu: below"))
    assert reason == "gpu: below 6.1 the models do not fit"
    out = cli(*words, "rate", "--until", "p99<=100ms", "--keep-warm-up")[1]
    assert "requests/s; " in out
    assert "a to b: a clearly meets the condition, b may; [low to high]" in out


def test_cells_and_classes(cli: Chrion) -> None:
    """``--cells`` prints the interval of a sample; a scenario with classes has a table of them."""
    text = '[workload]\nrequests = 400\n[[servers]]\ncount = 4\n[[classes]]\nname = "chat"\nslo_ms = 30.0\n'
    Path("s.toml").write_text(text)
    words = ("simulate", "s.toml", "--set", 'patterns=["gpu"]')
    out = cli(*words, "--cells", "2", "--replications", "2", "--workers", "1")[1]
    assert "2 of 2 cells" in out
    body = json.loads(cli(*words, "--cells", "2", "--replications", "2", "--workers", "1", "--json")[1])
    assert (body["cells"], body["simulated"]) == (2, 2)
    assert body["intervals"]["gpu"]["violations"]["half_width"] > 0.0
    out = cli(*words)[1]
    assert "By class" in out
    assert "chat" in out
    assert "or the class's, and those dropped" in " ".join(out.split())


def test_hardware_that_an_option_names(cli: Chrion) -> None:
    """The output says which figures are estimated, and warns if the scenario's own memory stays."""
    words = ("simulate", "table7", "--set", "requests=50", "--set", 'patterns=["gpu"]', "--workers", "1")
    code, out, err = cli(*words, "--sweep", "hardware=l4,t4")
    assert code == 0
    assert "warning: hardware: gpu_memory_gb" in err
    assert "l4: estimated from datasheets: gpu_speed = 0.6198, cost_per_hour = " in out
    assert "l4: as the scenario gives them: gpu_memory_gb (datasheet: 24), pcie_gb_per_s (datasheet: 2" in out
    points = json.loads(cli(*words, "--sweep", "hardware=l4,t4", "--json")[1])["points"]
    assert [round(point["patterns"][0]["cost_per_hour"], 3) for point in points] == [0.805, 0.526]
    _, out, err = cli(*words, "--set", "hardware=l4", "--set", "gpu_memory_gb=24", "--set", "pcie_gb_per_s=24")
    assert "warning" not in err
    assert "l4: estimated" in out


def test_replications(cli: Chrion) -> None:
    """``--replications`` prints an interval of each figure, as a table or as JSON."""
    words = ("simulate", "table7", "--set", "requests=100", "--replications", "3", "--workers", "1")
    assert "95 % confidence" in cli(*words)[1]
    body = json.loads(cli(*words, "--json")[1])
    assert body["intervals"]["gpu"]["violations"]["half_width"] > 0
    assert len(body["replications"]) == 3


def test_json_describes_its_scenario_and_export_writes_requests(cli: Chrion) -> None:
    """The JSON of a run has the version and all values of the scenario; ``--export`` writes a line for each request."""
    body = json.loads(cli("simulate", "table7", "--set", "requests=30", "--json", "--export", "r.csv")[1])
    assert body["version"] == chrion.__version__
    assert body["content"]["workload"]["requests"] == 30
    assert len(body["content"]["models"]) == 9
    assert len(Path("r.csv").read_text().splitlines()) == 1 + 4 * 30
    assert_refused(cli("simulate", "table7", "--set", "requests=20", "--export", "r.csv"), "add --force")


def test_the_listed_sizes_are_those_of_the_page_and_of_a_run(cli: Chrion) -> None:
    """The page lists the bundled scenarios as ``--list`` does, and a run says how often their requests are sent."""
    page = (Path(chrion.__file__).parents[1] / "docs" / "simulation.md").read_text(encoding="utf-8")
    rows = [line.strip("|").split("|") for line in page.splitlines() if line.startswith("| `")]
    listed = {
        name.strip(" `"): [cell.replace(" ", "") for cell in cells[1:]] for name, *cells in rows if len(cells) == 4
    }
    scenarios = json.loads(cli("simulate", "--list", "--json")[1])["scenarios"]
    assert {s["name"] for s in scenarios} <= listed.keys()
    for s in scenarios:
        expected = [str(s["servers"]), str(s["models"])]
        assert listed[s["name"]][:2] == expected, s["name"]
        assert s["requests"] is None or listed[s["name"]][2] == str(s["requests"])
    assert "in three patterns and with shrinking" in {s["name"]: s for s in scenarios}["table7"]["description"]


def test_the_memory_of_plans_is_named(cli: Chrion, tmp_path: Path) -> None:
    """The output says which figure of a plan file counts as memory, since the gain in swapping depends on it."""
    graph = chrion.load(build("lstm", {"layers": 2, "seq": 2}))
    chrion.partition(graph, chrion.Profile.load("gtx1080ti-paper"), policy="heft").save(tmp_path / "p.json")
    text = '[workload]\nrequests = 20\n[[models]]\nname = "m"\nvariants.a = {plan = "p.json"%s}\n%s'
    resident, other = ', memory = "resident"', 'variants.b = {plan = "p.json"}'
    for given, more, expected in (
        ("", "", "summed"),
        (resident, "", "resident, what one request holds"),
        (resident, other, "summed, every operator with its own weights (Equation 4); of other variants: resident"),
    ):
        (tmp_path / "s.toml").write_text(text % (given, more))
        output = cli("simulate", str(tmp_path / "s.toml"))[1]
        assert f"memory of plans: {expected}" in " ".join(output.split())
    assert "memory of plans" not in cli("simulate", "table7", "--set", "requests=20")[1]
