"""Packing of values into buffers, compared with the optimum on small cases."""

from __future__ import annotations

import itertools
from dataclasses import replace
from random import Random

import networkx as nx
from hypothesis import given
from hypothesis import strategies as st

from chrion.graph import Dag
from chrion.graph.segments import cut
from chrion.scheduler import Schedule
from chrion.scheduler.evaluation.frame_buffers import Lifetimes
from chrion.scheduler.evaluation.packing import ALIGNMENT, DeviceValue, pack, share_buffers
from property_tests import repetitions
from random_plans import random_order
from strategies import costs_for, dags, schedules


def lifetimes(dag: Dag, schedule: Schedule, segments: tuple[tuple[int, ...], ...]) -> list[DeviceValue]:
    """Return the values of a frame, each after those that precede it."""
    found = Lifetimes(dag, schedule, None)
    for segment in segments:
        found.add(segment)
    return [*found.inputs.values(), *found.values.values()]


def draw_values(data: st.DataObject) -> list[DeviceValue]:
    """Return the values of a random schedule."""
    dag = data.draw(dags(10, requests=True))
    dag = replace(dag, value_bytes=tuple(300 * size for size in dag.value_bytes))
    schedule = data.draw(schedules(dag, data.draw(costs_for(dag, accelerator=True)), most_streams=3, staged=None))
    return lifetimes(dag, schedule, cut(dag, schedule.order, schedule.lanes, stages=schedule.stages))


@given(st.data())
def test_values_that_may_be_alive_together_do_not_overlap(data: st.DataObject) -> None:
    """Values with a byte in common follow each other, for both kinds of buffers; whole buffers have one kind."""
    values = draw_values(data)
    (total,), places = pack(values) if values else ((0,), [])
    for (a, at), (b, other) in itertools.combinations(zip(values, places, strict=True), 2):
        if at.offset < other.offset + b.size and other.offset < at.offset + a.size:
            assert a.blocked_at(b.known) is None
    for value, place in zip(values, places, strict=True):
        assert place.offset % ALIGNMENT == 0
        assert place.offset + value.size <= total
    sizes, places = share_buffers(values)
    for (a, at), (b, other) in itertools.combinations(zip(values, places, strict=True), 2):
        if at == other:
            assert a.kind == b.kind
            assert a.blocked_at(b.known) is None
    assert [sizes[place.buffer] for place in places] == [value.size for value in values]


@given(st.data())
def test_values_lie_in_the_smallest_gap(data: st.DataObject) -> None:
    """Each value has the offset that a walk over all values that it does not follow finds."""
    values = draw_values(data)
    placed: list[tuple[int, int, DeviceValue]] = []
    for value in values:
        size = -(-value.size // ALIGNMENT) * ALIGNMENT
        end, gaps = 0, []
        for offset, until, other in sorted(placed, key=lambda row: row[:2]):
            if other.blocked_at(value.known) is not None:
                gaps.append((offset - end, end))
                end = max(end, until)
        offset = min([gap for gap in gaps if gap[0] >= size], default=(0, end))[1]
        placed.append((offset, offset + size, value))
    assert [place.offset for place in pack(values)[1]] == [offset for offset, *_ in placed]


def test_a_gap_before_a_value_of_another_lane_is_used() -> None:
    """The second lane has to leave room for a value that has ended for the first, whose next value takes its place."""
    first = [DeviceValue("a", size, [steps, 0], 0) for steps, size in enumerate((256, 512, 256, 256))]
    for value in (first[0], first[2]):
        value.ends[1] = 9  # read by the second lane later
    other = DeviceValue("a", 256, [0, 0], 1)
    sizes, places = pack([*first[:3], other, first[3]])
    assert [place.offset for place in places] == [0, 256, 256, 768, 512]
    assert sizes == (1024,)


@given(st.data())
def test_few_whole_buffers_are_used(data: st.DataObject) -> None:
    """There are at most two more buffers than an optimal cover by chains has."""
    values = draw_values(data)
    assert fewest_buffers(values) <= len(share_buffers(values)[0]) <= fewest_buffers(values) + 2


@given(st.data())
def test_one_lane_uses_the_fewest_whole_buffers(data: st.DataObject) -> None:
    """On one lane of the accelerator alone, the number of buffers is optimal."""
    dag = data.draw(dags(12))
    order = dag.topological_order
    values = lifetimes(dag, Schedule(order, (0,) * len(dag), 0), tuple((i,) for i in order))
    assert len(share_buffers(values)[0]) == fewest_buffers(values)


def test_offsets_are_near_the_optimum() -> None:
    """On small random cases, one buffer takes 1.05 times the optimum on average, and at most 1.5 times."""
    pick = Random(0)
    ratios = []
    while len(ratios) < repetitions(200):
        n = pick.randint(4, 8)
        edges = [(i, j) for j in range(n) for i in range(j) if pick.random() < 0.4]
        dag = Dag.from_edges(n, edges, [1] * len(edges))
        dag = replace(dag, value_bytes=tuple(ALIGNMENT * pick.randint(1, 9) for _ in range(n)))
        lanes = tuple(pick.choice([0, 0, -1, 1]) for _ in range(n))
        order = random_order(dag, pick)
        values = lifetimes(dag, Schedule(order, lanes, 1, 2), cut(dag, order, lanes))
        if 2 <= len(values) <= 6:
            ratios.append(pack(values)[0][0] / least_bytes(values))
    assert min(ratios) >= 1
    assert sum(ratios) / len(ratios) <= 1.05
    assert max(ratios) <= 1.5


def least_bytes(values: list[DeviceValue]) -> int:
    """Return the smallest buffer: in some order, each value is at the lowest offset that the ones before it leave.

    The order of an optimal packing by offsets is such an order, since no value moves up.
    """
    best = sum(value.size for value in values)
    for order in itertools.permutations(values):
        placed: list[tuple[int, DeviceValue]] = []
        for value in order:
            conflicts = [
                (at, v)
                for at, v in placed
                if v.blocked_at(value.known) is not None and value.blocked_at(v.known) is not None
            ]
            ends = sorted([0, *(at + v.size for at, v in conflicts)])
            free = (e for e in ends if all(e + value.size <= at or at + v.size <= e for at, v in conflicts))
            placed.append((next(free), value))
        best = min(best, max(at + v.size for at, v in placed))
    return best


def fewest_buffers(values: list[DeviceValue]) -> int:
    """Return the fewest chains that cover the values of each kind: all values less a maximum matching (Fulkerson)."""
    graph: nx.Graph = nx.Graph()
    left = [(0, at) for at in range(len(values))]
    graph.add_nodes_from([*left, *((1, at) for at in range(len(values)))])
    graph.add_edges_from(
        ((0, a), (1, b))
        for a, first in enumerate(values)
        for b, second in enumerate(values)
        if a != b and first.kind == second.kind and first.blocked_at(second.known) is None
    )
    return len(values) - len(nx.bipartite.hopcroft_karp_matching(graph, left)) // 2
