"""Opening and dropping of the one-thread session."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from chrion.runtime.one_thread import OneThreadSession
from helpers import FakeClock
from seams.sessions import refuse_threads
from tuning_support import wait_for

#: Interval in seconds in which sessions are checked.
CHECK_S = 0.005


class Session:
    """Stands for a plain session."""

    def __init__(self, arena: bool) -> None:  # noqa: FBT001 - as the session calls it
        self.arena = arena


def opened(clock: Callable[[], float] = time.monotonic) -> OneThreadSession:
    """Return a session that is open."""
    session = OneThreadSession(Session, clock, CHECK_S)  # type: ignore[arg-type,return-value]
    assert session.get() is None
    wait_for(lambda: session.is_open)
    return session


def test_the_session_is_opened_once_while_requests_are_served() -> None:
    """Requests get nothing until the session is open, and then all get the same one."""
    calls: list[int] = []
    release = threading.Event()

    def open_session(arena: bool) -> Any:  # noqa: FBT001
        calls.append(1)
        release.wait(30)
        return Session(arena)

    session = OneThreadSession(open_session)
    assert [session.get() for _ in range(100)] == [None] * 100
    release.set()
    wait_for(lambda: session.is_open)
    assert len({session.get() for _ in range(100)}) == 1
    assert calls == [1]


def test_an_unused_session_is_dropped_and_opened_again() -> None:
    """Its memory is returned after half a minute without a request."""
    clock = FakeClock()
    session = opened(clock)
    engine = session.get()
    assert engine is not None
    clock.now_s += 29.0
    time.sleep(10 * CHECK_S)
    assert session.get() is engine
    weak = weakref.ref(engine)
    del engine
    clock.now_s += 31.0
    wait_for(lambda: weak() is None)
    assert session.get() is None
    wait_for(lambda: session.get() is not None)


def test_the_thread_does_not_keep_the_session_alive() -> None:
    """When the owner is collected, the session is closed and the thread ends."""
    session = opened()
    engine = weakref.ref(session.get())  # type: ignore[arg-type]
    del session
    gc.collect()
    wait_for(lambda: engine() is None)
    wait_for(lambda: not [t for t in threading.enumerate() if t.name == "chrion-one-thread"])


@pytest.mark.parametrize("reason", ["no memory", ""])
def test_a_session_that_cannot_be_opened_does_not_affect_requests(
    reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Opening is tried once, and an error is logged; there is none if the session is not to be opened."""
    calls: list[int] = []

    def fails(_: bool) -> Any:  # noqa: FBT001
        calls.append(1)
        if reason:
            raise RuntimeError(reason)

    session = OneThreadSession(fails)
    assert session.get() is None
    wait_for(lambda: not [t for t in threading.enumerate() if t.name == "chrion-one-thread"])
    assert reason in caplog.text
    assert bool(caplog.text) is bool(reason)
    assert [session.get() for _ in range(100)] == [None] * 100
    assert len(calls) == 1


def test_a_closed_session_is_not_used_again() -> None:
    """After closing, requests do not use the session or open it again."""
    session = opened()
    session.close()
    assert [session.get() for _ in range(100)] == [None] * 100


def test_a_session_that_is_opened_too_late_is_dropped() -> None:
    """A session is dropped if its owner is closed while it is being opened; at exit, opening is awaited."""
    release, returned = threading.Event(), threading.Event()

    def open_session(arena: bool) -> Any:  # noqa: FBT001
        release.wait(30)
        returned.set()
        return Session(arena)

    session = OneThreadSession(open_session)
    session.get()
    session.close()
    release.set()
    session.close(time.monotonic() + 30)
    assert returned.is_set()
    assert not session.is_open


def test_an_exit_does_not_wait_for_an_open_session() -> None:
    """Closing with a time limit waits only for a session that is being opened."""
    session = opened()
    start_s = time.monotonic()
    session.close(start_s + 30)
    assert time.monotonic() - start_s < 20


def test_without_a_thread_requests_are_served_as_before(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests are served if no thread can be started, as while the interpreter exits or at a limit of the system."""
    refuse_threads(monkeypatch)
    session = OneThreadSession(Session)  # type: ignore[arg-type,return-value]
    assert [session.get() for _ in range(100)] == [None] * 100
    assert "can't start new thread" in caplog.text
    start_s = time.monotonic()
    session.close(start_s + 60)
    assert time.monotonic() - start_s < 30, "an exit waits for a session that is not being opened"


def test_a_session_is_replaced_by_one_without_an_arena() -> None:
    """Requests always have a session, the old one is closed, and every later one has no arena."""
    clock = FakeClock()
    session = opened(clock)
    old: Any = session.get()
    assert old.arena
    session.avoid_arena()
    session.avoid_arena()
    wait_for(lambda: not session.get().arena)  # type: ignore[union-attr]
    new: Any = session.get()
    weak = weakref.ref(old)
    del old
    wait_for(lambda: weak() is None)
    time.sleep(10 * CHECK_S)
    assert session.get() is new, "it is replaced once"
    del new
    clock.now_s += 31.0
    wait_for(lambda: not session.is_open)
    wait_for(lambda: session.get() is not None)
    assert not session.get().arena  # type: ignore[union-attr]


def test_an_exit_waits_for_a_session_that_is_being_replaced() -> None:
    """The interpreter must not end while another thread is inside onnxruntime."""
    begun, release = threading.Event(), threading.Event()

    def open_session(arena: bool) -> Any:  # noqa: FBT001
        if not arena:
            begun.set()
            release.wait(30)
        return Session(arena)

    session = OneThreadSession(open_session, check_s=CHECK_S)
    session.get()
    wait_for(lambda: session.is_open)
    session.avoid_arena()
    assert begun.wait(30)
    threading.Timer(0.2, release.set).start()
    session.close(time.monotonic() + 30)
    assert release.is_set()
    assert not session.is_open


@pytest.mark.parametrize("raises", [True, False])
def test_a_session_that_cannot_be_replaced_stays(*, raises: bool) -> None:
    """If there can be no other session, for lack of memory for example, the first one serves on."""
    tried: list[bool] = []

    def open_session(arena: bool) -> Any:  # noqa: FBT001
        tried.append(arena)
        if not arena and raises:
            raise RuntimeError("no memory")
        return Session(arena) if arena else None

    session = OneThreadSession(open_session, check_s=CHECK_S)
    session.get()
    wait_for(lambda: session.is_open)
    old = session.get()
    session.avoid_arena()
    wait_for(lambda: session.arena)
    session.avoid_arena()
    time.sleep(10 * CHECK_S)
    assert session.get() is old
    assert session.arena
    assert tried == [True, False], "it is tried once"
