"""Derive ``profiles/gtx1080ti-paper.json`` from Table 6 of the Chrion paper.

    python scripts/derive_paper_profile.py

Takes a few seconds. Prints the derived figures with those of the table and writes the profile. The profile's notes
(``NOTES`` below) list all assumptions.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from chrion.graph import Graph, load
from chrion.profiler import CopyCost, Machine, OperatorCost, Profile
from chrion.profiler.roofline import operator_bytes
from chrion.scheduler.evaluation.evaluate import evaluate
from chrion.scheduler.policies.single_device import cpu_only
from chrion.zoo import build, names

CORES = 12
#: 59.3 ms / 1152 cells; the other rows of the same cell give 50.8 to 53.4 us.
GPU_CELL_MS = 0.0515
BASE_MB = 345.0

NOTES = (
    "Derived from Table 6 of the Chrion paper (GTX 1080 Ti, Xeon E5-2685 v3, 12 cores); nothing here was measured.",
    (
        "GPU latency: 51.5 us a cell in every variant. The GPU rows are proportional to the number of cells and hardly "
        "depend on batch size or width."
    ),
    (
        "GPU memory: 345 MB once, plus for each cell what its row of Table 6 leaves (1.127 MB for the baseline's). "
        "Outputs and weights are counted from the model; the rest of it is booked as ephemeral."
    ),
    (
        "CPU latency is not printed by operator. W(j) = s * max(4, j) on j busy cores: the rows of 4, 8, 12 and 16 "
        "layers cost the same per cell, so cores beyond the fourth add no throughput (Figure 2 says the same of its "
        "model: no gain above five). s is fitted to the seven rows of the baseline's cell, and to the one row of "
        "every other cell. Ten per cent more for each further core would give 4 layers 39 ms instead of 24."
    ),
    (
        "Copies: 12 GB/s each way (PCIe 3.0 x16), without latency, as in Equation 2. Handoff and dispatch: none, as in "
        "the paper."
    ),
    (
        "Split and Concat at the ends of the graph take no time, and no memory but their results (0.2 MB each for the "
        "baseline); the paper's graph has cells alone."
    ),
)


@dataclass(frozen=True)
class Row:
    """One column of Table 6; Chrion's model specification of the same name builds its model."""

    gpu_ms: float
    gpu_mb: float
    cpu_ms: float


TABLE_6 = {
    "lstm-baseline": Row(59.3, 1643.0, 70.6),
    "lstm-layers-4": Row(20.5, 777.0, 23.9),
    "lstm-layers-8": Row(39.0, 1209.0, 47.1),
    "lstm-layers-16": Row(78.1, 2075.0, 94.1),
    "lstm-batch-1": Row(58.3, 1643.0, 65.9),
    "lstm-batch-2": Row(59.1, 1643.0, 63.3),
    "lstm-batch-4": Row(57.2, 1643.0, 67.0),
    "lstm-batch-16": Row(58.2, 1643.0, 80.4),
    "lstm-io-32": Row(59.2, 1533.0, 61.5),
    "lstm-io-128": Row(58.6, 2461.0, 96.8),
    "lstm-seq-32": Row(19.7, 777.0, 23.7),
    "lstm-seq-64": Row(39.2, 1209.0, 47.1),
    "lstm-seq-128": Row(78.5, 2075.0, 95.4),
}


def core_times(per_cell_ms: float) -> tuple[float, ...]:
    """Return W(1..12): four cores saturate shared resources, so that the time grows with the number of cores above."""
    return tuple(per_cell_ms * max(4, j) for j in range(1, CORES + 1))


def cell_signatures(graph: Graph) -> dict[str, int]:
    """Return one operator of each LSTM signature."""
    return {s: i for i, s in enumerate(graph.dag.signatures) if graph.dag.op_types[i] == "LSTM"}


def cpu_latency_ms(graph: Graph, per_cell_ms: float) -> float:
    """Return the CPU-only latency at the best number of cores."""
    costs = assemble([(graph, Row(0, 0, 0), per_cell_ms)]).costs(graph.dag)
    return evaluate(graph.dag, costs, cpu_only(graph.dag, costs, 0.0)).latency_ms


