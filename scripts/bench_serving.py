"""Measure a HybridSession and plain sessions that serve several client threads.

    python scripts/bench_serving.py [--only REGEX] [--clients 1 8] [--rounds N] [-o docs/serving.md]

In alternating rounds each candidate serves all clients for a fraction of a second: a tuned HybridSession, and plain
sessions with one thread, with as many as there are cores, and with onnxruntime's default. Prints a line for each model
and number of clients: requests per second and the 99th percentile of the latency, each with the ratio of HybridSession
to the best plain session for that load and its 90 % interval. ``ratios.py`` selects the best plain session without
selection bias. Takes about ten minutes with all models; ``-o`` replaces the section ``serving`` of pages.
"""

from __future__ import annotations

import argparse
import gc
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from bench_cpu import Case, light_models, recurrent_case
from onnx import TensorProto, helper, numpy_helper
from page_markers import fill_sections, markdown_table
from ratios import ratio_to_best

from chrion import HybridSession, load
from chrion.cores import physical_cores
from chrion.files import write_atomically
from chrion.profiler import this_machine
from chrion.profiler.synthetic_inputs import synthetic_inputs

OWN = "HybridSession"
#: Seconds of a trial, and of a pause after it, in which the threads of plain sessions stop spinning.
TRIAL_S, PAUSE_S = 0.3, 0.03
HEAD = ("model", "clients", "requests/s", "best plain", "ratio", "p99, ms", "best plain", "ratio")
TEXT = """Written by `scripts/bench_serving.py` on {machine}, onnxruntime {version}, {rounds} rounds. Ratios are
HybridSession to the best plain session for the same load: requests per second (higher is better) and the 99th
percentile of the latency (lower is better), with 90 % intervals.

{table}"""

Feed = Mapping[str, np.ndarray[Any, Any]]
#: Serves one request.
Serve = Callable[[], object]


@dataclass(frozen=True)
class Trial:
    """A trial of one candidate.

    Attributes:
        ms_per_request: Duration of the trial divided by the number of requests that were served.
        p99_ms: 99th percentile of the latency.
    """

    ms_per_request: float
    p99_ms: float


