"""``chrion simulate`` for a scenario with a decoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import structs

from chrion.cli.console import show, show_json, step
from chrion.cli.simulated_limits import show_limits
from chrion.common.units import format_count
from chrion.errors import OptionError
from chrion.report.capacity_tables import search_lines
from chrion.report.decoder_tables import (
    decoder_replications_table,
    decoder_sweep_table,
    decoder_table,
    plot_decoder_sweep,
    sweeps_rate,
)
from chrion.serving.simulator import overrides
from chrion.serving.simulator.confidence import CONFIDENCE
from chrion.serving.simulator.decoder_find import find_decoder_limits, searched_of_decoder
from chrion.serving.simulator.decoder_results import (
    METRICS,
    REPLICATIONS_SCHEMA,
    VIOLATIONS,
    export_requests,
    replicate,
    summarise,
    sweep_decoder,
    sweep_to_json,
    to_json,
)
from chrion.serving.simulator.decoder_scenario import build_decoder_scenario, decoder_path
from chrion.serving.simulator.find import SearchOptions, parse_until
from chrion.serving.simulator.iterations import draw_requests, simulate_decoder
from chrion.serving.simulator.replications import seeds
from chrion.serving.simulator.results import plain
from chrion.serving.simulator.scenario import ScenarioSource


@dataclass(frozen=True, slots=True)
class DecoderOptions:
    """The options of a simulation, of which at most one of find, sweep and replications is given."""

    find: str | None
    until: str | None
    swept: list[str]
    replications: int | None
    plot: Path | None
    export: Path | None
    #: How ``find`` simulates values; its processes are those of all simulations.
    search: SearchOptions


def refuse_for_decoders(options: Mapping[str, Any]) -> None:
    """Refuse options for scenarios with servers.

    Args:
        options: Their values by option; None if they are not given.

    Raises:
        OptionError: One is given.
    """
    for option, value in options.items():
        if value is not None:
            raise OptionError(f"{option}: not for a scenario with a decoder")


def simulate_decoders(source: ScenarioSource, options: DecoderOptions, *, as_json: bool) -> None:
    """Simulate a scenario with a decoder: once, with several seeds, at every point of a sweep, or to find its limit.

    Args:
        source: The scenario.
        options: The options.
        as_json: Print JSON.

    Raises:
        OptionError: There is a picture without a sweep of the rate.
    """
    values = [overrides.parse_sweep(text) for text in options.swept]
    if options.plot and not options.find and not sweeps_rate(name for name, _ in values):
        raise OptionError("--plot: a decoder is drawn over a sweep of its rate", hint="add --sweep rate_per_s=1,2,4")
    if options.find and options.until:
        _find(source, options.find, options.until, options, as_json=as_json)
    elif values:
        points = overrides.parameter_grid(values, decoder_path)
        _sweep(source, points, options.plot, options.search.workers, as_json=as_json)
    elif options.replications is not None:
        _replicate(source, options.replications, options.search.workers, as_json=as_json)
    else:
        _simulate_once(source, options.export, as_json=as_json)


def _simulate_once(source: ScenarioSource, export: Path | None, *, as_json: bool) -> None:
    scenario = build_decoder_scenario(source)
    workload = draw_requests(scenario)
    total = len(workload.arrivals_ms) * len(scenario.policies)
    with step(f"simulating {source.name}, {format_count(total, 'request')}") as update:
        results = simulate_decoder(scenario, lambda done: update(done, total, ""), workload=workload)
        summaries = [summarise(result) for result in results]
    if export:
        export_requests(export, results)
    if as_json:
        show_json(to_json(scenario, summaries))
    else:
        show(decoder_table(scenario, summaries))


def _find(source: ScenarioSource, name: str, until: str, options: DecoderOptions, *, as_json: bool) -> None:
    condition = parse_until(until, METRICS)
    scenario = build_decoder_scenario(source)
    quantity = searched_of_decoder(name, condition, scenario)  # refuses an unknown one before the work begins
    seeds(scenario.seed, options.search.replications)  # refuses a single one
    if condition.metric == VIOLATIONS and not any(structs.astuple(scenario.slo)):
        raise OptionError("--until violations: the scenario has no objectives", hint="set slo.first_token_ms")
    with step(f"searching the limit of {name} of {source.name}") as update:
        found = find_decoder_limits(
            source, name, condition, options.search, lambda done, text: update(done, done, text)
        )
    show_limits(
        source.name, name, quantity, condition, found, export=options.export, plot=options.plot, as_json=as_json
    )
    if not as_json:
        show(*search_lines(name, scenario, found, keep_warm_up=options.search.keep_warm_up))


def _replicate(source: ScenarioSource, number: int, workers: int, *, as_json: bool) -> None:
    points = seeds(build_decoder_scenario(source).seed, number)
    with step(f"simulating {format_count(number, 'replication')} of {source.name}") as update:
        intervals = replicate(source, points, lambda done: update(done, number, ""), workers)
    if as_json:
        rows = {policy: {name: plain(entry) for name, entry in row.items()} for policy, row in intervals.items()}
        head = {"schema": REPLICATIONS_SCHEMA, "scenario": source.name, "confidence": CONFIDENCE}
        show_json({**head, "replications": number, "intervals": rows})
    else:
        show(decoder_replications_table(number, intervals))


def _sweep(
    source: ScenarioSource, points: list[dict[str, Any]], plot: Path | None, workers: int, *, as_json: bool
) -> None:
    with step(f"simulating {format_count(len(points), 'variant')} of {source.name}") as update:
        simulated = sweep_decoder(source, points, lambda done: update(done, len(points), ""), workers)
    if plot:
        plot_decoder_sweep(simulated, plot)
    if as_json:
        show_json(sweep_to_json(source.name, simulated))
    else:
        show(decoder_sweep_table(simulated))
