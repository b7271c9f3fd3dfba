"""Measure several models on the cores of one machine: policies of a MultiSession beside plain sessions.

    python scripts/bench_multi.py [--windows 5] [--seconds 5] [--tables light,deadlines,flight,prediction] [-o FOLDER]

Prints four tables. *Light beside heavy*: SqueezeNet on images of 112 x 112 every 30 ms, with jitter, beside GoogLeNet
with 2 and 4 tasks always in flight. *Deadlines*: sets of models in given proportions of their rates, at shares of the
capacity (the cores over the times of one thread), by constant intervals with jitter, random, bursty and stepping; each
model has three times its own time. *In flight*: one model with 1 to 8 tasks always in flight. *Prediction*: the shares
of tasks that miss their deadlines, as ``chrion multi`` predicts and measures them. Each candidate has the machine to
itself for a window, is opened and warmed up for it (by *prediction*, once for all windows), and candidates alternate;
figures are those of all windows together. All of it takes hours on two cores: ``--sets``, ``--loads``, ``--arrivals``
and ``--only`` choose a part.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import multiprocessing
import os
import random
import re
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from result_files import write_results

from chrion import HybridSession, partition, profile
from chrion.machine.cores import physical_cores
from chrion.serving.multi.load import measure, measure_times, predict, submit_all, summarise
from chrion.serving.multi.policies import POLICIES
from chrion.serving.multi.session import MultiSession
from chrion.serving.multi.simulation import LOADS, Arrival, Served, build_arrivals
from chrion.zoo import build

Feeds = Mapping[str, Mapping[str, Any]]
Models = Mapping[str, bytes]
Submit = Callable[[str], Future[Any]]
#: What opens a candidate.
Open = Callable[[], contextlib.AbstractContextManager[Submit]]
_LIGHT = {"resolution": 112}
#: Models by their names in the zoo, with parameters, and their proportion of tasks per second. ``published`` is the
#: set and the proportion of TOP (Lin et al., TPDS 2024, Table II).
SETS: dict[str, dict[str, tuple[dict[str, int], float]]] = {
    "networks": {"squeezenet": ({}, 45.0), "googlenet": ({}, 20.0), "inception-v3": ({}, 8.4)},
    "equal rates": {"squeezenet": ({}, 1.0), "googlenet": ({}, 1.0), "inception-v3": ({}, 1.0)},
    "published": {"squeezenet": ({}, 4.0), "resnet-50": ({}, 2.0), "inception-v3": ({}, 1.0)},
    "pair": {"squeezenet": ({}, 3.0), "googlenet": ({}, 1.0)},
    "kinds": {
        "squeezenet": ({}, 4.0),
        "lstm": ({"batch": 1, "layers": 4, "seq": 32, "io": 128}, 8.0),
        "bert": ({"layers": 2, "seq": 64, "hidden": 256, "heads": 4}, 2.0),
    },
}
_ALONE = "googlenet"
#: Seconds between light tasks, and the part of an interval by which tasks are late or early.
_PERIOD_S, _JITTER = 0.03, 0.3
#: Times of the deadlines over those of the models.
_DEADLINE = 3.0
#: Tasks of a model that plain sessions run at the same time.
_WORKERS = 4
#: Tasks that wait at most: enough for all of a window.
_QUEUE = 4096
#: The niceness of models by their deadlines, the earliest first.
_NICE = (0, 5, 19)
#: Seconds between two looks at the queues, of which the variance is that between models.
_LOOK_S = 0.01


def plain_session(model: bytes, threads: int, *, shared: bool = False) -> ort.InferenceSession:
    """Return a plain session; with 0 threads, it has as many as onnxruntime chooses, or the shared ones."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.use_per_session_threads = not shared
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


@contextlib.contextmanager
def side_by_side(sessions: Mapping[str, Any], feeds: Feeds, nice: Sequence[int] = ()) -> Iterator[Submit]:
    """Yield a function that runs a task on the session of its model, whose calling threads may have a niceness."""
    levels = dict(zip(sessions, nice or [0] * len(sessions), strict=False))

    def lower(level: int) -> None:
        if level:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), level)

    pools = {name: ThreadPoolExecutor(_WORKERS, initializer=lower, initargs=(levels[name],)) for name in sessions}
    try:
        yield lambda name: pools[name].submit(sessions[name].run, None, feeds[name])
    finally:
        for pool in pools.values():
            pool.shutdown()
        for session in sessions.values():
            if isinstance(session, HybridSession):
                session.close()


