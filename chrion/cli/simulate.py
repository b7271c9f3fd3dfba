"""``chrion simulate``."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from chrion.cli import outputs
from chrion.cli.completion import complete_scenario
from chrion.cli.console import note, show, show_json, step
from chrion.cli.options import PICTURE, ForceOption, JsonOption, SetOption
from chrion.cli.simulate_decoder import DecoderOptions, refuse_for_decoders, simulate_decoders
from chrion.cli.simulated_limits import show_limits
from chrion.common.units import format_count
from chrion.errors import OptionError
from chrion.report import capacity_tables, simulation_plots, simulation_tables
from chrion.report.figure_table import FigureTable, key, text
from chrion.serving.simulator import cells as sampling
from chrion.serving.simulator import find as limits
from chrion.serving.simulator import overrides, results, run, sweep
from chrion.serving.simulator import replications as repeated
from chrion.serving.simulator.bundled_scenarios import scenario_descriptions
from chrion.serving.simulator.confidence import CONFIDENCE
from chrion.serving.simulator.decoder_scenario import is_decoder_scenario
from chrion.serving.simulator.export import export_requests
from chrion.serving.simulator.scenario import Scenario, ScenarioSource, find_scenario


def simulate(
    scenario: Annotated[
        str,
        typer.Argument(
            metavar="SCENARIO",
            help="A scenario file, or the name of a bundled scenario; see --list.",
            autocompletion=complete_scenario,
            show_default=False,
        ),
    ] = "",
    set_: SetOption = None,
    sweep_: Annotated[
        list[str] | None,
        typer.Option("--sweep", metavar="KEY=A,B,C", help="Simulate each value; several options make a grid."),
    ] = None,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help=f"Draw the results: {PICTURE}")] = None,
    workers: Annotated[int, typer.Option(min=0, metavar="N", help="Processes of a sweep; 0 for one per CPU.")] = 0,
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Sweep on a Ray cluster: an address, auto, or local.")
    ] = None,
    find: Annotated[
        str | None,
        typer.Option(metavar="QUANTITY", help="Search the limit: servers, memory, models or rate. Needs --until."),
    ] = None,
    until: Annotated[
        str | None, typer.Option(metavar="CONDITION", help="What has to hold: violations<=1%, p99<=250ms.")
    ] = None,
    replications: Annotated[
        int | None,
        typer.Option(metavar="N", help="Simulate N seeds; print means and confidence intervals. --find: N at most."),
    ] = None,
    cells: Annotated[
        int | None,
        typer.Option(
            min=2, metavar="K", help="Divide the cluster into K cells, and simulate as many as --replications says."
        ),
    ] = None,
    keep_warm_up: Annotated[
        bool, typer.Option("--keep-warm-up", help="With --find: count the requests of the warm-up, too.")
    ] = False,
    export: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write every request to a CSV file; with --find, every value tried."),
    ] = None,
    details: Annotated[bool, typer.Option("--details", help="Show tables by model and by server, too.")] = False,
    list_all: Annotated[bool, typer.Option("--list", help="List the bundled scenarios.")] = False,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Simulate a cluster of GPU servers that swap models in and out of memory, or a decoder that generates tokens.

    A scenario with the table [decoder] simulates iterations of a batch, and --find searches rate, replicas or
    max_batch.
    """
    if list_all:
        _list(as_json=as_json)
        return
    if not scenario:
        raise OptionError("simulate: no scenario given", hint="chrion simulate --list shows the bundled ones")
    _check_combination(
        find,
        until,
        ray,
        {
            "--sweep": sweep_,
            "--cells": cells,
            "--replications": replications,
            "--plot": plot,
            "--export": export,
            "--details": details,
            "--keep-warm-up": keep_warm_up,
        },
    )
    source = find_scenario(scenario).changed(dict(map(overrides.parse_set, set_ or [])))
    targets = outputs.check_outputs({"--export": export}, pictures={"--plot": plot}, force=force)
    processes = workers or os.cpu_count() or 1
    search = limits.SearchOptions(
        limits.REPLICATIONS if replications is None else replications, keep_warm_up, processes
    )
    if not sweep_ and not is_decoder_scenario(source):
        _note_replaced(source, [source.build()])
    if is_decoder_scenario(source):
        refuse_for_decoders({"--ray": ray, "--cells": cells, "--details": details or None})
        chosen = DecoderOptions(find, until, sweep_ or [], replications, plot, export, search)
        simulate_decoders(source, chosen, as_json=as_json)
    elif find and until:
        _find(source, find, limits.parse_until(until), search, export, plot, as_json=as_json)
    elif cells is not None:
        number = min(cells, limits.REPLICATIONS) if replications is None else replications
        _sample(source, cells, number, workers=processes, as_json=as_json)
    elif replications is not None:
        _replicate(source, replications, workers=processes, as_json=as_json)
    elif sweep_:
        _sweep(source, sweep_, plot, workers=processes, ray=ray, as_json=as_json)
    else:
        _simulate_once(source, plot, export, details=details, as_json=as_json)
    if not as_json:
        show(*(target.message for target in targets))


