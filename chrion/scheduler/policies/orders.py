"""Topological orders: the paper's hybrid of breadth and depth first (Algorithm 1), and its two parents.

Algorithm 1 walks the graph breadth first with a queue. A popped operator with an unscheduled predecessor goes back
to the end of the queue. A scheduled operator pushes its children; but a child that waits for it alone, and whose
communication time exceeds its mean execution time over the devices, is scheduled at once behind its parent::

    queue = deque(roots)
    while queue:
        v = queue.popleft()
        if all(p in done for p in predecessors[v]): schedule(v)
        else: queue.append(v)

    def schedule(v):
        order.append(v); done.add(v)
        for child in successors[v]:
            if joins(v, child): schedule(child)
            elif child was never queued: queue.append(child)

Taken literally that is quadratic: an operator may go round the queue as often as the graph is deep. Here each waiting
operator keeps a place in an ordered list instead and is looked at once, when its last predecessor is scheduled. Going
back to the queue keeps the places of waiting operators, and new ones are queued right behind what pushed them; so the
queue, round after round, is that list, and comparing two places says who is popped first. n log n with the list of
:mod:`chrion.scheduler.policies.order_list`. The tests compare with the literal text.
"""

from __future__ import annotations

import heapq

from chrion.graph.dag import Dag
from chrion.profiler.costs import Costs
from chrion.scheduler.policies.order_list import Place, Places


def hybrid_order(dag: Dag, costs: Costs) -> tuple[int, ...]:
    """Algorithm 1 with its merging of children whose communication outweighs their execution."""
    return _Walk(dag, _joining_children(dag, costs)).run()


def bfs_order(dag: Dag) -> tuple[int, ...]:
    """Algorithm 1 without merging: breadth first."""
    return _Walk(dag, [()] * len(dag)).run()


def dfs_order(dag: Dag) -> tuple[int, ...]:
    """Depth first: from an operator on to its first child that is ready, back up when there is none."""
    missing = [len(before) for before in dag.predecessors]
    order = []
    stack = [i for i in reversed(range(len(dag))) if not missing[i]]
    while stack:
        i = stack.pop()
        order.append(i)
        for child in reversed(dag.successors[i]):
            missing[child] -= 1
            if not missing[child]:
                stack.append(child)
    return tuple(order)


def _joining_children(dag: Dag, costs: Costs) -> list[tuple[int, ...]]:
    """For each operator, the children that are scheduled right behind it."""
    joining: list[tuple[int, ...]] = [()] * len(dag)
    if costs.accelerator_ms is None:
        return joining  # CPU cores share their memory: there is no communication to save
    for child, before in enumerate(dag.predecessors):
        if len(before) == 1:
            size = dag.edge_bytes[child][0]
            communication = (costs.upload.ms(size) + costs.download.ms(size)) / 2
            if communication > costs.mean_ms(child):
                joining[before[0]] += (child,)
    return joining


class _Walk:
    """One run of Algorithm 1.

    Attributes:
        current: Operators that this round of the queue still schedules, by place.
        following: Ready operators that the next round schedules.
    """

    def __init__(self, dag: Dag, joining: list[tuple[int, ...]]) -> None:
        self.dag = dag
        self.joining = [frozenset(children) for children in joining]
        self.missing = [len(before) for before in dag.predecessors]
        self.places = Places()
        self.place_of: list[Place | None] = [None] * len(dag)
        self.order: list[int] = []
        self.current: list[Place] = []
        self.following: list[Place] = []

    def run(self) -> tuple[int, ...]:
        last = self.places.first
        for i, count in enumerate(self.missing):
            if count == 0:
                last = self._queue(i, last)
        while self.following:
            # A list sorted by place is a heap.
            self.current, self.following = sorted(self.following), []
            while self.current:
                place = heapq.heappop(self.current)
                self._schedule(place)
                self.places.remove(place)
        return tuple(self.order)

    def _schedule(self, place: Place) -> None:
        """Append the operator at ``place`` and what joins it; queue the other children behind ``place``, in order."""
        self.order.append(place.item)
        last = place
        walk = [(place.item, iter(self.dag.successors[place.item]))]
        while walk:
            i, children = walk[-1]
            child = next(children, None)
            if child is None:
                walk.pop()
                continue
            self.missing[child] -= 1
            if child in self.joining[i]:
                self.order.append(child)
                walk.append((child, iter(self.dag.successors[child])))
            elif self.place_of[child] is None:
                last = self._queue(child, last)
            elif self.missing[child] == 0:
                self._wake(child, last)

    def _queue(self, i: int, behind: Place) -> Place:
        """Give a newly found operator the place behind another one."""
        place = self.place_of[i] = self.places.insert(i, behind)
        if self.missing[i] == 0:
            self.following.append(place)
        return place

    def _wake(self, i: int, now: Place) -> None:
        """An operator in the queue has become ready: in this round, if its turn is still to come, or in the next."""
        place = self.place_of[i]
        if place is not None and now < place:
            heapq.heappush(self.current, place)
        elif place is not None:
            self.following.append(place)
