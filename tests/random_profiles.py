"""Profiles of random costs on two cores; the CPU provider stands for the accelerator."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from chrion import Graph, Profile
from chrion.profiler import CopyCost, OperatorCost
from helpers import MACHINE

_PROVIDER = "CPUExecutionProvider"


def random_profile(graphs: Sequence[Graph], *, accelerator: bool, seed: int = 0) -> Profile:
    """Return a profile in which all operators of the graphs have different times.

    An operator takes 0.1 to 2 ms on a core and half of that on the accelerator.
    """
    pick = Random(seed)
    costs = {}
    for signature in sorted({s for graph in graphs for s in graph.dag.signatures}):
        ms = pick.uniform(0.1, 2.0)
        costs[signature] = OperatorCost("Op", (ms, 1.1 * ms), ms / 2 if accelerator else None, flops=ms, bytes=1)
    copy = CopyCost(0.01, 1e-6)
    return Profile(MACHINE, 2, _PROVIDER if accelerator else None, costs, copy, copy, 0.01, 0.01)


def coarse_random_profile(graph: Graph, pick: Random) -> Profile:
    """Return a profile of few different times, so that plans differ much and ties are frequent.

    Some operators do not run on the accelerator, and copies may be free.
    """
    operators = {
        signature: OperatorCost(
            op_type=op_type,
            cpu_ms=(cost := pick.choice([0.01, 0.1, 1.0]), cost),
            accelerator_ms=pick.choice([None, 0.01, 0.1]),
        )
        for signature, op_type in zip(graph.dag.signatures, graph.dag.op_types, strict=True)
    }
    copy = CopyCost(pick.choice([0.0, 0.05]), 1e-6)
    return Profile(MACHINE, 2, _PROVIDER, operators, copy, copy, handoff_ms=0.01, dispatch_ms=0.01)