def fit_cell_time(graphs: Sequence[tuple[Graph, Row]]) -> float:
    """Return the s that fits the CPU rows best; latency is proportional to it."""
    unit = np.array([cpu_latency_ms(graph, 1.0) for graph, _ in graphs])
    rows = np.array([row.cpu_ms for _, row in graphs])
    ratio = unit / rows
    return float(ratio.sum() / (ratio @ ratio))  # least squares of the relative errors


def assemble(models: Sequence[tuple[Graph, Row, float]]) -> Profile:
    """Return the profile of some models, each with its row and fitted s."""
    operators: dict[str, OperatorCost] = {}
    for graph, row, per_cell_ms in models:
        cells = sum(t == "LSTM" for t in graph.dag.op_types)
        cell_mb = (row.gpu_mb - BASE_MB) / cells
        for i, (op_type, signature) in enumerate(zip(graph.dag.op_types, graph.dag.signatures, strict=True)):
            own_bytes = graph.dag.output_bytes[i] + graph.dag.weight_total(i)
            cell = op_type == "LSTM"
            operators[signature] = OperatorCost(
                op_type=op_type,
                cpu_ms=core_times(per_cell_ms) if cell else (0.0,) * CORES,
                accelerator_ms=GPU_CELL_MS if cell else 0.0,
                ephemeral_bytes=max(0, round(cell_mb * 1e6) - own_bytes) if cell else 0,
                flops=graph.dag.flops[i],
                bytes=operator_bytes(graph.dag, i),
            )
    copy = CopyCost(0.0, 1 / 12e6)
    return Profile(
        machine=Machine(
            cpu="Intel Xeon E5-2685 v3",
            cores=CORES,
            memory_mb=128e3,
            system="Linux x86_64",
            onnxruntime="1.10.0",
            accelerator="NVIDIA GTX 1080 Ti",
        ),
        cores=CORES,
        accelerator="CUDAExecutionProvider",
        operators=operators,
        upload=copy,
        download=copy,
        base_memory_mb=BASE_MB,
        notes=NOTES,
    )


def main() -> None:
    """Fit the profile, print it with the table, and write it."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    graphs = {name: load(build(name)) for name in names() if name in TABLE_6}
    by_cell = sorted(TABLE_6, key=lambda name: sorted(cell_signatures(graphs[name])))
    models = []
    print(f"{'model':16} {'GPU ms':>14} {'GPU MB':>16} {'CPU ms':>14} {'s, us':>7}   (derived / paper)")
    for _, group in itertools.groupby(by_cell, key=lambda name: sorted(cell_signatures(graphs[name]))):
        same = [(graphs[name], TABLE_6[name]) for name in group]
        s = fit_cell_time(same)
        models += [(graph, row, s) for graph, row in same]
    # The baseline is last: if rows of one cell differ in memory, its figure is used.
    models.sort(key=lambda m: m[1] is TABLE_6["lstm-baseline"])
    profile = assemble(models)
    for name, row in TABLE_6.items():
        graph = graphs[name]
        cells = sum(t == "LSTM" for t in graph.dag.op_types)
        s = next(s for g, _, s in models if g is graph)
        costs = profile.costs(graph.dag)
        memory = BASE_MB + sum(m.own_mb for m in costs.memory)
        cpu = cpu_latency_ms(graph, s)
        print(
            f"{name:16} {cells * GPU_CELL_MS:6.1f} / {row.gpu_ms:5.1f} {memory:7.1f} / {row.gpu_mb:6.1f} "
            f"{cpu:6.1f} / {row.cpu_ms:5.1f} {s * 1e3:7.1f}"
        )
    path = Path(__file__).parent.parent / "profiles" / "gtx1080ti-paper.json"
    profile.save(path)
    print(f"written: {path.name}, {len(profile.operators)} signatures")


if __name__ == "__main__":
    main()
