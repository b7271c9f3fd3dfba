"""Cutting a model into a chain of blocks, between which other models may run.

A block is a contiguous part of a topological order, so that it needs results of earlier blocks only. Each cut costs a
call and the values that cross it, which onnxruntime would otherwise keep in caches. The cuts are those of least cost
for which no block takes longer than a limit, except for single operators that do.

The order is depth first: it ends one branch before it begins the next one, so that few values are alive at a time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from chrion.graph.dag import Dag, depth_first_order

#: A block more costs as much as this many bytes across cuts: a call of about 50 us, and 5 GB/s to write and read values
#: (a choice; it only matters if a later cut would pass less).
_BLOCK_BYTES = 250_000


def cut_blocks(dag: Dag, times_ms: Sequence[float], limit_ms: float) -> tuple[tuple[int, ...], ...]:
    """Cut a graph into a chain of blocks.

    A dynamic programme over the positions of the order: the least cost up to a position is the least, over the possible
    beginnings of the block that ends there, of the cost up to that beginning and of the cut there. It takes
    O(n * operators of a block).

    Args:
        dag: The graph.
        times_ms: The time of every operator.
        limit_ms: The limit of a block's time.

    Returns:
        The blocks in order, each with its operators in topological order.
    """
    order = depth_first_order(dag)
    crossing = crossing_bytes(dag, order)
    ends_ms = [0.0, *itertools.accumulate(times_ms[i] for i in order)]
    cost, begin = [0.0], [0]
    for end in range(1, len(order) + 1):
        best, chosen = math.inf, end - 1
        for first in range(end - 1, -1, -1):
            if first < end - 1 and ends_ms[end] - ends_ms[first] > limit_ms:
                break
            total = cost[first] + (_BLOCK_BYTES + crossing[first] if first else 0)
            if total < best:
                best, chosen = total, first
        cost.append(best)
        begin.append(chosen)
    blocks: list[tuple[int, ...]] = []
    end = len(order)
    while end:
        blocks.append(order[begin[end] : end])
        end = begin[end]
    return tuple(reversed(blocks))


def crossing_bytes(dag: Dag, order: Sequence[int]) -> list[int]:
    """Return the bytes of the values that are computed before each position of an order and read at or after it."""
    position = {i: at for at, i in enumerate(order)}
    change = [0] * (len(order) + 1)
    for i, values in enumerate(dag.output_values):
        for value, readers in values:
            last = max((position[reader] for reader in readers), default=position[i])
            change[position[i] + 1] += dag.value_bytes[value]
            change[last + 1] -= dag.value_bytes[value]
    return list(itertools.accumulate(change))[: len(order)]
