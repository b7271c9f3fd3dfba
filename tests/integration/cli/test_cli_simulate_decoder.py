"""``chrion simulate`` for scenarios with a decoder."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

import chrion
from chrion.report import decoder_tables
from chrion.serving.simulator.decoder_results import DecoderPoint, summarise
from chrion.serving.simulator.decoder_scenario import build_decoder_scenario
from chrion.serving.simulator.iterations import simulate_decoder
from chrion.serving.simulator.scenario import ScenarioSource, find_scenario
from command_line import Chrion, assert_each_refused
from seams.commands import catch_figures


@pytest.fixture
def scenario(tmp_path: Path) -> str:
    """Return the file of a small scenario."""
    path = tmp_path / "decoder.toml"
    path.write_text("[decoder]\nslots = 500\n[requests]\nrequests = 60\nrate_per_s = 2.0\n", encoding="utf-8")
    return str(path)


def test_a_table_and_json(cli: Chrion, scenario: str) -> None:
    """Both have the figures of the simulation; the JSON output describes its scenario and version."""
    summaries = [summarise(result) for result in simulate_decoder(build_decoder_scenario(find_scenario(scenario)))]
    code, out, _ = cli("simulate", scenario)
    assert code == 0
    assert f"{summaries[0].refused} refused" in out
    for summary in summaries:
        assert any(summary.policy in line and f" {summary.requests_per_s:.2f} " in line for line in out.splitlines())
    code, out, _ = cli("simulate", scenario, "--json")
    found = json.loads(out)
    assert (code, found["schema"], found["scenario"]) == (0, "chrion.decoder-simulation/2", "decoder")
    assert found["content"]["requests"] == {"requests": 60, "rate_per_s": 2.0}
    assert [row["normalised_p50_ms"] for row in found["policies"]] == [s.normalised_p50_ms for s in summaries]


def test_a_sweep_with_a_picture(cli: Chrion, scenario: str, tmp_path: Path) -> None:
    """Every point is simulated; the picture is written."""
    pytest.importorskip("matplotlib")
    picture = tmp_path / "curve.svg"
    sweeps = ("--sweep", "max_batch=1,4", "--sweep", "rate_per_s=1,2")
    code, out, _ = cli("simulate", scenario, *sweeps, "--json", "--plot", str(picture))
    points = json.loads(out)["points"]
    assert code == 0
    assert [tuple(point["values"].values()) for point in points] == [(1, 1), (1, 2), (4, 1), (4, 2)]
    assert picture.read_text(encoding="utf-8").lstrip().startswith("<?xml")
    code, out, _ = cli("simulate", scenario, *sweeps)
    assert code == 0
    assert "written" not in out


@pytest.mark.parametrize(
    "words",
    [
        ("--replications", "2"),
        ("--sweep", "max_batch=1,2"),
        ("--find", "max_batch", "--until", "first_p99<=60s", "--replications", "2"),
    ],
)
def test_all_results_say_where_they_are_from(cli: Chrion, scenario: str, words: tuple[str, ...]) -> None:
    """Hardware whose figures are from a datasheet is named, and JSON has the version and the scenario."""
    options = ("--set", "decoder.hardware=l4", "--set", "decoder.weights_gb=2", "--set", "decoder.slot_bytes=32768")
    given = ("simulate", scenario, "--set", "policies=['iteration']", *options, "--workers", "1", *words)
    code, out, err = cli(*given)
    assert code == 0, err
    assert "l4: estimated from datasheets" in out
    found = json.loads(cli(*given, "--json")[1])
    assert (found["version"], found["seed"], found["estimated_hardware"]) == (chrion.__version__, 0, ["l4"])
    assert found["content"]["requests"] == {"requests": 60, "rate_per_s": 2.0}
    assert "estimated" not in cli("simulate", scenario, "--workers", "1", *words)[1]


def test_both_costs_of_a_term_are_swept(cli: Chrion, scenario: str) -> None:
    """A term of iterations with prompts is another key than that of the others."""
    sweeps = ("--sweep", "fixed_ms=1,2", "--sweep", "decoder.prompt_costs.fixed_ms=3,4")
    code, out, _ = cli("simulate", scenario, *sweeps, "--json")
    assert code == 0
    assert [tuple(point["values"].values()) for point in json.loads(out)["points"]] == [(1, 3), (1, 4), (2, 3), (2, 4)]


def test_a_curve_follows_the_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Points are joined in the order of their rates, also where a higher rate has less throughput."""
    pytest.importorskip("matplotlib")
    drawn = catch_figures(monkeypatch)
    source = ScenarioSource("made", {"decoder": {}, "policies": ["iteration"], "requests": {"requests": 1}}, Path())
    scenario = build_decoder_scenario(source)
    (result,) = simulate_decoder(scenario)
    known = summarise(result)
    throughputs = {4: 2.0, 1: 1.0, 2: 2.5}
    points = [
        DecoderPoint({"requests.rate_per_s": rate}, scenario, (replace(known, requests_per_s=served),))
        for rate, served in throughputs.items()
    ]
    decoder_tables.plot_decoder_sweep(points, tmp_path / "curve.svg")
    (line,) = drawn[0].axes[0].lines
    assert list(line.get_xdata()) == [1.0, 2.5, 2.0]


