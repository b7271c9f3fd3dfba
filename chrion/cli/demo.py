"""``chrion demo``: the whole journey on the paper's baseline model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import onnxruntime as ort
import typer

from chrion import zoo
from chrion.benchmark.accuracy import largest_difference
from chrion.benchmark.latency import hybrid_candidate, plain_baselines, time_candidates
from chrion.cli.console import CoresOption, progress_bar, show, stored_or_measured
from chrion.errors import ModelError
from chrion.files import write_atomically
from chrion.graph import load
from chrion.profiler.machine import this_machine
from chrion.profiler.measure import synthetic_inputs
from chrion.report import (
    bench_table,
    bench_verdict,
    measured_chart,
    plan_table,
    predicted_chart,
    timeline_html,
    verdict,
)
from chrion.runtime import HybridSession
from chrion.scheduler import DEFAULT_POLICY, partition
from chrion.units import format_ms

_HYBRID = "hybrid"
_BASELINE = "lstm-baseline"


def demo(
    output: Annotated[Path, typer.Option("--output", "-o", help="Page to write.")] = Path("timeline.html"),
    cores: CoresOption = None,
) -> None:
    """Build the paper's LSTM, profile, partition, run and compare it on this machine. Takes about a minute."""
    show(f"[bold]1. Build[/bold] {_BASELINE}: 12 layers x 96 steps, batch 8, width 64, one operator a step")
    unfolded = zoo.build(_BASELINE)
    graph = load(unfolded)
    show(f"[bold]2. Profile[/bold] its {len(graph.dag)} operators on {this_machine()}")
    measured = stored_or_measured(graph, None, cores, None)
    kinds = len(set(graph.dag.signatures))
    total = format_ms(sum(measured.costs(graph.dag).cpu_ms[0]))
    show(f"   {kinds} distinct signatures; one after another on one core: {total}")
    show("[bold]3. Partition[/bold]")
    plan = partition(graph, measured, policy=DEFAULT_POLICY)
    show(plan_table(plan), f"   {verdict(plan)}")
    show("[bold]4. Run[/bold]")
    feed = synthetic_inputs(graph)
    expected = ort.InferenceSession(unfolded.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feed)
    with HybridSession(graph, plan=plan) as session:
        difference = largest_difference(session.run(None, feed), expected)
        explanation = session.explain()
        traces = [session.trace(feed) for _ in range(15)]
    show(explanation, f"   largest difference from plain onnxruntime: {difference:.2g}")
    if difference > 1e-3:
        raise ModelError("demo: outputs differ from plain onnxruntime's")
    show(
        "[bold]5. Compare[/bold] with plain onnxruntime, on the same graph and on the folded one that a user would run"
    )
    folded = zoo.build(_BASELINE, {"chunk": 96}).SerializeToString()
    rivals = {
        _HYBRID: hybrid_candidate(graph, plan, feed),
        **plain_baselines(unfolded.SerializeToString(), feed, "unfolded"),
        **plain_baselines(folded, feed, "folded"),
    }
    with progress_bar("compare") as progress:
        timings = time_candidates(rivals, rounds=4, progress=progress)
    same_graph = [t for t in timings if not t.name.startswith("folded")]
    show(bench_table(timings, _HYBRID, plan.predicted.latency_ms))
    remarks = [
        f"On the same graph, {bench_verdict(same_graph, _HYBRID)}.",
        f"Over all, {bench_verdict(timings, _HYBRID)}.",
        f"Predicted {format_ms(plan.predicted.latency_ms)} on {plan.machine}.",
    ]
    show(*remarks)
    traces.sort(key=lambda events: max((e.end_ms for e in events), default=0.0))
    typical = traces[len(traces) // 2]
    charts = [predicted_chart(plan), measured_chart(plan, typical)]
    write_atomically(output, timeline_html(plan, charts, remarks, graph=graph, profile=measured))
    show(f"[bold]6. Look[/bold] at both timelines, predicted and measured: {output.resolve()}")
