"""``chrion demo``: all steps from a model to a measured plan, on the paper's baseline model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import onnxruntime as ort
import typer
from rich.text import Text

from chrion import zoo
from chrion.benchmark.accuracy import TOLERANCE, largest_difference
from chrion.benchmark.latency import Feed, Timing, hybrid_candidate, plain_baselines
from chrion.cli import outputs
from chrion.cli.console import show, step
from chrion.cli.options import CoresOption, ForceOption
from chrion.cli.steps import load_or_measure_profile, time_sessions
from chrion.errors import ModelError
from chrion.files import write_atomically
from chrion.graph import Graph, load
from chrion.profiler.machine import this_machine
from chrion.profiler.synthetic_inputs import synthetic_inputs
from chrion.report import bench_table, measured_chart, plan_table, predicted_chart, timeline_html, verdict
from chrion.report.lane_chart import LaneChart
from chrion.report.tables import best_baseline
from chrion.runtime import HybridSession
from chrion.scheduler import DEFAULT_POLICY, Plan, partition
from chrion.units import format_ms

_PLAN = "plan"
_BASELINE = "lstm-baseline"
_TRACES = 15


def demo(
    output: Annotated[Path, typer.Option("--output", "-o", help="Page to write.")] = Path("timeline.html"),
    cores: CoresOption = None,
    force: ForceOption = False,
) -> None:
    """Build the paper's LSTM, profile, partition, run and compare it on this machine. Takes about a minute.

    It writes a web page with the predicted and the measured timeline; the page of an earlier demo is replaced.
    """
    target = outputs.check_output("-o", output, outputs.TIMELINE, force=force)
    _show_heading("1. Build", f"{_BASELINE}: 12 layers x 96 steps, batch 8, width 64, unfolded: one operator per step")
    with step(f"building {_BASELINE}"):
        unfolded = zoo.build(_BASELINE)
        folded = zoo.build(_BASELINE, {"chunk": 96})
        graph = load(unfolded)
    _show_heading("2. Profile", f"its {len(graph.dag)} operators on {this_machine()}")
    measured = load_or_measure_profile(graph, None, cores, None)
    kinds = len(set(graph.dag.signatures))
    total = format_ms(sum(measured.costs(graph.dag).cpu_ms[0]))
    show(f"   {kinds} of them distinct; {total} one after another on one core")
    _show_heading("3. Partition", "decide which operator runs on which lane")
    with step(f"planning {_BASELINE}"):
        plan = partition(graph, measured, policy=DEFAULT_POLICY)
    show(plan_table(plan), f"   {verdict(plan)}")
    _show_heading("4. Run", "the plan and check its outputs")
    feed = synthetic_inputs(graph)
    expected = ort.InferenceSession(unfolded.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feed)
    chart = _run(graph, plan, feed, expected)
    _show_heading("5. Compare", "with plain onnxruntime, on the same model and folded, with one operator per layer")
    candidates = {
        _PLAN: hybrid_candidate(graph, plan, feed),
        **plain_baselines(unfolded.SerializeToString(), feed, "unfolded"),
        **plain_baselines(folded.SerializeToString(), feed, "folded"),
    }
    timings = time_sessions(candidates, rounds=4)
    show(bench_table(timings, _PLAN, plan.predicted.latency_ms))
    conclusions = _conclusions(timings, plan)
    show(*conclusions)
    charts = [predicted_chart(plan), chart]
    write_atomically(output, timeline_html(plan, charts, conclusions, graph=graph, profile=measured))
    _show_heading("6. Look", f"at the predicted and the measured timeline in a browser ({target.message})")


def _show_heading(heading: str, text: str) -> None:
    show(Text.assemble((heading, "bold"), f": {text}"))


def _run(graph: Graph, plan: Plan, feed: Feed, expected: Sequence[object]) -> LaneChart:
    """Run the plan, check its outputs, and return the lanes of the run of median latency.

    Raises:
        ModelError: Its outputs differ from plain onnxruntime's.
    """
    with HybridSession(graph, plan=plan) as session:
        difference = largest_difference(session.run(None, feed), expected)
        explanation = session.explain()
        traces = [session.trace(feed) for _ in range(_TRACES)]
    show(explanation, f"   largest difference from plain onnxruntime: {difference:.2g}")
    if difference > TOLERANCE:
        raise ModelError(f"demo: outputs differ from plain onnxruntime's by {difference:.2g}, more than {TOLERANCE:g}")
    traces.sort(key=lambda events: max((e.end_ms for e in events), default=0.0))
    return measured_chart(plan, traces[_TRACES // 2])


def _conclusions(timings: Sequence[Timing], plan: Plan) -> list[str]:
    """Return one sentence on each comparison of the plan with the fastest plain sessions."""
    own = next(t for t in timings if t.name == _PLAN)
    unfolded = best_baseline([t for t in timings if t.name.startswith("unfolded")], _PLAN)
    folded = best_baseline([t for t in timings if t.name.startswith("folded")], _PLAN)
    return [
        f"On the same unfolded model: {_compare(own, unfolded)}.",
        f"With the folded model in plain onnxruntime: {_compare(own, folded)}.",
        f"The plan was predicted to take {format_ms(plan.predicted.latency_ms)}.",
    ]


def _compare(one: Timing, other: Timing) -> str:
    """Return which of two sessions is faster, by which factor; they are equally fast within 3 %."""
    fast, slow = sorted((one, other), key=lambda t: t.median_ms)
    times = f"{format_ms(fast.median_ms)} and {format_ms(slow.median_ms)}"
    ratio = slow.median_ms / fast.median_ms
    if ratio <= 1.03:
        return f"{_name(fast)} and {_name(slow)} are equally fast ({times})"
    return f"{_name(fast)} is {ratio:.1f} times as fast as {_name(slow)} ({times})"


def _name(timing: Timing) -> str:
    return "the plan" if timing.name == _PLAN else f"onnxruntime ({timing.name})"
