"""List schedulers that Chrion does not have, as textbooks print them: references for how good its plans are.

They share nothing with Chrion's list scheduling but its costs.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence

from chrion.graph import Dag
from chrion.profiler import Costs
from chrion.scheduler import Schedule

Slot = tuple[float, float, int]  # end, start, lane


class Board:
    """The operators placed so far, on one accelerator lane and all CPU lanes."""

    def __init__(self, dag: Dag, costs: Costs) -> None:
        self.dag, self.costs = dag, costs
        self.lanes = [*range(0 if costs.accelerator_ms is not None else 1, costs.cores + 1)]
        self.placed: dict[int, Slot] = {}
        #: Start and end of each lane's operators, by start.
        self.busy: dict[int, list[tuple[float, float]]] = {lane: [] for lane in self.lanes}
        self.pairs = [(a, b) for a in self.lanes for b in self.lanes if a != b]

    def ms(self, i: int, lane: int) -> float:
        """Return the time of an operator on a lane."""
        return self.costs.lane_ms(lane, self.costs.cores)[i]

    def supporting(self, i: int) -> list[int]:
        """Return the lanes that support an operator."""
        return [lane for lane in self.lanes if math.isfinite(self.ms(i, lane))]

    def transfer_ms(self, m: int, i: int, source: int, target: int) -> float:
        """Return the time until an operator's lane has the result of a predecessor."""
        size = self.dag.edge_bytes[i][self.dag.predecessors[i].index(m)]
        return 0.0 if source == target else self.costs.transfer_ms(source, target, size)

    def place(self, i: int, slot: Slot) -> None:
        """Place an operator."""
        self.placed[i] = slot
        bisect.insort(self.busy[slot[2]], (slot[1], slot[0]))

    def remove(self, i: int) -> None:
        """Remove an operator."""
        end, start, lane = self.placed.pop(i)
        self.busy[lane].remove((start, end))

    def slot(self, i: int, lane: int, *, insertion: bool = True) -> Slot:
        """Return the first slot of an operator on a lane, as far as its predecessors are placed."""
        before = [(m, self.placed[m]) for m in self.dag.predecessors[i] if m in self.placed]
        ready = max((slot[0] + self.transfer_ms(m, i, slot[2], lane) for m, slot in before), default=0.0)
        length = self.ms(i, lane)
        if all(slot[2] != lane for _, slot in before):
            length += self.costs.dispatch_ms
        busy = self.busy[lane]
        if not insertion:
            start = max(ready, busy[-1][1] if busy else 0.0)
            return start + length, start, lane
        start = ready
        for begin, end in busy[max(0, bisect.bisect(busy, (ready, math.inf)) - 1) :]:
            if begin >= start + length:
                break
            start = max(start, end)
        return start + length, start, lane

    def schedule(self) -> Schedule:
        """Return the schedule by start times."""
        position = {v: at for at, v in enumerate(self.dag.topological_order)}
        order = sorted(self.placed, key=lambda i: (self.placed[i][1], position[i]))
        return Schedule(tuple(order), tuple(self.placed[i][2] for i in range(len(self.dag))), self.costs.cores)


def ranks(board: Board, *, transfers: bool) -> list[float]:
    """Return the longest path from the start of each operator in mean times, with or without mean transfers."""
    dag, pairs = board.dag, board.pairs
    found = [0.0] * len(dag)
    for i in reversed(dag.topological_order):
        usable = board.supporting(i)
        rest = 0.0
        for s in dag.successors[i]:
            mean = sum(board.transfer_ms(i, s, a, b) for a, b in pairs) / len(pairs) if pairs and transfers else 0.0
            rest = max(rest, mean + found[s])
        found[i] = sum(board.ms(i, lane) for lane in usable) / len(usable) + rest
    return found


def by_rank(dag: Dag, rank: Sequence[float]) -> Iterable[int]:
    """Return the operators by decreasing rank, predecessors first."""
    position = {v: at for at, v in enumerate(dag.topological_order)}
    return sorted(range(len(dag)), key=lambda v: (-rank[v], position[v]))


def lookahead_heft(dag: Dag, costs: Costs) -> Schedule:
    """Return HEFT with lookahead (Bittencourt et al., 2010): the lane on which the last child would finish first."""
    board = Board(dag, costs)
    for i in by_rank(dag, ranks(board, transfers=True)):
        best: tuple[float, Slot] | None = None
        for lane in board.supporting(i):
            slot = board.slot(i, lane)
            board.place(i, slot)
            ends = [min(board.slot(s, other)[0] for other in board.supporting(s)) for s in dag.successors[i]]
            best = min([(max([slot[0], *ends]), slot), *([best] if best else [])])
            board.remove(i)
        assert best is not None
        board.place(i, best[1])
    return board.schedule()


def critical_path_list(dag: Dag, costs: Costs) -> Schedule:
    """Return list scheduling by the longest remaining path without transfers, without insertion."""
    board = Board(dag, costs)
    for i in by_rank(dag, ranks(board, transfers=False)):
        board.place(i, min(board.slot(i, lane, insertion=False) for lane in board.supporting(i)))
    return board.schedule()
