"""Tables of plans, benchmarks and machines."""

from __future__ import annotations

import io
import json
import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from rich.console import Console, RenderableType

from chrion import Plan, Profile, load
from chrion.report.alpha_sweep import alpha_sweep_hints, alpha_sweep_table
from chrion.report.benchmark.comparison import PolicyComparison, PolicyResult
from chrion.report.benchmark.latency import Timing
from chrion.report.capacity_tables import curve_table, limit_lines
from chrion.report.comparison import comparison_table, comparison_verdict
from chrion.report.figure_table import FigureTable
from chrion.report.simulation_tables import simulation_tables, sweep_table
from chrion.report.tables import bench_table, bench_verdict, machine_table, memory_line, plan_table, verdict
from chrion.scheduler import Prediction, fixed_plan
from chrion.serving.simulator import find_scenario, run_sweep, simulate
from chrion.serving.simulator.confidence import Interval
from chrion.serving.simulator.find import MET, MISSED, OPEN, SERVERS, UNFIT, Condition, Limit, Probe, Searched
from chrion.serving.simulator.overrides import parameter_grid
from chrion.serving.simulator.results import to_json
from helpers import MACHINE, alternating_lanes, branches


@pytest.fixture
def plan() -> Plan:
    """Return a plan on two alternating lanes; segment s runs from s to s + 1 ms."""
    graph = load(branches())
    return fixed_plan(graph, alternating_lanes(graph))


def shown(content: RenderableType, width: int = 200) -> str:
    """Return the text that a console of a width prints."""
    output = io.StringIO()
    Console(width=width, file=output, color_system=None).print(content)
    return output.getvalue()


def test_the_plan_table_compares_with_the_accelerator(plan: Plan) -> None:
    """The table shows 40 ms as 20 % less than 50 ms, and 25 MB as 75 % less than 100 MB."""
    object.__setattr__(plan, "predicted", Prediction(40.0, 25.0, 25.0))
    object.__setattr__(plan, "accelerator_only", Prediction(50.0, 100.0, 100.0))
    text = shown(plan_table(plan))
    assert "-20.0 %" in text
    assert "-75.0 %" in text


def test_the_plan_table_has_the_operators_of_the_model_on_one_device(plan: Plan) -> None:
    """A plan in chunks has more operators than the model, of which the other rows are."""
    one = Prediction(50.0, 100.0, 100.0)
    cut = replace(plan, accelerator_only=one, cpu_only=one, cpu_only_cores=2, model_operators=3)
    rows = {row.split("  ")[0]: row.split()[-3:] for row in shown(plan_table(cut)).splitlines()}
    assert (rows["accelerator only"], rows["CPU only"]) == (["3", "0", "0"], ["0", "3", "2"])
    assert rows["fixed placement"] == ["0", "4", "2"]


def test_the_plan_table_without_an_accelerator_compares_with_the_cores(plan: Plan) -> None:
    """Without an accelerator the table shows 40 ms as 20 % less than 50 ms, no memory, and fits 80 columns."""
    for name, value in {
        "accelerator": None,
        "accelerator_only": None,
        "cpu_only": Prediction(50.0, 0.0, 0.0),
        "predicted": Prediction(40.0, 0.0, 0.0),
    }.items():
        object.__setattr__(plan, name, value)
    text = shown(plan_table(plan), width=80)
    assert "-20.0 %" in text
    assert "accelerator" not in text
    assert " MB" not in text
    assert text.count("fixed placement") == 1  # the columns stay in one block


def searched_values(name: str, *amounts: float, met: str = MISSED) -> tuple[Searched, Limit]:
    """Return a quantity, and a limit of its values with figures of 1.37 %, all of which are clear from the first on."""
    probes = [Probe(amount, Interval(0.0137, 0.0), MET, 3) for amount in amounts]
    quantity = SERVERS.searched(name, Condition("violations", 0.02), find_scenario("table7").build())
    beyond = Probe(math.nan, Interval(math.nan, math.nan), UNFIT) if met == UNFIT else None
    return quantity, Limit("arena", probes[0], probes[0], probes[0], beyond, tuple(probes), None)


