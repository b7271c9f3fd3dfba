"""``chrion simulate``."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from chrion.cli import outputs
from chrion.cli.completion import complete_scenario
from chrion.cli.console import show, show_json, step
from chrion.cli.options import ForceOption, JsonOption
from chrion.errors import OptionError
from chrion.report import simulation_plots, simulation_tables
from chrion.report.figure_table import FigureTable, key, text
from chrion.simulator import overrides, results, run, sweep
from chrion.simulator.bundled_scenarios import scenario_descriptions
from chrion.simulator.scenario import ScenarioSource, find_scenario


def simulate(
    scenario: Annotated[
        str,
        typer.Argument(
            help="A scenario file, or the name of a bundled scenario; see --list.",
            autocompletion=complete_scenario,
            show_default=False,
        ),
    ] = "",
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a value. Repeatable.")
    ] = None,
    sweep_: Annotated[
        list[str] | None,
        typer.Option("--sweep", metavar="KEY=A,B,C", help="Simulate each value; several options make a grid."),
    ] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw the results: a PNG, SVG or PDF file.")] = None,
    workers: Annotated[int, typer.Option(min=0, metavar="N", help="Processes of a sweep; 0 for one per CPU.")] = 0,
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Sweep on a Ray cluster: an address, auto, or local.")
    ] = None,
    list_all: Annotated[bool, typer.Option("--list", help="List the bundled scenarios.")] = False,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Simulate a cluster of GPU servers that swap models in and out of memory."""
    if list_all:
        _list(as_json=as_json)
        return
    if not scenario:
        raise OptionError("simulate: no scenario given", hint="chrion simulate --list shows the bundled ones")
    if ray is not None and not sweep_:
        raise OptionError("--ray: only a sweep runs on a cluster", hint="add --sweep KEY=A,B,C")
    target = outputs.check_picture_output("--plot", plot, force=force) if plot else None
    source = find_scenario(scenario).changed(dict(map(overrides.parse_set, set_ or [])))
    if sweep_:
        swept = [overrides.parse_sweep(text) for text in sweep_]
        if plot:
            simulation_plots.check_axis(*swept[0])
        points = overrides.parameter_grid(swept)
        _sweep(source, points, plot, workers=workers or os.cpu_count() or 1, ray=ray, as_json=as_json)
    else:
        _simulate_once(source, plot, as_json=as_json)
    if target and not as_json:
        show(target.message)


def _list(*, as_json: bool) -> None:
    found = scenario_descriptions()
    if as_json:
        fields = ("name", "description", "servers", "models", "requests")
        show_json({"scenarios": [{field: getattr(s, field) for field in fields} for s in found]})
        return
    table = FigureTable("", [key("scenario"), text("description"), "servers", "models", "requests"])
    for s in found:
        requests = "trace" if s.requests is None else f"{s.requests}"
        table.add_row(s.name, s.description, str(s.servers), str(s.models), requests)
    show(table)


def _simulate_once(source: ScenarioSource, plot: Path | None, *, as_json: bool) -> None:
    scenario = source.build()
    requests = scenario.workload.requests * len(scenario.patterns)
    with step(f"simulating {source.name}, {requests} requests") as update:
        found = run.simulate(scenario, _counting(update, requests))
    if plot:
        simulation_plots.plot_results(found, plot)
    if as_json:
        show_json(results.to_json(scenario, found))
    else:
        show(simulation_tables.simulation_tables(scenario, found))


def _sweep(
    source: ScenarioSource,
    points: list[dict[str, Any]],
    plot: Path | None,
    *,
    workers: int,
    ray: str | None,
    as_json: bool,
) -> None:
    with step(f"simulating {len(points)} variants of {source.name}") as update:
        progress = _counting(update, len(points))
        found = sweep.run_sweep(source, points, workers=workers, ray_address=ray, progress=progress)
    if plot:
        simulation_plots.plot_sweep(found, plot)
    if as_json:
        body = {"schema": results.SWEEP_SCHEMA, "scenario": source.name, "points": [p.to_json() for p in found]}
        show_json(body)
    else:
        show(simulation_tables.sweep_table(found))


def _counting(update: Callable[[int, int, str], None], total: int) -> Callable[[int], None]:
    """Return a progress function of the simulator, which only counts what is done."""
    return lambda done: update(done, total, "")
