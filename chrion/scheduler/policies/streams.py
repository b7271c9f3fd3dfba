"""Stream allocation: which operators a device runs behind each other, and who waits for whom.

Nimble (Kwon et al., 2020) gives independent operators different streams, with the fewest synchronisations that this
allows. Opara (Chen et al., 2024) lets each operator follow one of its predecessors, in one pass, and decides the order
in which operators are launched.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from chrion.graph.dag import Dag
from chrion.scheduler.policies.matching import maximum_matching


def nimble(dag: Dag, *, share: bool = False) -> list[int]:
    """Nimble's stream assignment (its Algorithm 1).

    A maximum matching of the transitive reduction's edges, taken as a bipartite graph from operators that end to
    operators that begin, joins operators into chains; each chain is a stream. Independent operators are on different
    streams, and no such assignment needs fewer synchronisations (Theorem 4): edges of the reduction less the matching.

    Args:
        dag: The graph.
        share: Let chains that can never overlap, because the one ends before the other begins, share a stream: a
            second matching, of whole chains. Independent operators are still on different streams.

    Returns:
        The stream of each operator, numbered in the topological order of their first operators.
    """
    following = maximum_matching(dag.reduced, len(dag))
    chain_of = _joined(dag.topological_order, following)
    if not share:
        return chain_of
    first, last = _ends(dag, chain_of)
    after = [[b for b, head in enumerate(first) if dag.descendants[tail] >> head & 1] for tail in last]
    stream_of = _joined(range(len(first)), maximum_matching(after, len(first)))
    return [stream_of[chain] for chain in chain_of]


def _joined(order: Sequence[int], following: Sequence[int | None]) -> list[int]:
    """Numbers of the chains that ``following`` strings together, by their first member along ``order``."""
    chain = [-1] * len(following)
    count = 0
    for i in order:
        if chain[i] < 0:
            chain[i] = count
            count += 1
        after = following[i]
        if after is not None:
            chain[after] = chain[i]
    return chain


def _ends(dag: Dag, chain_of: Sequence[int]) -> tuple[list[int], list[int]]:
    """The first and the last operator of each chain."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for i in dag.topological_order:
        first.setdefault(chain_of[i], i)
        last[chain_of[i]] = i
    return [first[c] for c in sorted(first)], [last[c] for c in sorted(last)]


def opara(dag: Dag, order: Sequence[int] | None = None) -> list[int]:
    """Opara's stream allocation (its Algorithm 1): follow the first predecessor that nobody follows yet.

    One pass over the edges. The streams depend on the order, unlike Nimble's number of synchronisations.

    Args:
        dag: The graph.
        order: A topological order; the graph's own if missing.

    Returns:
        The stream of each operator, numbered as they are launched.
    """
    stream = [-1] * len(dag)
    followed = [False] * len(dag)
    launched = 0
    for i in dag.topological_order if order is None else order:
        leader = next((m for m in dag.predecessors[i] if not followed[m]), None)
        if leader is None:
            stream[i] = launched
            launched += 1
        else:
            stream[i] = stream[leader]
            followed[leader] = True
    return stream


def synchronisations(dag: Dag, streams: Sequence[int]) -> int:
    """How often a stream waits for another: edges of the transitive reduction between two streams.

    Other edges need no wait of their own: a longer path leads along them.
    """
    return sum(streams[i] != streams[after] for i, successors in enumerate(dag.reduced) for after in successors)


def opara_order(dag: Dag, demand: Sequence[float], memory_bound: Sequence[bool]) -> list[int]:
    """Opara's launch order (its Algorithm 2): small operators first, the two kinds in turn.

    Of the operators that wait for nothing more, the turn goes strictly from compute-bound to memory-bound and back,
    compute first; a kind that has none misses its turn. Of a kind, the one with the least demand goes first, the
    lowest index on a tie. O((n + edges) log n).

    Args:
        dag: The graph.
        demand: What each operator takes of the device.
        memory_bound: Whether memory, not arithmetic, limits it.

    Returns:
        A topological order.
    """
    waiting_for = [len(before) for before in dag.predecessors]
    ready: tuple[list[tuple[float, int]], list[tuple[float, int]]] = ([], [])
    for i, count in enumerate(waiting_for):
        if not count:
            heapq.heappush(ready[memory_bound[i]], (demand[i], i))
    order: list[int] = []
    memory_turn = False
    while ready[0] or ready[1]:
        _, i = heapq.heappop(ready[memory_turn] or ready[not memory_turn])
        memory_turn = not memory_turn
        order.append(i)
        for after in dag.successors[i]:
            waiting_for[after] -= 1
            if not waiting_for[after]:
                heapq.heappush(ready[memory_bound[after]], (demand[after], after))
    return order
