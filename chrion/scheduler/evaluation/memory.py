"""Accelerator memory of a placement, by two definitions.

Paper memory is Equation 4: all tensors of the operators on the accelerator, summed. A weight that two operators share
counts twice, and activations are never released.

Resident memory is what an arena must hold: each weight once; each activation from the moment it is made or copied in
until its last reader on the accelerator has run; the ephemeral memory of one operator at a time on each accelerator
lane.
"""

from __future__ import annotations

from collections.abc import Sequence

from chrion.graph.dag import Dag
from chrion.lane_numbers import is_accelerator_lane
from chrion.profiler.costs import Costs


def paper_mb(dag: Dag, costs: Costs, lanes: Sequence[int]) -> float:
    """Return M in MB, Equation 4, with the accelerator's base memory if any operator runs on it."""
    total = 0.0
    for i, lane in enumerate(lanes):
        if is_accelerator_lane(lane):
            total += costs.memory[i].own_mb
            total += sum(costs.memory[m].outputs_mb for m in dag.predecessors[i] if not is_accelerator_lane(lanes[m]))
    return total + costs.base_memory_mb * any(map(is_accelerator_lane, lanes))


def resident_mb(dag: Dag, costs: Costs, order: Sequence[int], lanes: Sequence[int]) -> float:
    """Return the peak of resident memory along ``order`` in MB.

    It includes the accelerator's base memory if any operator runs on the accelerator.
    """
    on_device = [i for i in order if is_accelerator_lane(lanes[i])]
    if not on_device:
        return 0.0
    weights = {w for i in on_device for w in dag.weights[i]}
    last_use = {m: at for at, i in enumerate(on_device) for m in (i, *dag.predecessors[i])}
    live = 0.0
    peak = 0.0
    held: set[int] = set()
    ephemeral: dict[int, float] = {}  # by lane: that of the operator that the lane runs
    expiring: list[list[int]] = [[] for _ in on_device]
    for m, at in last_use.items():
        expiring[at].append(m)
    for at, i in enumerate(on_device):
        arriving = [m for m in (i, *dag.predecessors[i]) if m not in held]
        held.update(arriving)
        live += sum(costs.memory[m].outputs_mb for m in arriving)
        ephemeral[lanes[i]] = costs.memory[i].ephemeral_mb
        peak = max(peak, live + sum(ephemeral.values()))
        live -= sum(costs.memory[m].outputs_mb for m in expiring[at])
    return peak + sum(dag.weight_bytes[w] for w in weights) / 1e6 + costs.base_memory_mb
