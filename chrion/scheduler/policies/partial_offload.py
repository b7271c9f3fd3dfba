"""Baselines for models that exceed the accelerator's memory: a part of the model in a fixed order, as much as fits.

- ``first-fit``: operators in topological order until the memory is full; all later ones stay on the CPU. This is what
  onnxruntime's resource-aware partitioning does (session option ``session.resource_cuda_partitioning_settings``).
- ``layers``: the last n layers, as with llama.cpp's option ``--n-gpu-layers``. Layers are recognised by their number in
  the names of operators (``block3``, ``layers.3``). What precedes the first layer, such as an embedding, stays on the
  CPU; what follows the last one is placed last. Without such names, every operator is a layer.

What fits is judged by the resident memory of the placement, like the budget of every other policy. onnxruntime's own
sum counts more, since it releases no activation, so it would place no more operators than these baselines. Operators
that the accelerator does not support, and those that do not fit, run one after another on the CPU, each on as many
cores as is best for all: the threads within an operator of a plain session.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

from chrion.graph.dag import Dag
from chrion.graph.segments import cut
from chrion.profiler.costs import Costs
from chrion.scheduler.evaluation.memory import device_memory
from chrion.scheduler.evaluation.solution import Problem, VariantSolution
from chrion.scheduler.policies.orders import hybrid_order
from chrion.scheduler.policies.policy import PlanningTask
from chrion.scheduler.schedule import Schedule

_LAYER = re.compile(r"(.*?(?:^|[/._:])(?:layers?|blocks?|h|stages?)[._]?\d+)(?=[/._]|$)")


def first_fit(task: PlanningTask) -> list[VariantSolution]:
    """Return the solution of ``first-fit`` within the task's budget."""
    return _solutions(task, one_by_one(task.graph.dag), "first-fit")


def last_layers(task: PlanningTask) -> list[VariantSolution]:
    """Return the solution of ``layers`` within the task's budget."""
    return _solutions(task, layer_units(task.graph.dag), "layers")


def layer_units(dag: Dag) -> list[list[int]]:
    """Return the operators in the order in which ``layers`` places them, those of a layer together.

    They are the layers from the last to the first, then the operators after the last layer. Operators before the first
    layer are not among them.
    """
    names = [_LAYER.match(name) for name in dag.names]
    order = dag.topological_order
    layers: dict[str, list[int]] = {}
    for i in order:
        if match := names[i]:
            layers.setdefault(match.group(1).partition(":")[2] or match.group(1), []).append(i)
    if not layers:
        return [[i] for i in reversed(order)]
    inside = {i for members in layers.values() for i in members}
    reached = set(inside)
    for i in order:
        if not reached.isdisjoint(dag.predecessors[i]):
            reached.add(i)
    after = [i for i in order if i in reached and i not in inside]
    return [*reversed(layers.values()), *([after] if after else [])]


def fill(dag: Dag, costs: Costs, units: Sequence[Sequence[int]], budget_mb: float) -> Schedule:
    """Return the schedule with as many of the first units on the accelerator as fit into a budget.

    Memory nearly always grows with every unit, so a binary search finds their number in O(n log n). If a unit frees
    more, as it takes in the readers of large values, the number found fits as well, and one more unit would not. The
    whole model may need less than all but its last units, since it passes no values to the CPU, so it is tried first.

    Args:
        dag: The graph.
        costs: The machine's costs.
        units: Operators to place, in the order of placement; those of a unit are placed together.
        budget_mb: Resident memory that must not be exceeded.
    """
    order = hybrid_order(dag, costs)
    counts = range(len(units) + 1 if costs.accelerator_ms is not None else 1)

    def schedule(count: int) -> Schedule:
        lanes = _lanes(dag, costs, units[:count])
        return Schedule(order, lanes, max(lanes, default=0))

    def needed_mb(count: int) -> float:
        trial = schedule(count)
        return device_memory(dag, costs, trial, cut(dag, order, trial.lanes)).resident_mb

    if needed_mb(counts[-1]) <= budget_mb:
        return schedule(counts[-1])
    return schedule(max(0, bisect_right(counts, budget_mb, key=needed_mb) - 1))


def one_by_one(dag: Dag) -> list[list[int]]:
    """Return the operators in the order of the model's nodes, which onnxruntime has sorted topologically."""
    return [[i] for i in range(len(dag))]


def _lanes(dag: Dag, costs: Costs, units: Sequence[Sequence[int]]) -> tuple[int, ...]:
    accelerator_ms = costs.accelerator_ms or (math.inf,) * len(dag)
    placed = {i for unit in units for i in unit if accelerator_ms[i] < math.inf}
    if not costs.cores:  # the operators have no other place
        placed = {i for i, ms in enumerate(accelerator_ms) if ms < math.inf}
    return tuple(int(i not in placed) for i in range(len(dag)))


def _solutions(task: PlanningTask, units: Sequence[Sequence[int]], origin: str) -> list[VariantSolution]:
    dag = task.graph.dag
    problem = Problem(dag, task.costs_of(dag))
    schedule = fill(dag, problem.costs, units, task.budget_mb)
    solutions = [
        problem.evaluate(_widened(schedule, width) if width > 1 else schedule, origin=origin)
        for width in (1, *(problem.costs.widths if schedule.cores else ()))
    ]
    best = min(solutions, key=lambda solution: solution.timeline.latency_ms)
    return [VariantSolution(0.0, best, None, task.graph)]


def _widened(schedule: Schedule, width: int) -> Schedule:
    """Return the schedule with all operators of the CPU on several cores."""
    return replace(schedule, cores=width, widths=tuple(width if lane else 1 for lane in schedule.lanes))
