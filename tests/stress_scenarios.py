"""Sessions under strain: many callers, many sessions, and callers that are interrupted."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import onnx
import psutil

from chrion import HybridSession, load
from chrion.runtime.execution.native_executor import NativeExecutor
from chrion.runtime.execution.python_executor import PythonExecutor
from chrion.scheduler import fixed_plan
from helpers import FLOAT, alternating_lanes, assert_equal, make_model, node, remaining_lane_threads, run_plain, value

WIDTH = 16
#: More than a session keeps engines for, so that some are made and let go of all the time.
BATCHES = (1, 2, 3, 5, 8, 13, 21, 34, 55)
#: How often a shape comes that few ask for.
_RARE = 0.01
VARIANTS = 4


@dataclass(frozen=True)
class Strain:
    """What a while of it came to."""

    calls: int
    #: Growth of the process from the end of the warm-up on.
    grown_mb: float
    #: Threads that are left over.
    threads: int = 0
    #: Calls that were interrupted.
    interrupted: int = 0


def free_batch() -> onnx.ModelProto:
    """Two towers over a batch of any size, that hand values to each other, over one weight."""
    w = np.random.default_rng(0).standard_normal((WIDTH, WIDTH)).astype(np.float32) / WIDTH
    nodes = []
    for step in range(4):
        for side, other in (("a", "b"), ("b", "a")):
            before, beside = (f"{s}{step - 1}" if step else "x" for s in (side, other))
            nodes += [
                node("Add" if side == "a" else "Sub", [before, beside], [f"{side}{step}_in"], name=f"{side}{step}_in"),
                node("MatMul", [f"{side}{step}_in", "w"], [f"{side}{step}"], name=f"{side}{step}"),
            ]
    nodes.append(node("Add", ["a3", "b3"], ["y"], name="sum"))
    shape = ["batch", WIDTH]
    return make_model(nodes, [value("x", FLOAT, shape)], [value("y", FLOAT, shape)], {"w": w})


def cut_for_every_shape(model: onnx.ModelProto) -> HybridSession:
    """A session that is cut whatever the shape of a request."""
    return HybridSession(model, plan=lambda graph: fixed_plan(graph, alternating_lanes(graph)))


def hammer(seconds: float, threads: int, seed: int) -> Strain:
    """Many threads call one session with different shapes and values.

    Raises:
        AssertionError: An answer is wrong, or two requests have had one frame.
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
            while time.monotonic() < end and not failures:
                rare = pick.random() < _RARE
                feed, expected = cases[pick.randrange(common, len(cases)) if rare else pick.randrange(common)]
                assert_equal(session.run(None, feed), expected)
                calls[caller] += 1
        except BaseException as error:  # noqa: BLE001 - raised again below
            failures.append(error)

    with cut_for_every_shape(model) as session, exclusive_frames() as shared:
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
    assert not shared, "two requests have had one frame"
    return Strain(sum(calls), grown)


@contextmanager
def exclusive_frames() -> Iterator[list[int]]:
    """Watch which frames are in use; the list gets those that are used twice at once."""
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

    with (
        mock.patch.object(NativeExecutor, "_perform", watched(NativeExecutor._perform)),
        mock.patch.object(PythonExecutor, "_perform", watched(PythonExecutor._perform)),
    ):
        yield shared


def cycles(count: int, *, close: bool) -> Strain:
    """Make a session, run it and let go of it, closed or not, again and again."""
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
    return Strain(count, settled_mb() - before, len(remaining_lane_threads()))


def interrupts(seconds: float, seed: int) -> Strain:
    """A caller on the main thread is interrupted at any moment; what it runs next is right all the same.

    Raises:
        AssertionError: An answer is wrong, or the thread's affinity is not what it was.
    """
    model, pick = free_batch(), random.Random(seed)
    feed = {"x": np.ones((2, WIDTH), np.float32)}
    expected, affinity = run_plain(model, feed), os.sched_getaffinity(0)
    calls = interrupted = 0
    end = time.monotonic() + seconds
    with cut_for_every_shape(model) as session, interruptions() as interrupt_in:
        session.run(None, feed)
        while time.monotonic() < end:
            try:
                interrupt_in(pick.uniform(1e-6, 3e-3))
                until = time.monotonic() + 0.1  # should one be lost all the same
                while time.monotonic() < until:
                    session.run(None, feed)
                    calls += 1
            except KeyboardInterrupt:
                interrupted += 1
            assert_equal(session.run(None, feed), expected)
            assert os.sched_getaffinity(0) == affinity
            if interrupted % 100 == 0:
                gc.collect()
    return Strain(calls, 0.0, interrupted=interrupted)


@contextmanager
def interruptions() -> Iterator[Callable[[float], object]]:
    """Gives what raises KeyboardInterrupt in the main thread after so many seconds.

    The garbage collector rests meanwhile: it may call back into Python (Hypothesis has it do so), and what is raised
    there reaches nobody.
    """

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    gc.disable()
    try:
        yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    finally:
        gc.enable()
        signal.signal(signal.SIGALRM, before)


def resident_mb() -> float:
    """Memory of this process in MB."""
    return float(psutil.Process().memory_info().rss) / 1e6


def settled_mb() -> float:
    """The same once garbage has been collected."""
    gc.collect()
    remaining_lane_threads()
    return resident_mb()
