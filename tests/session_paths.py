"""The ways in which a session serves a request, each of which a test can force.

The model's second input holds indices, so that a caller can make a request fail inside an operator.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import onnx
import pytest

from chrion import HybridSession
from chrion.native import available
from chrion.runtime import crowding
from chrion.runtime.execution.native_executor import NativeExecutor
from chrion.runtime.execution.python_executor import PythonExecutor
from helpers import FLOAT, INT64, cut_session, make_model, node, run_plain, value

#: Lanes in C; lane threads; a plain session; the session for crowded requests; a session that changes between its plan
#: and a plain session all the time; and one whose tuning ends while requests are in flight.
PATHS = ("native", "interpreted", "plain", "crowded", "switching", "tuned meanwhile")
#: Seconds after which tuning ends.
_TUNED_S = 0.2
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
        by_plan: One entry for each request that its lanes have served.
    """

    session: HybridSession
    by_plan: list[None] = field(default_factory=list)

    def check_path(self, name: str, requests: int) -> None:
        """Check that the requests were served on the path that the test is about.

        Args:
            name: The path.
            requests: Number of requests that were served.
        """
        by_plan, by_plain = len(self.by_plan), requests - len(self.by_plan)
        if name in {"native", "interpreted"}:
            assert by_plain <= 0, f"{by_plain} of {requests} requests were not served by the plan"
        elif name == "plain":
            assert by_plan == 0
        else:
            assert by_plain > 0, "no request was served by a plain session"
            assert by_plan > 0 or name == "crowded", "no request was served by the plan"


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
        if name == "crowded":
            stack.enter_context(mock.patch.object(crowding, "_PATIENCE", 1))
            stack.enter_context(mock.patch.object(crowding, "physical_cores", return_value=(0, 1)))
        else:
            fixtures.getfixturevalue("uncrowded")
        served = Served(stack.enter_context(_open(name, fixtures)))
        for executor in (NativeExecutor, PythonExecutor):
            stack.enter_context(mock.patch.object(executor, "_perform", _counting(executor._perform, served.by_plan)))
        if name == "crowded":
            stack.enter_context(_callers(served.session))
        elif name == "switching":
            stack.enter_context(_switching(served.session))
        elif name == "tuned meanwhile":
            timer = threading.Timer(_TUNED_S, fixtures.getfixturevalue("gate").set)
            timer.start()
            stack.callback(timer.join)
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


def _counting(perform: Callable[..., None], by_plan: list[None]) -> Callable[..., None]:
    def counted(*given: Any) -> None:
        by_plan.append(None)
        perform(*given)

    return counted


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
        time.sleep(0.1)
        yield


@contextmanager
def _switching(session: HybridSession) -> Iterator[None]:
    """Exchange the engine of a session about a thousand times a second."""
    stop, engines = threading.Event(), session._engines
    plan, plain = engines.current, engines.plain("switched by the test")

    def switch() -> None:
        while not stop.is_set():
            engines.current = plain if engines.current is plan else plan
            time.sleep(0.001)
        engines.current = plan

    with _running(switch, stop, 1):
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
