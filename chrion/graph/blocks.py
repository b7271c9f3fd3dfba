"""Cutting a model into a chain of blocks, between which other models may run.

A block is a contiguous part of a topological order, so that it needs results of earlier blocks only. Each cut costs a
call and the values that cross it, which onnxruntime would otherwise keep in caches. The cuts are those of least cost
for which no block takes longer than a limit, except for single operators that do.

The order is depth first: it ends one branch before it begins the next one, so that few values are alive at a time.

Networks are also built of *modules*: Inception modules, fire modules, stages of residual blocks. They are found by the
articulation points of the graph, and consist of pieces, the operators of which form a sequence.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from chrion.common.units import parse_duration_ms
from chrion.common.wrong_values import wrong_value
from chrion.graph.dag import Dag, depth_first_order

#: A block more costs as much as this many bytes across cuts: a call of about 50 us, and 5 GB/s to write and read values
#: (a choice; it only matters if a later cut would pass less).
_BLOCK_BYTES = 250_000
#: The shortest limit of a block's time. The call of a shorter one would take a large part of it, and every operator
#: would have a session of its own (a choice, not measured).
_LEAST_MS = 0.1


def parse_block_ms(text: str | float, name: str) -> float:
    """Parse the limit of a block's time, as :func:`chrion.common.units.parse_duration_ms` does.

    Raises:
        OptionError: The text is not a duration, or a shorter one than a block may have.
    """
    limit_ms = parse_duration_ms(text, name)
    if limit_ms < _LEAST_MS:
        raise wrong_value(name, f"at least {_LEAST_MS:g} ms", text, hint="each block costs a call; 5ms is usual")
    return limit_ms


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
    if sum(times_ms) <= limit_ms:
        return (tuple(order),) if order else ()
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


def split_into_blocks(dag: Dag) -> list[list[int]]:
    """Split a graph after each of its articulation points: operators related to every other by a path."""
    blocks: list[list[int]] = [[]]
    for i in dag.topological_order:
        blocks[-1].append(i)
        if dag.ancestors[i].bit_count() + dag.descendants[i].bit_count() == len(dag) - 1:
            blocks.append([])
    return [block for block in blocks if block]


def cut_modules(dag: Dag) -> list[list[int]]:
    """Cut a graph into modules: parts with branches, each with the straight part before it.

    The straight parts at the beginning and at the end are modules of their own. So Inception-v3 has the 13 modules of
    its publication, though it has 26 articulation points.
    """
    modules: list[list[int]] = []
    straight: list[int] = []
    for block in split_into_blocks(dag):
        straight += block
        if len(block) > 1:
            if not modules and len(straight) > len(block):
                modules.append(straight[: -len(block)])
                straight = block
            modules.append(straight)
            straight = []
    return [*modules, straight] if straight else modules


def cut_pieces(dag: Dag) -> list[list[tuple[int, ...]]]:
    """Cut a graph into modules, and each module into sequences of operators in topological order."""
    return [join_sequences(dag, [(i,) for i in module]) for module in cut_modules(dag)]


def join_sequences(dag: Dag, units: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Join each unit with its predecessor if it has no other and the predecessor has no other successor."""
    home = {i: at for at, unit in enumerate(units) for i in unit}
    before = [{home[m] for i in unit for m in dag.predecessors[i] if m in home} - {at} for at, unit in enumerate(units)]
    after = [{home[s] for i in unit for s in dag.successors[i] if s in home} - {at} for at, unit in enumerate(units)]
    rows: dict[int, tuple[int, ...]] = {}
    head = list(range(len(units)))
    for at, unit in enumerate(units):
        if len(before[at]) == 1 and len(after[next(iter(before[at]))]) == 1:
            head[at] = head[next(iter(before[at]))]
            rows[head[at]] += unit
        else:
            rows[at] = unit
    return list(rows.values())


@dataclass(frozen=True, slots=True)
class ModuleChain:
    """A model as a chain of modules, each of which consists of pieces."""

    #: The pieces of each module; pieces are numbered in topological order.
    modules: tuple[tuple[int, ...], ...]
    #: For each piece, the pieces of its module whose values it reads.
    before: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, dag: Dag, modules: Sequence[Sequence[Sequence[int]]]) -> ModuleChain:
        """Return the chain of a graph whose modules consist of pieces, which consist of operators."""
        pieces = [piece for module in modules for piece in module]
        home = {i: at for at, piece in enumerate(pieces) for i in piece}
        inside, first = [], 0
        for module in modules:
            inside.append(tuple(range(first, first + len(module))))
            first += len(module)
        own = {piece: set(module) for module in inside for piece in module}
        read = [{home[m] for i in piece for m in dag.predecessors[i]} - {at} for at, piece in enumerate(pieces)]
        return cls(tuple(inside), tuple(tuple(sorted(own[at] & before)) for at, before in enumerate(read)))

    @classmethod
    def straight(cls, count: int) -> ModuleChain:
        """Return a chain of modules of one piece each."""
        return cls(tuple((at,) for at in range(count)), ((),) * count)


def cut_chain(
    dag: Dag, times_ms: Sequence[float], limit_ms: float, *, modules: bool
) -> tuple[list[tuple[int, ...]], ModuleChain]:
    """Cut a graph as a session does: into blocks, or into the pieces of its modules.

    Args:
        dag: The graph.
        times_ms: The time of every operator.
        limit_ms: The limit of a block's time.
        modules: Return pieces of modules, whatever their time.

    Returns:
        The blocks in order, and the modules that consist of them; a block that is no piece is a module.
    """
    if modules:
        cut = cut_pieces(dag)
        return [piece for own in cut for piece in own], ModuleChain.of(dag, cut)
    blocks = cut_blocks(dag, times_ms, limit_ms)
    return [*blocks], ModuleChain.straight(len(blocks))


def combine(parts: Sequence[tuple[Dag, Sequence[int]]]) -> Dag:
    """Return one graph of parts of several graphs, or of one graph for several requests.

    Only edges inside a part are kept: two parts of one model serve different requests. The operators of the first part
    come first, each part in the given order.
    """
    edges, sizes, first = [], [], 0
    for dag, own in parts:
        position = {i: first + at for at, i in enumerate(own)}
        for i in own:
            for m, size in zip(dag.predecessors[i], dag.edge_bytes[i], strict=True):
                if m in position:
                    edges.append((position[m], position[i]))
                    sizes.append(size)
        first += len(own)
    return Dag.from_edges(first, edges, sizes)