def test_a_search_that_ends_without_a_limit_is_named() -> None:
    """Of the largest value, the greatest one tried is no limit; of the smallest, the reason why none is below."""
    condition = Condition("violations", 0.02)
    cases = [
        ("models", MISSED, 100_000, "no value above 100000 is tried; it is the most that is permitted"),
        ("servers", MISSED, 1, "no value below 1 is tried; it is the fewest that is permitted"),
        ("memory", UNFIT, 5.7, "below 5.7 the models do not fit"),
    ]
    for name, met, amount, reason in cases:
        quantity, limit = searched_values(name, amount, met=met)
        first, second = limit_lines(quantity, condition, [limit])
        unit = "server" if name == "servers" else quantity.unit
        assert first == f"arena: {amount} {unit}; {amount}: violations 1.37% [1.37% to 1.37%]"
        assert second == f"arena: {reason}"


def test_a_search_among_figures_that_are_not_monotone_says_so() -> None:
    """The line has the value that should be better than the limit."""
    quantity, limit = searched_values("memory", 11.4)
    beyond, worse = (Probe(amount, Interval(0.013, 0.001), MISSED) for amount in (11.3, 14.0))
    limit = replace(limit, beyond=beyond, exception=worse, curve=(beyond, *limit.curve, worse))
    _, line = limit_lines(quantity, Condition("violations", 0.01), [limit])
    assert line.startswith("arena: not monotone: violations is 1.30% at 14")


def test_the_table_of_a_search_has_the_values_that_decide() -> None:
    """Of ten values these are the last one before the limit, all up to the first clear one, and the exception."""
    condition = Condition("violations", 0.01)
    quantity, limit = searched_values("servers", 1)
    met = [MISSED] * 3 + [OPEN] * 2 + [MET, MET, MISSED, MET, MET]
    tried = tuple(Probe(n, Interval(0.02 - n / 1000, 0.0), found, 3) for n, found in enumerate(met, start=1))
    beyond, possible, best, certain = tried[2:6]
    found = replace(limit, possible=possible, best=best, certain=certain, beyond=beyond, curve=tried)

    def amounts(limit: Limit) -> list[str]:
        rows = shown(curve_table(quantity, condition, [limit])).splitlines()
        return [row.split()[1] for row in rows if row.startswith("arena")]

    assert amounts(found) == ["3", "4", "5", "6"]
    assert amounts(replace(found, exception=tried[7])) == ["3", "4", "5", "6", "8"]
    assert amounts(replace(found, possible=None)) == ["1", "10"]
    assert amounts(replace(found, certain=None)) == [str(n) for n in range(1, 11)]


def test_verdicts(plan: Plan) -> None:
    """The verdict says whether an SLO is met, and a session faster, as fast or slower."""
    assert verdict(plan) == "objective: minimum latency"
    priced = replace(plan, alpha=0.3)
    assert verdict(priced) == "objective: minimum latency"  # without an accelerator there is no memory to price
    priced = replace(priced, accelerator_only=plan.predicted)
    assert verdict(priced) == "objective: minimum latency + 0.3 ms/MB * resident memory"
    assert verdict(replace(priced, memory="paper")).endswith(" * memory (Eq. 4)")
    priced = replace(priced, policy="chrion")
    budget = replace(priced, budget_mb=1e6)
    assert verdict(replace(budget, priced=False)).endswith("; objective: minimum latency within the GPU budget")
    assert verdict(budget).endswith(" * resident memory")
    slo = replace(priced, slo_ms=1e6)
    assert verdict(replace(slo, priced=False)).endswith("; objective: minimum resident memory within the SLO")
    unweighed = replace(slo, policy="peft")
    assert verdict(replace(unweighed, priced=False)).endswith("; objective: minimum latency")
    both = replace(slo, budget_mb=1e6)
    assert verdict(replace(both, priced=False)).endswith("minimum resident memory within the GPU budget and the SLO")
    assert verdict(replace(slo, slo_ms=1e-6, priced=False)) == "objective: minimum latency"
    object.__setattr__(plan, "slo_ms", 100.0)
    assert verdict(plan).startswith("meets")
    object.__setattr__(plan, "slo_ms", 1.0)
    assert "SLO" not in verdict(plan)  # a remark of the plan has it
    for ours, expected in (
        (5.0, "is 2.00 times faster than the fastest plain session (a)"),
        (10.1, "is as fast as the"),
        (13.0, "is 30 % slower than the"),
        (20.0, "is 2.0 times slower than the"),
    ):
        timings = [Timing(n, ms, ms, ms, 5) for n, ms in (("hybrid", ours), ("a", 10.0), ("b", 11.0))]
        assert expected in bench_verdict(timings, "hybrid")
        assert bench_verdict(timings, "hybrid", plain=True).startswith("hybrid runs plain onnxruntime; ")
        assert bench_verdict(timings, "hybrid", interference=True).startswith("the machine was too busy")
        assert "0.70" in shown(bench_table(timings, "hybrid", 7.0))  # of a, the fastest baseline


