"""Measure the CPU time of requests: HybridSession beside plain sessions of one thread, of two, and of the default.

    python scripts/bench_cpu_time.py -o docs/data

Callers without pauses, and one with pauses of 20 ms, in alternating trials; figures are medians. Takes five minutes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from tempfile import TemporaryDirectory

import onnxruntime as ort
from bench_cpu import Case, recurrent_case
from command_arguments import add_output, positive
from page_markers import markdown_table
from result_files import write_results

import chrion
from chrion import HybridSession
from chrion.profiler import this_machine
from chrion.profiler.synthetic_inputs import synthetic_inputs
from chrion.report.benchmark.latency import Feed

TRIAL_S, WARM_UP = 0.7, 8
#: Pauses in seconds, and callers.
LOADS = {"1 caller": (0.0, 1), "1 caller, pauses of 20 ms": (0.02, 1), "2 callers": (0.0, 2)}
HEAD = ["model", "runs", "load", "session", "CPU, ms", "latency, ms", "requests/s"]


def cases() -> Iterator[Case]:
    """Yield the models."""
    yield recurrent_case("lstm", "LSTM 96, 10 layers", io=96, layers=10)
    yield recurrent_case("lstm", "LSTM 64", io=64)
    yield recurrent_case("gru", "GRU 160, 8 layers", io=160, layers=8)
    yield recurrent_case("lstm", "LSTM 256", io=256)


def plain_session(source: bytes, threads: int) -> ort.InferenceSession:
    """Return a plain session; 0 threads are onnxruntime's default."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def trial(
    session: HybridSession | ort.InferenceSession, feed: Feed, pause_s: float, callers: int
) -> tuple[float, float, float]:
    """Return the CPU time of a request and the median latency, in ms, and the requests per second."""
    for _ in range(WARM_UP):
        session.run(None, feed)
    latencies: list[list[float]] = [[] for _ in range(callers)]
    end = time.perf_counter() + TRIAL_S

    def call(own: list[float]) -> None:
        while not own or time.perf_counter() < end:
            begin = time.perf_counter()
            session.run(None, feed)
            own.append(time.perf_counter() - begin)
            if pause_s:
                time.sleep(pause_s)

    cpu_s, begin = time.process_time(), time.perf_counter()
    threads = [threading.Thread(target=call, args=(own,)) for own in latencies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - begin
    found = [latency for own in latencies for latency in own]
    return 1e3 * cpu_s / len(found), 1e3 * statistics.median(found), len(found) / wall_s


def rows(case: Case, rounds: int) -> Iterator[list[str]]:
    """Yield the rows of a model."""
    source = case.build().SerializeToString()
    feed = synthetic_inputs(chrion.load(source))
    with HybridSession(source, tune="now") as session:
        runs = "plan" if session.plan else "plain"
    sessions: dict[str, Callable[[], HybridSession | ort.InferenceSession]] = {
        "plain, 1 thread": lambda: plain_session(source, 1),
        "plain, 2 threads": lambda: plain_session(source, 2),
        "plain, default": lambda: plain_session(source, 0),
        "HybridSession": lambda: HybridSession(source, tune="now"),
    }
    for load, (pause_s, callers) in LOADS.items():
        found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in sessions}
        for _ in range(rounds):
            for name, make in sessions.items():
                session = make()
                found[name].append(trial(session, feed, pause_s, callers))
                if isinstance(session, HybridSession):
                    session.close()
        for name, trials in found.items():
            cpu_ms, latency_ms, per_s = map(statistics.median, zip(*trials, strict=True))
            yield [case.name, runs, load, name, f"{cpu_ms:.3g}", f"{latency_ms:.3g}", f"{per_s:.0f}"]


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_output(parser)
    parser.add_argument("--rounds", type=positive, default=7)
    arguments = parser.parse_args()
    with TemporaryDirectory() as os.environ["CHRION_CACHE"]:
        table = markdown_table([HEAD, *(row for case in cases() for row in rows(case, arguments.rounds))])
    print(table)
    text = f"{this_machine()}, onnxruntime {ort.__version__}."
    write_results(arguments.output, {"cpu-time": f"{text}\n\n{table}"})


if __name__ == "__main__":
    main()
