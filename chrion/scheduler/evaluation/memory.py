"""Accelerator memory of a placement, by two definitions.

Paper memory is Equation 4: all tensors of the operators on the accelerator, summed. A weight that two operators share
counts twice, and activations are never released.

Resident memory is what a request in flight holds:

- each weight once;
- the buffers of one frame (:mod:`chrion.scheduler.evaluation.frame_buffers`), from its first request on: every value
  that segments receive or pass on;
- the arenas, in which a segment computes: each activation that stays inside, from the moment it is made until its last
  reader has run, and the ephemeral memory of one operator at a time. Lanes run one segment each, and an arena keeps its
  largest size, so each lane of the accelerator counts with its largest segment.

Searches compare thousands of schedules by :func:`estimated_mb`, because the exact figure takes several times as long as
the rest of an evaluation. The planner selects among the solutions that they find by :func:`device_memory`, which is
exact, and computes it only for those that :func:`least_mb` does not rule out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from chrion.common.lane_numbers import is_accelerator_lane
from chrion.graph.dag import Dag
from chrion.profiler.costs import Costs
from chrion.scheduler.evaluation.frame_buffers import FrameBuffers, plan_frame
from chrion.scheduler.schedule import Schedule


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


def estimated_mb(dag: Dag, costs: Costs, order: Sequence[int], lanes: Sequence[int]) -> float:
    """Return the peak of resident memory along ``order`` in MB, as if all segments and copies used one arena.

    An activation counts from the moment it is made or copied in until its last reader on the accelerator has run, and
    ephemeral memory for one operator at a time on each lane. The figure includes the accelerator's base memory if any
    operator runs on the accelerator.
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


def least_mb(dag: Dag, costs: Costs, lanes: Sequence[int]) -> float:
    """Return a lower bound on resident memory in MB: the weights, and the accelerator's base memory."""
    on_device = [i for i, lane in enumerate(lanes) if is_accelerator_lane(lane)]
    if not on_device:
        return 0.0
    weights = {w for i in on_device for w in dag.weights[i]}
    return costs.base_memory_mb + sum(dag.weight_bytes[w] for w in weights) / 1e6


class ResidentMemory(NamedTuple):
    """Resident memory of a schedule with one request in flight."""

    #: All of it, with the accelerator's base memory if any operator runs on the accelerator.
    resident_mb: float
    #: The buffers of one frame; each further request in flight has as many of its own.
    frame_mb: float


def device_memory(dag: Dag, costs: Costs, schedule: Schedule, segments: Sequence[Sequence[int]]) -> ResidentMemory:
    """Return the resident memory of a schedule.

    Args:
        dag: The graph.
        costs: The machine's costs of its operators.
        schedule: The schedule.
        segments: Its segments, in topological order.
    """
    if not any(map(is_accelerator_lane, schedule.lanes)):
        return ResidentMemory(0.0, 0.0)
    frame = plan_frame(dag, schedule, segments, costs.buffers)
    arenas: dict[int, float] = {}
    for segment in segments:
        lane = schedule.lanes[segment[0]]
        if is_accelerator_lane(lane):
            arenas[lane] = max(arenas.get(lane, 0.0), _arena_mb(dag, costs, segment, frame))
    frame_mb = frame.bytes / 1e6
    return ResidentMemory(least_mb(dag, costs, schedule.lanes) + sum(arenas.values()) + frame_mb, frame_mb)


def _arena_mb(dag: Dag, costs: Costs, segment: Sequence[int], frame: FrameBuffers) -> float:
    """Return the peak of the memory inside a segment: values that do not leave it, and ephemeral memory."""
    memory = costs.memory
    inside = {}
    for i in segment:
        passed_on = sum(dag.value_bytes[value] for value, _ in dag.output_values[i] if value in frame.of_value)
        inside[i] = max(0.0, memory[i].outputs_mb - passed_on / 1e6)
    last_use = {m: i for i in segment for m in (i, *dag.predecessors[i]) if m in inside}
    expiring: dict[int, float] = {}
    for m, i in last_use.items():
        expiring[i] = expiring.get(i, 0.0) + inside[m]
    live = peak = 0.0
    for i in segment:
        live += inside[i]
        peak = max(peak, live + memory[i].ephemeral_mb)
        live -= expiring.get(i, 0.0)
    return peak
