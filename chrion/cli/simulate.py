"""``chrion simulate``: a scenario file in, tables, JSON and pictures out."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from chrion.cli.console import show_json
from chrion.errors import OptionError
from chrion.report import check_picture, simulation_plots, simulation_tables
from chrion.simulator import overrides, results, run, sweep
from chrion.simulator.scenario import ScenarioSource, find_scenario

#: Columns of the tables where stdout is no terminal.
_WIDTH = 160


def simulate(
    scenario: Annotated[str, typer.Argument(help="A scenario file, or the name of one that comes with Chrion.")],
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a value.")] = None,
    sweep_: Annotated[
        list[str] | None, typer.Option("--sweep", metavar="KEY=A,B,C", help="Run at each value; several make a grid.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw a picture into this file.")] = None,
    workers: Annotated[int, typer.Option(min=0, help="Processes of a sweep; 0 takes one for each CPU.")] = 0,
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Sweep on a Ray cluster: an address, auto, or local.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Simulate a cluster of GPU servers that swap models in and out of memory."""
    if ray is not None and not sweep_:
        raise OptionError("--ray: only a sweep runs on a cluster", hint="add --sweep KEY=A,B,C")
    if plot:
        check_picture("--plot", plot)
    source = find_scenario(scenario).changed(dict(map(overrides.parse_set, set_ or [])))
    if sweep_:
        swept = [overrides.parse_sweep(text) for text in sweep_]
        if plot:
            simulation_plots.check_axis(*swept[0])
        points = overrides.parameter_grid(swept)
        _sweep(source, points, plot, workers=workers or os.cpu_count() or 1, ray=ray, as_json=json_)
    else:
        _single(source, plot, as_json=json_)


def _single(source: ScenarioSource, plot: Path | None, *, as_json: bool) -> None:
    scenario = source.build()
    with _progress() as progress:
        task = progress.add_task("requests", total=scenario.workload.requests * len(scenario.patterns))
        found = run.simulate(scenario, lambda done: progress.update(task, completed=done))
    if plot:
        simulation_plots.plot_results(found, plot)
    if as_json:
        show_json(results.to_json(scenario, found))
    else:
        _print_tables(simulation_tables.simulation_tables(scenario, found))


def _sweep(
    source: ScenarioSource,
    points: list[dict[str, Any]],
    plot: Path | None,
    *,
    workers: int,
    ray: str | None,
    as_json: bool,
) -> None:
    with _progress() as progress:
        task = progress.add_task("points", total=len(points))
        found = sweep.run_sweep(
            source,
            points,
            workers=workers,
            ray_address=ray,
            progress=lambda done: progress.update(task, completed=done),
        )
    if plot:
        simulation_plots.plot_sweep(found, plot)
    if as_json:
        body = {"schema": results.SWEEP_SCHEMA, "scenario": source.name, "points": [p.to_json() for p in found]}
        show_json(body)
    else:
        _print_tables(simulation_tables.sweep_table(found))


def _progress() -> Progress:
    """A bar on stderr, gone when done, and none where stderr is not a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _print_tables(content: RenderableType) -> None:
    """In a file or a pipe nothing bounds the width."""
    console = Console()
    console = console if console.is_terminal else Console(width=_WIDTH)
    console.print(content)
