"""``chrion profile``, ``chrion partition`` and ``chrion report``."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from chrion.benchmark.comparison import is_this_machine
from chrion.benchmark.stage_timer import StageTimer
from chrion.cli.console import (
    AcceleratorOption,
    AlphaOption,
    CoresOption,
    GpuBudgetOption,
    JsonOption,
    ModelArgument,
    PolicyOption,
    ProfileOption,
    ShapeOption,
    SloOption,
    StreamsOption,
    load_graph,
    progress_bar,
    show,
    show_json,
    stderr,
    stored_or_measured,
)
from chrion.devices.nvml import MemoryMonitor
from chrion.errors import OptionError
from chrion.files import write_atomically
from chrion.graph import Graph, load
from chrion.profiler.measure import synthetic_inputs
from chrion.report import (
    alpha_sweep_json,
    alpha_sweep_table,
    chart_summary,
    check_picture,
    chrome_trace,
    estimated_lines,
    measured_chart,
    memory_line,
    plan_table,
    plot_alpha_sweep,
    plot_timelines,
    predicted_chart,
    timeline_html,
    verdict,
)
from chrion.report.lane_chart import LaneChart
from chrion.runtime import HybridSession
from chrion.scheduler import DEFAULT_POLICY, Plan
from chrion.scheduler import partition as make_plan
from chrion.scheduler.explain import explain_placement
from chrion.scheduler.planner import check_options
from chrion.units import format_ms, parse_range

#: Exit code where no plan meets the SLO, or fits the GPU budget.
_OUT_OF_REACH = 3
#: Runs that are traced; the first third warms up.
_TRACES = 60


def profile(
    model: ModelArgument,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write.  [default: MODEL.profile.json]")
    ] = None,
    cores: CoresOption = None,
    accelerator: AcceleratorOption = None,
    shape: ShapeOption = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again what was measured before.")] = False,
) -> None:
    """Measure what a model's operators cost on this machine, and store it."""
    graph = load_graph(model, shape)
    measured = stored_or_measured(graph, None, cores, accelerator, fresh=fresh)
    path = output or model.with_suffix(".profile.json")
    measured.save(path)
    total = sum(measured.costs(graph.dag).cpu_ms[0])
    stderr.print(
        f"{path}: {len(measured.operators)} signatures of {len(graph.dag)} operators on {measured.machine}; "
        f"one after another on one core they take {format_ms(total)}",
        highlight=False,
    )


