"""Initial solutions of the default policy."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chrion.profiler import uniform_costs
from chrion.scheduler.evaluation.validation import check_solution
from chrion.scheduler.search.initial_solutions import InitialSolutions
from recurrent_stack import stack
from strategies import costs_for, dags


@pytest.mark.parametrize(("layers", "steps", "cores"), [(4, 5, 2), (6, 4, 3), (12, 96, 2), (8, 8, 4)])
def test_alternating_layers_follow_one_step_behind(layers: int, steps: int, cores: int) -> None:
    """Without overheads every lane is always busy, and the last lane ends one step later for each lane before it."""
    dag = stack(layers, steps)
    costs = uniform_costs(dag, cpu_ms=[1.0] * cores)
    alternating = [s for s in InitialSolutions(dag, costs)(0.0) if s.origin.startswith("alternating")]
    found = [s for s in alternating if s.schedule.cores == cores]
    assert [s.timeline.latency_ms for s in found] == [layers // cores * steps + cores - 1]
    (solution,) = found
    check_solution(dag, costs, solution)
    for lane in range(1, cores + 1):
        layers_run = [i // steps for i in solution.schedule.order if solution.schedule.lanes[i] == lane]
        assert layers_run == sorted(layers_run)


@settings(deadline=None, max_examples=60)
@given(data=st.data(), alpha=st.sampled_from([0.0, 0.5, 3.0]))
def test_initial_solutions_are_valid_and_sorted_by_cost(data: st.DataObject, alpha: float) -> None:
    """On any graph and machine there is at least one initial solution, and all of them are valid and sorted by cost."""
    dag = data.draw(dags())
    costs = data.draw(costs_for(dag).filter(lambda c: c.cores or c.accelerator_ms))
    found = InitialSolutions(dag, costs)(alpha)
    for solution in found:
        check_solution(dag, costs, solution)
    assert [s.cost(alpha) for s in found] == sorted(s.cost(alpha) for s in found)
    assert found
