"""``chrion profile``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from chrion.cli import outputs
from chrion.cli.console import show
from chrion.cli.options import (
    AcceleratorOption,
    CoresOption,
    CorrectionsOption,
    ForceOption,
    HardwareOption,
    ModelArgument,
    ShapeOption,
)
from chrion.cli.steps import HardwareOptions, load_graph, load_or_measure_profile
from chrion.units import format_ms


def profile(
    model: ModelArgument,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File to write.", show_default="MODEL.profile.json in the current folder"),
    ] = None,
    cores: CoresOption = None,
    accelerator: AcceleratorOption = None,
    shape: ShapeOption = None,
    hardware: HardwareOption = None,
    corrections: CorrectionsOption = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Ignore cached measurements and measure again.")] = False,
    force: ForceOption = False,
) -> None:
    """Measure what a model's operators cost on this machine, and write the costs to a file.

    Measurements are cached: the next profile of a model with equal operators takes seconds. An existing profile is
    replaced. With --hardware the costs are estimated from datasheets.
    """
    path = output or Path(f"{model.stem}.profile.json")
    machine = HardwareOptions(hardware, corrections)
    machine.check()
    target = outputs.check_output("-o", path, outputs.PROFILE, force=force)
    graph = load_graph(model, shape)
    measured = load_or_measure_profile(graph, None, cores, accelerator, fresh=fresh, machine=machine)
    measured.save(path)
    total = sum(measured.costs(graph.dag).cpu_ms[0])
    show(
        f"{len(graph.dag)} operators, {len(measured.operators)} of them distinct, on {measured.machine}; "
        f"{format_ms(total)} one after another on one core",
        *filter(None, [measured.describe_width_fit()]),
        target.message,
    )
