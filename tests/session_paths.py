"""The ways in which a session serves a request, each of which a test can force.

The model's second input holds indices, so that a caller can make a request fail inside an operator.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from chrion import HybridSession
from chrion.native import available
from chrion.runtime.execution.cut_engine import CutEngine
from chrion.runtime.live_comparison import LiveComparison
from helpers import FLOAT, INT64, cut_session, make_model, node, run_plain, value
from seams.sessions import counting, crowd_at_two, engines_of, serve_by, set_patience, wrapped_requests
from tuning_support import wait_for

#: Lanes in C; lane threads; a plain session; the one-thread session for crowded requests; the same session for every
#: second request that is alone, as in trials of a live comparison; a session whose engine is exchanged between its plan
#: and a plain session all the time; and one whose tuning ends while requests are in flight.
PATHS = ("native", "interpreted", "plain", "crowded", "compared", "exchanged", "tuned meanwhile")
#: Seconds after which tuning ends.
_TUNED_S = 0.05
WIDTH = 16


def indexed_branches() -> onnx.ModelProto:
    """Build two branches over ``x`` that exchange values, and rows of their sum at the indices ``i``."""
    w = np.random.default_rng(0).standard_normal((WIDTH, WIDTH)).astype(np.float32) / WIDTH
    nodes = [
        node("MatMul", ["x", "w"], ["a"], name="left"),
        node("Neg", ["x"], ["b"], name="right"),
        node("Add", ["a", "b"], ["c"], name="left_sum"),
        node("MatMul", ["b", "w"], ["d"], name="right_product"),
        node("Sub", ["c", "d"], ["s"], name="difference"),
        node("Gather", ["s", "i"], ["y"], name="rows"),
    ]
    inputs = [value("x", FLOAT, [4, WIDTH]), value("i", INT64, [2])]
    return make_model(nodes, inputs, [value("y", FLOAT, [2, WIDTH])], {"w": w})


def request(seed: int) -> dict[str, np.ndarray[Any, Any]]:
    """Return inputs that differ from those of other seeds."""
    rng = np.random.default_rng(seed)
    return {"x": rng.standard_normal((4, WIDTH)).astype(np.float32), "i": rng.integers(0, 4, 2)}


def failing_request() -> dict[str, np.ndarray[Any, Any]]:
    """Return inputs for which an operator fails."""
    return request(0) | {"i": np.array([0, 99])}


@dataclass
class Served:
    """A session on one path.

    Attributes:
        session: The session.
        name: The path.
        by_plan: One entry for each request that its lanes have served, since the test began.
        by_plain: One entry for each request that a plain session has served.
        timer: Ends the tuning some time after it is started; None if the session is not being tuned.
    """

    session: HybridSession
    name: str
    by_plan: list[None] = field(default_factory=list)
    by_plain: list[None] = field(default_factory=list)
    timer: threading.Timer | None = None

    def more_for(self, seconds: float, *, alone: bool = False, failing: bool = False) -> Callable[[], bool]:
        """Begin the test; return a function that returns whether to send further requests.

        They are sent for a number of seconds, and then until they have been served on the path, for at most half a
        minute more.

        Args:
            seconds: The number of seconds.
            alone: Whether one request is in flight at a time.
            failing: Whether requests fail, which plain sessions repeat.
        """
        self.by_plan.clear()
        self.by_plain.clear()
        if self.timer:
            self.timer.start()
        end_s = time.monotonic() + seconds

        def more() -> bool:
            now_s = time.monotonic()
            return now_s < end_s or (now_s < end_s + 30 and not self.is_on_path(alone=alone, failing=failing))

        return more

    def is_on_path(self, *, alone: bool = False, failing: bool = False) -> bool:
        """Return whether the requests of the test have been served on the path that it is about."""
        by_plan, by_plain = bool(self.by_plan), bool(self.by_plain)
        if self.name == "compared" and not alone:
            return by_plan  # requests with others in flight are not compared
        if self.name == "crowded" or (failing and by_plan):
            return by_plain
        only = {"native": (True, False), "interpreted": (True, False), "plain": (False, True)}
        return (by_plan, by_plain) == only.get(self.name, (True, True))


@contextmanager
def open_path(name: str, fixtures: pytest.FixtureRequest) -> Iterator[Served]:
    """Open a session that serves on one path.

    Args:
        name: One of :data:`PATHS`.
        fixtures: Gives access to the fixtures that a path needs.
    """
    with ExitStack() as stack:
        if name == "native":
            if not available():
                pytest.skip("native lanes are not compiled")
        elif name == "interpreted":
            fixtures.getfixturevalue("interpreted")
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        set_patience(patch, 1 if name == "crowded" else math.inf)
        if name == "crowded":
            crowd_at_two(patch)
        served = Served(stack.enter_context(_open(name, fixtures)), name)
        stack.enter_context(wrapped_requests(lambda perform: counting(perform, served.by_plan)))
        patch.setattr(ort.InferenceSession, "run", counting(ort.InferenceSession.run, served.by_plain))
        if name == "crowded":
            stack.enter_context(_callers(served.session))
        elif name == "compared":
            _alternate(served.session)
        elif name == "exchanged":
            stack.enter_context(_exchanging(served.session))
        elif name == "tuned meanwhile":
            served.timer = threading.Timer(_TUNED_S, fixtures.getfixturevalue("gate").set)
        yield served


def _open(name: str, fixtures: pytest.FixtureRequest) -> HybridSession:
    if name == "plain":
        session = HybridSession(indexed_branches(), tune="never")
        assert session.plan is None
        return session
    if name == "tuned meanwhile":
        for fixture in ("background_tuning", "tuned_shapes"):
            fixtures.getfixturevalue(fixture)
        return HybridSession(indexed_branches())
    session = cut_session(indexed_branches())
    assert session.plan is not None
    return session


@contextmanager
def _callers(session: HybridSession) -> Iterator[None]:
    """Call a session from two threads all the time, so that every other request is crowded."""
    stop, feed = threading.Event(), request(1)
    expected = run_plain(indexed_branches(), feed)

    def call() -> None:
        while not stop.is_set():
            try:
                np.testing.assert_allclose(session.run(None, feed)[0], expected[0], rtol=1e-4, atol=1e-5)
            except RuntimeError as error:
                assert "closed" in str(error)  # noqa: PT017 - the test may close the session
                return

    with _running(call, stop, 2):
        wait_for(lambda: engines_of(session).diversion.one_thread.is_open)
        yield


class _Alternation(LiveComparison):
    """A comparison that sends every second request to the one-thread session."""

    def record(self, *_: object, diverted: bool) -> None:
        self.diverts = not diverted


def _alternate(session: HybridSession) -> None:
    """Let the plan and the one-thread session serve in turn the requests that are alone."""
    engines = engines_of(session)
    assert isinstance(engines.current, CutEngine)
    engines.current.comparison = _Alternation(1.0, 1.0)
    engines.diversion.one_thread.get()
    wait_for(lambda: engines.diversion.one_thread.is_open)


@contextmanager
def _exchanging(session: HybridSession) -> Iterator[None]:
    """Exchange the engine of a session about a thousand times a second."""
    stop, engines = threading.Event(), engines_of(session)
    plan, plain = engines.current, engines.plain("exchanged by the test")

    def exchange() -> None:
        while not stop.is_set():
            serve_by(session, plain if engines.current is plan else plan)
            time.sleep(0.001)
        serve_by(session, plan)

    with _running(exchange, stop, 1):
        yield


@contextmanager
def _running(work: Callable[[], None], stop: threading.Event, count: int) -> Iterator[None]:
    failures: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised again below
            failures.append(error)

    threads = [threading.Thread(target=guarded, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive(), "a caller is deadlocked"
    if failures:
        raise failures[0]


def call_from_threads(count: int, call: Callable[[int], None]) -> None:
    """Call a function in several threads, each with its number, and raise the first exception of them."""
    failures: list[BaseException] = []

    def guarded(caller: int) -> None:
        try:
            call(caller)
        except BaseException as error:  # noqa: BLE001 - raised again below
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(caller,), daemon=True) for caller in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
        assert not thread.is_alive(), "a caller is deadlocked"
    if failures:
        raise failures[0]