def partition(
    model: ModelArgument,
    slo: SloOption = None,
    alpha: AlphaOption = None,
    gpu_budget: GpuBudgetOption = None,
    profile: ProfileOption = None,
    policy: PolicyOption = DEFAULT_POLICY,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write.  [default: MODEL.plan.json]")
    ] = None,
    cores: CoresOption = None,
    accelerator: AcceleratorOption = None,
    shape: ShapeOption = None,
    streams: StreamsOption = None,
    measure_stages: Annotated[
        bool,
        typer.Option("--measure-stages", help="Policy ios times stages instead of adding up."),
    ] = False,
    explain: Annotated[
        str | None, typer.Option("--explain", metavar="NODE", help="Say why an operator is where it is.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Plan which operator runs where, and write the plan."""
    meter = StageTimer if measure_stages else None
    check_options(slo, alpha, policy, gpu_budget, streams=streams, meter=meter)
    graph = load_graph(model, shape)
    measured = stored_or_measured(graph, profile, cores, accelerator, policies=[policy])
    if meter and not is_this_machine(measured):
        raise OptionError(
            f"--measure-stages: the profile is of another machine ({measured.machine})", hint="leave out --profile"
        )
    plan = make_plan(
        graph, measured, slo, alpha, policy, cores=cores, streams=streams, meter=meter, gpu_budget=gpu_budget
    )
    reasons = explain_placement(graph, measured, plan, explain) if explain else []
    path = output or model.with_suffix(".plan.json")
    plan.save(path)
    if as_json:
        show_json({**_summary(plan, path), **({"explanation": reasons} if explain else {})})
    else:
        estimated = estimated_lines(plan.estimated, len(plan.operators))
        show(plan_table(plan), verdict(plan), *plan.remarks, *estimated, *reasons, f"written: {path}")
    if not (plan.meets_slo and plan.meets_budget):
        raise typer.Exit(_OUT_OF_REACH)


def sweep(
    model: ModelArgument,
    alpha: Annotated[str, typer.Option("--alpha", metavar="A:B:STEP", help="Alphas to plan for.")] = "0:1:0.1",
    gpu_budget: GpuBudgetOption = None,
    profile: ProfileOption = None,
    policy: PolicyOption = DEFAULT_POLICY,
    cores: CoresOption = None,
    accelerator: AcceleratorOption = None,
    shape: ShapeOption = None,
    streams: StreamsOption = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the points as JSON.")] = None,
    png: Annotated[Path | None, typer.Option("--png", help="Draw the curve.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Plan for a range of alphas: latency against accelerator memory (Figure 10 of the paper)."""
    alphas = parse_range(alpha, "alpha")
    if png:
        check_picture("--png", png)
    check_options(None, None, policy, gpu_budget, streams=streams)
    graph = load_graph(model, shape)
    measured = stored_or_measured(graph, profile, cores, accelerator, policies=[policy])
    points = []
    with progress_bar("sweep") as progress:
        for count, value in enumerate(alphas, start=1):
            plan = make_plan(graph, measured, None, value, policy, cores=cores, streams=streams, gpu_budget=gpu_budget)
            points.append((value, plan))
            progress(count, len(alphas), f"alpha {value:g}")
    if png:
        plot_alpha_sweep(points, png)
    if output:
        write_atomically(output, json.dumps(alpha_sweep_json(points), indent=1))
    if as_json:
        show_json(alpha_sweep_json(points))
    else:
        show(alpha_sweep_table(points), *(f"written: {path}" for path in (output, png) if path))


def report(
    plan: Annotated[Path, typer.Argument(help="A plan.", show_default=False)],
    measured: Annotated[bool, typer.Option("--measured", help="Run the model and show what really happens.")] = False,
    model: Annotated[Path | None, typer.Option("--model", help="The model, for --measured.")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write the timelines as a page.")] = None,
    png: Annotated[Path | None, typer.Option("--png", help="Draw them as a picture.")] = None,
    trace: Annotated[Path | None, typer.Option("--trace", help="Write them as a trace for Perfetto.")] = None,
) -> None:
    """Show a plan: its figures, its timeline, and how near the prediction comes."""
    if png:
        check_picture("--png", png)
    found = Plan.load(plan)
    show(plan_table(found), verdict(found), *found.remarks, *estimated_lines(found.estimated, len(found.operators)))
    if measured and model is None:
        raise OptionError("--measured: the model is missing", hint="give it with --model MODEL")
    graph = load(model, found.shapes) if model else None
    charts = [predicted_chart(found)]
    if measured and graph:
        lanes, held_mb = _measured(found, graph)
        charts.append(lanes)
        show(memory_line(found.predicted, held_mb))
    show(*chart_summary(found, charts))
    if html:
        write_atomically(html, timeline_html(found, charts, found.remarks, graph=graph))
        show(f"written: {html}")
    if png:
        plot_timelines(found, charts, png, graph=graph)
        show(f"written: {png}")
    if trace:
        write_atomically(trace, chrome_trace(charts))
        show(f"written: {trace}")


def _measured(plan: Plan, graph: Graph) -> tuple[LaneChart, float | None]:
    """The run of median latency among some, and the most accelerator memory held until then, in MB."""
    monitor = MemoryMonitor()
    feed = synthetic_inputs(graph)
    with HybridSession(graph, plan=plan, strict=True) as session:
        with monitor.sampled():
            session.trace(feed)
        held_mb = monitor.peak_mb() if plan.accelerator else 0.0
        runs = [session.trace(feed) for _ in range(_TRACES)]
    runs = sorted(runs[_TRACES // 3 :], key=lambda events: max((e.end_ms for e in events), default=0.0))
    if not runs[0]:
        raise OptionError("--measured: the plan is one segment and runs plain", hint="there are no lanes to show")
    return measured_chart(plan, runs[len(runs) // 2]), held_mb


def _summary(plan: Plan, path: Path) -> dict[str, Any]:
    only = plan.accelerator_only
    return {
        "model": plan.model,
        "operators": len(plan.operators),
        "policy": plan.policy,
        "cores": plan.schedule.cores,
        "alpha": plan.alpha,
        "slo_ms": plan.slo_ms,
        "meets_slo": plan.meets_slo,
        "budget_mb": plan.budget_mb,
        "meets_budget": plan.meets_budget,
        **asdict(plan.predicted),
        "on_accelerator": plan.on_accelerator,
        "on_cpu": plan.on_cpu,
        "accelerator_only": {"latency_ms": only.latency_ms, "memory_mb": only.memory_mb} if only else None,
        "cpu_only": {"latency_ms": plan.cpu_only.latency_ms} if plan.cpu_only else None,
        "plan": str(path),
    }
