"""Measure a HybridSession and plain sessions that serve requests as in production.

    python scripts/bench_serving.py [--scenario NAME ...] [--only REGEX] [--minutes 25] [--twin] [-o docs/data]
    python scripts/bench_serving.py --without [NAME ...] [--scenario NAME ...] [--only REGEX] [--minutes 60]

Scenarios: the start of a session, client threads, pauses between requests, a busy neighbour, several sessions and
processes, one CPU, a quota of CPU time, many shapes. The candidates are a tuned HybridSession and plain sessions with
one thread, with as many as there are cores, and with onnxruntime's default; each has processes of its own. They serve
in alternating rounds, each trial after a warm-up. Prints a line for each model and load, with ratios of HybridSession
to the plain session that serves the most requests per second under that load, and their 90 % intervals. Quantiles of
the latency are of all trials together.

Takes about as long as ``--minutes`` says, however many scenarios are selected: rounds are added until the time is over,
so that fewer scenarios or models are measured more precisely. On a busy machine it takes up to a fifth longer.
``-o`` writes the results ``serving``.

``--without`` compares HybridSession with sessions that lack a mechanism each (all mechanisms, if none is named) in
place of plain sessions, and writes the results ``serving-ablation``.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnxruntime as ort
from bench_cpu import Case
from command_arguments import add_output
from page_markers import markdown_table
from result_files import write_results
from serving import noticing, starting
from serving.ablation import MECHANISMS
from serving.fleet import Fleet, Setting, Trial, fleets
from serving.models import MODELS
from serving.noticing import Noticed, format_noticed, time_noticing, usual_ms
from serving.report import ABLATION_HEAD, HEAD, LIMIT, Row, ablation_row, far_behind, row_of
from serving.scenarios import Requests, Scenario, scenarios
from serving.surroundings import Neighbour
from serving.worker import CANDIDATES, DEFAULT, ONE, OWN, TWIN, WITHOUT

from chrion.machine.cores import physical_cores
from chrion.profiler import this_machine

#: Least and greatest number of rounds.
LEAST, MOST = 5, 200
#: Length of the load of a HybridSession before the first round, in seconds.
STATE_S = 2.0
#: Least lengths of the warm-up and of a trial, in median latencies. Threads that start together are answered together,
#: so that a trial of two latencies would count such an answer or not.
WARM_UP_REQUESTS, TRIAL_REQUESTS = 2, 8
#: Rounds after which plain sessions that are slower than others by a factor are no longer measured.
DROP_AFTER, DROP_FACTOR = 2, 1.3
#: Trials with a neighbour that becomes busy.
NOTICING = 5
#: The scenario that measures the creation of sessions.
START = "start"
#: Share of the given time that may pass in addition, on a busy machine.
OVERTIME = 0.2
#: Expected time to open the sessions of one model in one setting, tuning included, in seconds.
OPENING_S = 15.0
TEXT = """Written by `scripts/bench_serving.py` on {machine}, onnxruntime {version}. Ratios are HybridSession to the
plain session (one thread, all cores, or onnxruntime's default) that serves the most requests per second under the same
load, with 90 % intervals: requests per second (higher is better), median and 99th percentile of the latency, and CPU
time a request (lower is better); CPU time also to that of the default. *runs*: what HybridSession selected."""

ABLATION_TEXT = """Written by `scripts/bench_serving.py --without` on {machine}, onnxruntime {version}. Ratios are of
HybridSession without a mechanism to the whole one under the same load, in one run, with 90 % intervals: requests per
second (below 1: the mechanism gains), median and 99th percentile of the latency, and CPU time a request (above 1: the
mechanism gains)."""

TWINS = """**Two equal sessions.** The plain session with one thread, compared with the same session in a second
process: how far ratios differ from 1 by noise alone."""


class Schedule:
    """The division of the time among the measurements that remain."""

    def __init__(self, minutes: float, cells: int, openings: int) -> None:
        self._given_s = 60 * minutes
        self._end_s = time.monotonic() + self._given_s
        self._cells = cells
        self._openings = openings

    def is_over(self) -> bool:
        """Return whether so much more than the given time has passed that further sessions must not be opened."""
        return time.monotonic() > self._end_s + OVERTIME * self._given_s

    def opened(self) -> None:
        """Note that sessions have been opened."""
        self._openings -= 1

    def next_end_s(self) -> float:
        """Return the time of ``time.monotonic()`` until which the next measurement may add rounds."""
        now = time.monotonic()
        share_s = (self._end_s - now - self._openings * OPENING_S) / max(1, self._cells)
        self._cells -= 1
        return now + share_s


@dataclass
class Findings:
    """Lines of the tables by scenario, and what is to be said in addition."""

    rows: dict[str, list[Row]] = field(default_factory=dict)
    noticed: list[tuple[str, ...]] = field(default_factory=list)
    started: list[tuple[str, ...]] = field(default_factory=list)
    impossible: dict[str, str] = field(default_factory=dict)
    #: Lines that compare two equal sessions, with their scenarios.
    twins: list[tuple[str, ...]] = field(default_factory=list)
    #: Names of the candidates, HybridSession first.
    candidates: Sequence[str] = CANDIDATES


def measure(opened: Mapping[str, Fleet], load: Requests, scenario: Scenario, end_s: float) -> dict[str, list[Trial]]:
    """Run trials of all candidates in alternating rounds.

    A HybridSession has a load that does not count before: it may open a session for it.
    """
    for name in opened:
        if name.startswith(OWN + WITHOUT):
            opened[name].trial(load.clients, STATE_S, pause_s=load.pause_s)
    before = opened[OWN].trial(load.clients, STATE_S, pause_s=load.pause_s)
    median_s = float(np.median(before.latencies_ms)) / 1e3
    warm_up_s = max(scenario.warm_up_s, WARM_UP_REQUESTS * median_s)
    trial_s = max(scenario.trial_s, TRIAL_REQUESTS * median_s)
    trials: dict[str, list[Trial]] = {name: [] for name in opened}
    names = list(opened)
    for turn in range(MOST):
        if turn >= LEAST and time.monotonic() > end_s:
            break
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            trials[name].append(opened[name].trial(load.clients, trial_s, pause_s=load.pause_s, warm_up_s=warm_up_s))
        if turn + 1 == DROP_AFTER and DEFAULT in opened:
            slow = far_behind({name: own for name, own in trials.items() if name != TWIN}, DROP_FACTOR)
            kept = {ONE, TWIN} if TWIN in opened else set()
            names = [name for name in names if name in kept or name not in slow]
    return trials


def measure_setting(
    case: Case, setting: Setting, chosen: Mapping[str, Scenario], schedule: Schedule, findings: Findings
) -> Iterator[tuple[str, Row]]:
    """Yield the lines of a model in all scenarios that have a setting in common; note those of the twin, if wanted."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model.onnx"
        model.write_bytes(case.build().SerializeToString())
        with fleets(str(model), setting, f"{folder}/cache", findings.candidates) as opened:
            schedule.opened()
            for name, scenario in chosen.items():
                for load in scenario.loads:
                    if not scenario.neighbour:
                        trials = measure(opened, load, scenario, schedule.next_end_s())
                    else:
                        with Neighbour(physical_cores()[0]) as neighbour:
                            neighbour.resume()
                            trials = measure(opened, load, scenario, schedule.next_end_s())
                            neighbour.suspend()
                            if DEFAULT in opened:
                                findings.noticed.append(notice(case, opened[OWN], neighbour, trials))
                    if DEFAULT not in opened:
                        for other in findings.candidates[1:]:
                            without = other.removeprefix(OWN + WITHOUT)
                            yield name, ablation_row(case.name, load.label, without, trials[other], trials[OWN])
                        continue
                    twins = trials.pop(TWIN, [])
                    yield name, row_of(case.name, load.label, opened[OWN].selected, trials)
                    if twins:
                        row = row_of(case.name, load.label, "1 thread", {OWN: twins, DEFAULT: trials[ONE]})
                        findings.twins.append((name, *row.cells[:-1]))


def notice(case: Case, fleet: Fleet, neighbour: Neighbour, trials: Mapping[str, Sequence[Trial]]) -> tuple[str, ...]:
    """Return the line of a model's times until it notices a neighbour."""
    plain = [own for name, own in trials.items() if name not in (OWN, TWIN)]
    fastest = min(plain, key=lambda own: float(np.median([trial.ms_per_request for trial in own])))
    noticed: list[Noticed] = [time_noticing(fleet, neighbour, usual_ms(fastest)) for _ in range(NOTICING)]
    return format_noticed(case.name, noticed)


def measure_all(chosen: Mapping[str, Scenario], only: str, minutes: float, findings: Findings) -> None:
    """Measure all scenarios, model after model, and print a line for each load."""
    cases = {case.name: case for each in chosen.values() for case in each.models if re.search(only, case.name)}
    parts: list[tuple[Case, Setting, dict[str, Scenario]]] = []
    for case in cases.values():
        fitting = {name: each for name, each in chosen.items() if any(case.name == one.name for one in each.models)}
        parts += [
            (case, setting, {name: each for name, each in fitting.items() if each.setting == setting})
            for setting in dict.fromkeys(each.setting for each in fitting.values())
        ]
    cells = sum(len(each.loads) for _, _, fitting in parts for each in fitting.values())
    schedule = Schedule(minutes, cells, len(parts))
    for case, setting, fitting in parts:
        if schedule.is_over():
            print(f"the time is over: {case.name} is not measured: {', '.join(fitting)}", flush=True)
            continue
        try:
            for name, row in measure_setting(case, setting, fitting, schedule, findings):
                findings.rows.setdefault(name, []).append(row)
                print(f"{name} | {' | '.join(row.cells)}", flush=True)
        except OSError as error:  # no control group can be created, for example
            findings.impossible |= dict.fromkeys(fitting, str(error))
            print(f"{', '.join(fitting)}: not possible on this machine: {error}", flush=True)
        except RuntimeError as error:  # a process has failed or does not answer
            print(f"FAILED: {case.name}: {', '.join(fitting)}: {error}", flush=True)


def measure_starts(only: str, findings: Findings) -> None:
    """Measure the start of all models, and print a line for each."""
    for case in MODELS:
        if re.search(only, case.name):
            findings.started.append(starting.start_row(case.name, case.build().SerializeToString()))
            print(f"{START} | {' | '.join(findings.started[-1])}", flush=True)


def format_results(chosen: Mapping[str, Scenario], findings: Findings) -> str:
    """Return the results in Markdown."""
    text, head = (TEXT, HEAD) if DEFAULT in findings.candidates else (ABLATION_TEXT, ABLATION_HEAD)
    parts = [text.format(machine=this_machine(), version=ort.get_version_string())]
    for name, scenario in chosen.items():
        rows = findings.rows.get(name, [])
        parts.append(f"**{scenario.title}.** {scenario.text}")
        if rows:
            parts.append(markdown_table([head, *(row.cells for row in rows)]))
        elif name in findings.impossible:
            parts.append(f"Not possible on this machine: {findings.impossible[name]}.")
        if scenario.neighbour and findings.noticed:
            parts += [noticing.TEXT, markdown_table([noticing.HEAD, *findings.noticed])]
    if findings.twins:
        parts += [TWINS, markdown_table([("scenario", *HEAD[:-1]), *findings.twins])]
    if findings.started:
        parts += [f"**{starting.TITLE}.** {starting.TEXT}", markdown_table([starting.HEAD, *findings.started])]
    return "\n\n".join(parts)


def print_remarks(findings: Findings) -> None:
    """Print when neighbours were noticed, the comparisons of equal sessions, and the figures that are worse."""
    for title, lines in (("noticing", findings.noticed), ("twin", findings.twins)):
        for line in lines:
            print(f"{title} | {' | '.join(line)}")
    for name, rows in findings.rows.items():
        for row in rows:
            if row.worse:
                print(f"worse by more than {LIMIT - 1:.0%} | {name} | {row.cells[0]} | {row.cells[1]}", *row.worse)


def main() -> None:
    """Measure the scenarios, print lines and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [START, *scenarios([1])]
    parser.add_argument("--scenario", choices=names, nargs="+", default=names, help="scenarios to measure")
    parser.add_argument("--only", default="", help="a regular expression that names of models must match")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="numbers of client threads")
    parser.add_argument("--minutes", type=float, default=25.0, help="duration (default: 25)")
    twin_help = "also compare two processes of the plain session with one thread: how far ratios are noise"
    parser.add_argument("--twin", action="store_true", help=twin_help)
    without_help = "compare with sessions without a mechanism each (default: all) in place of plain sessions"
    parser.add_argument("--without", choices=MECHANISMS, nargs="*", help=without_help)
    add_output(parser)
    arguments = parser.parse_args()
    ablation = arguments.without is not None
    if ablation and arguments.twin:
        parser.error("--twin: plain sessions are not measured with --without")
    without = [OWN + WITHOUT + name for name in arguments.without or MECHANISMS]
    chosen = {name: each for name, each in scenarios(arguments.clients).items() if name in arguments.scenario}
    findings = Findings(candidates=[OWN, *without] if ablation else [*CANDIDATES, *[TWIN] * arguments.twin])
    began_s = time.monotonic()
    try:
        if START in arguments.scenario and not ablation:
            print(f"{START} | {' | '.join(starting.HEAD)}")
            measure_starts(arguments.only, findings)
        if chosen:
            print(f"scenario | {' | '.join(ABLATION_HEAD if ablation else HEAD)}")
        measure_all(chosen, arguments.only, arguments.minutes - (time.monotonic() - began_s) / 60, findings)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    print_remarks(findings)
    write_results(arguments.output, {"serving-ablation" if ablation else "serving": format_results(chosen, findings)})


if __name__ == "__main__":
    main()
