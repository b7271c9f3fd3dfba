"""Measure how soon a default HybridSession under traffic serves by the engine that is the faster one.

    python scripts/bench_adoption.py [--model gru] [--traffic NAME ...] [--trials 3] [--limit 60] [-o docs/data]
    python scripts/bench_adoption.py --simulate [-o docs/data]

Each trial is a process of its own with an empty cache: a plain session serves the traffic first, then a new
HybridSession, until it has decided and for some time after. The times count from the construction of the session; a
decision is the plan in use, or a certain reason to stay plain. *while undecided* compares requests before the decision
with those of the plain session before, *after* those that come after it. A trial that has not decided at the limit
counts as such. With 8 callers, the session of one thread is the right choice, whatever a comparison would select. Takes
two to ten minutes a model; ``-o`` writes the results ``adoption``. ``--simulate`` has the session's own rules decide on
simulated latencies, in seconds, and writes ``adoption-simulated``.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import onnxruntime as ort
from adoption_simulation import SimulatedApplication
from bench_cpu import Case, recurrent_case
from command_arguments import add_output, positive
from page_markers import markdown_table
from result_files import write_results
from serving.models import perceptron
from serving.surroundings import Neighbour

from chrion import HybridSession, load
from chrion.machine.cores import physical_cores
from chrion.profiler import this_machine
from chrion.profiler.interference import TOO_BUSY
from chrion.profiler.synthetic_inputs import synthetic_inputs
from chrion.runtime.background_tuning import NOT_TUNED, OPENING
from chrion.runtime.diversion import CROWDED
from chrion.runtime.live_selection import COMPARING

MODELS: Mapping[str, Case] = {
    "gru": recurrent_case("gru", "GRU 160, 8 layers", io=160, layers=8),
    "lstm": recurrent_case("lstm", "LSTM 96, 10 layers", io=96, layers=10),
    "perceptron": Case("perceptron, 100 MB", perceptron),
}
#: Time for which the plain session serves before, and the HybridSession after its decision, in seconds.
PLAIN_S, AFTER_S = 3.0, 3.0
#: Pause between requests of an application that is idle, in seconds: none come before tuning has ended.
IDLE = -1.0
HEAD = ("model", "traffic", "decided after, s", "requests", "serves by", "while undecided: p50", "p99", "after: p50")
TEXT = """Written by `scripts/bench_adoption.py` on {machine}, onnxruntime {version}: time from the construction of a
default `HybridSession` with an empty cache to its decision, and requests until then; least to greatest of {trials}
trials. *while undecided* and *after*: latencies relative to those of a plain session (onnxruntime's default) under the
same traffic just before, median of the trials."""

#: Simulated trials of each kind, and the latency of the plain session in them, in ms.
SIMULATED, PLAIN_MS = 400, 4.0
SIMULATED_HEAD = ("traffic", "plan/plain", "right", "decided after, s (95 %)", "requests (95 %)", "extra, ms (95 %)")
SIMULATED_TEXT = f"""Written by `scripts/bench_adoption.py --simulate`: the session's own comparison on simulated
latencies, {SIMULATED} trials a line, the plain session at {PLAIN_MS:g} ms. Latencies have a log-normal deviation of
0.2, one in fifty takes five times longer, a neighbour slows both engines by half for some tens of requests now and
then, and all requests in the 90 ms after a change take twice as long. *extra*: the time by which all requests together
took longer than on the faster engine."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests of an application.

    Attributes:
        callers: Threads that send requests.
        pause_s: Pause of each between two requests; :data:`IDLE` sends none before tuning has ended.
        neighbour: Whether another process uses the first core all the time.
    """

    callers: int = 1
    pause_s: float = 0.0
    neighbour: bool = False


TRAFFIC: Mapping[str, Traffic] = {
    "idle": Traffic(pause_s=IDLE),
    "every 100 ms": Traffic(pause_s=0.1),
    "every 20 ms": Traffic(pause_s=0.02),
    "every 5 ms": Traffic(pause_s=0.005),
    "every 1 ms": Traffic(pause_s=0.001),
    "back to back": Traffic(),
    "8 callers": Traffic(callers=8),
    "every 20 ms, busy neighbour": Traffic(pause_s=0.02, neighbour=True),
    "back to back, busy neighbour": Traffic(neighbour=True),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a trial.

    Attributes:
        decided_s: Time until the decision, in seconds; None if there was none.
        requests: Requests until then.
        serves: What served in the end.
        ratios: Median and 99th percentile while undecided, and median after, to those of the plain session.
    """

    decided_s: float | None
    requests: int
    serves: str
    ratios: tuple[float, float, float]


class Application:
    """Threads that send requests to a session, which may be replaced."""

    def __init__(self, session: Any, feed: Mapping[str, Any], traffic: Traffic) -> None:
        self._run, self._feed, self._traffic = session.run, feed, traffic
        #: Start and latency of each request, in seconds.
        self.served: list[tuple[float, float]] = []
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._call) for _ in range(traffic.callers)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def latencies_ms(self, start_s: float, end_s: float) -> np.ndarray[Any, Any]:
        """Return the latencies of the requests that began in some time."""
        return np.array([took_s * 1e3 for at_s, took_s in list(self.served) if start_s <= at_s < end_s])

    def _call(self) -> None:
        while not self._over.is_set():
            start_s = time.perf_counter()
            self._run(None, self._feed)
            self.served.append((start_s, time.perf_counter() - start_s))
            if self._traffic.pause_s > 0:
                time.sleep(self._traffic.pause_s)


