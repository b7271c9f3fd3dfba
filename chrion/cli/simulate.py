"""``chrion simulate``."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from msgspec import structs

from chrion.cli import outputs
from chrion.cli.console import note, show, show_json, step
from chrion.cli.options import PICTURE, ForceOption, JsonOption, ScenarioArgument, SetOption
from chrion.common.units import format_count
from chrion.errors import OptionError
from chrion.report import capacity_tables, decoder_tables, simulation_plots, simulation_tables
from chrion.report.figure_table import FigureTable, key, text
from chrion.serving.simulator import cells as sampling
from chrion.serving.simulator import decoder_results, overrides, results, run, sweep
from chrion.serving.simulator import find as limits
from chrion.serving.simulator.confidence import CONFIDENCE
from chrion.serving.simulator.decoder_find import DECODERS
from chrion.serving.simulator.decoder_scenario import DECODER, DecoderScenario, build_decoder_scenario, decoder_path
from chrion.serving.simulator.export import export_requests, write_curve
from chrion.serving.simulator.iterations import draw_requests, simulate_decoder
from chrion.serving.simulator.scenario import Scenario, ScenarioSource, find_scenario, scenario_descriptions

#: Kinds of simulations, and the options that each can be combined with.
_COMPANIONS = {
    "--find": ("--replications", "--export", "--keep-warm-up", "--plot"),
    "--sweep": ("--plot",),
    "--cells": ("--replications",),
    "--replications": (),
}


def simulate(
    scenario: ScenarioArgument = "",
    set_: SetOption = None,
    sweep_: Annotated[
        list[str] | None,
        typer.Option("--sweep", metavar="KEY=A,B,C", help="Simulate each value; several options make a grid."),
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help=f"Draw the results: {PICTURE}")] = None,
    workers: Annotated[int, typer.Option(min=0, metavar="N", help="Processes of a sweep; 0 for one per CPU.")] = 0,
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Sweep on a Ray cluster: an address, auto, or local.")
    ] = None,
    find: Annotated[
        str | None,
        typer.Option(
            metavar="QUANTITY",
            help=(
                "Search the limit: servers, memory, models or rate; of a decoder, rate, replicas or max_batch. "
                "Needs --until."
            ),
        ),
    ] = None,
    until: Annotated[
        str | None,
        typer.Option(
            metavar="CONDITION",
            help=(
                "What has to hold, for example violations<=1%, p99<=250ms; of a decoder, first_p99<=1s, "
                "between_p99<=50ms or token_p50<=40ms."
            ),
        ),
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

    A scenario with the table [decoder] simulates iterations of a batch.
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
    kind = DECODERS if DECODER in source.content else limits.SERVERS
    if kind is DECODERS:
        _check_decoder(
            plot is not None and not find, sweep_ or [], {"--ray": ray, "--cells": cells, "--details": details}
        )
    elif not sweep_:
        _note_replaced(source, [source.build()])
    if find and until:
        _find(kind, source, find, until, search, export, plot, as_json=as_json)
    elif cells is not None:
        number = min(cells, limits.REPLICATIONS) if replications is None else replications
        _sample(source, cells, number, workers=processes, as_json=as_json)
    elif replications is not None:
        _replicate(kind, source, replications, workers=processes, as_json=as_json)
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
        example = f"--find {find or 'rate'} --until '{until or 'violations<=1%'}'"
        raise OptionError(f"{given}: {missing} is missing", hint=f"for example {example}")
    given_options = [option for option, value in {"--find": find, **others}.items() if value]
    if "--keep-warm-up" in given_options and not find:
        raise OptionError("--keep-warm-up: only --find leaves out the warm-up of runs")
    kind = next((option for option in _COMPANIONS if option in given_options), None)
    for option in given_options:
        if kind and option not in {kind, *_COMPANIONS[kind]}:
            both = {kind, option} == {"--sweep", "--replications"}
            hint = "for intervals, --replications with one value at a time by --set" if both else "use one of them"
            raise OptionError(f"{kind} and {option} cannot be combined", hint=hint)


def _find(
    kind: limits.Kind,
    source: ScenarioSource,
    name: str,
    until: str,
    options: limits.SearchOptions,
    export: Path | None,
    plot: Path | None,
    *,
    as_json: bool,
) -> None:
    condition = limits.parse_until(until, kind.metrics)
    scenario = kind.build(source)
    quantity = kind.searched(name, condition, scenario)  # refuses an unknown quantity before the work begins
    sweep.seeds(scenario.seed, options.replications)  # refuses a single one
    of_decoder = isinstance(scenario, DecoderScenario)
    if of_decoder and condition.metric == decoder_results.VIOLATIONS and not any(structs.astuple(scenario.slo)):
        raise OptionError("--until violations: the scenario has no objectives", hint="set slo.first_token_ms")
    with step(f"searching {name} of {source.name}") as update:
        found = limits.find_limits(kind, source, name, condition, options, lambda done, text: update(done, 0, text))
    if export:
        write_curve(export, quantity.unit, condition.metric, found)
    if plot:
        simulation_plots.plot_search(quantity, condition, found, plot)
    if as_json:
        head = {**results.provenance(limits.FIND_SCHEMA, [scenario]), "find": name, "unit": quantity.unit}
        until_ = {"figure": condition.metric, "limit": condition.limit}
        show_json({**head, "until": until_, "limits": [results.plain(limit) for limit in found]})
        return
    show(*_definitions(scenario))
    if any(limit.curve for limit in found):
        show(capacity_tables.curve_table(quantity, condition, found))
    show(*capacity_tables.limit_lines(quantity, condition, found))
    show(*capacity_tables.search_lines(name, quantity, scenario, found, keep_warm_up=options.keep_warm_up))


def _replicate(kind: limits.Kind, source: ScenarioSource, number: int, *, workers: int, as_json: bool) -> None:
    scenario = kind.build(source)
    points, of_decoder = sweep.seeds(scenario.seed, number), isinstance(scenario, DecoderScenario)
    with step(f"simulating {format_count(number, 'replication')} of {source.name}") as update:
        progress = _counting(update, number)
        if of_decoder:
            runs = decoder_results.sweep_decoder(source, points, progress, workers)
            intervals = decoder_results.intervals([point.summaries for point in runs])
        else:
            simulated = sweep.run_sweep(source, points, workers=workers, progress=progress)
            intervals = sweep.intervals([point.results for point in simulated])
    if not as_json:
        show(*_definitions(scenario))
        table = decoder_tables.decoder_replications_table if of_decoder else capacity_tables.intervals_table
        show(table(f"means of {number} replications", intervals))
        if not any(entry.half_width > 0 for row in intervals.values() for entry in row.values()):
            show("all replications are equal: seeds change nothing in this scenario")
        return
    schema = decoder_results.REPLICATIONS_SCHEMA if of_decoder else sweep.REPLICATIONS_SCHEMA
    points_json = number if of_decoder else [point.to_json() for point in simulated]
    show_json({**_intervals_json(schema, scenario, intervals), "replications": points_json})


def _definitions(scenario: Scenario | DecoderScenario) -> list[str]:
    """Return lines that define the figures of servers, and say what is estimated."""
    if isinstance(scenario, DecoderScenario):
        return decoder_tables.datasheet_lines([scenario])
    return [simulation_tables.definitions(scenario), *simulation_tables.datasheet_lines([scenario])]


def _intervals_json(
    schema: str, scenario: Scenario | DecoderScenario, intervals: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    rows = {name: {figure: results.plain(entry) for figure, entry in row.items()} for name, row in intervals.items()}
    return {**results.provenance(schema, [scenario]), "confidence": CONFIDENCE, "intervals": rows}


def _sample(source: ScenarioSource, cells: int, number: int, *, workers: int, as_json: bool) -> None:
    with step(f"simulating {number} of {cells} cells of {source.name}") as update:
        progress = _counting(update, number)
        intervals = sampling.sample_cells(source, cells, number, workers=workers, progress=progress)
    scenario = source.build()
    if as_json:
        body = _intervals_json(sampling.CELLS_SCHEMA, scenario, intervals)
        show_json({**body, "cells": cells, "simulated": number})
    else:
        show(*simulation_tables.datasheet_lines([scenario]))
        show(capacity_tables.intervals_table(f"{number} of {cells} cells", intervals), capacity_tables.CELLS_LINE)


def _simulate_once(
    source: ScenarioSource, plot: Path | None, export: Path | None, *, details: bool, as_json: bool
) -> None:
    if DECODER in source.content:
        _simulate_decoder(source, export, as_json=as_json)
        return
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
    if DECODER in source.content:
        _sweep_decoder(source, overrides.parameter_grid(swept, decoder_path), plot, workers=workers, as_json=as_json)
        return
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
        body = results.provenance(results.SWEEP_SCHEMA, scenarios)
        show_json({**body, "points": [point.to_json() for point in simulated]})
    else:
        show(definitions.pop() if len(definitions) == 1 else "violations: as each point of the sweep defines them")
        show(*simulation_tables.datasheet_lines(scenarios))
        show(simulation_tables.sweep_table(simulated))


def _simulate_decoder(source: ScenarioSource, export: Path | None, *, as_json: bool) -> None:
    scenario = build_decoder_scenario(source)
    workload = draw_requests(scenario)
    total = len(workload.arrivals_ms) * len(scenario.policies)
    each = f" with each of {len(scenario.policies)} policies" if len(scenario.policies) > 1 else ""
    with step(f"simulating {source.name}, {format_count(len(workload.arrivals_ms), 'request')}{each}") as update:
        simulated = simulate_decoder(scenario, _counting(update, total), workload=workload)
        summaries = [decoder_results.summarise(result) for result in simulated]
    if export:
        decoder_results.export_requests(export, simulated)
    if as_json:
        show_json(decoder_results.to_json(scenario, summaries))
    else:
        show(decoder_tables.decoder_table(scenario, summaries))


def _sweep_decoder(
    source: ScenarioSource, points: list[dict[str, Any]], plot: Path | None, *, workers: int, as_json: bool
) -> None:
    with step(f"simulating {format_count(len(points), 'variant')} of {source.name}") as update:
        simulated = decoder_results.sweep_decoder(source, points, _counting(update, len(points)), workers)
    if plot:
        decoder_tables.plot_decoder_sweep(simulated, plot)
    if as_json:
        show_json(decoder_results.sweep_to_json(simulated))
    else:
        show(*decoder_tables.datasheet_lines([point.scenario for point in simulated]))
        show(decoder_tables.decoder_sweep_table(simulated))


def _check_decoder(draws: bool, texts: Sequence[str], options: Mapping[str, Any]) -> None:
    """Refuse options that a scenario with a decoder does not have, and a picture without a sweep of its rate."""
    if given := next((option for option, value in options.items() if value not in {None, False}), None):
        raise OptionError(f"{given}: not for a scenario with a decoder")
    if draws and not decoder_tables.sweeps_rate(overrides.parse_sweep(text)[0] for text in texts):
        raise OptionError("--plot: a decoder is drawn over a sweep of its rate", hint="add --sweep rate_per_s=1,2,4")


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
