"""Figures of published schedulers that their papers report and that Chrion itself does not need."""

from __future__ import annotations

from collections.abc import Sequence

from chrion.graph import Dag
from chrion.scheduler.policies.endings import GROUPS, Block, endings


def count_synchronisations(dag: Dag, streams: Sequence[int]) -> int:
    """Return how often a stream waits for another: the edges of the transitive reduction between two streams.

    An edge outside the reduction needs no wait of its own, because a longer path joins the same operators.
    """
    return sum(streams[i] != streams[after] for i, successors in enumerate(dag.reduced) for after in successors)


def count_search_space(
    dag: Dag, r: int | None = None, s: int | None = None, groups: str = GROUPS[0]
) -> tuple[int, int, int]:
    """Return the size of the search over a whole graph, without splitting it.

    Args:
        dag: The graph.
        r: Most operators of a group; None for any number.
        s: Most groups of a stage; None for any number.
        groups: ``connected`` or ``rooted``; see :mod:`chrion.scheduler.policies.endings`.

    Returns:
        States (distinct non-empty sets of remaining operators), transitions (endings tried over all states), and
        schedules (complete sequences of stages).

    Raises:
        OptionError: ``groups`` is not one of them.
    """
    block = Block.of(dag, [(i,) for i in dag.topological_order])
    # By size of the set: the number of stage sequences that lead to each set.
    levels: list[dict[int, int]] = [{} for _ in range(len(dag) + 1)]
    levels[-1][block.whole] = 1
    states = transitions = 0
    for level in reversed(levels[1:]):
        for remaining, ways in level.items():
            states += 1
            for ending, _ in endings(block, remaining, r, s, groups):
                transitions += 1
                rest = levels[(remaining ^ ending).bit_count()]
                rest[remaining ^ ending] = rest.get(remaining ^ ending, 0) + ways
    return states, transitions, levels[0].get(0, 0)
