"""Plans whose placement comes from outside: given, or drawn at random.

No costs are needed, so what such a plan predicts is made up. They are for what is asked of any plan, whoever made it:
that it runs, and gives what plain onnxruntime gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from chrion.graph.dag import Dag
from chrion.graph.model import Graph
from chrion.graph.segments import cut
from chrion.profiler.machine import this_machine
from chrion.scheduler.plan import Plan, Prediction
from chrion.scheduler.schedule import Schedule

#: How often a random plan has a barrier.
_BARRIERS = 0.1


def fixed_plan(  # noqa: PLR0913 - the parts of a plan that can be chosen
    graph: Graph,
    lanes: Sequence[int],
    order: Sequence[int] | None = None,
    accelerator: str | None = None,
    *,
    stages: Sequence[int] = (),
    segments: Sequence[Sequence[int]] | None = None,
) -> Plan:
    """A plan of a given placement.

    Args:
        graph: The graph.
        lanes: The lane of every operator, by operator index.
        order: All operators in a topological order; any if missing.
        accelerator: Execution provider of the accelerator's lanes.
        stages: The stage of every operator, by operator index; empty: no barriers.
        segments: Consecutive operators of a lane that run as one call, in topological order; if missing, those that
            can without delaying anything.
    """
    order = tuple(order or graph.dag.topological_order)
    parts = tuple(tuple(s) for s in segments) if segments is not None else cut(graph.dag, order, lanes, stages=stages)
    made_up = Prediction(float(len(parts)), 0.0, 0.0)
    cores, streams = max([1, *lanes]), 1 - min([0, *lanes])
    return Plan(
        model=graph.name,
        digest=graph.digest,
        shapes=graph.shapes,
        chunk=None,
        policy="by hand",
        alpha=0.0,
        slo_ms=None,
        budget_mb=None,
        accelerator=accelerator,
        machine=this_machine(),
        estimated=0,
        schedule=Schedule(order, tuple(lanes), cores, streams, tuple(stages)),
        operators=graph.dag.names,
        segments=parts,
        segment_ms=tuple((float(at), float(at + 1)) for at in range(len(parts))),
        predicted=made_up,
        busy_ms=(1.0,) * (cores + streams),
        lower_bound_ms=0.0,
        accelerator_only=None,
        cpu_only=made_up,
    )


def random_plan(graph: Graph, pick: Random, *, cores: int = 2, everywhere: bool = True) -> Plan:
    """A plan that scatters the operators over CPU lanes.

    Args:
        graph: The graph.
        pick: Where chance comes from; equal states give equal plans.
        cores: CPU lanes to scatter over.
        everywhere: Cut wherever that is legal, every operator a segment of its own; or else only where operators
            on other lanes have to wait, with a barrier between all lanes here and there.
    """
    order = random_order(graph.dag, pick)
    lanes = [pick.randint(1, cores) for _ in order]
    if everywhere:
        return fixed_plan(graph, lanes, order, segments=[[i] for i in order])
    stages, stage = [0] * len(order), 0
    for i in order:
        stage += pick.random() < _BARRIERS
        stages[i] = stage
    return fixed_plan(graph, lanes, order, stages=stages if stage else ())


def random_order(dag: Dag, pick: Random) -> tuple[int, ...]:
    """A topological order; every one of them may come up."""
    waiting = [len(before) for before in dag.predecessors]
    ready = [i for i, count in enumerate(waiting) if not count]
    order: list[int] = []
    while ready:
        i = ready.pop(pick.randrange(len(ready)))
        order.append(i)
        for after in dag.successors[i]:
            waiting[after] -= 1
            if not waiting[after]:
                ready.append(after)
    return tuple(order)