@contextlib.contextmanager
def one_after_another(models: Models, feeds: Feeds) -> Iterator[Submit]:
    """Yield a function that runs one task at a time, on a plain session with all threads."""
    sessions = {name: plain_session(model, 0) for name, model in models.items()}
    with ThreadPoolExecutor(1) as pool:
        yield lambda name: pool.submit(sessions[name].run, None, feeds[name])


@contextlib.contextmanager
def combined_graph(models: Models, feeds: Feeds) -> Iterator[Submit]:
    """Yield a function that runs tasks of all models together, as one graph on all threads.

    So do POS and other schedulers of a combined graph, whose inputs are synchronised: a round begins when a task waits
    and the last round has ended. It takes one task of each model, and computes models without a task in vain.
    """
    session = ort.InferenceSession(combine(models), providers=["CPUExecutionProvider"])
    inputs = {f"{name}/{key}": value for name, feed in feeds.items() for key, value in feed.items()}
    queues: dict[str, deque[Future[Any]]] = {name: deque() for name in models}
    changed, stopped = threading.Condition(), False

    def serve() -> None:
        while True:
            with changed:
                changed.wait_for(lambda: stopped or any(queues.values()))
                if not any(queues.values()):
                    return
                tasks = [queue.popleft() for queue in queues.values() if queue]
            outputs = session.run(None, inputs)
            for task in tasks:
                task.set_result(outputs)

    def submit(name: str) -> Future[Any]:
        task: Future[Any] = Future()
        with changed:
            queues[name].append(task)
            changed.notify()
        return task

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield submit
    finally:
        with changed:
            stopped = True
            changed.notify()
        thread.join()


@contextlib.contextmanager
def global_thread_pool(models: Models) -> Iterator[Submit]:
    """Yield a function that runs a task in another process: with a global pool, all sessions of a process use it."""
    context = multiprocessing.get_context("spawn")
    own, other = context.Pipe()
    process = context.Process(target=serve_by_global_pool, args=(other, dict(models)))
    process.start()
    other.close()
    numbers, lock = itertools.count(), threading.Lock()
    tasks: dict[int, Future[Any]] = {}

    def receive() -> None:
        with contextlib.suppress(EOFError):
            while True:
                tasks.pop(own.recv()).set_result(None)

    def submit(name: str) -> Future[Any]:
        task: Future[Any] = Future()
        with lock:
            tasks[number := next(numbers)] = task
            own.send((number, name))
        return task

    thread = threading.Thread(target=receive)
    thread.start()
    try:
        yield submit
    finally:
        own.send(None)
        thread.join()
        process.join()


def serve_by_global_pool(connection: Any, models: Models) -> None:
    """Run tasks whose numbers and models come by a connection, on sessions that share onnxruntime's thread pool."""
    ort.set_global_thread_pool_sizes(len(physical_cores()), 1)
    sessions = {name: plain_session(model, 0, shared=True) for name, model in models.items()}
    feeds = {name: feed(model) for name, model in models.items()}
    lock = threading.Lock()

    def run(number: int, name: str) -> None:
        sessions[name].run(None, feeds[name])
        with lock:
            connection.send(number)

    with contextlib.ExitStack() as stack:
        pools = {name: stack.enter_context(ThreadPoolExecutor(_WORKERS)) for name in models}
        while (task := connection.recv()) is not None:
            pools[task[1]].submit(run, *task)
    connection.close()


