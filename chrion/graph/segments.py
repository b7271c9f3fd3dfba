"""Cutting a placed order into segments: operators that one lane runs as one call.

Operator ``v`` joins the segment that its lane is filling when that changes no operator's start or finish:

- ``v`` waits for no other lane, or only for what the segment waits for already, and receives no more bytes of it, so
  that the segment starts no later;
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
    filling: dict[int, tuple[list[int], dict[int, int]]] = {}
    for i in order:
        lane = lanes[i]
        received = zip(dag.predecessors[i], dag.edge_bytes[i], strict=True)
        foreign = {m: size for m, size in received if lanes[m] != lane}
        segment, awaited = filling.get(lane, ([], {}))
        if segment and all(m in awaited and size <= awaited[m] for m, size in foreign.items()):
            segment.append(i)
        else:
            segment, awaited = [i], foreign
            segments.append(segment)
        if any(lanes[s] != lane for s in dag.successors[i]):
            filling.pop(lane, None)
        else:
            filling[lane] = (segment, awaited)
    return tuple(tuple(s) for s in segments)
