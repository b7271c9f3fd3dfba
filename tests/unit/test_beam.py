"""Beam search over partial schedules of tiny graphs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from chrion.common.lane_numbers import all_lanes
from chrion.graph import Dag
from chrion.profiler import CopyCost, Costs, OperatorMemory, uniform_costs
from chrion.scheduler import Schedule, evaluate
from chrion.scheduler.evaluation.solution import Problem
from chrion.scheduler.policies.list_scheduling import Lanes
from chrion.scheduler.search.beam import beam_search
from property_tests import examples
from solution_checks import check_solution
from strategies import costs_for, dags


def schedules(dag: Dag, costs: Costs) -> Iterator[Schedule]:
    """Yield every schedule on all lanes."""
    streams = costs.streams if costs.accelerator_ms is not None else 0
    for order in itertools.permutations(range(len(dag))):
        position = {i: at for at, i in enumerate(order)}
        if all(position[m] < position[i] for i in range(len(dag)) for m in dag.predecessors[i]):
            for lanes in itertools.product(all_lanes(costs.cores, streams), repeat=len(dag)):
                yield Schedule(order, lanes, costs.cores)


@examples(25)
@given(data=st.data())
def test_on_cores_the_best_schedule_is_the_optimum(data: st.DataObject) -> None:
    """Without dispatches, no order and placement of up to five operators on two cores is faster."""
    dag = data.draw(dags(5))
    ms = tuple(float(data.draw(st.integers(0, 9))) for _ in range(len(dag)))
    costs = Costs(None, (ms, ms), (OperatorMemory(),) * len(dag), handoff_ms=data.draw(st.integers(0, 3)))
    found = beam_search(Lanes(dag, costs), math.inf)
    best = min(evaluate(dag, costs, schedule).latency_ms for schedule in schedules(dag, costs))
    assert evaluate(dag, costs, found[0]).latency_ms == best


@examples(60)
@given(data=st.data())
def test_schedules_are_valid(data: st.DataObject) -> None:
    """On any machine with one stream, with request inputs and outputs, all results are valid schedules."""
    dag = data.draw(dags(requests=True))
    costs = data.draw(costs_for(dag).filter(lambda c: c.cores + (c.accelerator_ms is not None) > 1)).limited_to(3, 1)
    found = beam_search(Lanes(dag, costs), math.inf)
    assert found
    for schedule in found:
        check_solution(dag, costs, Problem(dag, costs).evaluate(schedule))


def test_an_accelerator_is_used_where_copies_pay() -> None:
    """Of two chains, the one that is fast on the accelerator runs there, beside the other one on the core."""
    dag = Dag.from_edges(4, [(0, 1), (2, 3)], [1000, 1000])
    costs = Costs(
        (9.0, 9.0, 1.0, 1.0), ((2.0, 2.0, 6.0, 6.0),), (OperatorMemory(),) * 4, CopyCost(0.5, 0.0), CopyCost(0.5, 0.0)
    )
    best = beam_search(Lanes(dag, costs.limited_to(1, 1)), math.inf)[0]
    assert best.lanes == (1, 1, 0, 0)
    assert evaluate(dag, costs, best).latency_ms == 4.0


def test_only_faster_schedules_are_returned() -> None:
    """Three operators of 1 ms on two cores take 2 ms, so nothing is faster than a known schedule of 2 ms."""
    dag = Dag.from_edges(3, [])
    lanes = Lanes(dag, uniform_costs(dag, cpu_ms=[1.0, 1.0]))
    assert beam_search(lanes, 2.0) == []
    assert beam_search(lanes, 2.1) != []


def test_operators_without_edges_are_no_more_work() -> None:
    """Sixteen operators in any order, on two cores and an accelerator, extend few partial schedules."""
    dag = Dag.from_edges(16, [])
    ms = tuple(1 + 0.1 * i for i in range(16))
    costs = Costs((1.0,) * 16, (ms, ms), (OperatorMemory(),) * 16, handoff_ms=0.01, dispatch_ms=0.01)
    lanes = Lanes(dag, costs.limited_to(2, 1))
    reads = []

    class Counted(tuple[float, ...]):
        """The times on a lane, read twice for each operator that is added to a partial schedule."""

        __slots__ = ()

        def __getitem__(self, i: Any) -> Any:
            reads.append(i)
            return super().__getitem__(i)

    lanes.ms = {lane: Counted(row) for lane, row in lanes.ms.items()}
    assert beam_search(lanes, math.inf)
    assert 16 < len(reads) <= 60_000
