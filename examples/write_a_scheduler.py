"""Write a scheduler: a function from a graph and its costs to a schedule, judged by the evaluator, then run."""

from __future__ import annotations

import numpy as np

import chrion
from chrion.profiler import Costs
from chrion.scheduler import Schedule, evaluate, fixed_plan, validate
from chrion.zoo import build


def least_loaded(dag: chrion.Dag, costs: Costs, cores: int) -> Schedule:
    """Give each operator, in topological order, to the CPU core with the least work so far."""
    work_ms = [0.0] * (cores + 1)  # lanes 1, 2, ... are CPU cores; lane 0 is the accelerator
    lanes = [0] * len(dag)
    for operator in dag.topological_order:
        lane = min(range(1, cores + 1), key=work_ms.__getitem__)
        lanes[operator] = lane
        work_ms[lane] += costs.cpu_ms[cores - 1][operator]
    return Schedule(order=dag.topological_order, lanes=tuple(lanes), cores=cores)


graph = chrion.load(build("lstm", {"layers": 4, "batch": 1, "seq": 8}))
costs = chrion.profile(graph).costs(graph.dag)

for cores in range(1, costs.cores + 1):
    schedule = least_loaded(graph.dag, costs, cores)
    validate(graph.dag, costs, schedule)  # raises ScheduleError if it breaks a rule
    plan = fixed_plan(graph, schedule.lanes, schedule.order)  # cuts the graph into segments
    timeline = evaluate(graph.dag, costs, schedule, plan.segments)
    print(f"{cores} cores: predicted {timeline.latency_ms:.3f} ms in {len(plan.segments)} segments")

with chrion.HybridSession(graph, plan=plan) as session:
    outputs = session.run(None, {i.name: np.ones(i.shape, np.float32) for i in session.get_inputs()})
print(f"outputs: {[o.shape for o in outputs]}")
