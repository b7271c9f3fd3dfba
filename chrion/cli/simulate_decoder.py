"""``chrion simulate`` for a scenario with a decoder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chrion.cli.console import show, show_json, step
from chrion.common.units import format_count
from chrion.errors import OptionError
from chrion.report.decoder_tables import decoder_sweep_table, decoder_table, plot_decoder_sweep, sweeps_rate
from chrion.serving.simulator import overrides
from chrion.serving.simulator.decoder_results import summarise, sweep_decoder, sweep_to_json, to_json
from chrion.serving.simulator.decoder_scenario import build_decoder_scenario, decoder_path
from chrion.serving.simulator.iterations import simulate_decoder
from chrion.serving.simulator.scenario import ScenarioSource


def simulate_decoders(
    source: ScenarioSource, swept: list[str], plot: Path | None, others: Mapping[str, Any], *, as_json: bool
) -> None:
    """Simulate a scenario with a decoder, once or at every point of a sweep.

    Args:
        source: The scenario.
        swept: Values of ``--sweep``.
        plot: The picture's file, or None.
        others: Values of options that are for scenarios with servers only, by option.
        as_json: Print JSON.

    Raises:
        OptionError: Such an option is given, or a picture without a sweep of the rate.
    """
    for option, value in others.items():
        if value is not None:
            raise OptionError(f"{option}: not for a scenario with a decoder", hint="use --set, --sweep and --plot")
    values = [overrides.parse_sweep(text) for text in swept]
    if plot and not sweeps_rate(name for name, _ in values):
        raise OptionError("--plot: a decoder is drawn over a sweep of its rate", hint="add --sweep rate_per_s=1,2,4")
    if swept:
        _sweep(source, overrides.parameter_grid(values, decoder_path), plot, as_json=as_json)
        return
    scenario = build_decoder_scenario(source)
    total = scenario.requests.requests * len(scenario.policies)
    with step(f"simulating {source.name}, {format_count(total, 'request')}") as update:
        summaries = [summarise(r) for r in simulate_decoder(scenario, lambda done: update(done, total, ""))]
    if as_json:
        show_json(to_json(scenario, summaries))
    else:
        show(decoder_table(scenario, summaries))


def _sweep(source: ScenarioSource, points: list[dict[str, Any]], plot: Path | None, *, as_json: bool) -> None:
    with step(f"simulating {format_count(len(points), 'variant')} of {source.name}") as update:
        simulated = sweep_decoder(source, points, lambda done: update(done, len(points), ""))
    if plot:
        plot_decoder_sweep(simulated, plot)
    if as_json:
        show_json(sweep_to_json(source.name, simulated))
    else:
        show(decoder_sweep_table(simulated))
