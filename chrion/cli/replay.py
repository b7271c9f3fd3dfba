"""``chrion replay``."""

from __future__ import annotations

import math
import shlex
import ssl
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from chrion.cli.console import note, show, show_json, step
from chrion.cli.options import JsonOption, ScenarioArgument, SetOption
from chrion.cli.serve import read_token, require_libraries, scenario_policies
from chrion.common.units import format_count, parse_duration_ms
from chrion.common.wrong_values import wrong_value
from chrion.errors import OptionError
from chrion.report import simulation_tables
from chrion.serving.simulator import overrides, results, run
from chrion.serving.simulator.scenario import Scenario, find_scenario


def replay(
    scenario: ScenarioArgument,
    url: Annotated[str, typer.Option(metavar="URL", help="The running server.")] = "http://127.0.0.1:8000",
    set_: SetOption = None,
    pattern: Annotated[
        str, typer.Option(metavar="NAME", help="The pattern that the server serves.", show_default="all are predicted")
    ] = "",
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="Send the first N requests.")] = None,
    duration: Annotated[str | None, typer.Option(metavar="60s", help="Send the requests of this time.")] = None,
    timeout: Annotated[str, typer.Option(metavar="60s", help="Give up a request after this time.")] = "60s",
    token_file: Annotated[Path | None, typer.Option(metavar="FILE", help="The server's bearer token.")] = None,
    tls_ca: Annotated[
        Path | None, typer.Option(metavar="PEM", help="Trust these certificates.", show_default="the system's")
    ] = None,
    write_models: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write stand-ins for the scenario's models, and send nothing.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Send a scenario's requests to a running server; print what it does beside what the simulation predicts."""
    require_libraries("replay")
    source = find_scenario(scenario).changed(dict(map(overrides.parse_set, set_ or [])))
    built = _of_pattern(source.build(), pattern)
    if write_models:
        _write_models(built, write_models, served_by(scenario, built, changed=bool(set_)))
        return
    from chrion.serving.replay import run as replays  # noqa: PLC0415 - needs the extra

    options = replays.ReplayOptions(
        url=url,
        headers={"Authorization": f"Bearer {read_token(token_file)}"} if token_file else {},
        tls=_tls(tls_ca) if tls_ca else None,
        max_requests=limit,
        until_ms=parse_duration_ms(duration, "--duration") if duration else math.inf,
        timeout_s=parse_duration_ms(timeout, "--timeout") / 1000,
    )
    chosen = replays.limited(built, options)
    with step(f"waiting until {url} is ready"):
        replays.check(chosen, options)
    number = chosen.workload.requests
    with step(f"simulating {built.name}, {chosen.size}"):
        predicted = run.simulate(chosen)
    with step(f"sending {format_count(number, 'request')} to {url}") as update:
        replayed = replays.replay(chosen, options, lambda done: update(done, number, ""))
    everything = (*predicted, replayed.measured)
    if as_json:
        show_json(replays.to_json(results.to_json(chosen, everything), replayed))
    else:
        show(simulation_tables.simulation_tables(chosen, everything), *replays.remarks(replayed))


def _of_pattern(scenario: Scenario, pattern: str) -> Scenario:
    if pattern and pattern not in scenario.patterns:
        raise wrong_value("--pattern", f"one of {', '.join(scenario.patterns)}", pattern)
    return replace(scenario, patterns=(pattern,)) if pattern else scenario


def served_by(name: str, scenario: Scenario, *, changed: bool) -> str:
    """Return the options with which a server has the policies of a scenario, as far as servers have them.

    Args:
        name: Its name or file.
        scenario: The scenario.
        changed: Whether options have changed it.
    """
    policies = scenario.policies
    names = f"--serving-policy {policies.eviction},{policies.load_order},{policies.admission}"
    if changed:
        return names
    try:
        scenario_policies(name)
    except OptionError:
        return names
    return f"--scenario {shlex.quote(name)} --accelerator none"


def _write_models(scenario: Scenario, folder: Path, policies: str) -> None:
    from chrion.serving.replay import stand_ins  # noqa: PLC0415 - needs the extra

    with step(f"writing {format_count(len(scenario.models), 'model')} to {folder}"):
        stand_ins.write_stand_ins(scenario, folder)
    budget = f"{scenario.servers[0].budget_bytes / 1e6:g}MB"
    note(f"serve them: chrion serve {shlex.quote(str(folder))} {policies} --host-budget {budget}")


def _tls(path: Path) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=path)
    except OSError as error:  # ssl.SSLError is one
        raise OptionError(f"--tls-ca {path}: {error}") from error
