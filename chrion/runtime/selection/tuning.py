"""Background tuning: decisions made beside a session that serves requests already.

A thread of the session looks for a cached decision on the model's file, or else asks a tuning process of low priority
(see :mod:`chrion.runtime.selection.worker`), and opens the selected engine. The session uses it from its next request.
"""

from __future__ import annotations

import heapq
import itertools
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from chrion.errors import ChrionError
from chrion.files import cache_folder
from chrion.runtime.selection.configuration import SessionConfig
from chrion.runtime.selection.decisions import Decision, decision_from_json, model_identity
from chrion.runtime.selection.selector import PLAIN, EngineSelector, why_plain
from chrion.runtime.selection.worker import Decider, config_to_data

log = logging.getLogger(__name__)

#: Shapes of the inputs by name, for a model with free dimensions; empty for another.
NamedShapes = Mapping[str, tuple[int, ...]]
#: Opens the engine of a decision and gives it to the session.
Install = Callable[[NamedShapes, Decision], None]

#: Reasons for which a model runs plain.
NOT_TUNED = "tuning has not finished"
_NOT_CACHED = "tuning is switched off, and no decision is cached"

#: The program of the tuning process. At this niceness it uses idle cores fully and about a tenth of busy ones.
_PROGRAM = """import os
if hasattr(os, "nice"):
    os.nice(10)
from chrion.runtime.selection.worker import main
main()
"""
#: Tuning begins this many seconds after it is asked for, so that it does not slow down the first requests.
_DELAY_S = 0.3
#: How often a thread that waits checks whether its session was closed, in seconds.
_POLL_S = 0.2


