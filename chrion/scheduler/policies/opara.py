"""Opara: streams in one pass, and a launch order that mixes demands (Chen et al., 2024)."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from chrion.graph.dag import Dag
from chrion.profiler.costs import Costs
from chrion.profiler.roofline import Roofline
from chrion.scheduler.policies.streams import schedule_streams
from chrion.scheduler.schedule import Schedule


def opara(dag: Dag, costs: Costs, _alpha: float) -> Schedule:
    """Return Opara's streams in its launch order.

    onnxruntime does not report the registers and shared memory of a kernel. So the demand of an operator is its working
    set, and it is memory-bound if moving its bytes takes longer than its arithmetic at the machine's best rates.
    """
    times = costs.cpu_ms[0] if costs.accelerator_ms is None else costs.accelerator_ms
    roofline = Roofline.of(dag, times)
    demand = [float(roofline.bytes[i]) for i in range(len(dag))]
    memory_bound = [roofline.memory_bound(i) for i in range(len(dag))]
    return schedule_streams(dag, costs, opara_streams(dag), launch_order(dag, demand, memory_bound))


def opara_streams(dag: Dag, order: Sequence[int] | None = None) -> list[int]:
    """Return Opara's stream assignment (its Algorithm 1).

    Each operator joins the stream of its first predecessor that no other operator follows yet, or else a new stream.
    It takes one pass over the edges. The result depends on the order, whereas the number of synchronisations of
    Nimble's assignment does not.

    Args:
        dag: The graph.
        order: A topological order; the graph's own if missing.

    Returns:
        The stream of each operator, numbered in launch order.
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


def launch_order(dag: Dag, demand: Sequence[float], memory_bound: Sequence[bool]) -> list[int]:
    """Return Opara's launch order (its Algorithm 2): compute-bound and memory-bound operators alternate, small first.

    Ready operators are launched alternately from the two kinds, beginning with a compute-bound one. If a kind has no
    ready operator, the other kind is used and the alternation continues. Within a kind, the operator with the least
    demand goes first, on a tie the one with the lowest index. O((n + edges) log n).

    Args:
        dag: The graph.
        demand: Resources of the device that each operator needs.
        memory_bound: True for operators limited by memory, not by arithmetic.

    Returns:
        A topological order.
    """
    unlaunched = [len(before) for before in dag.predecessors]
    ready: tuple[list[tuple[float, int]], list[tuple[float, int]]] = ([], [])
    for i, count in enumerate(unlaunched):
        if not count:
            heapq.heappush(ready[memory_bound[i]], (demand[i], i))
    order: list[int] = []
    memory_next = False
    while ready[0] or ready[1]:
        _, i = heapq.heappop(ready[memory_next] or ready[not memory_next])
        memory_next = not memory_next
        order.append(i)
        for after in dag.successors[i]:
            unlaunched[after] -= 1
            if not unlaunched[after]:
                heapq.heappush(ready[memory_bound[after]], (demand[after], after))
    return order
