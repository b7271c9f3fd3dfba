"""Cutting a placed order into segments: operators that one lane runs as one call.

Without tiles, operator ``v`` joins the segment that its lane is filling when that changes no operator's start or
finish (copies of the request's own inputs and outputs apart, which are no reason to cut):

- ``v`` waits for no other lane, or only for operators that the segment waits for already, and for none of their values
  that is copied after those that the segment reads, so that it starts no later;
- no operator of the segment is awaited by another lane, so that nobody gets a result later.

With tiles, ``v`` joins if it is of the segment's tile and no other lane has read from the segment yet: what the
segment makes is seen later, and it starts when the last of its inputs is there, but there are fewer of them. A segment
is closed when another lane reads from it, so that no two ever wait for each other.

A segment never spans two stages: between them, all lanes wait for each other.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from chrion.graph.dag import Dag


def cut(
    dag: Dag,
    order: Sequence[int],
    lanes: Sequence[int],
    tiles: Sequence[int] | None = None,
    stages: Sequence[int] = (),
) -> tuple[tuple[int, ...], ...]:
    """Cut a schedule into segments.

    Args:
        dag: The graph of n operators.
        order: All operators in a topological order.
        lanes: The lane of every operator, by operator index.
        tiles: A label for every operator; those of one lane and label stay together where they can.
        stages: The stage of every operator, which never falls along ``order``; without any, there are no barriers.
            With stages and no tiles, a lane's operators of one stage stay together where they can.

    Returns:
        Segments in topological order; each lists its operators in ``order``.
    """
    if not stages:
        return _by_tile(dag, order, lanes, tiles) if tiles is not None else _without_delay(dag, order, lanes)
    by_stage = itertools.groupby(order, key=lambda i: stages[i])
    return tuple(s for _, part in by_stage for s in _by_tile(dag, tuple(part), lanes, tiles or stages))


def _without_delay(dag: Dag, order: Sequence[int], lanes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    closed: list[list[int]] = []  # the awaited ones by their ends: they are copied in the operators' order, as uncut
    filling: dict[int, tuple[list[int], dict[int, int]]] = {}
    for i in order:
        lane = lanes[i]
        received = zip(dag.predecessors[i], dag.edge_values[i], strict=True)
        foreign = {m: max(values) for m, values in received if lanes[m] != lane}
        segment, awaited = filling.get(lane, ([], {}))
        if segment and all(m in awaited and last <= awaited[m] for m, last in foreign.items()):
            segment.append(i)
        else:
            if segment:
                closed.append(segment)
            segment, awaited = [i], foreign
        filling[lane] = (segment, awaited)
        if any(lanes[s] != lane for s in dag.successors[i]):
            closed.append(filling.pop(lane)[0])
    closed.extend(segment for segment, _ in filling.values())
    return tuple(tuple(s) for s in closed)


def _by_tile(dag: Dag, order: Sequence[int], lanes: Sequence[int], tiles: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    closed: list[list[int]] = []  # in topological order: a segment is closed before any that reads from it
    filling: dict[int, list[int]] = {}
    home: dict[int, list[int]] = {}
    for i in order:
        lane = lanes[i]
        read = (m for m in dag.predecessors[i] if lanes[m] != lane and m in home)
        closed.extend(filling.pop(lanes[m]) for m in read if filling.get(lanes[m]) is home[m])
        segment = filling.get(lane)
        if segment is None or tiles[segment[0]] != tiles[i]:
            if segment is not None:
                closed.append(segment)
            segment = filling[lane] = []
        segment.append(i)
        home[i] = segment
    closed.extend(filling.values())
    return tuple(tuple(s) for s in closed)
