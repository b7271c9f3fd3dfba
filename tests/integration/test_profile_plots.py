"""Pictures of profiles: Figures 2, 3 and 6 of the paper."""

from __future__ import annotations

from pathlib import Path

import pytest

from chrion import Graph, Profile, load
from chrion.profiler import OperatorCost
from chrion.report.profile_plots import costs_by_type, plans_by_cores, plot_profile
from helpers import MACHINE, branches
from seams.commands import catch_figures

pytest.importorskip("matplotlib")
from matplotlib.figure import Figure

#: Times on one core and on the accelerator, in ms, by operator type.
TIMES = {"MatMul": (4.0, 1.0), "Gemm": (2.0, 3.0), "Relu": (1.0, 0.5), "Neg": (0.5, None)}


@pytest.fixture
def graph() -> Graph:
    return load(branches())


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Return the figures that are drawn in a test; their files are empty."""
    return catch_figures(monkeypatch)


def make_profile(graph: Graph, cores: int, *, accelerator: bool) -> Profile:
    """Return a profile in which each further busy core slows all operators by a tenth of their time."""
    costs = {}
    for op_type, signature in zip(graph.dag.op_types, graph.dag.signatures, strict=True):
        alone_ms, on_accelerator_ms = TIMES[op_type]
        by_busy = tuple(alone_ms * (1 + 0.1 * busy) for busy in range(cores))
        costs[signature] = OperatorCost(op_type, by_busy, on_accelerator_ms if accelerator else None)
    return Profile(MACHINE, cores, "CUDAExecutionProvider" if accelerator else None, costs)


def test_costs_are_means_by_type(graph: Graph) -> None:
    """The type with the greatest total time is first, and a type that the accelerator lacks has no time on it."""
    profile = make_profile(graph, 2, accelerator=True)
    found = costs_by_type(graph, profile.costs(graph.dag))
    totals = {kind: TIMES[kind][0] * graph.dag.op_types.count(kind) for kind in set(graph.dag.op_types)}
    assert [entry.op_type for entry in found] == sorted(totals, key=lambda kind: -totals[kind])
    for entry in found:
        alone_ms, on_accelerator_ms = TIMES[entry.op_type]
        assert entry.total_ms == pytest.approx(totals[entry.op_type])
        assert entry.cpu_ms == pytest.approx((alone_ms, 1.1 * alone_ms))
        assert entry.accelerator_ms == on_accelerator_ms


def test_the_panels_show_latency_operators_and_busy_cores(graph: Graph, figures: list[Figure], tmp_path: Path) -> None:
    """There is a point for each number of cores, a bar for each type and device, and a line for each type."""
    profile = make_profile(graph, 3, accelerator=True)
    plans = plans_by_cores(graph, profile)
    plot_profile(graph, profile, plans, tmp_path / "p.png")
    latency, operators, busy = figures[0].axes
    assert list(latency.lines[0].get_ydata()) == [plan.predicted.latency_ms for plan in plans]
    assert plans[0].predicted.latency_ms == pytest.approx(sum(TIMES[kind][0] for kind in graph.dag.op_types))
    assert [len(bars) for bars in operators.containers] == [4, 3]
    assert len(busy.lines) == 4
    for line in busy.lines:
        assert list(line.get_ydata()) == pytest.approx([1.0, 1.1, 1.2])
    assert len({(line.get_marker(), line.get_linestyle()) for line in busy.lines}) == 4


def test_a_profile_of_one_core_has_no_panel_by_cores(graph: Graph, figures: list[Figure], tmp_path: Path) -> None:
    """With one core and no accelerator there are only the operators on that core."""
    profile = make_profile(graph, 1, accelerator=False)
    plot_profile(graph, profile, plans_by_cores(graph, profile), tmp_path / "p.png")
    (operators,) = figures[0].axes
    assert [len(bars) for bars in operators.containers] == [4]
