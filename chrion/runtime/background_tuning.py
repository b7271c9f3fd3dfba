"""Background tuning: engines are selected while a session already serves requests by its plain session.

One thread of the process counts the shapes of requests, obtains decisions on frequent ones
(:mod:`chrion.runtime.selection.decision_source`), and opens the selected engines. A session uses an engine from the
next request on. A decision is made again if it is uncertain, or if live requests contradict it.

The thread polls for work instead of being notified. A thread that is notified takes the GIL as soon as the request
that notifies it releases it, and where other processes use the cores, the system may suspend it while it holds the GIL:
first requests took 10 to 30 ms instead of 1.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from chrion.common.imports import import_late
from chrion.machine.allocator import trim
from chrion.machine.cgroups import cpu_quota
from chrion.machine.cores import affinity
from chrion.machine.cpu_use import CpuUse, cores_in_use, cpu_use
from chrion.runtime.engine_table import EngineTable, Shapes
from chrion.runtime.execution.engine import Engine, Footprint
from chrion.runtime.execution.plain_engine import PlainEngine
from chrion.runtime.live_selection import LiveSelection
from chrion.runtime.requests import known_shape
from chrion.runtime.selection.comparison_summary import PLAIN, describe_timings
from chrion.runtime.selection.configuration import SessionConfig
from chrion.runtime.selection.decision_source import DecisionSource, Load
from chrion.runtime.selection.decisions import Decision, TimedCandidate, retry_s
from chrion.runtime.selection.guard import SHARE
from chrion.runtime.selection.plan_memory import explain_refusal
from chrion.runtime.selection.selector import SHARE_BESIDE_PLAIN, EngineSelector, plan_name, warn_of_slo, why_plain
from chrion.runtime.selection.shapes import ShapeCounter
from chrion.runtime.selection.tuning_lock import BusyError
from chrion.runtime.selection.tuning_process import NamedShapes
from chrion.scheduler.plan import Plan

if TYPE_CHECKING:
    from chrion.runtime.execution.cut_engine import CutEngine

log = logging.getLogger(__name__)

#: Reasons why a model runs plain before its first decision: in general, and if only cached ones are used.
NOT_TUNED = "tuning has not finished"
NOT_LOOKED_UP = "tuning is switched off, and cached decisions are looked up beside the first requests"
#: Begins the reason while the engine of the first decision is being opened.
OPENING = "a plan was selected and is being opened"

#: Maximum number of requests whose shapes wait for the tuning thread, which counts them a few times a second: a sample.
_MAX_NOTED = 64
#: Tuning begins this many seconds after it is asked for, so that it does not slow down the first requests.
_DELAY_S = 0.3
#: Interval between two polls for work, in seconds (a choice, not measured).
_POLL_S = 0.2
#: Name of the plan that is compared on live requests: that with the best prediction.
_CANDIDATE = plan_name(1)
#: Delay before the next attempt if another process tunes, or live requests compare a plan of other shapes, in seconds.
_BUSY_S = 1.0
#: Numbers of cores in use from which on timings are disturbed, and not in use from which on the tuning process needs no
#: others: it then takes four times its three seconds at most (choices, not measured).
_BUSY_CORES, _SPARE_CORES = 0.3, 0.25
#: Share of its time by which a request is prolonged while the tuning process has no other time of the cores, and the
#: longest such pause in seconds (choices: 1.2 of the latency is permitted meanwhile).
_YIELDED, _MOST_YIELDED_S = 0.18, 0.05
#: Number of times that a decision is put off, for ``_BUSY_S`` each, because requests are crowded: the session of one
#: thread serves them, whatever is decided.
_MAX_PUT_OFF = 30


@dataclass(eq=False, slots=True)
class _Work:
    """A decision to make."""

    #: Time at which to make it, of ``time.monotonic()``.
    due_s: float
    shapes: NamedShapes
    #: Whether it replaces a decision, so that :meth:`BackgroundTuner.wait` does not wait for it.
    again: bool = False
    #: Whether a cached decision must not be used.
    anew: bool = False
    #: Uses the decision that live requests have made; None if one is to be made.
    use: Callable[[], Decision | None] | None = None
    #: Number of pairs that live requests had compared when it was last due.
    pairs: int = 0
    #: Use of the cores when it was queued, and the number of times that it was put off because of a crowd.
    before: CpuUse | None = None
    put_off: int = 0


class BackgroundTuner:
    """Tunes for one session.

    Args:
        config: The session's configuration.
        selector: Opens the engines of decisions.
        table: The session's engines. Its lock is held while they are changed.
        is_crowded: Returns whether requests are crowded; see :mod:`chrion.runtime.diversion`.
        cached_only: Make no decisions: without a cached decision, select the plain session.

    Attributes:
        failure: Why the latest decision could not be made, or none can be; empty otherwise.
        opening: That a plan was selected and is being opened, with the reason; empty otherwise.
        noted: Shapes of requests, appended by the threads of callers; None if all requests have the same shapes.
        yields: Share of its time for which a request returns later, so that the tuning process has a core meanwhile.
    """

    def __init__(
        self,
        config: SessionConfig,
        selector: EngineSelector,
        table: EngineTable,
        is_crowded: Callable[[], bool],
        *,
        cached_only: bool,
    ) -> None:
        self._config = config
        self._is_crowded = is_crowded
        self._selector = selector
        self._table = table
        self._cached_only = cached_only
        self._source = DecisionSource(config, cached_only=cached_only)
        free = any(info.free for info in table.inputs)
        self.noted: deque[NamedShapes] | None = deque() if free else None
        self._counter = ShapeCounter()
        #: Decisions to make, now or later.
        self._queue: list[_Work] = []
        #: Number of decisions that were requested and are not made yet.
        self._pending = 0
        #: How often live requests have contradicted the decision on some shapes.
        self._contradicted: dict[Shapes, int] = {}
        self._state = threading.Condition()
        #: Held by the tuning thread while it works for this session.
        self._working = threading.Lock()
        self.yields = 0.0
        self.opening = ""
        self.failure = _thread.serve(self)
        if not free:
            self._submit({})

    def note(self, feed: Mapping[str, Any]) -> None:
        """Note the shapes of a request that the plain session served, if they are known without converting inputs.

        If many are waiting to be counted, the request is not noted: a sample suffices.
        """
        noted, table = self.noted, self._table
        untuned = table.current is self._selector.plain_sessions.opened
        if noted is not None and untuned and len(noted) < _MAX_NOTED:
            shapes = {i.name: shape for i in table.inputs if (shape := known_shape(feed.get(i.name))) is not None}
            if len(shapes) == len(table.inputs):
                noted.append(shapes)

    def give_way(self, took_s: float) -> None:
        """Leave a core to the tuning process for a part of the time that a request has taken.

        That process runs only on cores that are idle, and leaves them when a thread of another one wants them. Where
        requests follow each other without pause, no core would be idle. In slices of its own, which last milliseconds,
        it would make some requests far slower; in these pauses it makes all of them a little slower.
        """
        time.sleep(min(self.yields * took_s, _MOST_YIELDED_S))

    def reconsider(self, shapes: Shapes) -> None:
        """Make a decision again that live requests contradict, after a while; return at once.

        The while grows with each time that it happens for the same shapes.
        """
        self._contradicted[shapes] = self._contradicted.get(shapes, 0) + 1
        if not self._cached_only:
            named = {info.name: shape for info, shape in zip(self._table.inputs, shapes, strict=False)}
            self._queue_after(retry_s(self._contradicted[shapes]), _Work(0.0, named, again=True, anew=True))

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all requested decisions are made.

        Returns:
            False if the time is over first, or at once if the thread that tunes could not be started.
        """
        source = self._source
        with self._state:
            return source.closed or (
                _thread.started
                and self._state.wait_for(lambda: not (self._pending or self.noted) or source.closed, timeout_s)
            )

    def close(self, until: float | None = None) -> None:
        """Stop: no engine is installed any more. May be called from any thread, and more than once.

        Args:
            until: Time of ``time.monotonic()`` until which to wait for work in progress; None does not wait.
        """
        self._source.close()
        with self._state:
            self._state.notify_all()
        if until is not None and self._working.acquire(timeout=max(0.0, until - time.monotonic())):
            self._working.release()

    def after_fork(self) -> None:
        """Stop in a forked child, and forget locks that threads of the parent may hold."""
        self._source.after_fork()
        self._state = threading.Condition()
        self._working = threading.Lock()

    def work(self) -> bool:
        """Count the shapes of requests, and make the first decision that is due; return whether there was one.

        Called by the tuning thread.
        """
        self._count_noted()
        with self._state:
            first = min(self._queue, key=lambda work: work.due_s, default=None)
            if self._source.closed or first is None or first.due_s > time.monotonic():
                return False
            self._queue.remove(first)
        if delay_s := self._until_compared(first):
            self._queue_after(delay_s, first)
        else:
            self._tune(first)
        return True

    def _until_compared(self, work: _Work) -> float:
        """Return for how long a decision has to wait, in seconds, since live requests have compared further pairs."""
        trial = self._table.trial
        if trial is None or work.use:
            return 0.0
        other = self._table.trial_shapes != self._key(work.shapes)
        pairs, before = trial.pairs + other, work.pairs  # for other shapes, it waits at least once
        work.pairs = pairs
        return 0.0 if pairs <= before else _BUSY_S if other else retry_s(1)

    def _submit(self, shapes: NamedShapes) -> None:
        """Request a first decision."""
        with self._state:
            self._pending += 1
        self._queue_after(0.0 if self._cached_only else _DELAY_S, _Work(0.0, shapes))

    def _queue_after(self, delay_s: float, work: _Work) -> None:
        work.due_s, work.before = time.monotonic() + delay_s, cpu_use(affinity())
        with self._state:
            self._queue.append(work)

    def _count_noted(self) -> None:
        """Count the shapes of requests, and request decisions on frequent ones."""
        while self.noted:
            shapes, halvings = self.noted[0], self._counter.halvings
            if self._counter.count(self._key(shapes)):
                self._submit(shapes)
            if self._counter.halvings > halvings:
                with self._table.lock:
                    self._table.halve_requests()
            self.noted.popleft()
        with self._state:
            self._state.notify_all()

    def _tune(self, work: _Work) -> None:
        """Make a decision and use it; queue it again if another process tunes, or if it is uncertain."""
        decision, later_s = None, None
        with self._working:
            if self._source.closed:  # since the work was taken from the queue: the process may be ending
                return
            try:
                decision = self._decide_and_install(work)
            except BusyError:
                later_s = _BUSY_S
            except Exception as error:  # noqa: BLE001 - the session keeps serving
                if not self._source.closed:
                    self.failure = f"tuning failed: {why_plain(error)}"
                    log.warning("%s", self.failure)
            else:
                self.failure = ""
            with self._state:
                if later_s is None:
                    self._pending -= not work.again
                if not self._pending or self._source.closed:
                    self._source.stop_process()
                self._state.notify_all()
        if decision and decision.uncertain and not self._cached_only:
            later_s, work.again, work.anew = decision.valid_s, True, False
        if later_s is not None:
            self._queue_after(later_s, work)

    def _decide_and_install(self, work: _Work) -> Decision | None:
        """Make a decision and use its engine; return None if no plan for the shapes has room."""
        named = work.shapes
        if work.use:
            return work.use()
        if self._table.least and (plain := self._make_room(named, self._table.least, evict=False)):
            with self._table.lock:
                if self._table.find(self._key(named)) is None:
                    self._table.put_beside_plain(self._key(named), plain)
            return None
        crowded = self._is_crowded() and work.put_off < _MAX_PUT_OFF
        work.put_off += crowded
        load = _load_since(work.before, crowded=crowded)
        self.yields = _YIELDED if load.own else 0.0
        try:
            decision = self._source.decide(named, load, anew=work.anew)
        finally:
            self.yields = 0.0
        self.opening = f"{OPENING}: {decision.evidence}" if decision.plan else ""
        try:
            self.install(named, decision)
        finally:
            self.opening = ""
        return decision

    def install(self, named: NamedShapes, decision: Decision, opened: Engine | None = None) -> None:
        """Use the engine of a decision from the next request on, unless tuning was stopped.

        Args:
            named: The shapes; empty if all requests have the same.
            decision: The decision.
            opened: Its engine, if that is open.
        """
        warn_of_slo(self._config.name, decision)
        with self._table.lock:
            before = self._table.find(self._key(named))
        if before and before.plan and before.plan == decision.plan:
            return  # decided again
        refusal = None
        try:
            refusal = self._make_room(named, decision.footprint)
            engine = refusal or opened or self._open(named, decision)
        except Exception as error:  # noqa: BLE001 - the plain session keeps serving
            if not self._source.closed:
                log.warning("the model runs plain: %s", why_plain(error))
            engine = self._table.plain(why_plain(error))
        with self._table.lock:
            if self._table.trial_shapes == self._key(named):
                self._table.end_trial()
            if self._source.closed:
                engine.close()
            elif named:
                self._table.put_beside_plain(self._key(named), engine)
            else:
                self._table.current = self._table.put((), engine)
                self._table.drop_plain()
        if decision.candidate and engine.session and not (refusal or self._cached_only):
            self._begin_trial(named, decision, decision.candidate)
        trim()

    def _begin_trial(self, named: NamedShapes, decision: Decision, candidate: Plan) -> None:
        """Open the plan that a decision could not select with certainty, and compare it on live requests."""
        try:
            engine = self._open(named, replace(decision, winner=_CANDIDATE, plan=candidate))
        except Exception as error:  # noqa: BLE001 - the plain session keeps serving
            if not self._source.closed:  # the process may be ending
                log.warning("no plan is compared on live requests: %s", why_plain(error))
            return
        from chrion.runtime.execution.cut_engine import CutEngine  # noqa: PLC0415 - plain sessions do not need plans

        if not isinstance(engine, CutEngine):  # the options do not allow plans
            return
        own = weakref.ref(self)  # the trial does not keep a session alive

        def end(trial: LiveSelection) -> None:
            if tuner := own():
                tuner._note_selected(named, decision, engine, trial)  # noqa: SLF001 - this class

        trial = LiveSelection(engine, end, SHARE_BESIDE_PLAIN if named else SHARE)
        with self._table.lock:
            if self._source.closed:
                engine.close()
            else:
                self._table.begin_trial(self._key(named), trial)

    def _note_selected(self, named: NamedShapes, decision: Decision, engine: CutEngine, trial: LiveSelection) -> None:
        """Have the tuning thread use what live requests have selected. Called by a thread that serves a request."""
        timings = (
            TimedCandidate(PLAIN, plain=True, latency_ms=trial.plain_ms, rounds=trial.pairs),
            TimedCandidate(_CANDIDATE, plain=False, latency_ms=trial.plan_ms, rounds=trial.pairs),
        )
        winner, plan = (_CANDIDATE, engine.plan) if trial.plan_wins else (PLAIN, None)
        relation = "faster" if plan else f"no plan took at most {trial.share:.0%} of the plain session's time"
        made = replace(
            decision,
            winner=winner,
            plan=plan,
            why=f"{relation} on live requests ({describe_timings(timings, self._config.threads)})",
            uncertain=False,
            timings=timings,
            footprint=decision.footprint if plan else None,
            candidate=None,
            attempts=1,
            made_s=0.0,
            origin="",
        )
        self._queue_after(0.0, _Work(0.0, named, again=True, use=partial(self._use_selected, named, made, engine)))

    def _use_selected(self, named: NamedShapes, decision: Decision, engine: CutEngine) -> Decision | None:
        """Keep a decision that live requests have made, and use it; return None if another one was made meanwhile.

        Args:
            named: The shapes; empty if all requests have the same.
            decision: The decision.
            engine: The engine of the plan that was compared.
        """
        trial = self._table.trial
        if trial is None or trial.other is not engine or self._source.closed:
            return None
        kept = self._source.keep(named, decision, engine.selected_for)
        if kept:
            self.install(named, kept, self._selector.adopt(engine, kept) if kept.plan else None)
        return kept

    def _make_room(self, named: NamedShapes, footprint: Footprint | None, *, evict: bool = True) -> PlainEngine | None:
        """Close plans until one of the given memory has room, if ``evict``; return the plain session if none may."""
        if footprint is None or not named:
            return None
        key = self._key(named)
        with self._table.lock:
            evicted = self._table.find_room(key, footprint, self._counter.recent(key))
            if evicted is None:
                return self._table.plain(explain_refusal(footprint))
            for shapes in evicted if evict else ():
                self._table.remove(shapes)
        return None

    def _open(self, named: NamedShapes, decision: Decision) -> Engine:
        if decision.plan is None:
            plain_sessions = self._selector.plain_sessions
            if decision.winner != PLAIN:
                return plain_sessions.of_decision(decision)
            plain = self._table.plain(decision.evidence)
            # With free dimensions it serves other shapes as well.
            return plain if named else plain_sessions.compare_live(plain, decision)
        import_late("chrion.graph.loader", "chrion.graph.merge", "chrion.graph.recurrent", "chrion.graph.trees")
        import_late("chrion.runtime.execution.cut_engine", "chrion.runtime.options.probe")
        model_loading = import_late("chrion.runtime.selection.model_loading")

        graph = self._config.load(named)
        if reason := model_loading.reason_of_options(self._config, graph):
            return self._table.plain(reason)
        return self._selector.open(graph, decision)

    def _key(self, named: NamedShapes) -> Shapes:
        return tuple(named[info.name] for info in self._table.inputs) if named else ()


