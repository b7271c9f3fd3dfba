"""Unfolded recurrent stacks without a model."""

from __future__ import annotations

from dataclasses import replace

from chrion.graph import Dag
from chrion.profiler import Costs, uniform_costs


def stack(layers: int, steps: int) -> Dag:
    """Return an unfolded recurrent stack: operator ``layer * steps + step``, with a weight of 64 kB for each layer."""
    edges = [(la * steps + t, la * steps + t + 1) for la in range(layers) for t in range(steps - 1)]
    edges += [(la * steps + t, (la + 1) * steps + t) for la in range(layers - 1) for t in range(steps)]
    weights = tuple((i // steps,) for i in range(layers * steps))
    signatures = ("cell",) * (layers * steps)
    dag = Dag.from_edges(layers * steps, edges)
    return replace(dag, weights=weights, weight_bytes=(1 << 16,) * layers, signatures=signatures)


def two_cores(dag: Dag, **machine: float) -> Costs:
    """Return costs for two cores, with operators of 10 us, handoffs of 2 us and dispatches of 5 us."""
    given = {"handoff_ms": 0.002, "dispatch_ms": 0.005, **machine}
    return uniform_costs(dag, cpu_ms=[0.01, 0.01], **given)