def combine(models: Models) -> bytes:
    """Return one model of several; names are prefixed with those of the models."""
    parts = [onnx.compose.add_prefix(onnx.load_from_string(model), f"{name}/") for name, model in models.items()]
    graph = onnx.GraphProto(name="combined")
    opsets: dict[str, int] = {}
    for part in parts:
        for field in ("node", "input", "output", "initializer", "value_info"):
            getattr(graph, field).extend(getattr(part.graph, field))
        opsets |= {opset.domain: opset.version for opset in part.opset_import}
    imports = [onnx.helper.make_opsetid(domain, version) for domain, version in opsets.items()]
    version = max(part.ir_version for part in parts)
    content: bytes = onnx.helper.make_model(graph, opset_imports=imports, ir_version=version).SerializeToString()
    return content


@functools.cache
def ios_plan(model: bytes) -> Any:
    """Return the plan of a model by IOS, on all cores."""
    with HybridSession(
        model, plan=lambda graph: partition(graph, profile(graph), policy="ios"), tune="never"
    ) as session:
        return session.plan


def hybrid_sessions(models: Models, *, ios: bool) -> dict[str, HybridSession]:
    """Return a tuned session of each model, or one of its plan by IOS."""
    if ios:
        return {name: HybridSession(model, plan=ios_plan(model), tune="never") for name, model in models.items()}
    return {name: HybridSession(model, tune="now") for name, model in models.items()}


def multi_session(
    models: Models, feeds: Feeds, deadlines: Mapping[str, float], rates: Mapping[str, float], **options: Any
) -> contextlib.AbstractContextManager[Submit]:
    """Return a context with a function that submits a task; models that come first have the higher priorities."""
    options |= {"rates": rates, "priorities": {name: at for at, name in enumerate(models)}, "queue": _QUEUE}
    return _submitting(lambda: MultiSession(models, deadlines=deadlines, **options), feeds)


@contextlib.contextmanager
def _submitting(open_session: Callable[[], MultiSession], feeds: Feeds) -> Iterator[Submit]:
    with open_session() as session:
        yield lambda name: session.submit(name, feeds[name])


def candidates(
    models: Models, feeds: Feeds, deadlines: Mapping[str, float], rates: Mapping[str, float], only: str
) -> dict[str, Open]:
    """Return the candidates whose names match a regular expression anywhere, each as a function that opens it."""

    def plain(threads: int, nice: Sequence[int] = ()) -> Open:
        return lambda: side_by_side({n: plain_session(m, threads) for n, m in models.items()}, feeds, nice)

    def blocks(policy: str | None, **options: Any) -> Open:
        return lambda: multi_session(models, feeds, deadlines, rates, policy=policy, **options)

    nice = _NICE if len(models) > 2 else (0, 19)
    found = {
        "one after another, all threads": lambda: one_after_another(models, feeds),
        "one combined graph, all threads": lambda: combined_graph(models, feeds),
        "side by side, default": plain(0),
        "side by side, two threads each": plain(2),
        "side by side, global thread pool": lambda: global_thread_pool(models),
        "side by side, one thread each": plain(1),
        "the same, nice by hand": plain(1, nice),
        "side by side, IOS": lambda: side_by_side(hybrid_sessions(models, ios=True), feeds),
        "side by side, HybridSession": lambda: side_by_side(hybrid_sessions(models, ios=False), feeds),
        "background": blocks(None, background=True),
    }
    if len(models) == 1:
        del found["the same, nice by hand"], found["background"], found["one combined graph, all threads"]
    found |= {f"blocks, {policy}": blocks(policy) for policy in POLICIES}
    found["blocks of 2 ms, edf"] = blocks("edf", block="2ms")
    found["blocks, edf, late tasks dropped"] = blocks("edf", drop_late=True)
    return {name: open_candidate for name, open_candidate in found.items() if re.search(only, name)}


def repeat_in_flight(submit: Submit, name: str, in_flight: int, stop: threading.Event) -> Callable[[], int]:
    """Keep tasks of a model in flight until a stop; return a function that waits for them and counts those done."""
    done = [0] * in_flight

    def repeat(at: int) -> None:
        while not stop.is_set():
            submit(name).result()
            done[at] += not stop.is_set()

    threads = [threading.Thread(target=repeat, args=(at,)) for at in range(in_flight)]
    for thread in threads:
        thread.start()

    def finish() -> int:
        stop.set()
        for thread in threads:
            thread.join()
        return sum(done)

    return finish


