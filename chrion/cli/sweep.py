"""``chrion sweep``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from chrion.cli import outputs
from chrion.cli.console import show, show_json, step
from chrion.cli.option_groups import CostOptions, ModelOptions, PlanningOptions
from chrion.cli.options import PICTURE, ForceOption, JsonOption
from chrion.common.files import write_atomically
from chrion.common.units import parse_range
from chrion.report.alpha_sweep import alpha_sweep_hints, alpha_sweep_json, alpha_sweep_table, plot_alpha_sweep
from chrion.scheduler.limits import Limits
from chrion.scheduler.planner import Planner


def sweep(
    model: ModelOptions,
    *,
    alpha: Annotated[str, typer.Option(metavar="A:B:STEP", help="Alphas in ms per MB, or a list A,B,C.")] = "0:1:0.1",
    planning: PlanningOptions,
    costs: CostOptions,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the points as JSON.")
    ] = None,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help=f"Draw the curve: {PICTURE}")] = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Plan for several alphas: latency against accelerator memory.

    With --policy chrion-paper it is Figure 10 of the paper; the default policy's curve for the paper's LSTM has one
    step.
    """
    alphas = parse_range(alpha, "--alpha")
    options = planning.plan_options(costs.cores)
    limits = options.limits
    graph = model.load()
    targets = outputs.check_outputs({"-o": output}, pictures={"--png": png}, force=force)
    measured = costs.find_profile(graph, [options.policy])
    points = []
    with step(f"planning {graph.name} for {len(alphas)} alphas") as update:
        fastest_only = limits == Limits() and not any(alphas)
        planner = Planner(graph, measured, options, alphas=alphas, fastest_only=fastest_only)
        for done, value in enumerate(alphas, start=1):
            points.append((value, planner.plan(limits, value)))
            update(done, len(alphas), f"alpha {value:g}")
    if png:
        plot_alpha_sweep(points, png)
    if output:
        write_atomically(output, json.dumps(alpha_sweep_json(points), indent=1))
    if as_json:
        show_json(alpha_sweep_json(points))
    else:
        messages = (target.message for target in targets)
        show(alpha_sweep_table(points), *alpha_sweep_hints(points), *messages)
