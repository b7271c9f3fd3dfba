"""``chrion partition``."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from chrion.cli import outputs
from chrion.cli.console import log, show, show_json, step
from chrion.cli.exit_codes import OUT_OF_REACH
from chrion.cli.options import (
    AcceleratorOption,
    AlphaOption,
    CoresOption,
    CorrectionsOption,
    ForceOption,
    GpuBudgetOption,
    HardwareOption,
    JsonOption,
    MemoryOption,
    ModelArgument,
    PolicyOption,
    ProfileOption,
    ShapeOption,
    SloOption,
    StreamsOption,
)
from chrion.cli.plan import plan_summary
from chrion.cli.steps import HardwareOptions, load_graph, load_or_measure_profile
from chrion.errors import OptionError
from chrion.profiler import Profile
from chrion.report import estimated_lines, plan_table, reference_lines, verdict
from chrion.report.benchmark.comparison import is_this_machine
from chrion.report.benchmark.stage_timer import StageTimer
from chrion.scheduler import DEFAULT_POLICY, Plan
from chrion.scheduler import partition as make_plan
from chrion.scheduler.annotation import write_annotated
from chrion.scheduler.explain import explain_placement
from chrion.scheduler.planner import check_options
from chrion.scheduler.priced_memory import check_memory


def partition(
    model: ModelArgument,
    slo: SloOption = None,
    alpha: AlphaOption = None,
    memory: MemoryOption = None,
    gpu_budget: GpuBudgetOption = None,
    profile: ProfileOption = None,
    hardware: HardwareOption = None,
    corrections: CorrectionsOption = None,
    policy: PolicyOption = DEFAULT_POLICY,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File to write.", show_default="MODEL.plan.json in the current folder"),
    ] = None,
    cores: CoresOption = None,
    accelerator: AcceleratorOption = None,
    shape: ShapeOption = None,
    streams: StreamsOption = None,
    measure_stages: Annotated[
        bool, typer.Option("--measure-stages", help="Let policy ios time its stages instead of predicting them.")
    ] = False,
    explain: Annotated[
        str | None, typer.Option("--explain", metavar="NODE", help="Explain the placement of an operator.")
    ] = None,
    annotate: Annotated[
        Path | None,
        typer.Option("--annotate", metavar="FILE", help="Write the model with the placement of its nodes, too."),
    ] = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Decide which operator runs on which device, and write the plan.

    An existing plan is replaced. If nothing meets the SLO or fits the GPU budget, the nearest plan is written and the
    exit code is 3.
    """
    meter = StageTimer if measure_stages else None
    kind = check_memory(memory)
    check_options(slo, alpha, policy, gpu_budget, streams=streams, meter=meter)
    machine = HardwareOptions(hardware, corrections)
    machine.check()
    path = output or Path(f"{model.stem}.plan.json")
    target = outputs.check_output("-o", path, outputs.PLAN, force=force)
    annotated = [outputs.check_output("--annotate", annotate, force=force)] if annotate else []
    graph = load_graph(model, shape)
    measured = load_or_measure_profile(graph, profile, cores, accelerator, policies=[policy], machine=machine)
    if meter:
        _require_this_machine(measured)
    with step(f"planning {graph.name}"):
        plan = make_plan(
            graph,
            measured,
            slo,
            alpha,
            policy,
            cores=cores,
            streams=streams,
            meter=meter,
            gpu_budget=gpu_budget,
            memory=kind,
        )
    log.info("initial solution: %s; alpha: %.4g ms/MB", plan.origin, plan.alpha)
    plan.save(path)
    reasons = explain_placement(graph, measured, plan, explain) if explain else []
    for file in annotated:
        write_annotated(graph, plan, file.path)
    if as_json:
        explanation = {"explanation": reasons} if explain else {}
        show_json({**plan_summary(plan), "plan": str(path), **explanation})
    else:
        _show_tables(plan, reasons, [target, *annotated], priced=alpha is not None)
        show(_next_step(model, path, shape or [], is_measured=is_this_machine(measured)))
    if not (plan.meets_slo and plan.meets_budget):
        raise typer.Exit(OUT_OF_REACH)


def _require_this_machine(profile: Profile) -> None:
    """Raise an error if a profile is of another machine, on which stages cannot be measured.

    Raises:
        OptionError: It is.
    """
    if not is_this_machine(profile):
        raise OptionError(
            f"--measure-stages: the profile is of another machine ({profile.machine})",
            hint="leave out --profile or --hardware",
        )


def _show_tables(plan: Plan, reasons: Sequence[str], written: Sequence[outputs.Output], *, priced: bool) -> None:
    estimated = estimated_lines(plan.estimated, len(plan.operators), plan.machine)
    messages = [file.message for file in written]
    lines = [verdict(plan, priced=priced), *plan.remarks, *reference_lines(plan), *estimated, *reasons, *messages]
    show(plan_table(plan), *lines)


def _next_step(model: Path, path: Path, shapes: Sequence[str], *, is_measured: bool) -> str:
    """Return a line with the commands that measure and draw a plan; only that which draws it for another machine."""
    options = [word for text in shapes for word in ("--shape", text)]
    bench = ["chrion", "bench", str(model), *options, "--plan", str(path)]
    report = ["chrion", "report", str(path), "--html", "timeline.html"]
    return f"next: {'; '.join(map(shlex.join, [bench, report] if is_measured else [report]))}"