def run_light_and_heavy(submit: Submit, seconds: float, in_flight: int, seed: int) -> tuple[list[Served], float]:
    """Return what became of the light tasks, and the heavy tasks per second."""
    finish = repeat_in_flight(submit, "googlenet", in_flight, threading.Event())
    rates = {"squeezenet": 1 / _PERIOD_S}
    begin = time.perf_counter()
    served, _ = submit_all(submit, jittered(rates, seconds, seed), {})
    took = time.perf_counter() - begin
    return served, finish() / took


def light_and_heavy(windows: int, seconds: float, only: str) -> str:
    """Return the table of a light model beside a heavy one."""
    models = {"squeezenet": serialised("squeezenet", _LIGHT), "googlenet": serialised("googlenet")}
    feeds = {name: feed(model) for name, model in models.items()}
    own = {name: one_thread_ms(models[name], feeds[name]) for name in models}
    deadlines, rates = {n: _DEADLINE * own[n] for n in models}, {n: 1e3 / own[n] for n in models}
    opened = candidates(models, feeds, deadlines, rates, only)
    opened.pop("blocks, edf, late tasks dropped", None)
    lines = [*head("candidate", "in flight", "p50", "p99", "max", "heavy tasks per second")]
    for in_flight in (2, 4):
        latencies: dict[str, list[float]] = {name: [] for name in opened}
        heavy_rates: dict[str, list[float]] = {name: [] for name in opened}
        for window, (name, open_candidate) in itertools.product(range(windows), opened.items()):
            with open_candidate() as submit:
                wait([submit(model) for model in models for _ in range(4)])
                served, rate = run_light_and_heavy(submit, seconds, in_flight, window)
            latencies[name] += [task.latency_ms for task in served]
            heavy_rates[name].append(rate)
        for name, found in latencies.items():
            p50, p99 = np.percentile(found, [50, 99])
            heavy = statistics.median(heavy_rates[name])
            lines.append(f"| {name} | {in_flight} | {p50:.1f} | {p99:.1f} | {max(found):.1f} | {heavy:.1f} |")
    return "\n".join(lines)


def with_deadlines(
    windows: int, seconds: float, only: str, sets: Sequence[str], arrivals: Sequence[tuple[str, float]]
) -> str:
    """Return the table of sets of models with deadlines, by kinds of arrivals at shares of the capacity."""
    columns = ("done per second", "mean", "p99", "missed", "of each model", "dropped", "variance of queues")
    lines = [*head("set", "arrivals", "load", "candidate", *columns)]
    for chosen in sets:
        found = open_set(chosen)
        for kind, load_ in arrivals:
            rates = {name: load_ * rate for name, rate in found.full_rates.items()}
            opened = candidates(found.models, found.feeds, found.deadlines, rates, only)
            served: dict[str, list[list[Served]]] = {name: [] for name in opened}
            for window, (name, open_candidate) in itertools.product(range(windows), opened.items()):
                with open_candidate() as submit:
                    wait([submit(model) for model in found.models for _ in range(4)])
                    served[name].append(submit_all(submit, draw(kind, rates, seconds, window), found.deadlines)[0])
            case = f"| {chosen} | {kind} | {load_:g} |"
            lines += [f"{case} {name} | {figures(own_, list(found.models))} |" for name, own_ in served.items()]
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class OpenedSet:
    """Models that run together, their inputs, and the times and rates that follow from sessions with one thread."""

    models: Models
    feeds: Feeds
    #: Three times the time of each model, in ms.
    deadlines: dict[str, float]
    #: Tasks per second of each model that fill the cores.
    full_rates: dict[str, float]


def open_set(name: str) -> OpenedSet:
    """Return one of :data:`SETS`."""
    models = {model: serialised(model, parameters) for model, (parameters, _) in SETS[name].items()}
    feeds = {model: feed(content) for model, content in models.items()}
    own = {model: one_thread_ms(content, feeds[model]) for model, content in models.items()}
    proportion = {model: share for model, (_, share) in SETS[name].items()}
    capacity = len(physical_cores()) / sum(proportion[model] * own[model] / 1e3 for model in models)
    deadlines = {model: _DEADLINE * own[model] for model in models}
    return OpenedSet(models, feeds, deadlines, {model: capacity * share for model, share in proportion.items()})


