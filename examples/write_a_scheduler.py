"""Write a scheduler: a function from a graph, its costs and alpha to a schedule. Evaluate its schedule, then run it.

A package offers such a function as a policy by an entry point in the group ``chrion.policies``; then
``chrion partition --policy NAME`` and ``chrion compare`` know it.
"""

from __future__ import annotations

import numpy as np

import chrion
from chrion.profiler import Costs
from chrion.scheduler import Schedule, evaluate, fixed_plan, validate
from chrion.zoo import build


def least_loaded(dag: chrion.Dag, costs: Costs, alpha: float) -> Schedule:  # noqa: ARG001 - it uses no GPU memory
    """Give each operator, in topological order, to the CPU core with the least work so far."""
    work_ms = [0.0] * (costs.cores + 1)  # lanes 1, 2, ... are CPU cores; lane 0 is the accelerator
    lanes = [0] * len(dag)
    for operator in dag.topological_order:
        lane = min(range(1, costs.cores + 1), key=work_ms.__getitem__)
        lanes[operator] = lane
        work_ms[lane] += costs.cpu_ms[costs.cores - 1][operator]
    return Schedule(order=dag.topological_order, lanes=tuple(lanes), cores=costs.cores)


graph = chrion.load(build("lstm", {"layers": 4, "batch": 1, "seq": 8}))
costs = chrion.profile(graph).costs(graph.dag)

schedule = least_loaded(graph.dag, costs, alpha=0.0)
validate(graph.dag, costs, schedule)  # raises ScheduleError if the schedule breaks a rule
plan = fixed_plan(graph, schedule.lanes, schedule.order)  # cuts the graph into segments
timeline = evaluate(graph.dag, costs, schedule, plan.segments)
print(f"least loaded: predicted {timeline.latency_ms:.3f} ms in {len(plan.segments)} segments")

default = chrion.partition(graph, chrion.profile(graph))
print(f"chrion: predicted {default.predicted.latency_ms:.3f} ms in {len(default.segments)} segments")

with chrion.HybridSession(graph, plan=plan) as session:
    outputs = session.run(None, {i.name: np.ones(i.shape, np.float32) for i in session.get_inputs()})
print(f"outputs: {[o.shape for o in outputs]}")
