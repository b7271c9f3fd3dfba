"""Device selection: the paper's Algorithm 2.

For every number of CPU cores k' in 0..k, visit the operators in order and place each on the lane with the least
``EFT + alpha * M``; keep the k' with the least ``L + alpha * M``. The paper compares all k' + 1 lanes for every
operator. CPU lanes differ only in the time at which they become available. So the least EFT among them is that of the
first lane that is available when the operator's inputs have arrived, or else of the lane that is available first: one
comparison with the accelerator remains. O((n + edges) * k) for all core counts together, plus a scan of at most k'
lanes for each operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from chrion.graph.dag import Dag
from chrion.profiler.costs import Costs
from chrion.scheduler.policies.core_counts import usable_counts
from chrion.scheduler.policies.edge_times import EdgeTimes, edge_times
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
    return DeviceSelector(dag, costs, edge_times(dag, costs)).select(costs, order, alpha)


class DeviceSelector:
    """Algorithm 2 on a machine and on the smaller machines within it.

    Args:
        dag: The graph.
        costs: W, M, C and b of the machine.
        edges: The transfer times of the graph's edges.
        counts: Returns the numbers of cores k' to try on a machine.
        remember: Make each selection once: a smaller machine has the same selections for its numbers of cores.
    """

    def __init__(
        self,
        dag: Dag,
        costs: Costs,
        edges: EdgeTimes,
        *,
        counts: Callable[[Costs, int], Sequence[int]] = usable_counts,
        remember: bool = False,
    ) -> None:
        self._dag, self._edges, self._counts = dag, edges, counts
        self._own_mb = [row.own_mb for row in costs.memory]
        self._outputs_mb = [row.outputs_mb for row in costs.memory]
        self._known: dict[tuple[Sequence[int], bool, int, float], Selection] | None = {} if remember else None

    def select(self, costs: Costs, order: Sequence[int], alpha: float) -> Selection:
        """Return Algorithm 2's result for the costs on the machine or a smaller one; see :func:`select_devices`."""
        selections = (self._select(costs, order, alpha, cores) for cores in self._counts(costs, len(self._dag)))
        return min(selections, key=lambda s: s.cost(alpha))

    def _select(self, costs: Costs, order: Sequence[int], alpha: float, cores: int) -> Selection:
        if self._known is None:
            return self._select_anew(costs, order, alpha, cores)
        key = tuple(order), costs.accelerator_ms is not None, cores, alpha
        if key not in self._known:
            self._known[key] = self._select_anew(costs, order, alpha, cores)
        return self._known[key]

    def _select_anew(self, costs: Costs, order: Sequence[int], alpha: float, cores: int) -> Selection:
        """Return the selection for one k' of Algorithm 2 (lines 4 to 17)."""
        before, edges, outputs_mb = self._dag.predecessors, self._edges, self._outputs_mb
        accelerator_ms = costs.lane_ms(0, cores)
        cpu_ms = costs.lane_ms(cores, cores)
        lanes = [0] * len(before)
        on_device = [False] * len(before)
        finish = [0.0] * len(before)
        available = [0.0] * cores  # of CPU lanes 1..cores
        accelerator_available = 0.0
        memory = 0.0
        for i in order:
            # Equation 2: when the inputs have arrived, on the accelerator and on the CPU.
            ready_device = ready_host = 0.0
            needed = self._own_mb[i]
            for m, (_, upload, download) in zip(before[i], edges[i], strict=True):
                host = device = finish[m]
                if on_device[m]:
                    host += download
                else:
                    device += upload
                    needed += outputs_mb[m]
                # Most time is spent here, and calls of max would double it.
                if host > ready_host:  # noqa: PLR1730
                    ready_host = host
                if device > ready_device:  # noqa: PLR1730
                    ready_device = device
            # Equation 3 and the costs of line 12; ties go to the lane with the least index.
            eft = max(accelerator_available, ready_device) + accelerator_ms[i]
            lane = _earliest(available, ready_host) if cores else 0
            if not cores or eft + alpha * needed <= max(available[lane], ready_host) + cpu_ms[i]:
                on_device[i] = True
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
