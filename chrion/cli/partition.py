"""``chrion partition``."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from chrion.cli import outputs
from chrion.cli.console import log, note, show, show_json, step
from chrion.cli.exit_codes import OUT_OF_REACH
from chrion.cli.option_groups import CostOptions, ModelOptions, PlanningOptions
from chrion.cli.options import AlphaOption, ForceOption, JsonOption, SloOption, output_option
from chrion.cli.plan import plan_summary
from chrion.errors import OptionError
from chrion.profiler import Profile
from chrion.profiler.machine import is_this_machine
from chrion.report.benchmark.stage_timer import StageTimer
from chrion.report.tables import estimated_lines, plan_table, reference_lines, verdict
from chrion.runtime.execution.engine import CannotCutError, require_tensors
from chrion.scheduler import Plan
from chrion.scheduler.annotation import write_annotated
from chrion.scheduler.explain import explain_placement
from chrion.scheduler.planner import alternatives
from chrion.scheduler.tree_choice import tree_choice

_OTHER_MACHINE = (
    "to plan for a machine with an accelerator: for example --hardware l4+epyc-16, or for the paper's LSTMs, its own "
    "measurements, --profile gtx1080ti-paper"
)


def partition(
    model: ModelOptions,
    *,
    slo: SloOption = None,
    alpha: AlphaOption = None,
    planning: PlanningOptions,
    costs: CostOptions,
    output: Annotated[Path | None, output_option("MODEL.plan.json in the current folder")] = None,
    measure_stages: Annotated[
        bool, typer.Option("--measure-stages", help="Let policy ios time its stages instead of predicting them.")
    ] = False,
    explain: Annotated[str | None, typer.Option(metavar="NODE", help="Explain the placement of an operator.")] = None,
    annotate: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the model with the placement of its nodes, too.")
    ] = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Decide which operator runs on which device, and write the plan.

    If nothing meets the SLO or fits the GPU budget, the nearest plan is written and the exit code is 3.
    """
    options = planning.plan_options(costs.cores, slo, alpha, StageTimer if measure_stages else None)
    path = output or Path(f"{model.path.stem}.plan.json")
    graph = model.load()
    files = {"-o": output, "--annotate": annotate}
    written = outputs.check_outputs(files, defaults={"-o": path}, force=force)
    measured = costs.find_profile(graph, [options.policy])
    if measure_stages:
        _require_this_machine(measured)
    with step(f"planning {graph.name}"):
        plan = alternatives(graph, measured, options)[0]
    log.info("initial solution: %s; alpha: %.4g ms/MB", plan.origin, plan.alpha)
    reasons = explain_placement(graph, measured, plan, explain) if explain else []
    trees = tree_choice(graph, measured, plan, options)
    plan.save(path)
    if annotate:
        write_annotated(graph, plan, annotate)
    if as_json:
        explanation = {"explanation": reasons} if explain else {}
        chosen = {"trees": asdict(trees)} if trees else {}
        show_json({**plan_summary(plan), "plan": str(path), **chosen, **explanation})
    else:
        _show_tables(plan, [*([str(trees)] if trees else []), *reasons], written)
    for line in plan.missed:
        note(f"warning: {line}")
    can_run = is_this_machine(measured.machine)
    try:
        require_tensors(graph)
    except CannotCutError as error:
        can_run = False
        note(f"warning: sessions run this model plain, without the plan: {error}")
    if not as_json:
        show(_next_step(model, path, can_run=can_run))
    if plan.missed:
        raise typer.Exit(OUT_OF_REACH)


def _require_this_machine(profile: Profile) -> None:
    """Raise an error if a profile is of another machine, on which stages cannot be measured.

    Raises:
        OptionError: It is.
    """
    if not is_this_machine(profile.machine):
        raise OptionError(
            f"--measure-stages: the profile is of another machine ({profile.machine})",
            hint="leave out --profile or --hardware",
        )


def _show_tables(plan: Plan, reasons: Sequence[str], written: Sequence[outputs.Output]) -> None:
    estimated = estimated_lines(plan.estimated, len(plan.operators), plan.machine)
    messages = [file.message for file in written]
    hints = [_OTHER_MACHINE] if plan.priced and plan.alpha and plan.accelerator_only is None else []
    remarks = [remark for remark in plan.remarks if remark not in plan.missed]  # those are the last lines, on stderr
    precision = [plan.precision_line] if plan.precision_line else []
    lines = [verdict(plan), *precision, *remarks, *hints, *reference_lines(plan)]
    show(plan_table(plan), *lines, *estimated, *reasons, *messages)


def _next_step(model: ModelOptions, path: Path, *, can_run: bool) -> str:
    """Return a line with the commands that measure and draw a plan; only that which draws it if it cannot run here."""
    options = [word for text in model.shape or () for word in ("--shape", text)]
    bench = ["chrion", "bench", str(model.path), *options, "--plan", str(path)]
    page = path.with_name(f"{path.name.removesuffix('.json').removesuffix('.plan')}.timeline.html")
    report = ["chrion", "report", str(path), "--html", str(page)]
    return f"next: {'; '.join(map(shlex.join, [bench, report] if can_run else [report]))}"
