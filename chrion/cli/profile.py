"""``chrion profile``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from chrion.cli import outputs
from chrion.cli.console import show, step
from chrion.cli.option_groups import CostOptions, ModelOptions
from chrion.cli.options import PICTURE, ForceOption, output_option
from chrion.common.units import format_ms
from chrion.errors import OptionError
from chrion.report.profile_plots import plans_by_cores, plot_profile


def profile(
    model: ModelOptions,
    *,
    output: Annotated[Path | None, output_option("MODEL.profile.json in the current folder")] = None,
    costs: CostOptions,
    fresh: Annotated[bool, typer.Option("--fresh", help="Ignore cached measurements and measure again.")] = False,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help=f"Draw latency by cores, and operators by device and busy cores: {PICTURE}"),
    ] = None,
    force: ForceOption = False,
) -> None:
    """Measure what a model's operators cost on this machine, and write the costs to a file.

    Measurements are cached: the next profile of a model with equal operators takes seconds. With --hardware the costs
    are estimated from datasheets. With --profile and --plot a stored profile is drawn, and nothing is measured or
    written beside the picture.
    """
    path = None if costs.profile else output or Path(f"{model.path.stem}.profile.json")
    if costs.profile:
        _check_stored(output, costs.cores, plot, fresh=fresh)
    graph = model.load()
    defaults = {"-o": path} if path else {}
    targets = outputs.check_outputs({"-o": output}, pictures={"--plot": plot}, defaults=defaults, force=force)
    measured = costs.find_profile(graph, fresh=fresh)
    if path:
        measured.save(path)
    if plot:
        with step(f"planning {graph.name} for 1 to {measured.cores} cores") as update:
            plans = plans_by_cores(graph, measured, update)
        plot_profile(graph, measured, plans, plot)
    total = sum(measured.costs(graph.dag).cpu_ms[0])
    show(
        f"{len(graph.dag)} operators, {len(set(graph.dag.signatures))} of them distinct, on {measured.machine}; "
        f"{format_ms(total)} one after another on one core",
        *filter(None, [measured.describe_width_fit()]),
        *(target.message for target in targets),
    )


def _check_stored(output: Path | None, cores: int | None, plot: Path | None, *, fresh: bool) -> None:
    """Raise an error if a stored profile is given with options of a measurement, or without a picture to draw."""
    if plot is None:
        raise OptionError("--profile: nothing to do with a stored profile", hint="name a picture with --plot")
    for option, given in (("-o", output is not None), ("--cores", cores is not None), ("--fresh", fresh)):
        if given:
            raise OptionError(f"{option}: not allowed with --profile, since nothing is measured")
