"""Measure several models on the cores of one machine: policies of a MultiSession beside plain sessions.

    python scripts/bench_multi.py [--windows 5] [--seconds 5] [-o FOLDER]

Prints two tables. Light beside heavy: SqueezeNet on images of 112 x 112 every 30 ms, with jitter, beside GoogLeNet with
2 and 4 tasks always in flight. Deadlines: SqueezeNet, GoogLeNet and Inception-v3 in the proportion of their rates, at
shares of the capacity (the cores over the times of one thread); each has three times its own time. Each candidate has
the machine to itself for a window, is opened and warmed up for it, and candidates alternate; figures are those of all
windows together. It takes the greater part of an hour on two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from result_files import write_results

from chrion.machine.cores import physical_cores
from chrion.serving.multi.load import submit_all
from chrion.serving.multi.policies import POLICIES
from chrion.serving.multi.session import MultiSession
from chrion.serving.multi.simulation import Arrival, Served
from chrion.zoo import build

Feeds = Mapping[str, Mapping[str, Any]]
Submit = Callable[[str], Future[Any]]
_LIGHT, _MODELS = {"resolution": 112}, ("squeezenet", "googlenet", "inception-v3")
#: Tasks per second of the three models, of which shares of the capacity are multiples.
_PROPORTION = {"squeezenet": 45.0, "googlenet": 20.0, "inception-v3": 8.4}
_LOADS = (0.8, 0.9, 0.95, 1.05)
#: Seconds between light tasks, and the part of that by which they are late or early.
_PERIOD_S, _JITTER = 0.03, 0.3
#: Times of the deadlines over those of the models.
_DEADLINE = 3.0
#: Tasks of a model that plain sessions run at the same time.
_WORKERS = 4
#: Tasks that wait at most: enough for all of a window.
_QUEUE = 4096
#: The niceness of models by their deadlines, the earliest first.
_NICE = (0, 5, 19)


def plain_session(model: bytes, threads: int) -> ort.InferenceSession:
    """Return a plain session; with 0 threads, it has as many as onnxruntime chooses."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


@contextlib.contextmanager
def side_by_side(models: Mapping[str, bytes], feeds: Feeds, threads: int, nice: Sequence[int] = ()) -> Iterator[Submit]:
    """Yield a function that runs a task on the plain session of its model, whose threads may have a niceness."""
    sessions = {name: plain_session(model, threads) for name, model in models.items()}
    levels = dict(zip(models, nice or [0] * len(models), strict=False))

    def lower(level: int) -> None:
        if level:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), level)

    pools = {name: ThreadPoolExecutor(_WORKERS, initializer=lower, initargs=(levels[name],)) for name in models}
    yield lambda name: pools[name].submit(sessions[name].run, None, feeds[name])
    for pool in pools.values():
        pool.shutdown()


@contextlib.contextmanager
def one_after_another(models: Mapping[str, bytes], feeds: Feeds) -> Iterator[Submit]:
    """Yield a function that runs one task at a time, on a plain session with all threads."""
    sessions = {name: plain_session(model, 0) for name, model in models.items()}
    with ThreadPoolExecutor(1) as pool:
        yield lambda name: pool.submit(sessions[name].run, None, feeds[name])


@contextlib.contextmanager
def multi_session(
    models: Mapping[str, bytes], feeds: Feeds, policy: str, deadlines: Mapping[str, float], **options: Any
) -> Iterator[Submit]:
    """Yield a function that submits a task to a MultiSession; models that come first have the higher priorities."""
    rates = {name: _PROPORTION[name] for name in models}
    options |= {"rates": rates, "priorities": {name: at for at, name in enumerate(models)}, "queue": _QUEUE}
    with MultiSession(models, policy=policy, deadlines=deadlines, **options) as session:
        yield lambda name: session.submit(name, feeds[name])


def candidates(
    models: Mapping[str, bytes], feeds: Feeds, deadlines: Mapping[str, float]
) -> dict[str, Callable[[], Any]]:
    """Return the candidates, each as a function that opens it."""
    found: dict[str, Callable[[], Any]] = {
        "one after another, all threads": lambda: one_after_another(models, feeds),
        "side by side, default": lambda: side_by_side(models, feeds, 0),
        "side by side, one thread each": lambda: side_by_side(models, feeds, 1),
        "the same, nice by deadline": lambda: side_by_side(models, feeds, 1, _NICE if len(models) > 2 else (0, 19)),
    }
    for policy in POLICIES:
        found[f"blocks, {policy}"] = functools.partial(multi_session, models, feeds, policy, deadlines)
    found["blocks, edf, late tasks dropped"] = lambda: multi_session(models, feeds, "edf", deadlines, drop_late=True)
    return found


def run_light_and_heavy(submit: Submit, seconds: float, in_flight: int, seed: int) -> tuple[list[Served], float]:
    """Return what became of the light tasks, and the heavy tasks per second."""
    stop, done = threading.Event(), [0] * in_flight

    def repeat(at: int) -> None:
        while not stop.is_set():
            submit("googlenet").result()
            done[at] += 1

    threads = [threading.Thread(target=repeat, args=(at,)) for at in range(in_flight)]
    for thread in threads:
        thread.start()
    jitter = random.Random(seed)  # noqa: S311 - not a secret
    count = int(seconds / _PERIOD_S)
    times = [(at + _JITTER * jitter.uniform(-1, 1)) * _PERIOD_S * 1e3 for at in range(1, count + 1)]
    served, _ = submit_all(submit, [Arrival(time_ms, "squeezenet") for time_ms in sorted(times)], {})
    rate = sum(done) / seconds
    stop.set()
    for thread in threads:
        thread.join()
    return served, rate


