"""Nimble: streams for all logical concurrency, with the fewest synchronisations (Kwon et al., 2020)."""

from __future__ import annotations

from collections.abc import Sequence

from chrion.graph.dag import Dag
from chrion.profiler.costs import Costs
from chrion.scheduler.policies.matching import maximum_matching
from chrion.scheduler.policies.streams import schedule_streams
from chrion.scheduler.schedule import Schedule


def nimble(dag: Dag, costs: Costs, _alpha: float) -> Schedule:
    """Return Nimble's streams, shared by chains that cannot overlap, launched in topological order."""
    return schedule_streams(dag, costs, nimble_streams(dag, share=True), dag.topological_order)


def nimble_streams(dag: Dag, *, share: bool = False) -> list[int]:
    """Return Nimble's stream assignment (its Algorithm 1).

    The edges of the transitive reduction form a bipartite graph between operators as sources and operators as targets.
    A maximum matching of it joins operators into chains; each chain is a stream. Independent operators are on different
    streams, and no such assignment needs fewer synchronisations (Theorem 4): the edges of the reduction less those of
    the matching.

    Args:
        dag: The graph.
        share: Let chains that can never overlap, because one ends before the other begins, share a stream: a second
            matching, of whole chains. Independent operators are still on different streams.

    Returns:
        The stream of each operator, numbered in the topological order of their first operators.
    """
    following = maximum_matching(dag.reduced, len(dag))
    chain_of = _number_chains(dag.topological_order, following)
    if not share:
        return chain_of
    first, last = _chain_ends(dag, chain_of)
    after = [[b for b, head in enumerate(first) if dag.descendants[tail] >> head & 1] for tail in last]
    stream_of = _number_chains(range(len(first)), maximum_matching(after, len(first)))
    return [stream_of[chain] for chain in chain_of]


def _number_chains(order: Sequence[int], following: Sequence[int | None]) -> list[int]:
    """Return the chain of each member, given the member that follows each; chains are numbered along ``order``."""
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


def _chain_ends(dag: Dag, chain_of: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the first and the last operator of each chain."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for i in dag.topological_order:
        first.setdefault(chain_of[i], i)
        last[chain_of[i]] = i
    return [first[c] for c in sorted(first)], [last[c] for c in sorted(last)]