def beside_prediction(
    windows: int, seconds: float, only: str, sets: Sequence[str], arrivals: Sequence[tuple[str, float]]
) -> str:
    """Return the table of predicted and measured shares of missed tasks: of all, and of the model worst predicted."""
    columns = ("predicted missed", "measured", "of the model worst predicted", "measured")
    lines = [*head("set", "arrivals", "load", "candidate", *columns)]
    options: dict[str, dict[str, Any]] = {
        "background": {"background": True},
        **{f"blocks, {name}": {"policy": name} for name in ("edf", "priority")},
    }
    for chosen in sets:
        found = open_set(chosen)
        names = list(found.models)
        common: dict[str, Any] = {
            "deadlines": found.deadlines,
            "queue": _QUEUE,
            "priorities": {n: at for at, n in enumerate(names)},
        }
        for (kind, load_), (candidate, how) in itertools.product(arrivals, options.items()):
            if not re.search(only, candidate):
                continue
            rates = {name: load_ * rate for name, rate in found.full_rates.items()}
            missed, tasks = np.zeros((2, len(names))), np.zeros((2, len(names)))
            with MultiSession(found.models, rates=rates, **common, **how) as session:
                for window in range(windows):
                    drawn = draw(kind, rates, seconds, window)
                    times = measure_times(session, found.feeds)
                    predicted = predict(session, drawn, times)
                    measured = summarise(*measure(session, found.feeds, drawn), drawn, session.lanes)
                    for at, result in enumerate((predicted, measured)):
                        missed[at] += [result.models[name].missed for name in names]
                        tasks[at] += [result.models[name].tasks for name in names]
            of_all, of_each = missed.sum(1) / tasks.sum(1), missed / tasks
            worst = of_each[:, np.abs(of_each[0] - of_each[1]).argmax()]
            cells = " | ".join(f"{share:.1%}" for share in (*of_all, *worst))
            lines.append(f"| {chosen} | {kind} | {load_:g} | {candidate} | {cells} |")
    return "\n".join(lines)


def figures(windows: Sequence[Sequence[Served]], names: Sequence[str]) -> str:
    """Return the cells of a candidate: throughput, latencies in ms, misses, and the variance of the queues.

    Args:
        windows: What became of the tasks of each window.
        names: The models, in the order in which the cell of their misses has them.
    """
    tasks = [task for window in windows for task in window]
    done = [task.latency_ms for task in tasks if task.outcome == "done"]
    per_s = len(done) / sum(max(task.end_ms for task in window) for window in windows) * 1e3
    mean, p99 = (statistics.mean(done), np.percentile(done, 99)) if done else (float("nan"),) * 2
    each = " ".join(f"{statistics.mean(task.missed for task in tasks if task.model == name):.1%}" for name in names)
    missed = statistics.mean(task.missed for task in tasks)
    dropped = statistics.mean(task.outcome != "done" for task in tasks)
    variance = statistics.mean(queue_variance(window) for window in windows)
    shares = f"{missed:.1%} | {each} | {dropped:.1%}"
    return f"{per_s:.1f} | {mean:.1f} | {p99:.1f} | {shares} | {variance:.2g}"


def queue_variance(tasks: Sequence[Served]) -> float:
    """Return the variance between the models' numbers of open tasks, averaged over the time until the last arrival."""
    times = np.arange(0.0, max(task.arrival_ms for task in tasks), _LOOK_S * 1e3)
    lengths = []
    for name in sorted({task.model for task in tasks}):
        own = [task for task in tasks if task.model == name]
        arrived = np.searchsorted(sorted(task.arrival_ms for task in own), times, side="right")
        ended = np.searchsorted(sorted(task.end_ms for task in own), times, side="right")
        lengths.append(arrived - ended)
    return float(np.mean(np.var(lengths, axis=0))) if len(times) else 0.0


