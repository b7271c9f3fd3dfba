"""Stream schedules on the lanes of one device."""

from __future__ import annotations

import itertools
from dataclasses import replace

from chrion.graph import Dag
from chrion.profiler import uniform_costs
from chrion.scheduler import POLICIES
from chrion.scheduler.policies.streams import schedule_streams
from schedule_counts import count_synchronisations


def test_each_stream_has_a_lane_if_there_are_enough() -> None:
    """Four operators without edges have a lane each if there are four lanes, and two a lane if there are two."""
    dag = Dag.from_edges(4, [])
    costs = uniform_costs(dag, accelerator_ms=1.0)
    for policy, streams in itertools.product(["nimble", "opara"], [2, 4]):
        lanes = POLICIES[policy].make_solver(dag, replace(costs, streams=streams))(0.0).schedule.lanes
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