def light_and_heavy(windows: int, seconds: float) -> str:
    """Return the table of a light model beside a heavy one."""
    models = {"squeezenet": serialised("squeezenet", _LIGHT), "googlenet": serialised("googlenet")}
    feeds = {name: feed(model) for name, model in models.items()}
    own = {name: one_thread_ms(models[name], feeds[name]) for name in models}
    deadlines = {name: _DEADLINE * own[name] for name in models}
    columns = ("candidate", "in flight", "p50", "p99", "max", "heavy tasks per second")
    lines = [f"| {' | '.join(columns)} |", "| --- |" + " ---: |" * (len(columns) - 1)]
    opened = candidates(models, feeds, deadlines)
    del opened["blocks, edf, late tasks dropped"]
    for in_flight in (2, 4):
        latencies: dict[str, list[float]] = {name: [] for name in opened}
        rates: dict[str, list[float]] = {name: [] for name in opened}
        for window in range(windows):
            for name, open_candidate in opened.items():
                with open_candidate() as submit:
                    wait([submit(model) for model in models for _ in range(4)])
                    served, rate = run_light_and_heavy(submit, seconds, in_flight, window)
                latencies[name] += [task.latency_ms for task in served]
                rates[name].append(rate)
        for name, own_latencies in latencies.items():
            p50, p99 = np.percentile(own_latencies, [50, 99])
            heavy = statistics.median(rates[name])
            lines.append(f"| {name} | {in_flight} | {p50:.1f} | {p99:.1f} | {max(own_latencies):.1f} | {heavy:.1f} |")
    return "\n".join(lines)


def with_deadlines(windows: int, seconds: float) -> str:
    """Return the table of three models with deadlines at shares of the capacity."""
    models = {name: serialised(name) for name in _MODELS}
    feeds = {name: feed(model) for name, model in models.items()}
    own = {name: one_thread_ms(models[name], feeds[name]) for name in models}
    deadlines = {name: _DEADLINE * own[name] for name in models}
    capacity = len(physical_cores()) / sum(_PROPORTION[name] * own[name] / 1e3 for name in models)
    lines = ["| candidate | load | missed | of the worst model | dropped |", "| --- | ---: | ---: | ---: | ---: |"]
    opened = candidates(models, feeds, deadlines)
    for load in _LOADS:
        rates = {name: load * capacity * _PROPORTION[name] for name in models}
        served: dict[str, list[Served]] = {name: [] for name in opened}
        for window in range(windows):
            for name, open_candidate in opened.items():
                with open_candidate() as submit:
                    wait([submit(model) for model in models for _ in range(4)])
                    served[name] += submit_all(submit, jittered(rates, seconds, window), deadlines)[0]
        for name, tasks in served.items():
            missed = {m: statistics.mean(task.missed for task in tasks if task.model == m) for m in models}
            dropped = statistics.mean(task.outcome != "done" for task in tasks)
            total = statistics.mean(task.missed for task in tasks)
            lines.append(f"| {name} | {load:g} | {total:.1%} | {max(missed.values()):.1%} | {dropped:.1%} |")
    return "\n".join(lines)


def jittered(rates: Mapping[str, float], seconds: float, seed: int) -> list[Arrival]:
    """Return arrivals at intervals of each model's rate, each early or late by a part of the interval."""
    jitter = random.Random(seed)  # noqa: S311 - not a secret
    arrivals = []
    for name, rate in rates.items():
        phase = jitter.random()
        times = [(at + phase + _JITTER * jitter.uniform(-1, 1)) / rate for at in range(int(seconds * rate))]
        arrivals += [Arrival(max(0.0, time_s) * 1e3, name) for time_s in times]
    return sorted(arrivals, key=lambda arrival: arrival.time_ms)


def serialised(name: str, parameters: Mapping[str, int] | None = None) -> bytes:
    """Return a model of the zoo as bytes."""
    content: bytes = build(name, parameters or {}).SerializeToString()
    return content


def feed(model: bytes) -> dict[str, Any]:
    """Return random inputs of a model."""
    graph = onnx.load_from_string(model).graph
    shapes = {i.name: [d.dim_value for d in i.type.tensor_type.shape.dim] for i in graph.input}
    generator = np.random.default_rng(0)
    return {name: generator.random(shape, np.float32) for name, shape in shapes.items()}


def one_thread_ms(model: bytes, arrays: Mapping[str, Any]) -> float:
    """Return the median time of a plain session with one thread."""
    session = plain_session(model, 1)
    times = []
    for _ in range(15):
        begin = time.perf_counter()
        session.run(None, arrays)
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times)


def main() -> None:
    """Print and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=5, help="windows of each candidate and case")
    parser.add_argument("--seconds", type=float, default=5.0, help="length of a window")
    parser.add_argument("-o", "--output", type=Path, metavar="FOLDER", help="write FOLDER/multi.json")
    arguments = parser.parse_args()
    light = light_and_heavy(arguments.windows, arguments.seconds)
    print(light, flush=True)
    deadlines = with_deadlines(arguments.windows, arguments.seconds)
    print(f"\n{deadlines}")
    write_results(arguments.output, {"multi": f"{light}\n\n{deadlines}"})


if __name__ == "__main__":
    main()
