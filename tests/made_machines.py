"""Graphs of several kinds with made costs, and made profiles of models, for tests of how good plans are."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from chrion import Graph, Profile
from chrion.graph import Dag
from chrion.profiler import CopyCost, Costs, Machine, OperatorCost, OperatorMemory
from chrion.profiler.roofline import operator_bytes

#: An operator reads one of the weights with this probability, if there are weights.
_READS_WEIGHT = 0.6


def roofline_profile(graph: Graph, cores: int, *, accelerator: bool) -> Profile:
    """Return a profile by roofline: slow cores without launch overhead, and a fast accelerator with one."""
    operators = {}
    for i, signature in enumerate(graph.dag.signatures):
        size, flops = operator_bytes(graph.dag, i), graph.dag.flops[i]
        core = 0.003 + max(flops / 2e7, size / 1e7)
        device = 0.008 + max(flops / 2e9, size / 5e8) if accelerator else None
        operators[signature] = OperatorCost(
            graph.dag.op_types[i],
            tuple(core * (1 + 0.03 * j) for j in range(cores)),
            device,
            flops=flops,
            bytes=size,
        )
    machine = Machine("a CPU", cores, 1000.0, "a system", "1.0")
    copy = CopyCost(0.015, 1e-7)
    provider = "CUDAExecutionProvider" if accelerator else None
    return Profile(machine, cores, provider, operators, copy, copy, handoff_ms=0.001, dispatch_ms=0.003)


def _layered(pick: Random, n: int) -> list[tuple[int, int]]:
    width = pick.choice([3, 5, 8])
    before = [range((i // width - 1) * width, i // width * width) for i in range(n)]
    return [(m, i) for i in range(width, n) for m in pick.sample(before[i], pick.randint(1, 3))]


def _fork_join(pick: Random, n: int) -> list[tuple[int, int]]:
    edges, last, i = [], 0, 1
    while i < n:
        ends = []
        for _ in range(pick.randint(2, 6)):
            previous = last
            for _ in range(pick.randint(1, 4)):
                if i < n:
                    edges.append((previous, i))
                    previous, i = i, i + 1
            ends.append(previous)
        if i < n:
            edges += [(end, i) for end in dict.fromkeys(ends)]
            last, i = i, i + 1
    return list(dict.fromkeys(edges))


def _recurrent(pick: Random, n: int) -> list[tuple[int, int]]:
    layers = pick.choice([2, 4, 6])
    steps = n // layers
    along = [(layer * steps + t - 1, layer * steps + t) for layer in range(layers) for t in range(1, steps)]
    return along + [((layer - 1) * steps + t, layer * steps + t) for layer in range(1, layers) for t in range(steps)]


def _sparse(pick: Random, n: int) -> list[tuple[int, int]]:
    density = min(0.4, pick.uniform(1.5, 4) / n)
    return [(a, b) for b in range(n) for a in range(b) if pick.random() < density]


FAMILIES = {"layered": _layered, "fork-join": _fork_join, "recurrent": _recurrent, "sparse": _sparse}


def made_problem(
    family: str, n: int, cores: int, seed: int, *, accelerator: bool, weights: bool = False, streams: int = 1
) -> tuple[Dag, Costs]:
    """Return a random graph of a family with random costs; operators differ in time, and machines in overheads."""
    pick = Random(f"{family}/{n}/{cores}/{accelerator}/{weights}/{seed}")
    edges = FAMILIES[family](pick, n)
    dag = Dag.from_edges(n, edges, [pick.choice([1_000, 20_000, 200_000, 1_000_000]) for _ in edges])
    if weights:
        layers = max(2, n // 8)
        read = tuple((i * layers // n,) if pick.random() < _READS_WEIGHT else () for i in range(n))
        dag = replace(dag, weights=read, weight_bytes=tuple(pick.choice([1 << 14, 1 << 18]) for _ in range(layers)))
    spread = pick.choice([[1.0], [0.1, 0.5, 1.0, 2.0], [0.05, 0.2, 1.0, 4.0]])
    scale, speed = pick.choice([0.02, 0.2, 2.0]), pick.choice([0.5, 1, 2, 5])
    core = [scale * pick.choice(spread) for _ in range(n)]
    return dag, Costs(
        accelerator_ms=tuple(ms / speed / pick.choice([0.5, 1, 2]) for ms in core) if accelerator else None,
        cpu_ms=tuple(tuple(ms * (1 + 0.05 * j) for ms in core) for j in range(cores)),
        memory=tuple(OperatorMemory(0, dag.output_bytes[i] / 1e6, 0, dag.weight_total(i) / 1e6) for i in range(n)),
        upload=CopyCost(0.01, 1e-7),
        download=CopyCost(0.01, 1e-7),
        handoff_ms=pick.choice([0.001, 0.005, 0.02]),
        dispatch_ms=pick.choice([0.0, 0.002, 0.01]),
        cache_bytes=1 << 18 if weights else 0,
        reload_ms_per_byte=5e-8 if weights else 0.0,
        accelerator_share=tuple(pick.uniform(0.05, 0.5) for _ in range(n)) if streams > 1 else (),
        streams=streams,
    )
