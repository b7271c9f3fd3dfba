"""``chrion report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from chrion.cli import outputs
from chrion.cli.console import show, step
from chrion.cli.option_groups import load_planned
from chrion.cli.options import PICTURE, ForceOption, PlanArgument
from chrion.common.files import write_atomically
from chrion.devices.nvml import MemoryMonitor
from chrion.errors import OptionError
from chrion.graph import Graph
from chrion.machine.cores import physical_cores
from chrion.profiler.interference import UsageMonitor
from chrion.profiler.synthetic_inputs import synthetic_inputs
from chrion.report.benchmark.feeds import run_plain
from chrion.report.lane_chart import LaneChart, chart_summary, chrome_trace, measured_chart, predicted_chart
from chrion.report.tables import BUSY_VERDICT, estimated_lines, memory_line, plan_table, verdict
from chrion.report.timeline_html import timeline_html
from chrion.report.timeline_picture import plot_timelines
from chrion.runtime import HybridSession
from chrion.scheduler import Plan

#: Runs that are traced, of which that of median latency is drawn; the first third are warm-ups.
_TRACES = 60


def report(
    plan: PlanArgument,
    measured: Annotated[
        bool, typer.Option("--measured", help="Run the model and show the measured lanes too.")
    ] = False,
    model: Annotated[Path | None, typer.Option(metavar="FILE", help="The plan's model; needed by --measured.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the timelines as a web page.")] = None,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help=f"Draw the timelines: {PICTURE}")] = None,
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a trace for Perfetto as JSON.")] = None,
    force: ForceOption = False,
) -> None:
    """Show a plan's figures and timeline, predicted and, with --measured, as it ran."""
    loaded = Plan.load(plan)
    if measured and model is None:
        raise OptionError("--measured: the model is missing", hint="name its file with --model")
    graph = load_planned(model, loaded) if model else None
    targets = outputs.check_outputs({"--html": html, "--trace": trace}, pictures={"--png": png}, force=force)
    charts, lines = [predicted_chart(loaded)], []
    if measured and graph and model:
        run_plain(model, synthetic_inputs(graph))
        monitor = UsageMonitor(physical_cores())
        chart, held_mb = _run_and_trace(loaded, graph)
        charts.append(chart)
        lines += [BUSY_VERDICT] if monitor.has_interference() else []
        lines += [memory_line(loaded.predicted, held_mb)] if loaded.accelerator else []
    show(
        plan_table(loaded),
        verdict(loaded),
        *loaded.remarks,
        *estimated_lines(loaded.estimated, len(loaded.operators), loaded.machine),
    )
    show(*lines, *chart_summary(loaded, charts))
    if html:
        write_atomically(html, timeline_html(loaded, charts, loaded.remarks, graph=graph))
    if png:
        plot_timelines(loaded, charts, png, graph=graph)
    if trace:
        write_atomically(trace, chrome_trace(charts))
    show(*(target.message for target in targets))


def _run_and_trace(plan: Plan, graph: Graph) -> tuple[LaneChart, float | None]:
    """Return the lanes of the run of median latency, and the peak accelerator memory in MB, None if not known."""
    monitor = MemoryMonitor()
    feed = synthetic_inputs(graph)
    with (
        step(f"running {graph.name} {_TRACES} times", animated=False),
        HybridSession(graph, plan=plan, strict=True) as session,
    ):
        with monitor.sampled():
            session.trace(feed)
        held_mb = monitor.peak_mb() if plan.accelerator else 0.0
        runs = [session.trace(feed) for _ in range(_TRACES)]
    runs = sorted(runs[_TRACES // 3 :], key=lambda events: max((e.end_ms for e in events), default=0.0))
    if not runs[0]:
        raise OptionError("--measured: the plan is one segment, which runs without lanes", hint="leave out --measured")
    return measured_chart(plan, runs[len(runs) // 2]), held_mb
