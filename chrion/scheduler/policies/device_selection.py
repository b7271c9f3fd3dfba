"""Device selection: the paper's Algorithm 2.

For every number of CPU cores k' in 0..k, walk the operators in order and give each to the lane with the least
``EFT + alpha * M``; keep the k' with the least ``L + alpha * M``. The text compares all k' + 1 lanes for every
operator. CPU lanes differ only in when they fall free, so that the least EFT among them is had by the first lane that
is free when the operator's inputs have arrived, or else by the one that falls free first: one comparison with the
accelerator remains. O((n + edges) * k) for all core counts together, plus a scan of at most k' lanes an operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from chrion.errors import ScheduleError
from chrion.graph.dag import Dag
from chrion.lane_numbers import is_accelerator_lane
from chrion.profiler.costs import Costs
from chrion.scheduler.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Selection:
    """Algorithm 2's result for one number of cores."""

    schedule: Schedule
    #: L, Equations 1 to 3.
    latency_ms: float
    #: M, Equation 4.
    memory_mb: float

    def cost(self, alpha: float) -> float:
        """L + alpha * M, Equation 5."""
        return self.latency_ms + alpha * self.memory_mb


def select_devices(dag: Dag, costs: Costs, order: Sequence[int], alpha: float) -> Selection:
    """Algorithm 2: device selection S and number of CPU cores k*, for a given order.

    Args:
        dag: The graph.
        costs: W, M, C and b. Handoff and dispatch are not known to the paper and are left out of EST here.
        order: O, from Algorithm 1 for example.
        alpha: ms that a megabyte of accelerator memory is worth.

    Returns:
        The selection with the least L + alpha * M; on a tie, the one with fewest cores.

    Raises:
        ScheduleError: Some operator can run neither on the accelerator nor on a CPU core.
    """
    table = _EdgeTable(dag, costs)
    counts = range(0 if _runs_alone(costs) else 1, costs.cores + 1)
    selections = [_select(dag, costs, table, order, alpha, cores) for cores in counts]
    if not selections:
        raise ScheduleError("schedule: there is neither an accelerator that runs every operator nor a CPU core")
    return min(selections, key=lambda s: s.cost(alpha))


def _runs_alone(costs: Costs) -> bool:
    return costs.accelerator_ms is not None and float("inf") not in costs.accelerator_ms


class _EdgeTable:
    """For every operator, its predecessors with the time to move their result up or down: computed once."""

    def __init__(self, dag: Dag, costs: Costs) -> None:
        self.rows = [
            [
                (m, costs.upload.ms(size), costs.download.ms(size), costs.memory[m].outputs_mb)
                for m, size in zip(before, sizes, strict=True)
            ]
            for before, sizes in zip(dag.predecessors, dag.edge_bytes, strict=True)
        ]
        self.own_mb = [row.own_mb for row in costs.memory]


def _select(  # noqa: PLR0913, PLR0917 - the inputs of Algorithm 2 and its k'
    dag: Dag, costs: Costs, table: _EdgeTable, order: Sequence[int], alpha: float, cores: int
) -> Selection:
    """One k' of Algorithm 2 (lines 4 to 17)."""
    accelerator_ms = costs.lane_ms(0, cores)
    cpu_ms = costs.lane_ms(cores, cores)
    lanes = [0] * len(dag)
    finish = [0.0] * len(dag)
    available = [0.0] * cores  # of CPU lanes 1..cores
    accelerator_free = 0.0
    memory = 0.0
    for i in order:
        # Equation 2: when the inputs are there, on the accelerator and on the CPU.
        there = here = 0.0
        needed = table.own_mb[i]
        for m, upload, download, outputs_mb in table.rows[i]:
            done = finish[m]
            if not is_accelerator_lane(lanes[m]):
                here = max(here, done)
                there = max(there, done + upload)
                needed += outputs_mb
            else:
                here = max(here, done + download)
                there = max(there, done)
        # Equation 3 and the costs of line 12; ties go to the lane with the least index.
        eft = max(accelerator_free, there) + accelerator_ms[i]
        lane = _earliest(available, here) if cores else 0
        if not cores or eft + alpha * needed <= max(available[lane], here) + cpu_ms[i]:
            lanes[i] = 0
            finish[i] = accelerator_free = eft
            memory += needed
        else:
            lanes[i] = lane + 1
            finish[i] = available[lane] = max(available[lane], here) + cpu_ms[i]
    schedule = Schedule(tuple(order), tuple(lanes), cores)
    return Selection(schedule, max(finish, default=0.0), memory)


def _earliest(available: Sequence[float], ready: float) -> int:
    """The CPU lane on which an operator starts first: the first that is free by ``ready``, or that falls free first."""
    least = 0
    for lane, free in enumerate(available):
        if free <= ready:
            return lane
        if free < available[least]:
            least = lane
    return least
