"""Background tuning: decisions made while a session already serves requests.

One thread of the process looks for cached decisions on the models' files, or else asks a tuning process of low
priority (see :mod:`chrion.runtime.selection.worker`), and opens the selected engines. A session uses its engine from
the next request on.

The thread polls for work instead of being notified. A thread that is notified takes the GIL as soon as the request
that notifies it releases it, and where other processes use the cores, the system may suspend it while it holds the GIL:
first requests took 10 to 30 ms instead of 1.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from chrion.errors import ChrionError
from chrion.runtime.options.session_options import fingerprint
from chrion.runtime.selection.configuration import SessionConfig
from chrion.runtime.selection.decisions import Decision, decision_from_json, retry_s
from chrion.runtime.selection.plain_sessions import PLAIN
from chrion.runtime.selection.selector import EngineSelector, why_plain
from chrion.runtime.selection.shapes import ShapeCounter
from chrion.runtime.selection.tuning_lock import BusyError, tuning_lock
from chrion.runtime.selection.tuning_process import NamedShapes, TuningProcess
from chrion.runtime.selection.worker import Decider

log = logging.getLogger(__name__)

#: Shapes of a request by input; None for an input whose shape is not known without converting it.
NotedShapes = Mapping[str, tuple[int, ...] | None]

#: Reasons why a model runs plain.
NOT_TUNED = "tuning has not finished"
NOT_CACHED = "tuning is switched off, and no cached decision is in use"
UNTUNED = (NOT_TUNED, NOT_CACHED)
_OPTIONS_CHANGED = "the session options were changed after the session was created"

#: Tuning begins this many seconds after it is asked for, so that it does not slow down the first requests.
_DELAY_S = 0.3
#: Interval between two polls for work, in seconds.
_POLL_S = 0.2
#: Delay before the next attempt if another process tunes, in seconds.
_BUSY_S = 1.0


class Tuner:
    """Makes decisions for one session.

    Args:
        config: The session's configuration.
        selector: The session's selector, which gives access to cached decisions.
        install: A method that opens the engine of a decision and gives it to the session. Called in the tuning thread
            with this tuner, the shapes and the decision. Its object is not kept alive, since that would keep the model
            in memory until a garbage collection.
        wanted: A method that returns whether a plan for some shapes could be used at all; called by the tuning thread
            before a decision on them is made. Held like ``install``.
        cached_only: Make no decisions: without a cached decision, select the plain session.

    Attributes:
        closed: Whether decisions are no longer used. A flag without a lock: garbage collection may close the
            tuner of a session in any thread at any moment, and another thread may fork.
        failure: Why the latest decision could not be made, or none can be; empty otherwise.
        noted: Shapes of requests, appended by the threads of callers.
    """

    def __init__(
        self,
        config: SessionConfig,
        selector: EngineSelector,
        install: Install,
        wanted: Callable[[Tuner, NamedShapes], bool],
        *,
        cached_only: bool = False,
    ) -> None:
        self._config = config
        #: State of the options now. The caller may change them later, when InferenceSession has copied them already.
        self._options = fingerprint(config.options)
        self._selector = selector
        self._install = weakref.WeakMethod(install)
        self._wanted = weakref.WeakMethod(wanted)
        self._cached_only = cached_only
        self._process: TuningProcess | None = None
        self.closed = False
        self.noted: deque[NotedShapes] = deque()
        self._counter = ShapeCounter()
        #: How often live requests have contradicted the decision on some shapes.
        self._contradicted: dict[tuple[tuple[str, tuple[int, ...]], ...], int] = {}
        #: Number of decisions that were requested and are not made yet.
        self._pending = 0
        self._state = threading.Condition()
        #: Held by the tuning thread while it works for this session.
        self._working = threading.Lock()
        self.failure = _thread.serve(self)

    def submit(self, shapes: NamedShapes) -> None:
        """Request a decision; return at once."""
        with self._state:
            self._pending += 1
        _thread.submit(self, shapes, 0.0 if self._cached_only else _DELAY_S)

    def reconsider(self, shapes: NamedShapes) -> None:
        """Make a decision again that live requests contradict, after a while; return at once.

        The while grows with each time that it happens for the same shapes.
        """
        key = tuple(shapes.items())
        self._contradicted[key] = self._contradicted.get(key, 0) + 1
        if not self._cached_only:
            _thread.submit(self, shapes, retry_s(self._contradicted[key]), again=True, anew=True)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all requested decisions are made.

        Returns:
            False if the time is over first, or at once if the thread that tunes could not be started.
        """
        with self._state:
            return self.closed or (
                _thread.started
                and self._state.wait_for(lambda: not (self._pending or self.noted) or self.closed, timeout_s)
            )

    def close(self, until: float | None = None) -> None:
        """Stop. May be called from any thread, and more than once.

        Args:
            until: Time of ``time.monotonic()`` until which to wait for work in progress; None does not wait.
        """
        self.closed = True
        process = self._process
        if process:
            process.kill()
        with self._state:
            self._state.notify_all()
        if until is not None and self._working.acquire(timeout=max(0.0, until - time.monotonic())):
            self._working.release()

    def after_fork(self) -> None:
        """Forget the tuning process, which belongs to the parent, and locks that its threads may hold."""
        self.closed = True
        self._process = None
        self._state = threading.Condition()
        self._working = threading.Lock()

    def count_noted(self) -> None:
        """Count the shapes of requests, and request decisions on frequent ones. Called by the tuning thread."""
        while self.noted:
            shapes = {name: shape for name, shape in self.noted[0].items() if shape is not None}
            if len(shapes) == len(self.noted[0]) and self._counter.count(tuple(shapes.items())):
                self.submit(shapes)
            self.noted.popleft()
        with self._state:
            self._state.notify_all()

    def recent_requests(self, shapes: NamedShapes) -> tuple[int, int]:
        """Return the number of recent requests of some shapes, and how often such numbers were halved."""
        return self._counter.recent(tuple(shapes.items())), self._counter.halvings

    def tune(self, shapes: NamedShapes, *, again: bool, anew: bool) -> None:
        """Make a decision and install it. Called by the tuning thread.

        Args:
            shapes: As given to :meth:`submit`.
            again: Whether a decision was made before; :meth:`wait` does not wait for this one.
            anew: Whether the cached decision is not used.
        """
        decision, later_s = None, None
        with self._working:
            if not self.closed:
                try:
                    decision = self._decide_and_install(shapes, anew=anew)
                except BusyError:
                    later_s = _BUSY_S
                except Exception as error:  # noqa: BLE001 - the session keeps serving
                    if not self.closed:
                        self.failure = f"tuning failed: {why_plain(error)}"
                        log.warning("%s", self.failure)
                else:
                    self.failure = ""
            with self._state:
                if later_s is None:
                    self._pending -= not again
                if not self._pending or self.closed:
                    self._stop_process()
                self._state.notify_all()
        if decision and decision.uncertain and not self._cached_only:
            later_s, again, anew = decision.valid_s, True, False
        if later_s is not None:
            _thread.submit(self, shapes, later_s, again=again, anew=anew)

    def _decide_and_install(self, shapes: NamedShapes, *, anew: bool) -> Decision | None:
        """Make a decision and give it to the session; return None if the session has no use for it."""
        if not ((wanted := self._wanted()) and wanted(self, shapes)):
            return None
        decision = self._decision(shapes, anew=anew)
        if install := self._install():
            install(self, shapes, decision)
        return decision

    def _stop_process(self) -> None:
        process, self._process = self._process, None
        if process:
            process.kill()

    def _decision(self, shapes: NamedShapes, *, anew: bool) -> Decision:
        """Return the cached decision, unless it has to be made anew, or have one made.

        Raises:
            BusyError: Another process tunes.
            RuntimeError: The session was closed meanwhile.
        """
        if fingerprint(self._config.options) != self._options:
            return Decision(PLAIN, None, _OPTIONS_CHANGED)
        cache = self._selector.known.cache("source", self._config.model.identity, sorted(shapes.items()))
        decision = None if anew else cache.recall() or self._selector.known.shipped(shapes=shapes)
        if decision is not None:
            return decision
        if self._cached_only:
            return Decision(PLAIN, None, NOT_CACHED)
        with tuning_lock():
            decision = None if anew else cache.recall()  # another process may have made it meanwhile
            if decision is None:
                decision = self._ask(shapes, anew=anew)
                if fingerprint(self._config.options) != self._options:
                    return Decision(PLAIN, None, _OPTIONS_CHANGED)
                decision = cache.keep(decision)
        return decision

    def _ask(self, shapes: NamedShapes, *, anew: bool) -> Decision:
        """Request a decision from the tuning process.

        If no process can be started, or it fails and session options were given, which may hold values that cannot be
        passed to it, decide in this process. If the process ends, the model runs plain for some time: either the model
        crashed the process, or the system or a user ended it.

        Raises:
            RuntimeError: The session was closed meanwhile.
        """
        try:
            self._process = self._process or TuningProcess(self._config)
        except (OSError, TypeError) as error:
            return self._decide_in_process(shapes, why_plain(error), anew=anew)
        self._require_open()
        try:
            answer = self._process.ask(shapes, anew=anew)
            if "decision" in answer:
                return decision_from_json(answer["decision"])
            failure = str(answer["failure"])
        except (OSError, ValueError, KeyError, ChrionError) as error:
            self._require_open()
            self._stop_process()
            return Decision(PLAIN, None, why_plain(error), uncertain=True)
        if self._config.options is None:
            return Decision(PLAIN, None, failure, uncertain=True)
        return self._decide_in_process(shapes, failure, anew=anew)

    def _decide_in_process(self, shapes: NamedShapes, reason: str, *, anew: bool) -> Decision:
        self._require_open()
        log.info("tuning in this process: %s", reason)
        return Decider(self._config).decide(shapes, anew=anew)

    def _require_open(self) -> None:
        if self.closed:
            raise RuntimeError("this session is closed")


