"""The example of Topcuoglu, Hariri, Wu (2002), Figure 1: ten tasks on three processors, with the published results.

All costs are tripled, so that the means over three processors are integers and equal ranks compare equal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from chrion.graph import Dag
from chrion.profiler import CopyCost, Costs, OperatorMemory
from chrion.scheduler import Schedule

#: Communication costs of the edges; tasks are numbered from 1.
_EDGES = {
    (1, 2): 18,
    (1, 3): 12,
    (1, 4): 9,
    (1, 5): 11,
    (1, 6): 14,
    (2, 8): 19,
    (2, 9): 16,
    (3, 7): 23,
    (4, 8): 27,
    (4, 9): 23,
    (5, 9): 13,
    (6, 8): 15,
    (7, 10): 17,
    (8, 10): 11,
    (9, 10): 13,
}
#: Computation costs of each task on P1, P2 and P3.
_TIMES = (
    (14, 16, 9),
    (13, 19, 18),
    (11, 13, 19),
    (13, 8, 17),
    (12, 13, 10),
    (13, 16, 9),
    (7, 15, 11),
    (5, 11, 14),
    (18, 12, 20),
    (21, 7, 16),
)
#: Table 2: upward and downward ranks.
_UPWARD = (108.0, 77.0, 80.0, 80.0, 69.0, 63.333, 42.667, 35.667, 44.333, 14.667)
_DOWNWARD = (0.0, 31.0, 25.0, 22.0, 24.0, 27.0, 62.333, 66.667, 63.667, 93.333)
UPWARD_RANKS, DOWNWARD_RANKS = (tuple(3 * rank for rank in ranks) for ranks in (_UPWARD, _DOWNWARD))
#: Makespans of Figure 3.
HEFT_MAKESPAN, CPOP_MAKESPAN = 3 * 80, 3 * 86

DAG = Dag.from_edges(10, [(a - 1, b - 1) for a, b in _EDGES], [3 * cost for cost in _EDGES.values()])


class ThreeProcessors(Costs):
    """Costs of the example: lanes 0, 1 and 2 are processors of their own, and every edge between two lanes costs."""

    def lane_ms(self, lane: int, cores: int) -> Sequence[float]:  # noqa: ARG002 - as in the base class
        """Return the column of the table."""
        return [3.0 * row[lane] for row in _TIMES]

    def transfer_ms(self, source: int, target: int, size: int) -> float:  # noqa: ARG002 - as in the base class
        """Return the edge's communication cost."""
        return float(size)

    def mean_ms(self, i: int) -> float:
        """Return the mean of the task's row."""
        return float(sum(_TIMES[i]))


_UNIT = CopyCost(0.0, 1.0)
COSTS = ThreeProcessors((math.nan,) * 10, ((math.nan,) * 10,) * 2, (OperatorMemory(),) * 10, _UNIT, _UNIT)


def makespan(schedule: Schedule) -> float:
    """Return the makespan of a schedule of the example, recomputed from its order and placement alone."""
    finish = [0.0] * len(DAG)
    available = [0.0, 0.0, 0.0]
    for i in schedule.order:
        lane = schedule.lanes[i]
        start = available[lane]
        for m in DAG.predecessors[i]:
            start = max(start, finish[m] + (3 * _EDGES[m + 1, i + 1] if schedule.lanes[m] != lane else 0))
        finish[i] = available[lane] = start + 3 * _TIMES[i][lane]
    return max(finish)
