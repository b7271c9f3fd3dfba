"""``chrion simulate``."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from chrion.cli import outputs
from chrion.cli.completion import complete_scenario
from chrion.cli.console import show, show_json, step
from chrion.cli.options import PICTURE, ForceOption, JsonOption, SetOption
from chrion.cli.simulate_decoder import simulate_decoders
from chrion.common.units import format_count
from chrion.errors import OptionError
from chrion.report import capacity_tables, simulation_plots, simulation_tables
from chrion.report.figure_table import FigureTable, key, text
from chrion.serving.simulator import find as limits
from chrion.serving.simulator import overrides, results, run, sweep
from chrion.serving.simulator import replications as repeated
from chrion.serving.simulator.bundled_scenarios import scenario_descriptions
from chrion.serving.simulator.decoder_scenario import is_decoder_scenario
from chrion.serving.simulator.export import export_requests
from chrion.serving.simulator.scenario import ScenarioSource, find_scenario


def simulate(
    scenario: Annotated[
        str,
        typer.Argument(
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
    plot: Annotated[Path | None, typer.Option("--plot", help=f"Draw the results: {PICTURE}")] = None,
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
        int | None, typer.Option(metavar="N", help="Simulate N seeds; print means and confidence intervals.")
    ] = None,
    export: Annotated[Path | None, typer.Option(metavar="FILE", help="Write every request to a CSV file.")] = None,
    details: Annotated[bool, typer.Option("--details", help="Show tables by model and by server, too.")] = False,
    list_all: Annotated[bool, typer.Option("--list", help="List the bundled scenarios.")] = False,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Simulate a cluster of GPU servers that swap models in and out of memory, or a decoder that generates tokens.

    A scenario with the table [decoder] simulates iterations of a batch. The options for it are --set, --sweep, --plot
    and --json.
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
        {"--sweep": sweep_, "--replications": replications, "--plot": plot, "--export": export, "--details": details},
    )
    source = find_scenario(scenario).changed(dict(map(overrides.parse_set, set_ or [])))
    targets = outputs.check_outputs({"--export": export}, pictures={"--plot": plot}, force=force)
    processes = workers or os.cpu_count() or 1
    if is_decoder_scenario(source):
        others = {"--find": find, "--replications": replications, "--export": export, "--ray": ray}
        others |= {"--workers": workers or None, "--details": details or None}
        simulate_decoders(source, sweep_ or [], plot, others, as_json=as_json)
    elif find and until:
        _find(source, find, limits.parse_until(until), as_json=as_json)
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
    kinds = [option for option in given_options if option in {"--find", "--sweep", "--replications"}]
    if len(kinds) > 1:
        raise OptionError(f"{kinds[0]} and {kinds[1]} cannot be combined", hint="use one of them")
    for option in ("--plot", "--export", "--details"):
        if option in given_options and kinds and not (option == "--plot" and kinds == ["--sweep"]):
            raise OptionError(f"{option} cannot be combined with {kinds[0]}")


def _find(source: ScenarioSource, name: str, condition: limits.Condition, *, as_json: bool) -> None:
    scenario = source.build()
    searched = limits.searched(name, scenario)  # refuses an unknown quantity before the work begins
    with step(f"searching the limit of {name} of {source.name}"):
        pattern_limits = limits.find_limits(source, name, condition)
    if as_json:
        until = {"figure": condition.metric, "limit": condition.limit}
        rows = [asdict(limit) for limit in pattern_limits]
        show_json({"schema": limits.FIND_SCHEMA, "scenario": source.name, "find": name, "until": until, "limits": rows})
    else:
        if any(limit.found for limit in pattern_limits):
            show(capacity_tables.limits_table(name, condition, pattern_limits))
        show(*capacity_tables.limit_lines(name, condition, pattern_limits, smallest=searched.smallest))
        show(simulation_tables.definitions(scenario))


def _replicate(source: ScenarioSource, number: int, *, workers: int, as_json: bool) -> None:
    points = repeated.seeds(source.build().seed, number)
    with step(f"simulating {format_count(number, 'replication')} of {source.name}") as update:
        simulated = sweep.run_sweep(source, points, workers=workers, progress=_counting(update, number))
    intervals = repeated.intervals(simulated)
    if as_json:
        head = {"schema": repeated.REPLICATIONS_SCHEMA, "scenario": source.name, "confidence": repeated.CONFIDENCE}
        rows = {p: {name: results.plain(entry) for name, entry in row.items()} for p, row in intervals.items()}
        show_json({**head, "intervals": rows, "replications": [point.to_json() for point in simulated]})
    else:
        show(capacity_tables.replications_table(number, intervals))


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


def _sweep(
    source: ScenarioSource, texts: list[str], plot: Path | None, *, workers: int, ray: str | None, as_json: bool
) -> None:
    swept = [overrides.parse_sweep(text) for text in texts]
    if plot:
        simulation_plots.check_axis(*swept[0])
    points = overrides.parameter_grid(swept)
    # Every point is built, which refuses a value before the work begins.
    definitions = {simulation_tables.definitions(source.changed(point).build()) for point in points}
    with step(f"simulating {format_count(len(points), 'variant')} of {source.name}") as update:
        progress = _counting(update, len(points))
        simulated = sweep.run_sweep(source, points, workers=workers, ray_address=ray, progress=progress)
    if plot:
        simulation_plots.plot_sweep(simulated, plot)
    if as_json:
        body = {"schema": results.SWEEP_SCHEMA, "scenario": source.name, "points": [p.to_json() for p in simulated]}
        show_json(body)
    else:
        show(simulation_tables.sweep_table(simulated))
        show(definitions.pop() if len(definitions) == 1 else "violations: as each point of the sweep defines them")


def _counting(update: Callable[[int, int, str], None], total: int) -> Callable[[int], None]:
    """Return a progress function of the simulator, which only counts what is done."""
    return lambda done: update(done, total, "")