def is_decided(session: HybridSession) -> bool:
    """Return whether a session has decided with certainty."""
    text = session.explain()
    return (
        session.plan is not None
        or CROWDED in text
        or not any(reason in text for reason in (NOT_TUNED, OPENING, COMPARING, TOO_BUSY))
    )


def run_trial(source: bytes, traffic: Traffic, limit_s: float) -> Outcome:
    """Serve by a plain session, then by a HybridSession until it has decided, and for some time after."""
    feed = synthetic_inputs(load(source))
    options = ort.SessionOptions()
    options.log_severity_level = 3
    steady = Traffic(traffic.callers, max(0.0, traffic.pause_s))
    began_s = time.perf_counter()
    with Application(ort.InferenceSession(source, options, providers=["CPUExecutionProvider"]), feed, steady) as plain:
        time.sleep(PLAIN_S)
    plain_ms = plain.latencies_ms(began_s + PLAIN_S / 3, time.perf_counter())
    start_s = time.perf_counter()
    with HybridSession(source) as session:
        if traffic.pause_s == IDLE:
            session.wait_until_tuned(limit_s)
        with Application(session, feed, steady) as own:
            while not (decided := is_decided(session)) and time.perf_counter() - start_s < limit_s:
                time.sleep(0.02)
            decided_s = time.perf_counter()
            time.sleep(AFTER_S)
            serves = "plan" if session.plan else "one thread" if CROWDED in session.explain() else "plain"
    before, after = own.latencies_ms(start_s, decided_s), own.latencies_ms(decided_s, time.perf_counter())
    p50, p99 = (
        float(np.quantile(before, q) / np.quantile(plain_ms, q)) if len(before) else float("nan") for q in (0.5, 0.99)
    )
    return Outcome(
        decided_s - start_s if decided else None,
        len(before),
        serves,
        (p50, p99, float(np.median(after) / np.median(plain_ms))),
    )


def _answer(connection: Any, source: bytes, traffic: Traffic, limit_s: float) -> None:
    with tempfile.TemporaryDirectory() as os.environ["CHRION_CACHE"]:
        connection.send(run_trial(source, traffic, limit_s))


