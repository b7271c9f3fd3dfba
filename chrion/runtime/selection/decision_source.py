"""Decisions for a session that serves meanwhile: found in a cache, or made by a tuning process of low priority."""

from __future__ import annotations

import logging
from typing import NamedTuple

from chrion.common.imports import import_late
from chrion.errors import ChrionError
from chrion.runtime.options.session_options import fingerprint
from chrion.runtime.selection.comparison_summary import PLAIN
from chrion.runtime.selection.configuration import SessionConfig
from chrion.runtime.selection.decisions import Decision, decision_from_json
from chrion.runtime.selection.known_decisions import KnownDecisions
from chrion.runtime.selection.selector import PATIENCE_S, why_plain
from chrion.runtime.selection.tuning_lock import BusyError, tuning_lock
from chrion.runtime.selection.tuning_process import NamedShapes, StarvedError, TuningProcess

log = logging.getLogger(__name__)

#: Reason why a model without a cached decision runs plain, if none may be made.
NOT_CACHED = "tuning is switched off, and no cached decision was found"
_OPTIONS_CHANGED = "the session options were changed after the session was created"


class Load(NamedTuple):
    """How busy the cores are."""

    #: Whether they are in use, so that timings in the tuning process are disturbed, and disturb requests.
    busy: bool = False
    #: Whether they are idle for part of the time, in which the tuning process can do its work.
    spare: bool = False
    #: Whether it is this process that leaves none, whose requests then give way to the tuning process.
    own: bool = False
    #: Whether requests are crowded, which no decision matters to, so that tuning would only disturb them.
    crowded: bool = False


def decide_now(config: SessionConfig) -> Decision | None:
    """Return the decision for a model of fixed shapes, made by another process unless it is known.

    Returns:
        None if that process cannot decide, or the caller wants its errors: then the caller finds the reason. If the
        process ends, an uncertain decision for the plain session: what ended it could end the caller.

    Raises:
        BusyError: Another process tunes.
    """
    source = DecisionSource(config, cached_only=False)
    try:
        for anew in (False, True):  # a cached decision for which nothing could be timed is made again
            decision = source.decide({}, Load(), anew=anew, patience_s=PATIENCE_S)
            if decision.plan or decision.timings or not decision.uncertain or source.failure is not None:
                break
    except BusyError:
        raise
    except Exception:  # noqa: BLE001 - the caller raises it if it concerns the caller
        return None
    finally:
        source.close()
    if decision.plan or decision.timings:
        return decision
    return None if source.failure or config.strict else decision


class DecisionSource:
    """Decisions for one session.

    Args:
        config: The session's configuration.
        cached_only: Make no decisions: without a cached decision, select the plain session.

    Attributes:
        closed: Whether decisions are no longer used. A flag without a lock: garbage collection may close it in any
            thread at any moment, and another thread may fork.
        failure: Why the tuning process could not decide, as it has answered; empty if it has decided or ended; None if
            it was not asked.
    """

    def __init__(self, config: SessionConfig, *, cached_only: bool) -> None:
        self.closed = False
        self.failure: str | None = None
        self._config = config
        self._known = KnownDecisions(config)
        #: State of the options now. The caller may change them later, when InferenceSession has copied them already.
        self._options = fingerprint(config.options)
        self._cached_only = cached_only
        self._process: TuningProcess | None = None

    def decide(self, shapes: NamedShapes, load: Load, *, anew: bool, patience_s: float = 0.0) -> Decision:
        """Return the cached decision, unless it has to be made anew, or have one made.

        Args:
            shapes: The shapes.
            load: How busy the cores are.
            anew: Whether a cached decision must not be used.
            patience_s: Longest time to wait for another process that tunes, in seconds.

        Raises:
            BusyError: Another process tunes, or requests are crowded.
            RuntimeError: The session was closed meanwhile.
        """
        if fingerprint(self._config.options) != self._options:
            return Decision(PLAIN, None, _OPTIONS_CHANGED)
        cache = self._known.of_source(shapes)
        decision = None if anew else cache.recall() or self._known.shipped(shapes=shapes)
        if decision is not None:
            return decision
        if self._cached_only:
            return Decision(PLAIN, None, NOT_CACHED)
        if load.crowded:
            raise BusyError
        with tuning_lock(patience_s):
            decision = None if anew else cache.recall()  # another process may have made it meanwhile
            if decision is None:
                decision = self._ask(shapes, load, anew=anew)
                if fingerprint(self._config.options) != self._options:
                    return Decision(PLAIN, None, _OPTIONS_CHANGED)
                decision = cache.keep(decision)
        return decision

    def keep(self, shapes: NamedShapes, decision: Decision, digest: str) -> Decision | None:
        """Store a decision that live requests have made; return None if the options are no longer what they were.

        Args:
            shapes: The shapes.
            decision: The decision.
            digest: The digest of the model's graph.
        """
        if fingerprint(self._config.options) != self._options:
            return None
        self._known.of_digest(digest, free=bool(shapes)).keep(decision)
        return self._known.of_source(shapes).keep(decision)

    def close(self) -> None:
        """Make no further decisions, and end the tuning process. May be called from any thread, and more than once."""
        self.closed = True
        if process := self._process:
            process.kill()

    def stop_process(self) -> None:
        """End the tuning process, which is started again when it is needed. Called by the thread that decides."""
        process, self._process = self._process, None
        if process:
            process.kill()

    def after_fork(self) -> None:
        """Forget the tuning process, which belongs to the parent."""
        self.closed, self._process = True, None

    def _ask(self, shapes: NamedShapes, load: Load, *, anew: bool) -> Decision:
        """Request a decision from the tuning process.

        If no process can be started, or it fails and session options were given, which may hold values that cannot be
        passed to it, decide in this process. If the process ends, the model runs plain for some time: either the model
        crashed the process, or the system or a user ended it.

        Raises:
            RuntimeError: The session was closed meanwhile.
        """
        self.failure, spare = "", load.spare or load.own
        # A process cannot raise its own priority. One that competes stays, since one in spare time may starve again.
        if self._process and self._process.spare and not spare:
            self.stop_process()
        try:
            self._process = self._process or TuningProcess(self._config, spare=spare)
        except (OSError, TypeError) as error:
            return self._decide_in_process(shapes, load, why_plain(error), anew=anew)
        self._require_open()
        try:
            answer = self._process.ask(shapes, anew=anew, busy=load.busy)
            if "decision" in answer:
                return decision_from_json(answer["decision"])
            self.failure = failure = str(answer["failure"])
        except StarvedError:
            self._require_open()
            self.stop_process()
            return self._ask(shapes, Load(busy=True), anew=anew)
        except (OSError, ValueError, KeyError, ChrionError) as error:
            self._require_open()
            self.stop_process()
            return Decision(PLAIN, None, why_plain(error), uncertain=True)
        if self._config.options is None:
            return Decision(PLAIN, None, failure, uncertain=True)
        return self._decide_in_process(shapes, load, failure, anew=anew)

    def _decide_in_process(self, shapes: NamedShapes, load: Load, reason: str, *, anew: bool) -> Decision:
        self._require_open()
        import_late("numpy.random", "chrion.profiler.measure_graph", "chrion.scheduler.native_kernels")
        import_late("chrion.runtime.selection.proposals", "chrion.runtime.selection.worker")
        from chrion.runtime.selection.worker import Decider  # noqa: PLC0415 - usually the tuning process decides

        log.info("tuning in this process: %s", reason)
        return Decider(self._config).decide(shapes, anew=anew, busy=load.busy)

    def _require_open(self) -> None:
        if self.closed:
            raise RuntimeError("this session is closed")
