"""Topological orders: the paper's hybrid of breadth first and depth first (Algorithm 1), and those two themselves.

Algorithm 1 walks the graph breadth first with a queue. A popped operator with an unscheduled predecessor goes back
to the end of the queue. A scheduled operator pushes its children; but a child without other predecessors whose
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

Taken literally that is quadratic: an operator may return to the queue as often as the graph is deep. Instead, each
queued operator keeps a position in an order-maintenance list (:mod:`chrion.scheduler.policies.order_list`) and is
visited once, after its last predecessor has been scheduled. Returning to the queue preserves the relative order of
waiting operators, and new ones are queued directly behind the operator that pushed them. So the queue, round after
round, is that list, and comparing two positions decides which operator is popped first. O(n log n). The tests compare
it with the literal algorithm.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from chrion.graph.dag import Dag
from chrion.profiler.costs import Costs
from chrion.scheduler.policies.order_list import OrderKey, OrderList


def hybrid_order(dag: Dag, costs: Costs) -> tuple[int, ...]:
    """Return the order of Algorithm 1, which keeps children with costly communication behind their parents."""
    return _Walk(dag, _joining_children(dag, costs)).run()


def bfs_order(dag: Dag) -> tuple[int, ...]:
    """Return the order of Algorithm 1 without joined children: breadth first."""
    return _Walk(dag, [()] * len(dag)).run()


def priority_order(dag: Dag, priority: Sequence[float]) -> list[int]:
    """Return the topological order that always takes the ready operator of highest priority, then of least index."""
    missing = [len(before) for before in dag.predecessors]
    ready = [(-priority[i], i) for i, count in enumerate(missing) if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        _, i = heapq.heappop(ready)
        order.append(i)
        for child in dag.successors[i]:
            missing[child] -= 1
            if not missing[child]:
                heapq.heappush(ready, (-priority[child], child))
    return order


def _joining_children(dag: Dag, costs: Costs) -> list[tuple[int, ...]]:
    """Return, for each operator, the children that are scheduled directly behind it."""
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
        current: Ready operators that this round of the queue still schedules, as a heap of positions.
        following: Ready operators that the next round schedules.
    """

    def __init__(self, dag: Dag, joining: list[tuple[int, ...]]) -> None:
        self.dag = dag
        self.joining = [frozenset(children) for children in joining]
        self.missing = [len(before) for before in dag.predecessors]
        self.queue = OrderList()
        self.key_of: list[OrderKey | None] = [None] * len(dag)
        self.order: list[int] = []
        self.current: list[OrderKey] = []
        self.following: list[OrderKey] = []

    def run(self) -> tuple[int, ...]:
        """Return the order."""
        last = self.queue.head
        for i, count in enumerate(self.missing):
            if count == 0:
                last = self._enqueue(i, last)
        while self.following:
            # A sorted list is a heap.
            self.current, self.following = sorted(self.following), []
            while self.current:
                key = heapq.heappop(self.current)
                self._schedule(key)
                self.queue.remove(key)
        return tuple(self.order)

    def _schedule(self, key: OrderKey) -> None:
        """Append a key's operator and those that join it; queue its other children behind it, in order."""
        self.order.append(key.item)
        last = key
        walk = [(key.item, iter(self.dag.successors[key.item]))]
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
            elif self.key_of[child] is None:
                last = self._enqueue(child, last)
            elif self.missing[child] == 0:
                self._mark_ready(child, last)

    def _enqueue(self, i: int, after: OrderKey) -> OrderKey:
        """Insert a newly found operator into the queue directly after a key."""
        key = self.key_of[i] = self.queue.insert(i, after)
        if self.missing[i] == 0:
            self.following.append(key)
        return key

    def _mark_ready(self, i: int, now: OrderKey) -> None:
        """Add a queued operator that has become ready to this round if its position is ahead, else to the next."""
        key = self.key_of[i]
        if key is not None and now < key:
            heapq.heappush(self.current, key)
        elif key is not None:
            self.following.append(key)
