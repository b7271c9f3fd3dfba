"""Accelerator memory by both definitions."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chrion.graph import Dag
from chrion.graph.segments import cut
from chrion.profiler import Costs, OperatorMemory
from chrion.profiler.costs import BufferSupport
from chrion.scheduler import Schedule
from chrion.scheduler.evaluation.frame_buffers import plan_frame
from chrion.scheduler.evaluation.memory import device_memory, estimated_mb, paper_mb
from strategies import costs_for, dags, schedules


def chain(*, shared: bool) -> tuple[Dag, Costs]:
    """Return a chain of three operators: results of 1, 2 and 4 MB, and a weight of 8 MB each, or one for all."""
    dag = Dag.from_edges(3, [(0, 1), (1, 2)], [1_000_000, 2_000_000])
    weights = ((0,), (0,), (0,)) if shared else ((0,), (1,), (2,))
    dag = replace(dag, weights=weights, weight_bytes=(8_000_000,) * 3)
    memory = tuple(OperatorMemory(outputs_mb=mb, weights_mb=8.0) for mb in (1.0, 2.0, 4.0))
    whole = BufferSupport(views=False)
    return dag, Costs((1.0,) * 3, ((1.0,) * 3,), memory, base_memory_mb=100.0, buffers=whole)


def resident_mb(dag: Dag, costs: Costs, lanes: tuple[int, ...], segments: tuple[tuple[int, ...], ...]) -> float:
    """Return the resident memory of operators 0, 1, ... in this order."""
    schedule = Schedule(tuple(range(len(dag))), lanes, max(0, *lanes), 1 - min(0, *lanes))
    return device_memory(dag, costs, schedule, segments).resident_mb


def test_a_shared_weight_is_resident_once() -> None:
    """Equation 4 counts a shared weight for each operator, 24 MB; sessions hold 8 MB."""
    dag, costs = chain(shared=True)
    assert paper_mb(dag, costs, (0, 0, 0)) == 100 + 24 + 7
    assert resident_mb(dag, costs, (0, 0, 0), ((0, 1, 2),)) == 100 + 8 + 6


def test_an_activation_lives_until_its_last_reader() -> None:
    """The first result is released before the third is made; the peak is the second and third together."""
    dag, costs = chain(shared=False)
    assert resident_mb(dag, costs, (0, 0, 0), ((0, 1, 2),)) == 100 + 24 + 6


def test_values_between_segments_are_in_the_frame() -> None:
    """A value that is passed on counts in the frame from the first request on; the rest counts in the arena."""
    dag, costs = chain(shared=False)
    assert resident_mb(dag, costs, (0, 0, 0), ((0,), (1, 2))) == 100 + 24 + 1 + 6
    assert resident_mb(dag, costs, (1, 1, 0), ((0, 1), (2,))) == 100 + 8 + 2 + 4
    assert resident_mb(dag, costs, (1, 1, 1), ((0, 1, 2),)) == 0.0


def test_every_lane_of_the_accelerator_counts() -> None:
    """Weights and results on all lanes count, and the largest segment of each lane."""
    dag = Dag.from_edges(2, [])
    costs = Costs((1.0, 1.0), ((1.0, 1.0),), (OperatorMemory(0.0, 1.0, 2.0), OperatorMemory(0.0, 4.0, 8.0)))
    assert paper_mb(dag, costs, (0, -1)) == 15.0
    each = ((0,), (1,))
    assert resident_mb(dag, costs, (0, 0), each) == 12.0  # the first result is never read, and released
    assert resident_mb(dag, costs, (0, -1), each) == 15.0
    assert resident_mb(dag, costs, (-1, 1), each) == 3.0


@given(data=st.data())
def test_resident_memory_is_that_of_the_naive_definition(data: st.DataObject) -> None:
    """Weights once, the frame, and for each lane the largest sum of live inner values and ephemeral memory."""
    dag = data.draw(dags(requests=True))
    costs = data.draw(costs_for(dag, accelerator=True))
    schedule = data.draw(schedules(dag, costs, most_streams=2))
    segments = cut(dag, schedule.order, schedule.lanes)
    frame = plan_frame(dag, schedule, segments, costs.buffers)
    arenas = dict.fromkeys(range(0, -2, -1), 0.0)
    for segment in segments:
        for at, i in enumerate(segment if schedule.lanes[segment[0]] <= 0 else ()):
            live = costs.memory[i].ephemeral_mb
            for begin, m in enumerate(segment[: at + 1]):
                reads = [position for position, j in enumerate(segment) if m in dag.predecessors[j]]
                if at <= max([begin, *reads]):
                    live += max(0.0, costs.memory[m].outputs_mb - (m in frame.of_value) * dag.value_bytes[m] / 1e6)
            arenas[schedule.lanes[i]] = max(arenas[schedule.lanes[i]], live)
    used = any(lane <= 0 for lane in schedule.lanes)
    expected = sum(arenas.values()) + frame.bytes / 1e6 + used * costs.base_memory_mb
    found = device_memory(dag, costs, schedule, segments)
    assert found == (pytest.approx(expected), frame.bytes / 1e6)


def test_the_estimate_is_the_peak_of_one_arena() -> None:
    """Values count while they are held, wherever segments begin; ephemeral memory counts on every lane."""
    dag, costs = chain(shared=False)
    assert estimated_mb(dag, costs, (0, 1, 2), (0, 0, 0)) == 100 + 24 + 6
    assert estimated_mb(dag, costs, (0, 1, 2), (1, 1, 0)) == 100 + 8 + 6
    assert estimated_mb(dag, costs, (0, 1, 2), (1, 1, 1)) == 0.0
    dag = Dag.from_edges(2, [])
    costs = Costs((1.0, 1.0), ((1.0, 1.0),), (OperatorMemory(0.0, 1.0, 2.0), OperatorMemory(0.0, 4.0, 8.0)))
    assert estimated_mb(dag, costs, (0, 1), (0, 0)) == 12.0  # the first result is never read, and released
    assert estimated_mb(dag, costs, (0, 1), (0, -1)) == 14.0
    assert estimated_mb(dag, costs, (0, 1), (-1, 1)) == 3.0


@given(data=st.data())
def test_the_estimate_is_that_of_the_naive_definition(data: st.DataObject) -> None:
    """It is the largest sum, over all operators, of the values that exist already and are read later."""
    dag = data.draw(dags())
    costs = data.draw(costs_for(dag, accelerator=True))
    schedule = data.draw(schedules(dag, costs))
    on_device = [i for i in schedule.order if schedule.lanes[i] == 0]
    peak = 0.0
    for at, i in enumerate(on_device):
        live = set()
        for m in {m for j in on_device for m in (j, *dag.predecessors[j])}:
            uses = [position for position, j in enumerate(on_device) if m == j or m in dag.predecessors[j]]
            if uses[0] <= at <= uses[-1]:
                live.add(m)
        peak = max(peak, sum(costs.memory[m].outputs_mb for m in live) + costs.memory[i].ephemeral_mb)
    expected = peak + costs.base_memory_mb if on_device else 0.0
    assert estimated_mb(dag, costs, schedule.order, schedule.lanes) == expected
