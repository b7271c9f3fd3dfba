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
    on_device = [i for i, lane in enumerate(lanes) if is_accelerator_lane(lane)]
    if not on_device:
        return 0.0
    memory = costs.memory
    total = 0.0
    for i in on_device:
        total += memory[i].own_mb
        for m in dag.predecessors[i]:
            if not is_accelerator_lane(lanes[m]):
                total += memory[m].outputs_mb
    return total + costs.base_memory_mb


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
    memory = costs.memory
    for at, i in enumerate(on_device):
        for m in (i, *dag.predecessors[i]):
            if m not in held:
                held.add(m)
                live += memory[m].outputs_mb
        ephemeral[lanes[i]] = memory[i].ephemeral_mb
        peak = max(peak, live + sum(ephemeral.values()))
        for m in expiring[at]:
            live -= memory[m].outputs_mb
    return peak + sum(dag.weight_bytes[w] for w in weights) / 1e6 + costs.base_memory_mb
