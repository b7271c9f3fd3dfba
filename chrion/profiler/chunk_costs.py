"""Costs of recurrent operators in chunks, interpolated between a few measured chunk lengths.

A plan may cut a recurrent operator into chunks of several lengths. Its time is nearly an affine function of the number
of steps, so that the shortest and the longest chunks are measured, besides the whole sequence, and the costs of all
others lie between. Operators beside it (Squeeze, Relu, ...) are cut likewise. Operators that split or join chunks have
no such neighbours; they are estimated from measured operators of their type.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from chrion.graph.dag import Dag
from chrion.graph.folding import fold
from chrion.graph.model import Graph
from chrion.graph.recurrent import chunk_choices, unroll
from chrion.profiler.estimate import Estimator, OperatorWork
from chrion.profiler.profiles import OperatorCost
from chrion.profiler.roofline import operator_bytes

#: The times of an operator.
Times = tuple[float, ...]
#: The first dimension of the first shape in a signature, which is the number of steps of a recurrent operator.
_STEPS = re.compile(r"\[(\d+)")


def representatives(graph: Graph, chunks: Iterable[int], variants: Iterable[Graph]) -> dict[str, tuple[Graph, int]]:
    """Return the first operator of every signature, as a graph and an index.

    Args:
        graph: The graph.
        chunks: The chunk lengths in which its recurrent operators count as well.
        variants: Further graphs.
    """
    first: dict[str, tuple[Graph, int]] = {}
    for each in (graph, *(unroll(graph, chunk) for chunk in chunks), *variants):
        for i, signature in enumerate(each.dag.signatures):
            first.setdefault(signature, (each, i))
    return first


def measured_chunks(graph: Graph) -> tuple[int, ...]:
    """Return the chunk lengths to measure: the longest and the shortest.

    If the graph has chains, these are the folded graph and two chunk lengths: chunks have initial states as inputs.
    """
    choices = chunk_choices(graph)
    ends = choices[1:] if fold(graph) is not graph else choices
    return tuple(dict.fromkeys([*choices[:1], *ends[:1], *ends[-1:]]))


def interpolate(dags: Iterable[Dag], known: Mapping[str, OperatorCost]) -> dict[str, OperatorCost]:
    """Return costs of the operators that were not measured.

    Args:
        dags: Graphs in chunks of several lengths.
        known: Measured costs by signature.

    Returns:
        Costs by signature. Operators without a measured operator of their type are left out.
    """
    families: dict[str, list[tuple[int, OperatorCost]]] = {}
    for signature, cost in known.items():
        family, steps = _family(signature)
        families.setdefault(family, []).append((steps, cost))
    costs: dict[str, OperatorCost] = {}
    for dag in dags:
        for i, signature in enumerate(dag.signatures):
            if signature in known or signature in costs:
                continue
            family, steps = _family(signature)
            measured = families.get(family, [])
            if len(measured) > 1:
                costs[signature] = _between(dag, i, steps, sorted(measured, key=lambda point: point[0]))
            elif same := [cost for cost in known.values() if cost.op_type == dag.op_types[i]]:
                costs[signature] = _estimated(dag, i, same)
    return costs


def _family(signature: str) -> tuple[str, int]:
    """Return the signature without the number of steps, and the number of steps; 0 if it has no shape."""
    match = _STEPS.search(signature)
    return (_STEPS.sub("[", signature, count=1), int(match[1])) if match else (signature, 0)


def _between(dag: Dag, i: int, steps: int, measured: Sequence[tuple[int, OperatorCost]]) -> OperatorCost:
    """Return the cost on the line through the two measured lengths around a length, or nearest to it."""
    above = next((at for at, point in enumerate(measured) if point[0] >= steps), len(measured) - 1)
    (low, a), (high, b) = measured[max(1, above) - 1], measured[max(1, above)]
    part = (steps - low) / (high - low)

    def value(first: float, second: float) -> float:
        return max(0.0, first + part * (second - first))

    both = a.accelerator_ms is not None and b.accelerator_ms is not None
    return OperatorCost(
        op_type=dag.op_types[i],
        cpu_ms=tuple(value(x, y) for x, y in zip(a.cpu_ms, b.cpu_ms, strict=True)),
        accelerator_ms=value(a.accelerator_ms or 0.0, b.accelerator_ms or 0.0) if both else None,
        ephemeral_bytes=int(value(a.ephemeral_bytes, b.ephemeral_bytes)),
        spread=max(a.spread, b.spread),
        flops=dag.flops[i],
        bytes=operator_bytes(dag, i),
        wide_ms=_wide(a.wide_ms, b.wide_ms, a.cpu_ms, b.cpu_ms, value),
        native_ms=tuple(map(value, a.native_ms, b.native_ms)),  # empty if either is
        native_wide_ms=_wide(a.native_wide_ms, b.native_wide_ms, a.native_ms, b.native_ms, value),
        native_error=max(a.native_error, b.native_error),
    )


def _wide(a: Times, b: Times, alone_a: Times, alone_b: Times, value: Callable[[float, float], float]) -> Times:
    """Return the times on several cores between two operators; one that was too short to measure gains nothing."""
    count = max(len(a), len(b))
    return tuple(map(value, a or alone_a[:1] * count, b or alone_b[:1] * count))


def _estimated(dag: Dag, i: int, same: Sequence[OperatorCost]) -> OperatorCost:
    """Return the cost estimated from operators of the same type."""
    work = OperatorWork(dag.op_types[i], dag.flops[i], operator_bytes(dag, i))

    def time_ms(times: Sequence[float]) -> float:
        known = [OperatorWork(c.op_type, c.flops, c.bytes, ms) for c, ms in zip(same, times, strict=True)]
        return Estimator(known).time_ms(work)

    accelerated = [cost.accelerator_ms for cost in same if cost.accelerator_ms is not None]
    return OperatorCost(
        op_type=work.op_type,
        cpu_ms=tuple(time_ms(times) for times in zip(*(cost.cpu_ms for cost in same), strict=True)),
        accelerator_ms=time_ms(accelerated) if len(accelerated) == len(same) else None,
        ephemeral_bytes=max(cost.ephemeral_bytes for cost in same),
        spread=max(cost.spread for cost in same),
        flops=work.flops,
        bytes=int(work.bytes),
    )
