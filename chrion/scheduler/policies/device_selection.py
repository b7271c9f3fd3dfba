"""Device selection: the paper's Algorithm 2.

For every number of CPU cores k' in 0..k, visit the operators in order and place each on the lane with the least
``EFT + alpha * M``; keep the k' with the least ``L + alpha * M``. The paper compares all k' + 1 lanes for every
operator. CPU lanes differ only in the time at which they become available. So the least EFT among them is that of the
first lane that is available when the operator's inputs have arrived, or else of the lane that is available first: one
comparison with the accelerator remains. O((n + edges) * k) for all core counts together, plus a scan of at most k'
lanes for each operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from chrion.graph.dag import Dag
from chrion.lane_numbers import is_accelerator_lane
from chrion.profiler.costs import Costs
from chrion.scheduler.policies.core_counts import usable_counts
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
        """Return L + alpha * M, Equation 5."""
        return self.latency_ms + alpha * self.memory_mb


def select_devices(dag: Dag, costs: Costs, order: Sequence[int], alpha: float) -> Selection:
    """Return Algorithm 2's device selection S and number of CPU cores k* for a given order.

    Args:
        dag: The graph.
        costs: W, M, C and b. The paper has no handoff latency and no dispatch; EST leaves them out.
        order: O, for example from Algorithm 1.
        alpha: Price of accelerator memory, in ms per MB.

    Returns:
        The selection with the least L + alpha * M; on a tie, the one with fewest cores.

    Raises:
        ScheduleError: There is neither an accelerator that runs every operator nor a CPU core.
    """
    return DeviceSelector(dag, costs).select(costs, order, alpha)


class DeviceSelector:
    """Algorithm 2 on a machine and on the smaller machines within it.

    Args:
        dag: The graph.
        costs: W, M, C and b of the machine.
        remember: Make each selection once: a smaller machine has the same selections for its numbers of cores.
    """

    def __init__(self, dag: Dag, costs: Costs, *, remember: bool = False) -> None:
        self._dag, self._table = dag, _EdgeTable(dag, costs)
        self._known: dict[tuple[Sequence[int], bool, int, float], Selection] | None = {} if remember else None

    def select(self, costs: Costs, order: Sequence[int], alpha: float) -> Selection:
        """Return Algorithm 2's result for the costs on the machine or a smaller one; see :func:`select_devices`."""
        selections = (self._select(costs, order, alpha, cores) for cores in usable_counts(costs))
        return min(selections, key=lambda s: s.cost(alpha))

    def _select(self, costs: Costs, order: Sequence[int], alpha: float, cores: int) -> Selection:
        if self._known is None:
            return _select(self._dag, costs, self._table, order, alpha, cores)
        key = tuple(order), costs.accelerator_ms is not None, cores, alpha
        if key not in self._known:
            self._known[key] = _select(self._dag, costs, self._table, order, alpha, cores)
        return self._known[key]


class _EdgeTable:
    """The predecessors of every operator, with the times in ms to copy their results in each direction."""

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
    """Return the selection for one k' of Algorithm 2 (lines 4 to 17)."""
    accelerator_ms = costs.lane_ms(0, cores)
    cpu_ms = costs.lane_ms(cores, cores)
    lanes = [0] * len(dag)
    finish = [0.0] * len(dag)
    available = [0.0] * cores  # of CPU lanes 1..cores
    accelerator_available = 0.0
    memory = 0.0
    for i in order:
        # Equation 2: when the inputs have arrived, on the accelerator and on the CPU.
        ready_device = ready_host = 0.0
        needed = table.own_mb[i]
        for m, upload, download, outputs_mb in table.rows[i]:
            done = finish[m]
            if not is_accelerator_lane(lanes[m]):
                ready_host = max(ready_host, done)
                ready_device = max(ready_device, done + upload)
                needed += outputs_mb
            else:
                ready_host = max(ready_host, done + download)
                ready_device = max(ready_device, done)
        # Equation 3 and the costs of line 12; ties go to the lane with the least index.
        eft = max(accelerator_available, ready_device) + accelerator_ms[i]
        lane = _earliest(available, ready_host) if cores else 0
        if not cores or eft + alpha * needed <= max(available[lane], ready_host) + cpu_ms[i]:
            lanes[i] = 0
            finish[i] = accelerator_available = eft
            memory += needed
        else:
            lanes[i] = lane + 1
            finish[i] = available[lane] = max(available[lane], ready_host) + cpu_ms[i]
    schedule = Schedule(tuple(order), tuple(lanes), cores)
    return Selection(schedule, max(finish, default=0.0), memory)


def _earliest(available: Sequence[float], ready: float) -> int:
    """Return the CPU lane on which an operator starts first: the first available by ``ready``, or else the earliest."""
    least = 0
    for lane, time in enumerate(available):
        if time <= ready:
            return lane
        if time < available[least]:
            least = lane
    return least
