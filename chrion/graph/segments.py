"""Cutting a schedule into segments: operators that one lane runs as one call.

Segments are formed either without delay or by tile, a label that the caller gives to operators to keep together.

Without tiles, operator ``v`` joins the open segment of its lane if that does not change the start or the finish of any
operator. Copies of the request's own inputs and outputs are ignored; they are no reason to cut. The conditions are:

- The segment starts no later: ``v`` waits for no other lane, or only for operators that the segment already waits for,
  and reads none of their values that are copied after those that the segment reads.
- No lane gets a result later: no other lane waits for an operator that is already in the segment.

With tiles, ``v`` joins if it belongs to the segment's tile and no other lane has read from the segment yet. Such a
segment starts only when the last of its inputs is available, and its results are available only when all of it has
run; in return, there are fewer segments. A segment is closed when another lane reads from it, so that no two segments
wait for each other.

A segment never spans two stages, since all lanes wait for each other between stages. Its operators have one width; a
segment on several lanes closes the open segments of all of them, and later operators of those lanes begin new ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TypeVar

from chrion.graph.dag import Dag

Segment = TypeVar("Segment")


def cut(  # noqa: PLR0913, PLR0917 - the parts of a schedule
    dag: Dag,
    order: Sequence[int],
    lanes: Sequence[int],
    tiles: Sequence[int] | None = None,
    stages: Sequence[int] = (),
    widths: Sequence[int] = (),
) -> tuple[tuple[int, ...], ...]:
    """Cut a schedule into segments.

    Args:
        dag: The graph of n operators.
        order: All operators in a topological order.
        lanes: The lane of every operator, by operator index.
        tiles: A label for every operator; operators of one lane and label are kept together if possible.
        stages: The stage of every operator, which never decreases along ``order``; empty if there are no barriers. With
            stages and no tiles, operators of one lane and stage are kept together if possible.
        widths: The number of lanes that every operator occupies, from its own on; empty if it is 1.

    Returns:
        The segments in topological order, each with its operators in the order of ``order``.
    """
    if not stages:
        if tiles is not None:
            return _by_tile(dag, order, lanes, tiles, widths)
        return _without_delay(dag, order, lanes, widths)
    by_stage = itertools.groupby(order, key=lambda i: stages[i])
    return tuple(s for _, part in by_stage for s in _by_tile(dag, tuple(part), lanes, tiles or stages, widths))


def _without_delay(
    dag: Dag, order: Sequence[int], lanes: Sequence[int], widths: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    closed: list[list[int]] = []  # by the ends of the operators that other lanes wait for: copies keep their order
    open_segments: dict[int, tuple[list[int], dict[int, int]]] = {}
    received, successors = dag.received, dag.successors
    for i in order:
        lane = lanes[i]
        if widths:
            closed += [current[0] for current in _take_conflicting(open_segments, i, lanes, widths, lambda s: s[0])]
        foreign: dict[int, int] = {}
        for m, values in received[i]:
            if lanes[m] != lane:
                foreign[m] = max(values)
        current = open_segments.get(lane)
        if current is not None and (not foreign or _awaits(current[1], foreign)):
            current[0].append(i)
        else:
            if current is not None:
                closed.append(current[0])
            current = open_segments[lane] = ([i], foreign)
        for after in successors[i]:
            if lanes[after] != lane:
                closed.append(current[0])
                del open_segments[lane]
                break
    closed.extend(segment for segment, _ in open_segments.values())
    return tuple(tuple(s) for s in closed)


def _awaits(awaited: dict[int, int], foreign: dict[int, int]) -> bool:
    """Return True if a segment already waits for given values; both map operators to their last value."""
    return all(m in awaited and last <= awaited[m] for m, last in foreign.items())


def _take_conflicting(
    open_segments: dict[int, Segment],
    i: int,
    lanes: Sequence[int],
    widths: Sequence[int],
    operators: Callable[[Segment], Sequence[int]],
) -> list[Segment]:
    """Remove and return the open segments that operator ``i`` cannot join and whose lanes it occupies."""
    own = range(lanes[i], lanes[i] + widths[i])
    conflicting = []
    for lane, segment in open_segments.items():
        width = widths[operators(segment)[0]]
        overlap = lane < own.stop and own.start < lane + width
        if overlap and (lane, width) != (lanes[i], widths[i]):
            conflicting.append(lane)
    return [open_segments.pop(lane) for lane in conflicting]


def _by_tile(
    dag: Dag, order: Sequence[int], lanes: Sequence[int], tiles: Sequence[int], widths: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    closed: list[list[int]] = []  # in topological order: a segment is closed before the segments that read from it
    open_segments: dict[int, list[int]] = {}
    segment_of: dict[int, list[int]] = {}
    for i in order:
        lane = lanes[i]
        if widths:
            closed += _take_conflicting(open_segments, i, lanes, widths, lambda s: s)
        read = (m for m in dag.predecessors[i] if lanes[m] != lane and m in segment_of)
        closed.extend(open_segments.pop(lanes[m]) for m in read if open_segments.get(lanes[m]) is segment_of[m])
        segment = open_segments.get(lane)
        if segment is None or tiles[segment[0]] != tiles[i]:
            if segment is not None:
                closed.append(segment)
            segment = open_segments[lane] = []
        segment.append(i)
        segment_of[i] = segment
    closed.extend(open_segments.values())
    return tuple(tuple(s) for s in closed)
