"""Hypothesis strategies for graphs, costs and schedules; times are whole numbers, so that sums and ties are exact."""

from __future__ import annotations

import itertools
from dataclasses import replace

from hypothesis import strategies as st

from chrion.graph import Dag
from chrion.profiler import CopyCost, Costs, OperatorMemory
from chrion.scheduler import Schedule


@st.composite
def dags(draw: st.DrawFn, largest: int = 9, *, requests: bool = False) -> Dag:
    """Draw a DAG whose indices are in no particular order; its edges carry 0 to 4 bytes.

    With ``requests``, some operators read inputs of a request, and some produce its outputs.
    """
    n = draw(st.integers(1, largest))
    name = draw(st.permutations(range(n)))
    pairs = [(i, j) for j in range(n) for i in range(j)]
    chosen = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=2 * n)) if pairs else []
    sizes = draw(st.lists(st.integers(0, 4), min_size=len(chosen), max_size=len(chosen)))
    dag = Dag.from_edges(n, [(name[i], name[j]) for i, j in chosen], sizes)
    if not requests:
        return dag
    operators = st.sets(st.integers(0, n - 1))
    brought = draw(st.lists(st.tuples(st.integers(0, 4), operators), max_size=3))
    return replace(
        dag,
        request_inputs=tuple((size, tuple(sorted(readers))) for size, readers in brought),
        request_outputs=tuple(
            (i, i) for i in sorted(draw(operators))
        ),  # each operator of such a graph produces one value
    )


@st.composite
def costs_for(
    draw: st.DrawFn, dag: Dag, *, accelerator: bool | None = None, dispatch: bool = True, wide: bool = False
) -> Costs:
    """Draw costs with up to three cores; whether there is an accelerator is drawn, too, if ``accelerator`` is None.

    With ``wide``, there are times for every width, and busy cores do not slow each other down.
    """
    n = len(dag)

    def row(low: int, high: int) -> tuple[float, ...]:
        return tuple(float(ms) for ms in draw(st.lists(st.integers(low, high), min_size=n, max_size=n)))

    has = draw(st.booleans()) if accelerator is None else accelerator
    cores = draw(st.integers(0 if has else 1, 3))
    outputs, ephemeral, weights = row(0, 3), row(0, 2), row(0, 2)
    cpu_ms = (row(0, 9),) * cores if wide else tuple(row(0, 9) for _ in range(cores))
    widths = tuple(range(2, cores + 1)) if wide else ()
    return Costs(
        accelerator_ms=row(0, 6) if has else None,
        cpu_ms=cpu_ms,
        widths=widths,
        wide_ms=tuple(row(0, 9) for _ in widths),
        wake_ms=draw(st.integers(0, 2)) if wide else 0.0,
        memory=tuple(OperatorMemory(1.0, o, e, w) for o, e, w in zip(outputs, ephemeral, weights, strict=True)),
        upload=CopyCost(draw(st.integers(0, 2)), draw(st.integers(0, 2))),
        download=CopyCost(draw(st.integers(0, 2)), draw(st.integers(0, 2))),
        handoff_ms=draw(st.integers(0, 3)),
        dispatch_ms=draw(st.integers(0, 2)) if dispatch else 0.0,
        base_memory_mb=draw(st.integers(0, 5)),
    )


@st.composite
def topological_orders(draw: st.DrawFn, dag: Dag) -> tuple[int, ...]:
    """Draw a topological order."""
    order: list[int] = []
    while len(order) < len(dag):
        ready = [i for i in range(len(dag)) if i not in order and set(dag.predecessors[i]) <= set(order)]
        order.append(draw(st.sampled_from(ready)))
    return tuple(order)


@st.composite
def schedules(
    draw: st.DrawFn, dag: Dag, costs: Costs, *, most_streams: int = 1, staged: bool | None = False
) -> Schedule:
    """Draw a valid schedule; whether it has stages is drawn, too, if ``staged`` is None."""
    has = costs.accelerator_ms is not None
    streams = draw(st.integers(1, most_streams)) if has else 1
    cores = draw(st.integers(0 if has else 1, costs.cores))
    usable = st.integers(1 - streams if has else 1, cores)
    lanes = tuple(draw(usable) for _ in range(len(dag)))
    order = draw(topological_orders(dag))
    stages: tuple[int, ...] = ()
    if draw(st.booleans()) if staged is None else staged:
        steps = draw(st.lists(st.sampled_from([0, 0, 1, 2]), min_size=len(dag), max_size=len(dag)))
        along = dict(zip(order, itertools.accumulate(steps), strict=True))
        stages = tuple(along[i] for i in range(len(dag)))
    widths: tuple[int, ...] = ()
    if costs.widths:
        widths = tuple(draw(st.integers(1, cores - lane + 1)) if lane > 0 else 1 for lane in lanes)
    return Schedule(order, lanes, cores, streams, stages, widths)


@st.composite
def problems(draw: st.DrawFn) -> tuple[Dag, Costs]:
    """Draw a graph, and costs for an accelerator and one to three cores."""
    dag = draw(dags(largest=5))
    return dag, draw(costs_for(dag, accelerator=True).filter(lambda c: c.cores > 0))
