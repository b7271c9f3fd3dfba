"""``chrion profile``, ``chrion partition`` and ``chrion report``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from chrion.cli.console import (
    AcceleratorOption,
    AlphaOption,
    CoresOption,
    JsonOption,
    ModelArgument,
    PolicyOption,
    ProfileOption,
    ShapeOption,
    SloOption,
    load_graph,
    show,
    show_json,
    stderr,
    stored_or_measured,
)
from chrion.files import write_atomically
from chrion.report import chrome_trace, plan_table, predicted_lanes, timeline_html, verdict
from chrion.scheduler import DEFAULT_POLICY, Plan
from chrion.scheduler import partition as make_plan
from chrion.units import format_ms

#: Exit code where no plan meets the SLO.
_SLO_OUT_OF_REACH = 3


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
    profile: ProfileOption = None,
    policy: PolicyOption = DEFAULT_POLICY,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write.  [default: MODEL.plan.json]")
    ] = None,
    cores: CoresOption = None,
    accelerator: AcceleratorOption = None,
    shape: ShapeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Plan which operator runs where, and write the plan."""
    graph = load_graph(model, shape)
    measured = stored_or_measured(graph, profile, cores, accelerator)
    plan = make_plan(graph, measured, slo, alpha, policy, cores=cores)
    path = output or model.with_suffix(".plan.json")
    plan.save(path)
    if as_json:
        show_json(_summary(plan, path))
    else:
        show(plan_table(plan), verdict(plan), *plan.remarks, *_estimated(plan), f"written: {path}")
    if not plan.meets_slo:
        raise typer.Exit(_SLO_OUT_OF_REACH)


def report(
    plan: Annotated[Path, typer.Argument(help="A plan.", show_default=False)],
    html: Annotated[Path | None, typer.Option("--html", help="Write the predicted timeline as a page.")] = None,
    trace: Annotated[Path | None, typer.Option("--trace", help="Write it as a trace for Perfetto.")] = None,
) -> None:
    """Show a plan."""
    found = Plan.load(plan)
    show(plan_table(found), verdict(found), *found.remarks, *_estimated(found))
    sections = [predicted_lanes(found)]
    if html:
        write_atomically(html, timeline_html(f"{found.model}, {found.policy}", sections, found.remarks))
        show(f"written: {html}")
    if trace:
        write_atomically(trace, chrome_trace(sections))
        show(f"written: {trace}")


def _summary(plan: Plan, path: Path) -> dict[str, Any]:
    return {
        "model": plan.model,
        "operators": len(plan.operators),
        "policy": plan.policy,
        "cores": plan.schedule.cores,
        "alpha": plan.alpha,
        "slo_ms": plan.slo_ms,
        "meets_slo": plan.meets_slo,
        **asdict(plan.predicted),
        "on_accelerator": plan.on_accelerator,
        "on_cpu": plan.on_cpu,
        "accelerator_only": asdict(plan.accelerator_only) if plan.accelerator_only else None,
        "cpu_only": {"latency_ms": plan.cpu_only.latency_ms} if plan.cpu_only else None,
        "plan": str(path),
    }


def _estimated(plan: Plan) -> list[str]:
    if not plan.estimated:
        return []
    return [f"{plan.estimated} of {len(plan.operators)} operators are not in the profile; their costs are estimated"]