def run_in_process(source: bytes, traffic: Traffic, limit_s: float) -> Outcome:
    """Run a trial in a process of its own.

    Raises:
        EOFError: The process has failed.
    """
    context = multiprocessing.get_context("spawn")
    own, other = context.Pipe()
    with contextlib.ExitStack() as beside:
        if traffic.neighbour:
            beside.enter_context(Neighbour(physical_cores()[0])).resume()
        process = context.Process(target=_answer, args=(other, source, traffic, limit_s))
        process.start()
        other.close()
        try:
            outcome: Outcome = own.recv()
        finally:
            process.join()
    return outcome


def row_of(model: str, traffic: str, outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    """Return the line of some trials."""
    times = sorted(outcome.decided_s for outcome in outcomes if outcome.decided_s is not None)
    missing = len(outcomes) - len(times)
    shown = f"{times[0]:.1f} to {times[-1]:.1f}" if times else ""
    if missing:
        shown = f"{shown}; {missing} of {len(outcomes)} not" if times else "not"
    counts = sorted(outcome.requests for outcome in outcomes)
    serves = sorted(outcome.serves for outcome in outcomes)
    medians = (statistics.median(outcome.ratios[at] for outcome in outcomes) for at in range(3))
    kinds = ", ".join(f"{serves.count(kind)} {kind}" for kind in dict.fromkeys(serves))
    return (model, traffic, shown, f"{counts[0]} to {counts[-1]}", kinds, *(f"{ratio:.2f}" for ratio in medians))


def simulated_rows() -> list[tuple[str, ...]]:
    """Return a line for each kind of simulated traffic and each ratio of a plan's latency to the plain session's."""
    rows: list[tuple[str, ...]] = []
    for pause_ms, ratio in itertools.product((0, 1, 5, 20, 100), (0.8, 1.25)):
        applications = [
            SimulatedApplication(PLAIN_MS, ratio * PLAIN_MS, seed, pause_s=pause_ms / 1e3) for seed in range(SIMULATED)
        ]
        for application in applications:
            application.serve()
        right = sum(application.selection.plan_wins is (ratio < 1) for application in applications)
        times, counts, extra = (
            np.quantile([value(application) for application in applications], 0.95)
            for value in (lambda a: a.now_s, lambda a: len(a.diverted), lambda a: a.extra_ms)
        )
        traffic = f"every {pause_ms} ms" if pause_ms else "back to back"
        figures = f"{right / SIMULATED:.1%}", f"{times:.1f}", f"{counts:.0f}", f"{extra:.0f}"
        rows.append((traffic, f"{ratio:.2f}", *figures))
    return rows


def write_simulated(folder: Path | None) -> None:
    """Print and write the results of comparisons on simulated latencies."""
    table = markdown_table([SIMULATED_HEAD, *simulated_rows()])
    print(table)
    write_results(folder, {"adoption-simulated": f"{SIMULATED_TEXT}\n\n{table}"})


def main() -> None:
    """Run the trials, print a line for each model and traffic, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, nargs="+", default=["gru", "perceptron"], help="models")
    parser.add_argument("--traffic", choices=TRAFFIC, nargs="+", default=list(TRAFFIC), help="kinds of traffic")
    parser.add_argument("--trials", type=positive, default=3, help="trials of each (default: 3)")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds until a trial counts as undecided")
    parser.add_argument("--simulate", action="store_true", help="simulate comparisons instead of measuring")
    add_output(parser)
    arguments = parser.parse_args()
    if arguments.simulate:
        write_simulated(arguments.output)
        return
    rows = []
    print(" | ".join(HEAD))
    for name in arguments.model:
        case = MODELS[name]
        source = case.build().SerializeToString()
        for traffic in arguments.traffic:
            outcomes = [run_in_process(source, TRAFFIC[traffic], arguments.limit) for _ in range(arguments.trials)]
            rows.append(row_of(case.name, traffic, outcomes))
            print(" | ".join(rows[-1]), flush=True)
    text = TEXT.format(machine=this_machine(), version=ort.get_version_string(), trials=arguments.trials)
    write_results(arguments.output, {"adoption": f"{text}\n\n{markdown_table([HEAD, *rows])}"})


if __name__ == "__main__":
    main()
