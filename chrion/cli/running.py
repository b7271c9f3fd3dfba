"""``chrion run`` and ``chrion bench``."""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import onnxruntime as ort
import typer

from chrion.benchmark.accuracy import TOLERANCE, largest_difference
from chrion.benchmark.feeds import read_feed
from chrion.benchmark.latency import (
    hybrid_candidate,
    memory_held_mb,
    plain_baselines,
    time_candidates,
)
from chrion.cli.console import (
    AcceleratorOption,
    AlphaOption,
    CoresOption,
    GpuBudgetOption,
    JsonOption,
    ModelArgument,
    PolicyOption,
    ShapeOption,
    SloOption,
    StreamsOption,
    load_graph,
    progress_bar,
    show,
    show_json,
    stored_or_measured,
)
from chrion.devices.nvml import MemoryMonitor
from chrion.errors import OptionError
from chrion.graph import Graph
from chrion.profiler.measure import synthetic_inputs
from chrion.report import bench_table, bench_verdict, memory_line
from chrion.report.tables import best_baseline
from chrion.runtime import HybridSession
from chrion.scheduler import DEFAULT_POLICY, Plan, partition
from chrion.scheduler.planner import check_options
from chrion.units import format_ms

PlanOption = Annotated[Path | None, typer.Option("--plan", metavar="PLAN.json", help="A plan.  [default: made here]")]
InputOption = Annotated[
    Path | None, typer.Option("--input", metavar="X.npz", help="Arrays by input name.  [default: made up]")
]

HYBRID = "hybrid"


def run(
    model: ModelArgument,
    plan: PlanOption = None,
    slo: SloOption = None,
    alpha: AlphaOption = None,
    gpu_budget: GpuBudgetOption = None,
    policy: PolicyOption = DEFAULT_POLICY,
    feed: InputOption = None,
    repeat: Annotated[int, typer.Option(min=1, help="Runs to time.")] = 20,
    cores: CoresOption = None,
    accelerator: AcceleratorOption = None,
    shape: ShapeOption = None,
    streams: StreamsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run a model by its plan and check the outputs against plain onnxruntime."""
    graph = load_graph(model, shape)
    chosen = _plan(graph, plan, slo, alpha, gpu_budget, policy, cores, accelerator, streams)
    arrays = read_feed(feed, graph) if feed else synthetic_inputs(graph)
    plain = ort.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    expected = plain.run(None, arrays)
    del plain  # its threads would spin beside the lanes
    times = []
    with HybridSession(graph, plan=chosen, strict=True) as session:
        outputs = session.run(None, arrays)
        for _ in range(repeat):
            before = time.perf_counter()
            outputs = session.run(None, arrays)
            times.append((time.perf_counter() - before) * 1e3)
        explanation = session.explain()
    difference = largest_difference(outputs, expected)
    equal = difference <= TOLERANCE
    if as_json:
        latency = {"predicted_ms": chosen.predicted.latency_ms, "measured_ms": statistics.median(times)}
        show_json({"model": graph.name, "equal": equal, "largest_difference": difference, "runs": repeat, **latency})
    else:
        predicted = format_ms(chosen.predicted.latency_ms)
        show(
            explanation,
            f"measured {format_ms(statistics.median(times))} (median of {repeat}), predicted {predicted}",
            f"outputs {'equal' if equal else 'DIFFER FROM'} plain onnxruntime's: largest difference {difference:.2g}",
        )
    if not equal:
        raise typer.Exit(1)


def bench(
    model: ModelArgument,
    plan: PlanOption = None,
    slo: SloOption = None,
    alpha: AlphaOption = None,
    gpu_budget: GpuBudgetOption = None,
    policy: PolicyOption = DEFAULT_POLICY,
    feed: InputOption = None,
    cycles: Annotated[int, typer.Option(min=1, help="Turns of each rival.")] = 5,
    cores: CoresOption = None,
    accelerator: AcceleratorOption = None,
    shape: ShapeOption = None,
    streams: StreamsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Time the hybrid session beside plain onnxruntime sessions."""
    monitor = MemoryMonitor()
    graph = load_graph(model, shape)
    chosen = _plan(graph, plan, slo, alpha, gpu_budget, policy, cores, accelerator, streams)
    arrays = read_feed(feed, graph) if feed else synthetic_inputs(graph)
    rivals = {HYBRID: hybrid_candidate(graph, chosen, arrays), **plain_baselines(str(model), arrays)}
    held_mb = memory_held_mb(rivals[HYBRID], monitor) if chosen.accelerator else 0.0
    with progress_bar("bench") as progress:
        timings = time_candidates(rivals, rounds=cycles, progress=progress)
    if as_json:
        best = best_baseline(timings, HYBRID)
        own = next(t for t in timings if t.name == HYBRID)
        summary = {"model": graph.name, "ratio": own.median_ms / best.median_ms, "best_plain": best.name}
        predicted = chosen.predicted
        memory = {
            "predicted_memory_mb": predicted.memory_mb,
            "predicted_resident_mb": predicted.resident_mb,
            "measured_mb": held_mb,
        }
        timed = {"predicted_ms": predicted.latency_ms, "timings": [asdict(t) for t in timings]}
        show_json({**summary, **memory, **timed})
    else:
        show(bench_table(timings, HYBRID, chosen.predicted.latency_ms), bench_verdict(timings, HYBRID))
        show(memory_line(chosen.predicted, held_mb))


def _plan(
    graph: Graph,
    stored: Path | None,
    slo: str | None,
    alpha: float | None,
    gpu_budget: str | None,
    policy: str,
    cores: int | None,
    accelerator: str | None,
    streams: int | None,
) -> Plan:
    if stored is None:
        check_options(slo, alpha, policy, gpu_budget, streams=streams)
        measured = stored_or_measured(graph, None, cores, accelerator, policies=[policy])
        return partition(graph, measured, slo, alpha, policy, cores=cores, streams=streams, gpu_budget=gpu_budget)
    if (slo, alpha, gpu_budget, cores, accelerator, streams) != (None,) * 6 or policy != DEFAULT_POLICY:
        options = "--slo, --alpha, --gpu-budget, --policy, --cores, --accelerator or --streams"
        raise OptionError(f"--plan: it is made already; give no {options}")
    plan = Plan.load(stored)
    plan.apply(graph)  # refuses a plan of another model before anything is measured
    return plan