def test_a_value_of_json_without_requests_is_null(cli: Chrion, scenario: str) -> None:
    """If no request fits, latencies are null, which JSON allows, in place of NaN."""
    code, out, _ = cli("simulate", scenario, "--set", "slots=1", "--set", "prompt_least=9", "--json")
    assert code == 0
    assert [row["normalised_p50_ms"] for row in json.loads(out)["policies"]] == [None, None]


def test_every_request_is_exported(cli: Chrion, scenario: str, tmp_path: Path) -> None:
    """A row for each policy and request has its replica, times and tokens; that of a refused one has no times."""
    path = tmp_path / "requests.csv"
    code, _, _ = cli("simulate", scenario, "--set", "replicas.count=2", "--export", str(path))
    assert code == 0
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    source = find_scenario(scenario).changed({"replicas.count": 2})
    for result in simulate_decoder(build_decoder_scenario(source)):
        own = [row for row in rows if row["policy"] == result.policy]
        assert [int(row["number"]) for row in own] == list(range(60))
        assert [int(row["prompt_tokens"]) for row in own] == result.workload.prompts.tolist()
        for row, end_ms, replica in zip(own, result.ends_ms.tolist(), result.replicas.tolist(), strict=True):
            refused = row["outcome"] == "refused"
            assert refused == math.isnan(end_ms)
            assert row["replica"] == ("" if refused else str(replica))
            assert row["end_ms"] == ("" if refused else f"{end_ms:.6f}")


def test_replications_have_intervals(cli: Chrion, scenario: str) -> None:
    """The table has a row for each figure, the JSON output its mean and half width by policy."""
    code, out, _ = cli("simulate", scenario, "--replications", "2", "--json")
    found = json.loads(out)
    assert (code, found["schema"], found["replications"]) == (0, "chrion.decoder-simulation-replications/1", 2)
    first = found["intervals"]["iteration"]["first_p99"]
    assert first["half_width"] > 0
    assert found["intervals"]["request"]["goodput_per_s"]["mean"] is None
    code, out, _ = cli("simulate", scenario, "--replications", "2")
    assert code == 0
    line = next(line for line in out.splitlines() if line.startswith("first_p99 ms"))
    assert float(line.split()[2]) == pytest.approx(first["mean"], rel=1e-3)
    assert "goodput_per_s" not in out


def test_a_limit_is_found(cli: Chrion, scenario: str, tmp_path: Path) -> None:
    """The output has the limit of each policy, and the file every value that was tried."""
    path = tmp_path / "tried.csv"
    options = ("--set", "policies=['iteration']", "--replications", "2", "--workers", "1", "--export", str(path))
    code, out, _ = cli("simulate", scenario, "--find", "replicas", "--until", "violations<=60", *options)
    assert code == 2
    code, out, _ = cli("simulate", scenario, "--find", "replicas", "--until", "first_p99<=60000ms", *options)
    assert code == 0
    assert any(line.startswith("iteration: 1 replica;") for line in out.splitlines())
    with path.open(encoding="utf-8", newline="") as file:
        assert next(csv.DictReader(file))["replicas"] == "1"
    out = cli("simulate", scenario, "--find", "max_batch", "--until", "first_p99<=60000ms", *options[:-2])[1]
    assert "iteration: 1 request a batch;" in out


def test_what_has_no_meaning_is_refused(cli: Chrion, scenario: str, tmp_path: Path) -> None:
    """Options and keys of server scenarios are refused, and nothing is written."""
    cases: list[tuple[tuple[str, ...], str]] = [
        (("--find", "servers", "--until", "first_p99<=1ms"), "--find: expected one of rate, replicas, max_batch"),
        (("--find", "rate", "--until", "p99<=1ms"), "--until: expected figure<=limit, found 'p99<=1ms'"),
        (("--find", "rate", "--until", "violations<=1%"), "--until violations: the scenario has no objectives"),
        (("--find", "rate", "--until", "first_p99<=1ms", "--replications", "1"), "--replications: expected 2 or more"),
        (("--replications", "0"), "--replications: expected 2 or more"),
        (("--details",), "--details: not for a scenario with a decoder"),
        (("--set", "path=none.csv"), "requests.path: has no effect with kind = 'poisson'"),
        (("--set", "kind=csv"), "requests.rate_per_s: has no effect with kind = 'csv'"),
        (("--set", "lengths=csv"), "requests.path is missing: 'csv' requires a trace file"),
        (("--set", "lengths=csv", "--set", "path=none.csv"), "requests.path: "),
        (("--set", "block=16"), "batching.block: request-level scheduling reserves all slots of a request"),
        (("--plot", "run.svg"), "--plot: a decoder is drawn over a sweep of its rate"),
        (("--plot", "run.svg", "--sweep", "max_batch=1,2"), "--plot: a decoder is drawn over a sweep of its rate"),
        (("--set", "gpu_memory_gb=3"), "unknown key 'gpu_memory_gb'"),
        (
            ("--sweep", "rate_per_s=1,2", "--sweep", "requests.rate_per_s=3"),
            "--sweep: keys 'rate_per_s' and 'requests.rate_per_s' are the same",
        ),
        (
            ("--sweep", "decoder.costs.fixed_ms=1,2", "--sweep", "fixed_ms=3"),
            "--sweep: keys 'decoder.costs.fixed_ms' and 'fixed_ms' are the same",
        ),
        (("--sweep", "max_batch=0,1"), "batching.max_batch: expected a whole number of at least 1"),
    ]
    assert_each_refused(cli, [(("simulate", scenario, *options), about) for options, about in cases])
    assert [path.name for path in tmp_path.iterdir()] == ["decoder.toml"]