@pytest.mark.parametrize(
    ("measured", "expected"), [(412.5, "measured at most 412.5 MB"), (None, "not known"), (0.0, "0 MB")]
)
def test_memory_is_predicted_both_ways_beside_the_measured_peak(measured: float | None, expected: str) -> None:
    """The line has the sum of Equation 4, the size of an arena, and the measured peak if it is known."""
    line = memory_line(Prediction(40.0, 948.1, 400.5), measured)
    assert all(text in line for text in ("948.1 MB", "400.5 MB", expected))


def planned() -> Plan:
    """Return a plan with figures of many digits."""
    graph = load(branches())
    made = fixed_plan(graph, alternating_lanes(graph))
    figures = Prediction(12345.6, 98765.4, 54321.9)
    return replace(
        made, model="a model of a long name", predicted=figures, accelerator_only=Prediction(999.4, 1643.2, 7.1)
    )


def timings() -> list[Timing]:
    """Return timings of five sessions."""
    names = ("hybrid", "onnxruntime, 1 thread", "onnxruntime, 2 threads", "onnxruntime, default", "folded, CUDA")
    return [Timing(name, 123.4 + i, 111.1 + i, 145.6 + i, 1000 + i) for i, name in enumerate(names)]


def compared() -> FigureTable:
    """Return the table of three policies, one of which found no plan, and four plain sessions."""
    graph = load(branches())
    reason = "policy exact: 1154 operators are more than the 24 that it can place"
    results = (
        PolicyResult("chrion-paper", planned(), 1234.5, 12, 1126, Timing("chrion-paper", 45.6, 44.4, 47.7, 321)),
        PolicyResult("wavefront", planned(), 0.25, 2, 7),
        PolicyResult("exact", None, 0.5, reason=reason),
    )
    return comparison_table(PolicyComparison(graph, Profile(MACHINE, 2, None, {}), results, tuple(timings()[1:])))


def described() -> FigureTable:
    """Return the table of a machine with many cores, a GPU and a provider that does not work."""
    providers = [
        {"name": "CUDAExecutionProvider", "reason": None, "remedy": "", "base_memory_mb": 342.5},
        {
            "name": "WebGpuExecutionProvider",
            "reason": "error 126: no Vulkan 1.3 driver",
            "remedy": "install one",
            "base_memory_mb": None,
        },
    ]
    gpus = [{"name": "NVIDIA H200", "memory_mb": 150754.9, "used_mb": 1234.5}]
    return machine_table(MACHINE, range(0, 96, 2), {"lanes": True, "operators": False}, providers, gpus)


def swept() -> FigureTable:
    """Return the table of a sweep over two keys."""
    source = find_scenario("table7").changed({"requests": 300})
    return sweep_table(run_sweep(source, parameter_grid([("gpu_memory_gb", (8.5, 12)), ("eviction", ("lru", "lfu"))])))


def steps() -> list[tuple[float, Plan]]:
    """Return points of which the last two have the same plan."""
    fast, small = planned(), replace(planned(), digest="other")
    return [(0.0, fast), (0.5, small), (1.0, small)]


def test_alphas_of_one_plan_share_a_row() -> None:
    """A curve with a single step says where it is, and how to see more of it."""
    assert [row[0] for row in alpha_sweep_table(steps()).rows] == ["0", "0.5 to 1"]
    (line,) = alpha_sweep_hints(steps())
    assert line.startswith("the plan changes between 0 and 0.5 ms/MB: --alpha 0:0.5:0.05")
    assert alpha_sweep_hints(steps()[1:]) == []


