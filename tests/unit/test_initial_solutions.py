"""Initial solutions of the default policy."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chrion.profiler import Costs, OperatorMemory, uniform_costs
from chrion.scheduler.search.group_placement import balanced_stretches
from chrion.scheduler.search.initial_solutions import GraphFacts, InitialSolutions
from chrion.scheduler.search.machines import sub_machines
from property_tests import examples
from recurrent_stack import stack
from solution_checks import check_solution
from strategies import costs_for, dags


@pytest.mark.parametrize(("cores", "streams", "origin"), [(1, 0, "one core"), (0, 1, "accelerator alone")])
def test_one_lane_has_one_schedule(cores: int, streams: int, origin: str) -> None:
    """On a machine of one lane, there is nothing to choose."""
    dag = stack(2, 3)
    costs = uniform_costs(dag, accelerator_ms=0.5, cpu_ms=[1.0, 1.0]).limited_to(cores, streams)
    (found,) = InitialSolutions(GraphFacts(dag, costs), costs).make([0.0])
    assert found.origin == origin
    assert set(found.schedule.lanes) == {cores}


@examples(60)
@given(data=st.data(), alpha=st.sampled_from([0.5, 3.0]))
def test_initial_solutions_are_valid(data: st.DataObject, alpha: float) -> None:
    """On every sub-machine of any machine there is an initial solution for any graph, and all of them are valid."""
    dag = data.draw(dags())
    costs = data.draw(costs_for(dag).filter(lambda c: c.cores or c.accelerator_ms))
    facts = GraphFacts(dag, costs)
    found = [
        s for machine in sub_machines(costs, len(dag)) for s in InitialSolutions(facts, machine).make([0.0, alpha])
    ]
    assert found
    for solution in found:
        check_solution(dag, costs, solution)


@given(times=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=7), cores=st.integers(1, 3))
def test_stretches_are_balanced_as_well_as_possible(times: list[tuple[int, int]], cores: int) -> None:
    """The greatest load is the least of all ways to cut the groups into one stretch for each lane."""
    n = len(times)
    device, host = zip(*times, strict=True)
    loads = Costs(tuple(map(float, device)), (tuple(map(float, host)),) * cores, (OperatorMemory(),) * n)
    lanes = range(cores + 1)
    placed = balanced_stretches(loads, lanes, cores)
    assert placed == sorted(placed)

    def greatest(lane_of: Sequence[int]) -> float:
        return max(sum((device if lane == 0 else host)[g] for g in range(n) if lane_of[g] == lane) for lane in lanes)

    best = min(greatest(lane_of) for lane_of in itertools.combinations_with_replacement(lanes, n))
    assert greatest(placed) == best
