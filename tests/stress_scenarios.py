"""Stress scenarios: concurrent callers, sessions in sequence, and interrupted calls."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import psutil

from chrion import HybridSession, load
from chrion.scheduler import fixed_plan
from helpers import FLOAT, alternating_lanes, assert_equal, make_model, node, remaining_lane_threads, run_plain, value
from seams.sessions import wrapped_requests

WIDTH = 16
#: More shapes than a session keeps engines for, so that engines are created and discarded all the time.
BATCHES = (1, 2, 3, 5, 8, 13, 21, 34, 55)
#: Share of the requests that have the largest shape.
_RARE_SHARE = 0.01
#: Requests of each shape.
VARIANTS = 4


@dataclass(frozen=True)
class StressResult:
    """The counts of a scenario."""

    calls: int
    #: Growth of resident memory in MB after the warm-up.
    grown_mb: float
    #: Lane threads that remain.
    threads: int = 0
    #: Calls that were interrupted.
    interrupted: int = 0


def free_batch() -> onnx.ModelProto:
    """Build two towers over a batch of any size, which exchange values and share one weight."""
    w = np.random.default_rng(0).standard_normal((WIDTH, WIDTH)).astype(np.float32) / WIDTH
    nodes = []
    for step in range(4):
        for tower, other in (("a", "b"), ("b", "a")):
            own, exchanged = (f"{t}{step - 1}" if step else "x" for t in (tower, other))
            name = f"{tower}{step}"
            nodes += [
                node("Add" if tower == "a" else "Sub", [own, exchanged], [f"{name}_in"], name=f"{name}_in"),
                node("MatMul", [f"{name}_in", "w"], [name], name=name),
            ]
    nodes.append(node("Add", ["a3", "b3"], ["y"], name="sum"))
    shape = ["batch", WIDTH]
    return make_model(nodes, [value("x", FLOAT, shape)], [value("y", FLOAT, shape)], {"w": w})


def cut_session(model: onnx.ModelProto) -> HybridSession:
    """Return a session that is cut for every shape."""
    return HybridSession(model, plan=lambda graph: fixed_plan(graph, alternating_lanes(graph)))


def call_concurrently(seconds: float, threads: int, seed: int) -> StressResult:
    """Call one session from many threads with different shapes and values.

    Raises:
        AssertionError: An output is wrong, or two requests used one frame at the same time.
    """
    model = free_batch()
    rng = np.random.default_rng(seed)
    feeds = [{"x": rng.standard_normal((b, WIDTH)).astype(np.float32)} for b in BATCHES for _ in range(VARIANTS)]
    cases = [(feed, run_plain(model, feed)) for feed in feeds]
    common = len(cases) - VARIANTS
    failures: list[BaseException] = []
    calls = [0] * threads
    end = time.monotonic() + seconds

    def call(caller: int) -> None:
        pick = random.Random(f"{seed} {caller}")
        try:
            while not (failures or (calls[caller] and time.monotonic() > end)):
                rare = pick.random() < _RARE_SHARE
                feed, expected = cases[pick.randrange(common, len(cases)) if rare else pick.randrange(common)]
                assert_equal(session.run(None, feed), expected)
                calls[caller] += 1
        except BaseException as error:  # noqa: BLE001 - raised again below
            failures.append(error)

    with cut_session(model) as session, detect_shared_frames() as shared:
        workers = [threading.Thread(target=call, args=(caller,), daemon=True) for caller in range(threads)]
        for worker in workers:
            worker.start()
        time.sleep(seconds / 3)
        before = resident_mb()
        for worker in workers:
            worker.join()
        grown = resident_mb() - before
    if failures:
        raise failures[0]
    assert not shared, "two requests used one frame at the same time"
    return StressResult(sum(calls), grown)


@contextmanager
def detect_shared_frames() -> Iterator[list[int]]:
    """Record the frames in use; those that two requests use at the same time are appended to the list."""
    lock = threading.Lock()
    inside: set[int] = set()
    shared: list[int] = []

    @contextmanager
    def using(frame: int) -> Iterator[None]:
        with lock:
            (shared.append if frame in inside else inside.add)(frame)
        try:
            yield
        finally:
            with lock:
                inside.discard(frame)

    def watched(perform: Callable[..., None]) -> Callable[..., None]:
        def watched_perform(self: Any, frame: Any, *rest: Any) -> None:
            with using(id(frame)):
                perform(self, frame, *rest)

        return watched_perform

    with wrapped_requests(watched):
        yield shared


def recreate_sessions(count: int, *, close: bool) -> StressResult:
    """Create a session, run it, close it or not, and delete it, many times."""
    model = free_batch()
    graph = load(model, {"batch": (2,)})
    plan = fixed_plan(graph, alternating_lanes(graph))
    feed = {"x": np.ones((2, WIDTH), np.float32)}
    expected = run_plain(model, feed)
    before = 0.0
    for cycle in range(count):
        session = HybridSession(graph, plan=plan)
        assert_equal(session.run(None, feed), expected)
        if close:
            session.close()
        del session
        if cycle == count // 4:
            before = settled_mb()
    return StressResult(count, settled_mb() - before, len(remaining_lane_threads()))


def interrupt_calls(seconds: float, seed: int) -> StressResult:
    """Interrupt calls on the main thread at random moments, and check the next call.

    Raises:
        AssertionError: An output is wrong, or the thread's affinity was not restored.
    """
    model, pick = free_batch(), random.Random(seed)
    feed = {"x": np.ones((2, WIDTH), np.float32)}
    expected, affinity = run_plain(model, feed), os.sched_getaffinity(0)
    calls = interrupted = 0
    end = time.monotonic() + seconds
    with cut_session(model) as session, schedule_interrupts() as interrupt_in:
        session.run(None, feed)
        while time.monotonic() < end:
            try:
                interrupt_in(pick.uniform(1e-6, 3e-3))
                until = time.monotonic() + 0.1  # in case the interrupt is lost
                while time.monotonic() < until:
                    session.run(None, feed)
                    calls += 1
            except KeyboardInterrupt:
                interrupted += 1
            assert_equal(session.run(None, feed), expected)
            assert os.sched_getaffinity(0) == affinity
            if interrupted % 100 == 0:
                gc.collect()
    return StressResult(calls, 0.0, interrupted=interrupted)


@contextmanager
def schedule_interrupts() -> Iterator[Callable[[float], object]]:
    """Yield a function that raises KeyboardInterrupt in the main thread after a number of seconds.

    The garbage collector is disabled meanwhile: it may call back into Python (as Hypothesis makes it do), where an
    exception would be lost. If the interrupt arrives while psutil opens the system's CPU times, Python closes the file
    with a warning, which is ignored.
    """

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "unclosed file <.* name='/proc/stat'", ResourceWarning)
            yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    finally:
        gc.enable()
        signal.signal(signal.SIGALRM, before)


def resident_mb() -> float:
    """Return the resident memory of this process in MB."""
    return float(psutil.Process().memory_info().rss) / 1e6


def settled_mb() -> float:
    """Return the resident memory of this process in MB after garbage collection."""
    gc.collect()
    remaining_lane_threads()
    return resident_mb()