TABLES: dict[str, Callable[[], FigureTable]] = {
    "plan": lambda: plan_table(planned()),
    "bench": lambda: bench_table(timings(), "hybrid", 99.9),
    "alpha sweep": lambda: alpha_sweep_table([(alpha, planned()) for alpha in (0.0, 0.125, 1.0)]),
    "alpha steps": lambda: alpha_sweep_table(steps()),
    "comparison": compared,
    "machine": described,
    "sweep": swept,
}


def numbers(texts: list[str]) -> Counter[str]:
    """Count the numbers in some texts."""
    return Counter(number for text in texts for number in re.findall(r"\d+(?:\.\d+)?", text))


WIDTHS = (60, 80, 100, 200)


@pytest.mark.parametrize("name", TABLES)
def test_every_figure_can_be_read_back(name: str) -> None:
    """Each figure of a table is printed whole at every width."""
    table = TABLES[name]()
    cells = [cell for row in table.rows for cell in row]
    # Text may be folded within a word; its numbers are read from what is printed without line breaks.
    figures = [row[at] for row in table.rows for at, column in enumerate(table.columns) if not column.is_text]
    letters = Counter("".join("".join(cells).split()))
    for width in WIDTHS:
        printed = shown(table, width)
        assert "…" not in printed, width
        assert all(len(line.rstrip()) <= width for line in printed.splitlines()), width
        assert not numbers(figures) - numbers([printed]), width
        assert not letters - Counter("".join(printed.split())), width


def test_simulation_tables_show_the_figures_of_the_json() -> None:
    """Rates and latencies of every pattern, model and server are printed whole at every width."""
    scenario = find_scenario("table7").changed({"requests": 300}).build()
    results = simulate(scenario)
    body = json.loads(json.dumps(to_json(scenario, results)))
    expected: list[str] = []
    for pattern in body["patterns"]:
        for entry in (pattern, *pattern["per_model"]):
            expected += [
                str(entry["arrivals"]),
                f"{entry['violation_rate'] * 100:.2f}",
                f"{entry['swapping_rate'] * 100:.2f}",
            ]
            expected += [f"{entry['response'][key]:.1f}" for key in ("mean_ms", "p50_ms", "p95_ms", "p99_ms")]
        for server in pattern["per_server"]:
            expected += [f"{server[key] * 100:.1f}" for key in ("gpu_busy", "cpu_busy", "link_busy")]
    assert len(expected) == 4 * (10 * 7 + 3)
    for width in WIDTHS:
        assert not Counter(expected) - numbers([shown(simulation_tables(scenario, results), width)]), width


@pytest.mark.parametrize(
    ("policy_ms", "plain_ms", "line"),
    [
        (
            35.43,
            1.0,
            "fastest policy: cpu, 35.4 ms, 35.4 times slower than the fastest plain session (plain, 1.00 ms)",
        ),
        (
            5.0,
            10.0,
            "fastest policy: cpu, 5.00 ms, 2.00 times faster than the fastest plain session (plain, 10.0 ms)",
        ),
        (
            10.0,
            10.0,
            "fastest policy: cpu, 10.0 ms, as fast as the fastest plain session (plain, 10.0 ms)",
        ),
    ],
)
def test_the_verdict_says_whether_a_policy_is_faster(policy_ms: float, plain_ms: float, line: str) -> None:
    """The verdict calls a policy faster, as fast or slower than the fastest plain session."""
    result = PolicyResult("cpu", planned(), 1.0, 1, 0, Timing("cpu", policy_ms, policy_ms, policy_ms, 9))
    baseline = Timing("plain", plain_ms, plain_ms, plain_ms, 9)
    graph = load(branches())
    assert comparison_verdict(PolicyComparison(graph, Profile(MACHINE, 2, None, {}), (result,), (baseline,))) == line


def test_after_interference_there_is_no_verdict_on_policies() -> None:
    """Where other processes used the cores, no policy is called fastest."""
    timing = Timing("cpu", 1.0, 1.0, 1.0, 9)
    result, profile = PolicyResult("cpu", planned(), 1.0, 1, 0, timing), Profile(MACHINE, 2, None, {})
    busy = PolicyComparison(load(branches()), profile, (result,), (timing,), interference=True)
    assert comparison_verdict(busy).startswith("the machine was too busy for a reliable comparison: repeat it")
