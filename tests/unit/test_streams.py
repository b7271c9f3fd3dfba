"""Stream schedules on the lanes of one device."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from reproduction.schedule_counts import count_synchronisations

from chrion.graph import Dag
from chrion.profiler import uniform_costs
from chrion.scheduler.policies.streams import schedule_streams
from policy_solutions import solve_policy
from strategies import costs_for, dags, topological_orders


def test_each_stream_has_a_lane_if_there_are_enough() -> None:
    """Four operators without edges have a lane each if there are four lanes, and two a lane if there are two."""
    dag = Dag.from_edges(4, [])
    costs = uniform_costs(dag, accelerator_ms=1.0)
    for policy, streams in itertools.product(["nimble", "opara"], [2, 4]):
        lanes = solve_policy(policy, dag, replace(costs, streams=streams)).schedule.lanes
        assert sorted(lanes) == sorted(-(at % streams) for at in range(4))


def test_a_stream_takes_the_lane_that_is_available_first() -> None:
    """Of three streams of 3, 1 and 1 ms on two cores, the last two share a lane."""
    dag = Dag.from_edges(3, [])
    costs = replace(uniform_costs(dag, cpu_ms=[1.0, 1.0]), cpu_ms=((3.0, 1.0, 1.0),) * 2)
    assert schedule_streams(dag, costs, [0, 1, 2], [0, 1, 2]).lanes == (1, 2, 2)


def test_synchronisations_are_counted_in_the_reduction() -> None:
    """An edge beside a longer path needs no synchronisation of its own."""
    dag = Dag.from_edges(3, [(0, 1), (1, 2), (0, 2)])
    assert count_synchronisations(dag, [0, 1, 0]) == 2
    assert count_synchronisations(dag, [0, 0, 0]) == 0


@given(data=st.data())
def test_streams_start_as_soon_as_their_lane_is_free(data: st.DataObject) -> None:
    """The lanes are those of a literal simulation: a stream goes to the lane that starts its first operator first."""
    dag = data.draw(dags(12))
    costs = replace(data.draw(costs_for(dag)), streams=data.draw(st.integers(1, 3)))
    if costs.accelerator_ms is not None and costs.cores:
        rows = zip(costs.accelerator_ms, costs.cpu_ms[0], strict=True)
        unsupported = [data.draw(st.booleans()) for _ in range(len(dag))]
        times = [cpu if lacks else ms for (ms, cpu), lacks in zip(rows, unsupported, strict=True)]
        mixed = (math.inf if lacks else ms for ms, lacks in zip(costs.accelerator_ms, unsupported, strict=True))
        costs = replace(costs, accelerator_ms=tuple(mixed))
    else:
        unsupported = [False] * len(dag)
        times = list(costs.accelerator_ms or costs.cpu_ms[0])
    streams = data.draw(st.lists(st.integers(0, 5), min_size=len(dag), max_size=len(dag)))
    order = data.draw(topological_orders(dag))
    lanes = simulate(dag, times, streams, order, costs.streams if costs.accelerator_ms is not None else costs.cores)
    first = 0 if costs.accelerator_ms is not None else 1
    numbers = [-lane if first == 0 else lane + 1 for lane in lanes]
    expected = tuple(1 if lacks else lane for lane, lacks in zip(numbers, unsupported, strict=True))
    assert schedule_streams(dag, costs, streams, order).lanes == expected


def simulate(dag: Dag, times: Sequence[float], streams: Sequence[int], order: Sequence[int], lanes: int) -> list[int]:
    """Return the lane of each operator, if lanes run their operators in launch order and nothing else takes time."""
    free, finish, lane_of = [0.0] * lanes, [0.0] * len(dag), dict[int, int]()
    for i in order:
        ready = max((finish[m] for m in dag.predecessors[i]), default=0.0)
        if streams[i] not in lane_of:
            starts = [max(time, ready) for time in free]
            own = len(lane_of) if len(set(streams)) <= lanes else starts.index(min(starts))
            lane_of[streams[i]] = own
        lane = lane_of[streams[i]]
        finish[i] = free[lane] = max(free[lane], ready) + times[i]
    return [lane_of[stream] for stream in streams]