@dataclass(order=True)
class _Work:
    """A decision to make."""

    #: Time at which to make it, of ``time.monotonic()``.
    due_s: float
    #: Order of decisions due at the same time.
    number: int
    tuner: weakref.ref[Tuner] = field(compare=False)
    shapes: NamedShapes = field(compare=False)
    #: Whether it replaces a decision, and whether that is still cached and must not be used.
    again: bool = field(compare=False)
    anew: bool = field(compare=False)


#: Type of the argument ``install`` of :class:`Tuner`.
Install = Callable[[Tuner, NamedShapes, Decision], None]


class _TuningThread:
    """The thread that tunes for all sessions of a process, one after another."""

    def __init__(self) -> None:
        self._tuners: weakref.WeakSet[Tuner] = weakref.WeakSet()
        self._submitted: deque[_Work] = deque()
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        #: Whether the thread runs. If it could not be started, the next session tries again.
        self.started = False

    def serve(self, tuner: Tuner) -> str:
        """Count the shapes that a tuner notes from now on; start the thread, unless it is running.

        Returns:
            Empty if the thread runs, else why it could not be started: the interpreter exits, or a limit of the system
            is reached.
        """
        with self._lock:
            self._tuners.add(tuner)
            if not self.started:
                try:
                    threading.Thread(target=self._run, name="chrion-tuning", daemon=True).start()
                except RuntimeError as error:
                    failure = f"tuning could not start: {error}"
                    log.warning("%s", failure)
                    return failure
                self.started = True
        return ""

    def submit(
        self, tuner: Tuner, shapes: NamedShapes, delay_s: float, *, again: bool = False, anew: bool = False
    ) -> None:
        """Call ``tuner.tune`` in the thread after a delay, unless the tuner is collected before."""
        due_s = time.monotonic() + delay_s
        self._submitted.append(_Work(due_s, next(self._numbers), weakref.ref(tuner), shapes, again, anew))

    def _run(self) -> None:
        waiting: list[_Work] = []
        while True:
            time.sleep(_POLL_S)
            try:
                self._work(waiting)
            except Exception:  # an error of one session must not end the tuning of the others
                log.exception("error in the tuning thread")

    def _work(self, waiting: list[_Work]) -> None:
        """Make all decisions that are due.

        Args:
            waiting: A heap of the decisions that are not due yet.
        """
        self._count_noted()
        while self._submitted:
            heapq.heappush(waiting, self._submitted.popleft())
        while waiting and waiting[0].due_s <= time.monotonic():
            work = heapq.heappop(waiting)
            if tuner := work.tuner():
                tuner.tune(work.shapes, again=work.again, anew=work.anew)
            del tuner

    def _count_noted(self) -> None:
        with self._lock:
            tuners = list(self._tuners)
        for tuner in tuners:
            tuner.count_noted()


_thread = _TuningThread()


def _forget_thread() -> None:
    """Replace the thread in a forked child, where it does not exist."""
    global _thread  # noqa: PLW0603 - one thread a process
    _thread = _TuningThread()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_thread)