def dense_stack(layers: int = 6, width: int = 2048) -> onnx.ModelProto:
    """Build a perceptron with 100 MB of weights."""
    rng = np.random.default_rng(0)
    nodes, weights, name = [], [], "x"
    for layer in range(layers):
        matrix = (rng.standard_normal((width, width)) / width**0.5).astype(np.float32)
        weights.append(numpy_helper.from_array(matrix, f"w{layer}"))
        nodes.append(helper.make_node("MatMul", [name, f"w{layer}"], [f"m{layer}"], name=f"product{layer}"))
        name = "y" if layer == layers - 1 else f"r{layer}"
        nodes.append(helper.make_node("Relu", [f"m{layer}"], [name], name=f"relu{layer}"))
    values = [helper.make_tensor_value_info(value, TensorProto.FLOAT, [1, width]) for value in ("x", "y")]
    graph = helper.make_graph(nodes, "perceptron", values[:1], values[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


CASES = [
    recurrent_case("lstm", "LSTM 64", io=64),
    recurrent_case("lstm", "LSTM 128", io=128),
    recurrent_case("lstm", "LSTM 256", io=256),
    recurrent_case("gru", "GRU 128", io=128),
    recurrent_case("lstm", "LSTM 64, batch 8, unfolded", io=64, batch=8, chunk=1),
    *(case for case in light_models() if case.name == "squeezenet"),
    Case("perceptron, 100 MB", dense_stack),
]


@contextmanager
def candidates(source: bytes, feed: Feed) -> Iterator[dict[str, Serve]]:
    """Open all candidates, HybridSession first."""
    with ExitStack() as opened:
        hybrid = opened.enter_context(HybridSession(source, tune="now"))
        sessions = {OWN: hybrid} | {f"{n or 'default'}": plain_session(source, n) for n in (1, cores(), None)}
        yield {name: partial(session.run, None, feed) for name, session in sessions.items()}


def cores() -> int:
    """Return the number of physical cores."""
    return len(physical_cores())


def plain_session(source: bytes, threads: int | None) -> ort.InferenceSession:
    """Open a plain session with a number of threads, or onnxruntime's default."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    if threads is not None:
        options.intra_op_num_threads = threads
    return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def run_trial(serve: Serve, clients: int, trial_s: float) -> Trial:
    """Let several client threads call a candidate, without pauses between their requests."""
    latencies: list[list[float]] = [[] for _ in range(clients)]
    ready, end = threading.Barrier(clients + 1), [0.0]

    def client(own: list[float]) -> None:
        serve()
        ready.wait()
        ready.wait()
        before = time.perf_counter()
        while before < end[0] or not own:
            serve()
            after = time.perf_counter()
            own.append(after - before)
            before = after

    threads = [threading.Thread(target=client, args=(own,)) for own in latencies]
    for thread in threads:
        thread.start()
    ready.wait()
    start = time.perf_counter()
    end[0] = start + trial_s
    ready.wait()
    for thread in threads:
        thread.join()
    took_s = time.perf_counter() - start
    served = [latency for own in latencies for latency in own]
    return Trial(took_s * 1e3 / len(served), float(np.percentile(served, 99)) * 1e3)


def measure(case: Case, clients: Sequence[int], rounds: int) -> Iterator[list[str]]:
    """Yield the lines of a model's table, one for each number of clients."""
    source = case.build().SerializeToString()
    feed = synthetic_inputs(load(source))
    with candidates(source, feed) as serves:
        for serve in serves.values():
            serve()
        for count in clients:
            trials: dict[str, list[Trial]] = {name: [] for name in serves}
            names = list(serves)
            for turn in range(rounds + 1):
                for name in names[turn % len(names) :] + names[: turn % len(names)]:
                    trial = run_trial(serves[name], count, TRIAL_S)
                    if turn:  # the first round is a warm-up: crowded sessions are opened in it
                        trials[name].append(trial)
                    time.sleep(PAUSE_S)
            yield [case.name, str(count), *format_trials(trials)]
    gc.collect()


def format_trials(trials: Mapping[str, Sequence[Trial]]) -> list[str]:
    """Return the figures of a line."""
    per_request = {name: [trial.ms_per_request for trial in own] for name, own in trials.items()}
    slowest = {name: [trial.p99_ms for trial in own] for name, own in trials.items()}
    ratio, low, high = ratio_to_best(per_request, OWN)
    speed = {name: 1e3 / float(np.median(own)) for name, own in per_request.items()}
    p99_ms = {name: float(np.median(own)) for name, own in slowest.items()}
    p99, p99_low, p99_high = ratio_to_best(slowest, OWN)
    best = max((name for name in speed if name != OWN), key=speed.__getitem__)
    calmest = min((name for name in p99_ms if name != OWN), key=p99_ms.__getitem__)
    return [
        *(f"{speed[OWN]:.0f}", f"{speed[best]:.0f} ({best})", f"{1 / ratio:.2f} [{1 / high:.2f} to {1 / low:.2f}]"),
        *(f"{p99_ms[OWN]:.2f}", f"{p99_ms[calmest]:.2f} ({calmest})", f"{p99:.2f} [{p99_low:.2f} to {p99_high:.2f}]"),
    ]


def main() -> None:
    """Measure the models, print the table and fill in pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a regular expression that names of models must match")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="numbers of client threads")
    parser.add_argument("--rounds", type=int, default=12, help="rounds for each model and number of clients")
    parser.add_argument("-o", "--output", type=Path, nargs="*", default=[], help="pages whose section to fill in")
    arguments = parser.parse_args()
    rows = []
    print(" | ".join(HEAD))
    for case in CASES:
        if re.search(arguments.only, case.name):
            for row in measure(case, arguments.clients, arguments.rounds):
                rows.append(row)
                print(" | ".join(row), flush=True)
    table = markdown_table([HEAD, *rows])
    machine, version = this_machine(), ort.get_version_string()
    content = TEXT.format(machine=machine, version=version, rounds=arguments.rounds, table=table)
    for path in arguments.output:
        write_atomically(path, fill_sections(path.read_text(encoding="utf-8"), {"serving": content}))


if __name__ == "__main__":
    main()