def _list(*, as_json: bool) -> None:
    scenarios = scenario_descriptions()
    if as_json:
        fields = ("name", "description", "servers", "models", "requests")
        show_json({"scenarios": [{field: getattr(s, field) for field in fields} for s in scenarios]})
        return
    table = FigureTable("", [key("scenario"), text("description"), "servers", "models", "requests"])
    for s in scenarios:
        requests = "trace" if s.requests is None else f"{s.requests}"
        table.add_row(s.name, s.description, str(s.servers), str(s.models), requests)
    show(table, "every pattern of a scenario receives all of its requests")


def _check_combination(find: str | None, until: str | None, ray: str | None, others: dict[str, Any]) -> None:
    """Refuse options that have no meaning together."""
    if ray is not None and not others["--sweep"]:
        raise OptionError("--ray: only a sweep runs on a cluster", hint="add --sweep KEY=A,B,C")
    if (find is None) != (until is None):
        missing, given = ("--until", "--find") if find else ("--find", "--until")
        example = "--find servers --until 'violations<=1%'"
        raise OptionError(f"{given}: {missing} is missing", hint=f"for example {example}")
    used = {"--find": find, **others}
    given_options = [option for option, value in used.items() if value]
    if find:  # it repeats the values that it tries, and exports them
        own = {"--replications", "--export", "--keep-warm-up"}
        given_options = [option for option in given_options if option not in own]
    elif "--keep-warm-up" in given_options:
        raise OptionError("--keep-warm-up: only --find leaves out the warm-up of runs")
    if "--cells" in given_options:  # it says how many of the cells are simulated
        given_options = [option for option in given_options if option != "--replications"]
    kinds = [option for option in given_options if option in {"--find", "--sweep", "--cells", "--replications"}]
    if len(kinds) > 1:
        raise OptionError(f"{kinds[0]} and {kinds[1]} cannot be combined", hint="use one of them")
    for option in ("--plot", "--export", "--details"):
        if option in given_options and kinds and not (option == "--plot" and kinds[0] in {"--sweep", "--find"}):
            raise OptionError(f"{option} cannot be combined with {kinds[0]}")


def _find(
    source: ScenarioSource,
    name: str,
    condition: limits.Condition,
    options: limits.SearchOptions,
    export: Path | None,
    plot: Path | None,
    *,
    as_json: bool,
) -> None:
    scenario = source.build()
    quantity = limits.searched(name, scenario)  # refuses an unknown quantity before the work begins
    repeated.seeds(scenario.seed, options.replications)  # refuses a single one
    with step(f"searching the limit of {name} of {source.name}") as update:
        found = limits.find_limits(source, name, condition, options, lambda done, text: update(done, done, text))
    if not as_json:
        show(simulation_tables.definitions(scenario), *simulation_tables.datasheet_lines(scenario))
    show_limits(source.name, name, quantity, condition, found, export=export, plot=plot, as_json=as_json)
    if not as_json:
        show(*capacity_tables.search_lines(name, scenario, found, keep_warm_up=options.keep_warm_up))


