"""Random plans of a model, and an ONNX backend that runs every model with one."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

import onnx

from chrion import HybridSession, load
from chrion.backend import HybridBackend
from chrion.errors import ModelError
from chrion.graph.dag import Dag
from chrion.graph.model import Graph
from chrion.scheduler import fixed_plan
from chrion.scheduler.plan import Plan

#: Probability of a barrier before an operator of a random plan.
_BARRIERS = 0.1


def random_plan(graph: Graph, pick: Random, *, cores: int = 2, everywhere: bool = True, wide: bool = False) -> Plan:
    """Return a plan that distributes the operators randomly over CPU lanes.

    Args:
        graph: The graph.
        pick: Random number generator; equal states give equal plans.
        cores: Number of CPU lanes.
        everywhere: Make every operator a segment of its own; otherwise cut only where operators on other lanes have
            to wait, and at a few random barriers.
        wide: Run some operators on several cores.
    """
    order = random_order(graph.dag, pick)
    lanes = [pick.randint(1, cores) for _ in order]
    widths = [pick.randint(1, cores - lane + 1) for lane in lanes] if wide else []
    if everywhere:
        return fixed_plan(graph, lanes, order, widths=widths, segments=[[i] for i in order])
    stages, stage = [0] * len(order), 0
    for i in order:
        stage += pick.random() < _BARRIERS
        stages[i] = stage
    return fixed_plan(graph, lanes, order, stages=stages if stage else (), widths=widths)


def random_order(dag: Dag, pick: Random) -> tuple[int, ...]:
    """Return a random topological order; each has a positive probability."""
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


class RandomCutBackend(HybridBackend):
    """A backend in which every operator is a segment of its own on a random lane.

    Attributes:
        seed: The seed of the random numbers, the same for every model.
        optimise: Apply onnxruntime's basic optimisation first, which leaves fewer operators.
    """

    seed = 0
    optimise = True

    @classmethod
    def open(cls, model: onnx.ModelProto | bytes | str, **options: Any) -> HybridSession:
        """Create a session with a random plan; a model that cannot be cut runs in a plain InferenceSession."""
        maker = partial(random_plan, pick=Random(cls.seed))
        source: Any = model
        if not cls.optimise:
            try:
                source = load(model, optimise=False)
            except ModelError:  # HybridSession then raises the error of InferenceSession
                source = model
        return HybridSession(source, **{"plan": maker, **options})
