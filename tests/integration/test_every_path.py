"""Many callers, failures and closing, on every path on which a session serves requests."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator

import onnxruntime as ort
import pytest

from helpers import assert_equal, run_plain
from seams.sessions import count_in_flight
from session_paths import PATHS, Served, call_from_threads, failing_request, indexed_branches, open_path, request
from stress_scenarios import detect_shared_frames
from tuning_support import wait_for

# A deadlock is a failure.
pytestmark = pytest.mark.timeout(180, method="thread")

CALLERS = 8
SECONDS = 0.1


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> str:
    """Return the name of a path."""
    return str(request.param)


@pytest.fixture
def served(path: str, request: pytest.FixtureRequest) -> Iterator[Served]:
    """Return a session that serves on the path."""
    with open_path(path, request) as opened:
        yield opened


def test_many_callers(served: Served) -> None:
    """Each of eight callers gets the outputs of its own inputs, and no two requests use one frame at the same time."""
    feeds = [request(caller) for caller in range(CALLERS)]
    expected = [run_plain(indexed_branches(), feed) for feed in feeds]
    more = served.more_for(SECONDS)

    def call(caller: int) -> None:
        while True:
            assert_equal(served.session.run(None, feeds[caller]), expected[caller])
            if not more():
                return

    with detect_shared_frames() as shared:
        call_from_threads(CALLERS, call)
    assert not shared, "two requests used one frame at the same time"
    assert served.is_on_path(), served.session.explain()


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
    count_in_flight(monkeypatch, count)
    feed = request(0)
    values = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in feed.items()}
    with pytest.raises(KeyboardInterrupt):
        getattr(served.session, method)(None, feed if method == "run" else values)
    assert not count


def test_failing_requests(served: Served) -> None:
    """Requests with an index out of range raise onnxruntime's message, and others in flight are served."""
    feed, failing = request(0), failing_request()
    expected = run_plain(indexed_branches(), feed)
    more = served.more_for(SECONDS, failing=True)

    def call(caller: int) -> None:
        while True:
            if caller % 2:
                with pytest.raises(Exception, match="indices element out of data bounds"):
                    served.session.run(None, failing)
                time.sleep(0.01)  # onnxruntime logs each failure
            else:
                assert_equal(served.session.run(None, feed), expected)
            if not more():
                return

    call_from_threads(4, call)
    assert served.is_on_path(failing=True), served.session.explain()


def test_closing(served: Served) -> None:
    """Requests in flight while the session is closed are served; later ones are refused."""
    feed = request(0)
    expected = run_plain(indexed_branches(), feed)
    counts = [0] * CALLERS
    more = served.more_for(0.0)
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

    def close() -> None:
        wait_for(lambda: all(counts) and not more())
        served.session.close()

    closing = threading.Thread(target=close)
    closing.start()
    call_from_threads(CALLERS, call)
    closing.join()
    assert sorted(refused) == list(range(CALLERS))