class Tuner:
    """Makes decisions for one session, in a thread that exists while there is something to decide.

    Args:
        config: The session's configuration.
        selector: The session's selector, for cached decisions; also makes decisions, where no process can be started.
        install: Called in the thread with each decision.
        cached_only: Use cached decisions only, or else a plain session.
    """

    def __init__(
        self, config: SessionConfig, selector: EngineSelector, install: Install, *, cached_only: bool = False
    ) -> None:
        self._config = config
        self._delay_s = 0.0 if cached_only else _DELAY_S
        self._cached_only = cached_only
        self._selector = selector
        self._install = install
        self._queue: deque[NamedShapes] = deque()
        #: Shapes with an uncertain decision: when to decide again, in ``time.monotonic()``; a number that breaks ties.
        self._later: list[tuple[float, int, NamedShapes]] = []
        self._ties = itertools.count()
        self._state = threading.Condition()
        self._thread: threading.Thread | None = None
        #: Whether a decision that was asked for is not made yet.
        self._pending = False
        self._worker: _Worker | None = None
        self._closed = threading.Event()

    def submit(self, shapes: NamedShapes) -> None:
        """Ask for a decision; return at once."""
        with self._state:
            if self._closed.is_set():
                return
            self._queue.append(shapes)
            self._pending = True
            self._state.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="chrion-tuner", daemon=True)
                self._thread.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all decisions asked for are made; return false if the time is over before."""
        with self._state:
            return self._state.wait_for(lambda: not self._pending or self._closed.is_set(), timeout_s)

    def close(self, until: float | None = None) -> None:
        """Stop. May be called from any thread, and more than once.

        Args:
            until: Wait for the thread to end until this value of ``time.monotonic()``; do not wait if missing.
        """
        self._closed.set()
        worker, thread = self._worker, self._thread
        if worker:
            worker.kill()
        with self._state:
            self._state.notify_all()
        if until is not None and thread and thread is not threading.current_thread():
            thread.join(max(0.0, until - time.monotonic()))

    def after_fork(self) -> None:
        """Forget the thread and the process, which belong to the parent."""
        self._closed.set()
        self._worker = self._thread = None
        self._state = threading.Condition()

    def _work(self) -> None:
        self._closed.wait(self._delay_s)
        while (shapes := self._take()) is not None:
            try:
                decision = self._decision(shapes)
                self._install(shapes, decision)
            except Exception as error:  # noqa: BLE001 - the session goes on serving
                if not self._closed.is_set():
                    log.warning("tuning failed: %s", why_plain(error))
                continue
            if decision.uncertain and not self._cached_only:
                heapq.heappush(self._later, (time.monotonic() + decision.valid_s, next(self._ties), shapes))

    def _take(self) -> NamedShapes | None:
        """Return the next shapes to decide on, when it is time; None to end the thread."""
        with self._state:
            while not self._closed.is_set():
                if self._queue:
                    return self._queue.popleft()
                if self._later and self._later[0][0] <= time.monotonic():
                    return heapq.heappop(self._later)[-1]
                self._pending = False
                self._state.notify_all()
                self._stop_worker()
                if not self._later:
                    break
                self._state.wait(self._later[0][0] - time.monotonic())
            self._stop_worker()
            self._thread = None
            self._state.notify_all()
            return None

    def _stop_worker(self) -> None:
        worker, self._worker = self._worker, None
        if worker:
            worker.kill()

    def _decision(self, shapes: NamedShapes) -> Decision:
        cache = self._selector.cache("source", model_identity(self._config.source), sorted(shapes.items()))
        decision = cache.recall()
        if decision is not None:
            return decision
        if self._cached_only:
            return Decision(PLAIN, None, _NOT_CACHED)
        with self._exclusive():
            decision = cache.recall()  # another process may have made it meanwhile
            if decision is None:
                decision = cache.keep(self._ask(shapes))
        return decision

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Let one process of this user tune at a time, since several would disturb each other's timing.

        Raises:
            RuntimeError: The session was closed meanwhile.
        """
        from filelock import FileLock, Timeout  # noqa: PLC0415 - its import takes as long as a small model's session

        folder = cache_folder()
        if not os.access(folder, os.W_OK):
            yield
            return
        lock = FileLock(folder / "tuning.lock", thread_local=False)
        while True:
            self._require_open()
            with suppress(Timeout):
                lock.acquire(timeout=_POLL_S)
                break
        try:
            yield
        finally:
            lock.release()

    def _ask(self, shapes: NamedShapes) -> Decision:
        """Have the decision made by the tuning process.

        If no process can be started, or the session's options hold what it cannot know, decide in this process. If the
        process is ended by the model, the model runs plain.

        Raises:
            RuntimeError: The session was closed meanwhile.
        """
        try:
            self._worker = self._worker or _Worker(self._config)
        except (OSError, TypeError) as error:
            return self._decide_here(shapes, why_plain(error))
        self._require_open()
        try:
            answer = self._worker.ask(shapes)
            if "decision" in answer:
                return decision_from_json(answer["decision"])
            failure = str(answer["failure"])
        except (OSError, ValueError, KeyError, ChrionError) as error:
            self._require_open()
            self._stop_worker()
            return Decision(PLAIN, None, why_plain(error))
        if self._config.options is None:
            return Decision(PLAIN, None, failure)
        return self._decide_here(shapes, failure)

    def _decide_here(self, shapes: NamedShapes, reason: str) -> Decision:
        self._require_open()
        log.info("tuning in this process: %s", reason)
        return Decider(self._config).decide(shapes)

    def _require_open(self) -> None:
        if self._closed.is_set():
            raise RuntimeError("this session is closed")


class _Worker:
    """A tuning process.

    Raises:
        OSError: It cannot be started.
        TypeError: The configuration cannot be passed to another process.
    """

    def __init__(self, config: SessionConfig) -> None:
        if not sys.executable or getattr(sys, "frozen", False):
            raise OSError("there is no Python interpreter to start")
        #: Data that is not sent yet.
        self._unsent = config_to_data(config)
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self._process = subprocess.Popen(  # noqa: S603 - this interpreter, a module of this package
            [sys.executable, "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            creationflags=getattr(subprocess, "BELOW_NORMAL_PRIORITY_CLASS", 0),
        )

    def ask(self, shapes: NamedShapes) -> dict[str, Any]:
        """Return the answer for one set of shapes.

        Raises:
            OSError: The process has ended.
            ValueError: It answered something else.
        """
        assert self._process.stdin  # noqa: S101 - it is a pipe
        assert self._process.stdout  # noqa: S101
        line = b""
        with suppress(BrokenPipeError):
            self._process.stdin.write(self._unsent + json.dumps({"shapes": shapes}).encode() + b"\n")
            self._process.stdin.flush()
            self._unsent = b""
            line = self._process.stdout.readline()
        if not line:
            raise OSError(f"the tuning process ended with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def kill(self) -> None:
        """End the process at once."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream:
                with suppress(OSError):
                    stream.close()
