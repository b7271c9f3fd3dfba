"""Diversion of requests from a session's engine to another one, by crowding and by comparisons on live requests."""

from __future__ import annotations

import time
from collections.abc import Callable

from chrion.runtime.arena_contention import ArenaContention, SwitchSample
from chrion.runtime.execution.engine import Engine
from chrion.runtime.execution.plain_engine import PlainEngine
from chrion.runtime.live_comparison import LiveComparison
from chrion.runtime.live_selection import LiveSelection
from chrion.runtime.one_thread import OneThreadSession
from chrion.runtime.process_hooks import in_flight

#: Time for which requests still count as crowded after the last crowd, in seconds, so that gaps between the requests of
#: several callers do not end it (a choice, not measured).
_HOLD_S = 0.1
#: The one-thread session is opened after this many crowded requests, or when a crowd has lasted this long, in seconds:
#: a short crowd is not worth a second copy of the weights, which takes as long to open.
_PATIENCE, _PATIENCE_S = 32, 0.2


class Crowding:
    """Decides which requests of a session are crowded.

    A plan, or a plain session with several threads, gives several cores to one request. When more requests are in
    flight than those cores can serve, one thread for each is faster: no request waits for the others' threads. So
    crowded requests go to the one-thread session, until there has been no crowd for a while. Requests of all sessions
    in the process count, since they share its cores.

    Args:
        one_thread: The session's one-thread session.
        clock: Returns the time in seconds.

    Attributes:
        active: Whether requests were crowded at the last check.
    """

    def __init__(self, one_thread: OneThreadSession, clock: Callable[[], float] = time.monotonic) -> None:
        self.active = False
        self._one_thread = one_thread
        self._clock = clock
        #: Begin of the current crowd, and the time at which it is over unless there are further crowded requests.
        self._since_s = self._until_s = 0.0
        self._requests = 0

    def engine(self, engine: Engine) -> PlainEngine | None:
        """Return the one-thread session for a request in flight; None if it is not crowded or the session is not open.

        Called only if several requests are in flight or ``active`` is set, so that it costs a single caller nothing.

        Args:
            engine: The engine for the request otherwise.
        """
        now_s = self._clock()
        if len(in_flight) > engine.capacity:
            if not self.active:
                self.active, self._since_s = True, now_s
            self._until_s = now_s + _HOLD_S
            self._requests += 1  # a lost count does not matter
        elif self.active and now_s >= self._until_s:
            self.active = False
        if not self.active:
            return None
        if now_s - self._since_s >= _PATIENCE_S:
            self._requests = max(self._requests, _PATIENCE)
        return self._one_thread.get() if self._requests >= _PATIENCE else None


#: Line of :meth:`chrion.HybridSession.explain` while the one-thread session serves a crowd.
CROWDED = "several requests are in flight: a single-threaded plain session serves at present"
#: What records a request when it has ended.
Observer = LiveComparison | LiveSelection | SwitchSample


class Diversion:
    """Decides which requests of a session go to another engine than the usual one.

    Args:
        open_session: Opens the one-thread session, with a memory arena if its argument is true; returns
            None if there cannot be one.
        arena: Whether sessions have a memory arena of their own, so that one without it may be better.

    Attributes:
        one_thread: The one-thread session.
        crowding: Decides which requests are crowded.
    """

    def __init__(self, open_session: Callable[[bool], PlainEngine | None], *, arena: bool) -> None:
        self.one_thread = OneThreadSession(open_session)
        self.one_thread.replaceable = arena
        self.crowding = Crowding(self.one_thread)
        self._contention = ArenaContention(self.one_thread.avoid_arena)

    def divert(self, engine: Engine, *, fits: bool = True) -> tuple[Engine | None, Observer | None]:
        """Decide whether another engine serves a request.

        Args:
            engine: The engine for it otherwise.
            fits: Whether the engine is known to be for the request's shapes.

        Returns:
            The one-thread session, a plan that is compared with the engine, or None; and what records the request when
            it has ended, or None.
        """
        if len(in_flight) > 1 or self.crowding.active:
            return self._divert_crowded(engine, fits=fits)
        comparison = engine.comparison
        if comparison is None or not fits:
            return None, None
        if comparison.needless:
            engine.comparison = None
            return None, None
        if not comparison.diverts:
            return None, comparison
        return comparison.other or self.one_thread.get(), comparison

    def _divert_crowded(self, engine: Engine, *, fits: bool) -> tuple[PlainEngine | None, SwitchSample | None]:
        """Decide whether the one-thread session serves a request during a crowd.

        Other requests share a session that has one thread itself; it is replaced only by one without an arena.
        """
        other = self.crowding.engine(engine)
        alike = engine.has_one_thread and not engine.accelerated
        if alike and other is None and not self.one_thread.arena and len(in_flight) > 1:
            other = self.one_thread.get()
        sampled = self.one_thread.replaceable and (other is not None or (alike and fits))
        return other, self._contention.sample() if sampled else None

    @property
    def serves_crowd(self) -> bool:
        """Whether the one-thread session serves, since requests are crowded."""
        return self.crowding.active and self.one_thread.is_open

    def record(self, observer: Observer, start_s: float, *, diverted: bool) -> bool:
        """Record a request that ends now, for a comparison only if no others are in flight.

        Args:
            observer: As returned by :meth:`divert`.
            start_s: Start of the request, of ``time.perf_counter()``.
            diverted: Whether the other engine has served it.

        Returns:
            Whether live requests contradict the selection of the engine, which is then reported once.
        """
        if isinstance(observer, SwitchSample):
            self._contention.add(observer)
            return False
        if len(in_flight) > 1:
            return False
        observer.record(start_s, time.perf_counter(), diverted=diverted)
        if isinstance(observer, LiveSelection) or not observer.contradicted:
            return False
        observer.start_anew()
        return True
