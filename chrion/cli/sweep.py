"""``chrion sweep``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from chrion.cli import outputs
from chrion.cli.console import show, show_json, step
from chrion.cli.options import (
    AcceleratorOption,
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
    StreamsOption,
)
from chrion.cli.steps import HardwareOptions, load_graph, load_or_measure_profile
from chrion.common.files import write_atomically
from chrion.common.units import parse_range
from chrion.report import alpha_sweep_json, alpha_sweep_table, plot_alpha_sweep
from chrion.scheduler import DEFAULT_POLICY
from chrion.scheduler.planner import Planner, check_options
from chrion.scheduler.priced_memory import check_memory
from chrion.scheduler.search.alpha import Limits


def sweep(
    model: ModelArgument,
    alpha: Annotated[
        str, typer.Option("--alpha", metavar="A:B:STEP", help="Alphas in ms per MB, or a list A,B,C.")
    ] = "0:1:0.1",
    gpu_budget: GpuBudgetOption = None,
    memory: MemoryOption = None,
    profile: ProfileOption = None,
    hardware: HardwareOption = None,
    corrections: CorrectionsOption = None,
    policy: PolicyOption = DEFAULT_POLICY,
    cores: CoresOption = None,
    accelerator: AcceleratorOption = None,
    shape: ShapeOption = None,
    streams: StreamsOption = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the points as JSON.")] = None,
    png: Annotated[Path | None, typer.Option("--png", help="Draw the curve: a PNG, SVG or PDF file.")] = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Plan for several alphas: latency against accelerator memory.

    With --policy chrion-paper it is Figure 10 of the paper; the default policy's curve for the paper's LSTM has one
    step.
    """
    alphas = parse_range(alpha, "--alpha")
    kind = check_memory(memory)
    limits = check_options(None, None, policy, gpu_budget, streams=streams)
    machine = HardwareOptions(hardware, corrections)
    machine.check()
    targets = [outputs.check_output("-o", output, outputs.SWEEP, force=force)] if output else []
    targets += [outputs.check_picture_output("--png", png, force=force)] if png else []
    graph = load_graph(model, shape)
    measured = load_or_measure_profile(graph, profile, cores, accelerator, policies=[policy], machine=machine)
    points = []
    with step(f"planning {graph.name} for {len(alphas)} alphas") as update:
        fastest_only = limits == Limits() and not any(alphas)
        planner = Planner(
            graph,
            measured,
            policy,
            cores=cores,
            streams=streams,
            memory=kind,
            alphas=alphas,
            fastest_only=fastest_only,
        )
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
        show(alpha_sweep_table(points), *(target.message for target in targets))
