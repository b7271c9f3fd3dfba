"""Many callers, interrupts, forks, failures and closing, on every path on which a session serves requests."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from chrion.runtime import engines, session
from helpers import assert_equal, run_plain
from session_paths import PATHS, Served, failing_request, indexed_branches, open_path, request
from stress_scenarios import detect_shared_frames, schedule_interrupts

# A deadlock is a failure.
pytestmark = pytest.mark.timeout(120, method="thread")

CALLERS = 32
SECONDS = 1.0


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> str:
    """Return the name of a path."""
    return str(request.param)


@pytest.fixture
def served(path: str, request: pytest.FixtureRequest) -> Iterator[Served]:
    """Return a session that serves on the path."""
    with open_path(path, request) as opened:
        yield opened


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
        thread.join(60)
        assert not thread.is_alive(), "a caller is deadlocked"
    if failures:
        raise failures[0]


def test_many_callers(served: Served) -> None:
    """Each of 32 callers gets the outputs of its own inputs, and no two requests use one frame at the same time."""
    feeds = [request(caller) for caller in range(CALLERS)]
    expected = [run_plain(indexed_branches(), feed) for feed in feeds]
    requests: list[None] = []
    more = served.more_for(SECONDS)

    def call(caller: int) -> None:
        while more():
            assert_equal(served.session.run(None, feeds[caller]), expected[caller])
            requests.append(None)

    with detect_shared_frames() as shared:
        call_from_threads(CALLERS, call)
    assert not shared, "two requests used one frame at the same time"
    assert len(requests) >= CALLERS
    served.check_path()


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no such signals")
def test_interrupts(served: Served) -> None:
    """After a KeyboardInterrupt at any moment the next output is correct, and the thread's affinity is restored."""
    pick, feed, affinity = random.Random(0), request(0), os.sched_getaffinity(0)
    expected = run_plain(indexed_branches(), feed)
    interrupted = 0
    more, limit = served.more_for(SECONDS), time.monotonic() + 30  # on a busy machine, ten interrupts take longer
    with schedule_interrupts() as interrupt_in:
        while more() or (interrupted < 10 and time.monotonic() < limit):
            try:
                interrupt_in(pick.uniform(1e-6, 3e-3))
                until = time.monotonic() + 0.1  # in case the interrupt is lost
                while time.monotonic() < until:
                    served.session.run(None, feed)
            except KeyboardInterrupt:
                interrupted += 1
            assert_equal(served.session.run(None, feed), expected)
            assert os.sched_getaffinity(0) == affinity
    assert interrupted >= 10
    served.check_path(alone=served.name != "crowded")


@pytest.mark.parametrize("path", ["plain", "interpreted"])
@pytest.mark.parametrize("method", ["run", "run_with_ort_values"])
def test_an_interrupted_request_is_no_longer_in_flight(
    served: Served, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A KeyboardInterrupt as soon as a request is counted leaves no count, which would hold for all later requests."""

    class InterruptedCount(deque[None]):
        def append(self, entry: None) -> None:
            super().append(entry)
            raise KeyboardInterrupt

    count = InterruptedCount()
    for module in (session, engines):
        monkeypatch.setattr(module, "in_flight", count)
    feed = request(0)
    values = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in feed.items()}
    with pytest.raises(KeyboardInterrupt):
        getattr(served.session, method)(None, feed if method == "run" else values)
    assert not count


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forks(served: Served) -> None:
    """A child forked while requests are in flight is served, or refused with a reason; the parent is served."""
    feed = request(0)
    expected = run_plain(indexed_branches(), feed)
    more = served.more_for(SECONDS)

    def fork() -> None:
        child = os.fork()
        if child == 0:
            signal.alarm(20)  # ends a child that is deadlocked
            os._exit(result_in_child(served, feed, expected))
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0

    def call(caller: int) -> None:
        while more():
            assert_equal(served.session.run(None, feed), expected)
            if not caller:
                fork()
                time.sleep(0.05)

    call_from_threads(4, call)


def result_in_child(served: Served, feed: dict[str, np.ndarray[Any, Any]], expected: list[Any]) -> int:
    """Return 0 if the session serves correctly or refuses with a reason, in a forked child."""
    try:
        assert_equal(served.session.run(None, feed), expected)
        served.session.close()
    except RuntimeError as error:
        return 0 if "forked" in str(error) else 2
    except BaseException:  # noqa: BLE001 - reported by the exit code
        return 3
    return 0


def test_failing_requests(served: Served) -> None:
    """Requests with an index out of range raise onnxruntime's message, and others in flight are served."""
    feed, failing = request(0), failing_request()
    expected = run_plain(indexed_branches(), feed)
    more = served.more_for(SECONDS)

    def call(caller: int) -> None:
        while more():
            if caller % 2:
                with pytest.raises(Exception, match="indices element out of data bounds"):
                    served.session.run(None, failing)
                time.sleep(0.01)  # onnxruntime logs each failure
            else:
                assert_equal(served.session.run(None, feed), expected)

    call_from_threads(8, call)
    served.check_path(failing=True)


def test_closing(served: Served) -> None:
    """Requests in flight while the session is closed are served; later ones are refused."""
    feed = request(0)
    expected = run_plain(indexed_branches(), feed)
    counts = [0] * 8
    served.more_for(SECONDS)
    refused: list[int] = []

    def call(caller: int) -> None:
        while True:
            try:
                assert_equal(served.session.run(None, feed), expected)
                counts[caller] += 1
            except RuntimeError as error:
                assert "this session is closed" in str(error)  # noqa: PT017 - the loop ends with it
                refused.append(caller)
                return

    timer = threading.Timer(SECONDS / 2, served.session.close)
    timer.start()
    call_from_threads(8, call)
    timer.join()
    assert sum(counts) > 0
    assert sorted(refused) == list(range(8))