def in_flight(windows: int, seconds: float, only: str) -> str:
    """Return the table of one model with several tasks in flight: tasks per second."""
    counts = (1, 2, 4, 8)
    models = {_ALONE: serialised(_ALONE)}
    feeds = {_ALONE: feed(models[_ALONE])}
    own = one_thread_ms(models[_ALONE], feeds[_ALONE])
    opened = candidates(models, feeds, {_ALONE: _DEADLINE * own}, {_ALONE: 1e3 / own}, only)
    opened.pop("blocks, edf, late tasks dropped", None)
    rates: dict[tuple[str, int], list[float]] = {}
    for _, (name, open_candidate), count in itertools.product(range(windows), opened.items(), counts):
        with open_candidate() as submit:
            wait([submit(_ALONE) for _ in range(4)])
            stop = threading.Event()
            finish = repeat_in_flight(submit, _ALONE, count, stop)
            stop.wait(seconds)
            rates.setdefault((name, count), []).append(finish() / seconds)
    lines = [*head("candidate", *(f"{count} in flight" for count in counts))]
    for name in opened:
        own_cells = (f"{statistics.median(rates[name, count]):.1f}" for count in counts)
        lines.append(f"| {name} | {' | '.join(own_cells)} |")
    return "\n".join(lines)


def head(*columns: str) -> tuple[str, str]:
    """Return the first two lines of a table."""
    return f"| {' | '.join(columns)} |", "| --- |" + " ---: |" * (len(columns) - 1)


def draw(kind: str, rates: Mapping[str, float], seconds: float, seed: int) -> list[Arrival]:
    """Return the tasks of a window."""
    return jittered(rates, seconds, seed) if kind == "jittered" else build_arrivals(rates, seconds, kind, seed)


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
    """Return random inputs of a model; whole numbers are 0 or 1."""
    graph = onnx.load_from_string(model).graph
    generator = np.random.default_rng(0)
    found = {}
    for info in graph.input:
        shape = [d.dim_value for d in info.type.tensor_type.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type)
        numbers = generator.random(shape) if dtype.kind == "f" else generator.integers(0, 2, shape)
        found[info.name] = numbers.astype(dtype)
    return found


def one_thread_ms(model: bytes, arrays: Mapping[str, Any]) -> float:
    """Return the median time of a plain session with one thread."""
    session = plain_session(model, 1)
    times = []
    for _ in range(15):
        begin = time.perf_counter()
        session.run(None, arrays)
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times)


def chosen(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Return a parser of a list of names."""

    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",")]
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"expected some of {', '.join(known)}, found {unknown[0]!r}")
        return names

    return parse


def main(arguments: Sequence[str] | None = None) -> None:
    """Print and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tables, kinds = ("light", "deadlines", "flight", "prediction"), ("jittered", *LOADS)
    parser.add_argument("--windows", type=int, default=5, help="windows of each candidate and case")
    parser.add_argument("--seconds", type=float, default=5.0, help="length of a window")
    parser.add_argument("--tables", type=chosen(tables), default=list(tables), help=", ".join(tables))
    parser.add_argument("--sets", type=chosen(tuple(SETS)), default=list(SETS), help=", ".join(SETS))
    parser.add_argument("--arrivals", type=chosen(kinds), default=["jittered", "bursty", "stepping"], help="of tasks")
    loads = [0.7, 0.8, 0.9, 0.95, 1.05, 1.1]
    parser.add_argument("--loads", type=lambda text: [*map(float, text.split(","))], default=loads, help="of capacity")
    parser.add_argument("--only", default="", metavar="REGEX", help="only candidates whose names match")
    parser.add_argument("-o", "--output", type=Path, metavar="FOLDER", help="write FOLDER/multi-TABLE.json")
    given = parser.parse_args(arguments)
    arrivals = [*itertools.product(given.arrivals, given.loads)]
    each = given.windows, given.seconds, given.only
    tabulate = {
        "light": lambda: light_and_heavy(*each),
        "deadlines": lambda: with_deadlines(*each, given.sets, arrivals),
        "flight": lambda: in_flight(*each),
        "prediction": lambda: beside_prediction(*each, given.sets, arrivals),
    }
    for name in given.tables:
        table = tabulate[name]()
        print(f"{table}\n", flush=True)
        write_results(given.output, {f"multi-{name}": table})


if __name__ == "__main__":
    main()
