"""Maximum matching in a bipartite graph (Hopcroft and Karp, 1973), in O(edges * sqrt(nodes)).

Each phase computes the lengths of the shortest augmenting paths by a breadth-first search from all free left nodes at
once, and augments along as many disjoint ones as it finds. A path may be as long as the graph, so there is no
recursion, unlike in the functions of networkx.
"""

from __future__ import annotations

from collections.abc import Sequence


def maximum_matching(edges: Sequence[Sequence[int]], right: int) -> list[int | None]:
    """Match as many left nodes as possible to different right nodes.

    Args:
        edges: For each left node, the right nodes it may be matched to.
        right: Number of right nodes.

    Returns:
        The right node of each left node, or None. Equal inputs give equal matchings.
    """
    partner: list[int | None] = [None] * len(edges)
    owner: list[int | None] = [None] * right
    while True:
        depth = _depths(edges, partner, owner)
        at = [0] * len(edges)  # edges of each left node that this phase has tried
        augmented = [_augment(edges, partner, owner, depth, at, root) for root, p in enumerate(partner) if p is None]
        if not any(augmented):
            return partner


def _depths(
    edges: Sequence[Sequence[int]], partner: Sequence[int | None], owner: Sequence[int | None]
) -> list[int | None]:
    """Return the distance of each left node from the free ones, along alternating paths."""
    depth = [0 if p is None else None for p in partner]
    queue = [left for left, d in enumerate(depth) if d == 0]
    for left in queue:  # grows while it is walked
        for node in edges[left]:
            after = owner[node]
            if after is not None and depth[after] is None:
                depth[after] = (depth[left] or 0) + 1
                queue.append(after)
    return depth


def _augment(  # noqa: PLR0913, PLR0917 - the state of one phase
    edges: Sequence[Sequence[int]],
    partner: list[int | None],
    owner: list[int | None],
    depth: list[int | None],
    at: list[int],
    root: int,
) -> bool:
    """Augment along a path from a free left node to a free right node; return False if there is none."""
    path = [root]
    while path:
        left = path[-1]
        if at[left] == len(edges[left]):
            depth[left] = None  # no augmenting path through it in this phase
            path.pop()
            continue
        node = edges[left][at[left]]
        at[left] += 1
        after = owner[node]
        if after is None:
            for step in reversed(path):
                freed, partner[step], owner[node] = partner[step], node, step
                if freed is None:
                    return True
                node = freed
        elif depth[after] is not None and depth[after] == (depth[left] or 0) + 1:
            path.append(after)
    return False