def _load_since(before: CpuUse | None, *, crowded: bool) -> Load:
    """Return how busy the cores were since a measurement; if it is not known, as if nothing else ran."""
    cpus = affinity()
    use = cores_in_use(before, cpus) if before else None
    if use is None:
        return Load(crowded=crowded)
    used, own = use
    cores = len(cpus) if cpus else os.cpu_count() or 1
    full = own > min(cores, cpu_quota() or cores) - _SPARE_CORES
    spare = not full and used <= cores - _SPARE_CORES
    return Load(busy=used >= _BUSY_CORES, spare=spare, own=full, crowded=crowded)


class _TuningThread:
    """The thread that tunes for all sessions of a process, one after another."""

    def __init__(self) -> None:
        #: Not kept alive, since a tuner has the engines of its session.
        self._tuners: list[weakref.ref[BackgroundTuner]] = []
        self._lock = threading.Lock()
        #: Whether the thread runs. If it could not be started, the next session tries again.
        self.started = False

    def serve(self, tuner: BackgroundTuner) -> str:
        """Work for a tuner from now on; start the thread, unless it is running.

        Returns:
            Empty if the thread runs, else why it could not be started: the interpreter exits, or a limit of the system
            is reached.
        """
        with self._lock:
            self._tuners = [known for known in self._tuners if known() is not None] + [weakref.ref(tuner)]
            if not self.started:
                try:
                    threading.Thread(target=self._run, name="chrion-tuning", daemon=True).start()
                except RuntimeError as error:
                    failure = f"tuning could not start: {error}"
                    log.warning("%s", failure)
                    return failure
                self.started = True
        return ""

    def _run(self) -> None:
        while True:
            time.sleep(_POLL_S)
            while sum(map(_work_for, self._tuners)):  # in turn
                pass


def _work_for(reference: weakref.ref[BackgroundTuner]) -> bool:
    """Make one decision for a tuner that exists; return whether one was due."""
    try:
        tuner = reference()
        return tuner is not None and tuner.work()
    except Exception:  # an error of one session must not end the tuning of the others
        log.exception("error in the tuning thread")
        return False


_thread = _TuningThread()


def _forget_thread() -> None:
    """Replace the thread in a forked child, where it does not exist."""
    global _thread  # noqa: PLW0603 - one thread a process
    _thread = _TuningThread()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_thread)
