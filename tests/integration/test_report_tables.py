"""Tables of plans, benchmarks and machines."""

from __future__ import annotations

import pytest
from rich.console import Console

from chrion import Plan, load
from chrion.benchmark.latency import Timing
from chrion.report import bench_table, bench_verdict, memory_line, plan_table, verdict
from chrion.scheduler import Prediction, fixed_plan
from helpers import alternating_lanes, branches


@pytest.fixture
def plan() -> Plan:
    """Return a plan on two alternating lanes; segment s runs from s to s + 1 ms."""
    graph = load(branches())
    return fixed_plan(graph, alternating_lanes(graph))


def shown(thing: object) -> str:
    """A table as text."""
    console = Console(width=200, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
    with console.file:
        console.print(thing)
        return console.export_text()


def test_the_plan_table_compares_with_the_accelerator(plan: Plan) -> None:
    """40 ms against 50 is 20 % less, 25 MB against 100 is 75 % less."""
    object.__setattr__(plan, "predicted", Prediction(40.0, 25.0, 25.0))
    object.__setattr__(plan, "accelerator_only", Prediction(50.0, 100.0, 100.0))
    text = shown(plan_table(plan))
    assert "-20.0 %" in text
    assert "-75.0 %" in text


def test_verdicts_are_honest(plan: Plan) -> None:
    """Met, missed, or no SLO; won, level, or lost."""
    assert verdict(plan).startswith("no SLO")
    object.__setattr__(plan, "slo_ms", 100.0)
    assert verdict(plan).startswith("meets")
    object.__setattr__(plan, "slo_ms", 1.0)
    assert verdict(plan).startswith("misses")
    for ours, expected in ((5.0, "hybrid wins: 0.50"), (10.1, "level: 1.01"), (20.0, "does not win here: 2.00")):
        timings = [Timing(n, ms, ms, ms, 5) for n, ms in (("hybrid", ours), ("a", 10.0), ("b", 11.0))]
        assert expected in bench_verdict(timings, "hybrid")
        assert "against a" in shown(bench_table(timings, "hybrid", 7.0))


@pytest.mark.parametrize(
    ("measured", "told"), [(412.5, "measured at most 412.5 MB"), (None, "not known"), (0.0, "0.0 MB")]
)
def test_memory_is_predicted_both_ways_beside_the_measured_peak(measured: float | None, told: str) -> None:
    """Equation 4's sum, what an arena must hold, and the driver's word where there is one."""
    line = memory_line(Prediction(40.0, 948.1, 400.5), measured)
    assert all(text in line for text in ("948.1 MB", "400.5 MB", told))
