"""Device selection: the paper's Algorithm 2.

For every number of CPU cores k' in 0..k, visit the operators in order and place each on the lane with the least
``EFT + alpha * M``; keep the k' with the least ``L + alpha * M``. The paper compares all k' + 1 lanes for every
operator. CPU lanes differ only in the time at which they become available. So the least EFT among them is that of the
first lane that is available when the operator's inputs have arrived, or else of the lane that is available first: one
comparison with the accelerator remains. O((n + edges) * k) for all core counts together, plus a scan of at most k'
lanes for each operator. The shared list scheduler keeps the lanes; it has no insertion and no overheads here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from chrion.errors import ScheduleError
from chrion.graph.dag import Dag
from chrion.profiler.costs import Costs
from chrion.scheduler.policies.core_counts import usable_counts
from chrion.scheduler.policies.list_scheduling import EdgeTimes, Lanes, ListScheduler, edge_times
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
    """

    def __init__(
        self,
        dag: Dag,
        costs: Costs,
        edges: EdgeTimes,
        *,
        counts: Callable[[Costs, int], Sequence[int]] = usable_counts,
    ) -> None:
        self._dag, self._edges, self._counts = dag, edges, counts
        self._own_mb = [row.own_mb for row in costs.memory]
        self._outputs_mb = [row.outputs_mb for row in costs.memory]
        #: A smaller machine has the same selections for its numbers of cores. All costs are kept, but only selections
        #: that were the best up to their number of cores.
        self._costs: dict[tuple[Sequence[int], bool, int, float], float] = {}
        self._best: dict[tuple[Sequence[int], bool, int, float], Selection] = {}

    def select(self, costs: Costs, order: Sequence[int], alpha: float) -> Selection:
        """Return Algorithm 2's result for the costs on the machine or a smaller one; see :func:`select_devices`."""
        best: Selection | None = None
        order, accelerated = tuple(order), costs.accelerator_ms is not None
        for cores in self._counts(costs, len(self._dag)):
            # With lanes of one device only, the price makes no difference.
            key = order, accelerated, cores, alpha if cores and accelerated else 0.0
            if best and key in self._costs and self._costs[key] >= best.cost(alpha):
                continue
            selection = self._best.get(key) or self._select_anew(costs, order, alpha, cores)
            self._costs[key] = selection.cost(alpha)
            if best is None or selection.cost(alpha) < best.cost(alpha):
                best = self._best[key] = selection
        if best is None:
            raise ScheduleError("schedule: there is no number of CPU cores to plan for")
        return best

    def _select_anew(self, costs: Costs, order: Sequence[int], alpha: float, cores: int) -> Selection:
        """Return the selection for one k' of Algorithm 2 (lines 4 to 17)."""
        published = replace(costs.limited_to(cores, 1), streams=1, handoff_ms=0.0, dispatch_ms=0.0)
        scheduler = ListScheduler(Lanes(self._dag, published, self._edges), insertion=False)
        device_lanes = range(0 if costs.accelerator_ms is None else 1)
        host_lanes = range(1, cores + 1)
        device_ms, host_ms = costs.lane_ms(0, cores), costs.lane_ms(cores, cores)
        before, own_mb, outputs_mb = self._dag.predecessors, self._own_mb, self._outputs_mb
        lanes = [0] * len(before)
        latency = memory = 0.0
        for i in order:
            # Equations 2 and 3. CPU lanes are alike, so one comparison with the accelerator remains.
            ready_device, ready_host = scheduler.ready_ms(i)
            slot = scheduler.first_slot(device_lanes, ready_device, device_ms[i])
            on_host = scheduler.first_slot(host_lanes, ready_host, host_ms[i])
            # The costs of line 12: M counts the inputs from the CPU. Ties go to the lane with the least index.
            needed = own_mb[i]
            for m in before[i]:
                if lanes[m]:
                    needed += outputs_mb[m]
            if slot.end + alpha * needed <= on_host.end:
                memory += needed
            else:
                slot = on_host
            scheduler.place(i, slot)
            lanes[i] = slot.lane
            latency = max(latency, slot.end)
        return Selection(Schedule(tuple(order), tuple(lanes), cores), latency, memory)
