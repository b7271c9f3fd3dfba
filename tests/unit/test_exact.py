"""The exact policy, compared with exhaustive search."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chrion.errors import OptionError
from chrion.graph import Dag
from chrion.profiler import uniform_costs
from chrion.scheduler import Schedule, evaluate
from chrion.scheduler.plan_options import PlanOptions
from chrion.scheduler.policies.exact import exact, solve
from property_tests import examples
from strategies import costs_for, dags


@examples(25)
@given(data=st.data())
def test_no_order_and_placement_is_faster(data: st.DataObject) -> None:
    """Every topological order and every placement of up to four operators is tried."""
    dag = data.draw(dags(largest=4, requests=True))
    costs = data.draw(costs_for(dag).filter(lambda c: c.cores > 0))
    cores = min(costs.cores, 2)
    lanes = range(0 if costs.accelerator_ms is not None else 1, cores + 1)
    orders = [
        order
        for order in itertools.permutations(range(len(dag)))
        if all(order.index(m) < order.index(i) for i in range(len(dag)) for m in dag.predecessors[i])
    ]
    least = min(
        evaluate(dag, costs, Schedule(order, placed, cores)).latency_ms
        for order in orders
        for placed in itertools.product(lanes, repeat=len(dag))
    )
    found = solve(dag, costs, cores)
    assert found.proven
    assert evaluate(dag, costs, found.schedule).latency_ms == pytest.approx(least, rel=1e-3, abs=1e-6)
    assert found.lower_bound_ms <= least * (1 + 1e-3) + 1e-6


@examples(25)
@given(data=st.data())
def test_no_choice_of_widths_is_faster(data: st.DataObject) -> None:
    """Every order, placement and width of up to four operators is tried, on two cores or an accelerator and two."""
    dag = data.draw(dags(largest=4, requests=True))
    costs = data.draw(costs_for(dag, wide=True).filter(lambda c: c.cores > 1)).limited_to(2, 1)
    device = [(0, 1)] if costs.accelerator_ms is not None else []
    orders = [
        order
        for order in itertools.permutations(range(len(dag)))
        if all(order.index(m) < order.index(i) for i in range(len(dag)) for m in dag.predecessors[i])
    ]
    least = min(
        evaluate(
            dag, costs, Schedule(order, tuple(p[0] for p in placed), 2, widths=tuple(p[1] for p in placed))
        ).latency_ms
        for order in orders
        for placed in itertools.product([*device, (1, 1), (2, 1), (1, 2)], repeat=len(dag))
    )
    found = solve(dag, costs, 2)
    assert found.proven
    assert evaluate(dag, costs, found.schedule).latency_ms == pytest.approx(least, rel=1e-3, abs=1e-6)
    assert found.lower_bound_ms <= least * (1 + 1e-3) + 1e-6


def test_handoffs_that_take_longer_than_the_operators_are_avoided() -> None:
    """One core takes 3 ms for three operators of 1 ms; two cores would take 2 ms and a handoff of 10 ms."""
    dag = Dag.from_edges(3, [(0, 1), (0, 2)])
    costs = uniform_costs(dag, cpu_ms=[1.0, 1.0], handoff_ms=10.0)
    found = solve(dag, costs, 2)
    assert evaluate(dag, costs, found.schedule).latency_ms == pytest.approx(3.0)


def test_large_graphs_and_alphas_are_refused() -> None:
    """The solver would not terminate for large graphs, and its model has no memory for an alpha to weigh."""
    dag = Dag.from_edges(50, [])
    with pytest.raises(OptionError, match="at most 40 operators"):
        solve(dag, uniform_costs(dag), 1)
    small = Dag.from_edges(2, [])
    with pytest.raises(OptionError, match="latency alone"):
        exact(small, uniform_costs(small), 0.5)


def test_a_missing_solver_is_reported_with_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is measured or planned."""
    assert PlanOptions(policy="exact").policy == "exact"
    for name in [name for name in sys.modules if name.partition(".")[0] == "ortools"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ortools", None)
    with pytest.raises(OptionError, match="needs OR-Tools, which is not installed"):
        PlanOptions(policy="exact")


def test_unsupported_operators_run_on_a_core() -> None:
    """If an operator is not supported on the accelerator, a schedule on the accelerator alone is not considered."""
    dag = Dag.from_edges(2, [(0, 1)])
    costs = replace(uniform_costs(dag), accelerator_ms=(0.5, float("inf")))
    assert exact(dag, costs, 0.0).lanes[1] > 0


def test_an_empty_graph_has_an_empty_schedule() -> None:
    """A graph without operators, which constant folding may leave, has an empty schedule."""
    dag = Dag.from_edges(0, [])
    assert exact(dag, uniform_costs(dag), 0.0).order == ()