def _replicate(source: ScenarioSource, number: int, *, workers: int, as_json: bool) -> None:
    scenario = source.build()
    points = repeated.seeds(scenario.seed, number)
    with step(f"simulating {format_count(number, 'replication')} of {source.name}") as update:
        simulated = sweep.run_sweep(source, points, workers=workers, progress=_counting(update, number))
    intervals = repeated.intervals(simulated)
    if as_json:
        head = {"schema": repeated.REPLICATIONS_SCHEMA, "scenario": source.name, "confidence": CONFIDENCE}
        rows = {p: {name: results.plain(entry) for name, entry in row.items()} for p, row in intervals.items()}
        show_json({**head, "intervals": rows, "replications": [point.to_json() for point in simulated]})
    else:
        table = capacity_tables.intervals_table(f"means of {number} replications", intervals)
        show(simulation_tables.definitions(scenario), table)


def _sample(source: ScenarioSource, cells: int, number: int, *, workers: int, as_json: bool) -> None:
    with step(f"simulating {number} of {cells} cells of {source.name}") as update:
        progress = _counting(update, number)
        intervals = sampling.sample_cells(source, cells, number, workers=workers, progress=progress)
    if as_json:
        head = {"schema": sampling.CELLS_SCHEMA, "scenario": source.name, "cells": cells, "simulated": number}
        rows = {p: {name: results.plain(entry) for name, entry in row.items()} for p, row in intervals.items()}
        show_json({**head, "confidence": CONFIDENCE, "intervals": rows})
    else:
        show(capacity_tables.intervals_table(f"{number} of {cells} cells", intervals), capacity_tables.CELLS_LINE)


def _simulate_once(
    source: ScenarioSource, plot: Path | None, export: Path | None, *, details: bool, as_json: bool
) -> None:
    scenario = source.build()
    requests = scenario.workload.requests * len(scenario.patterns)
    with ExitStack() as stack:
        keep = stack.enter_context(export_requests(export, scenario)) if export else None
        update = stack.enter_context(step(f"simulating {source.name}, {scenario.size}"))
        pattern_results = run.simulate(scenario, _counting(update, requests), keep)
    if plot:
        simulation_plots.plot_results(pattern_results, plot)
    if as_json:
        show_json(results.to_json(scenario, pattern_results))
    else:
        tables = simulation_tables.simulation_tables if details else simulation_tables.pattern_table
        show(tables(scenario, pattern_results))
        if scenario.classes:
            show(simulation_tables.class_table(pattern_results))


def _sweep(
    source: ScenarioSource, texts: list[str], plot: Path | None, *, workers: int, ray: str | None, as_json: bool
) -> None:
    swept = [overrides.parse_sweep(text) for text in texts]
    if plot:
        simulation_plots.check_axis(*swept[0])
    points = overrides.parameter_grid(swept)
    # Every point is built, which refuses a value before the work begins.
    scenarios = [source.changed(point).build() for point in points]
    definitions = {simulation_tables.definitions(scenario) for scenario in scenarios}
    _note_replaced(source.changed(points[0]), scenarios)
    with step(f"simulating {format_count(len(points), 'variant')} of {source.name}") as update:
        progress = _counting(update, len(points))
        simulated = sweep.run_sweep(source, points, workers=workers, ray_address=ray, progress=progress)
    if plot:
        simulation_plots.plot_sweep(simulated, plot)
    if as_json:
        body = {"schema": results.SWEEP_SCHEMA, "scenario": source.name, "points": [p.to_json() for p in simulated]}
        show_json(body)
    else:
        show(definitions.pop() if len(definitions) == 1 else "violations: as each point of the sweep defines them")
        show(*dict.fromkeys(line for built in scenarios for line in simulation_tables.datasheet_lines(built)))
        show(simulation_tables.sweep_table(simulated))


def _note_replaced(source: ScenarioSource, scenarios: Sequence[Scenario]) -> None:
    """Say which figures of hardware that an option names are not used, since the scenario's file has its own."""
    changed = {key.rsplit(".", 1)[-1] for key in source.sets}
    if "hardware" not in changed:
        return
    sheets = [sheet for scenario in scenarios for sheet in scenario.datasheets]
    kept = dict.fromkeys(key for sheet in sheets for key in sheet.replaced if key not in changed)
    if kept:
        note(f"warning: hardware: {', '.join(kept)} of the scenario stays; set it, too, or leave it out of the file")


def _counting(update: Callable[[int, int, str], None], total: int) -> Callable[[int], None]:
    """Return a progress function of the simulator, which only counts what is done."""
    return lambda done: update(done, total, "")
