"""Cutting a placed order into segments: operators that one lane runs as one call.

Operator ``v`` joins the segment that its lane is filling when that changes no operator's start or finish:

- ``v`` waits for no other lane, or only for what the segment waits for already, so that the segment starts no later;
- no operator of the segment is awaited by another lane, so that nobody gets a result later.

A segment therefore ends at its only awaited operator, and segments sorted by their first operator are in
topological order.
"""

from __future__ import annotations

from collections.abc import Sequence

from chrion.graph.dag import Dag


def cut(dag: Dag, order: Sequence[int], lanes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Cut a schedule into segments.

    Args:
        dag: The graph of n operators.
        order: All operators in a topological order.
        lanes: The lane of every operator, by operator index.

    Returns:
        Segments in topological order; each lists its operators in ``order``.
    """
    segments: list[list[int]] = []
    filling: dict[int, tuple[list[int], set[int]]] = {}
    for i in order:
        lane = lanes[i]
        foreign = {m for m in dag.predecessors[i] if lanes[m] != lane}
        segment, awaited = filling.get(lane, ([], set()))
        if segment and foreign <= awaited:
            segment.append(i)
        else:
            segment, awaited = [i], foreign
            segments.append(segment)
        if any(lanes[s] != lane for s in dag.successors[i]):
            filling.pop(lane, None)
        else:
            filling[lane] = (segment, awaited)
    return tuple(tuple(s) for s in segments)
