"""Comparison of a plan with the one-thread session on live requests.

A plain session of several threads is compared in the same way; below, it counts as a plan.

Tuning times candidates on synthetic inputs, in a moment that may not be typical. Later another process may use a lane's
core, requests may come with pauses in which caches go cold, or inputs may take longer. The comparison watches the
latencies of requests that are alone in the process. While they are as expected, it does nothing. If the plan is slower
than a plain session was, the one-thread session serves a few requests in its place, and the faster of both continues.

Bound of the cost, while the mean latencies of both engines stay as they are: the slower engine serves

- the first :data:`_SLOW_WINDOWS` windows, until it is noticed,
- trials, of :data:`_PLAN_TRIAL` or :data:`_PLAIN_TRIAL` requests, or with slow requests fewer. The number of requests
  between two trials doubles from the first to the last of :data:`_PLAIN_GAPS`, or of :data:`_PLAN_GAPS` for trials of
  the plan. While other processes are known to use cores, it is one of :data:`_BUSY_GAPS`: the plan is likely slow for
  as long as they do, and their end is noticed. So in the long run less than one request in 100 is in a trial of the
  plan, and one in 1000 beside such processes. A trial is put off until its predecessor's extra time is at most
  :data:`_EXCESS` of the time since. Once the plan is slower than before the last trial by :data:`_CHANGED`, it is
  :data:`_EXCESS_CHANGED`, and no gap is kept.
- after a trial that noise has won, up to :data:`_PROBATION` windows.

After a change of the means the bound applies anew. A change in favour of the plan is noticed after the last gap at the
latest, unless the plan takes far longer in trials. If other processes use fewer cores than before, a trial of the plan
begins earlier; the gaps between such trials double from the first of :data:`_PLAIN_GAPS` while they are lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from chrion.machine.cpu_use import OtherWork

# The numbers below were adjusted with `scripts/bench_serving.py` (neighbour, pauses, quota) and give the bound above;
# none of them has a measurement of its own.

#: A window ends after this many requests and seconds; or, with slow requests, after fewer requests and more seconds.
_WINDOW, _WINDOW_S = 16, 0.1
_SHORT_WINDOW, _LONG_WINDOW_S = 3, 0.3
#: The plan may be slow if a mean latency exceeds the expected one by the first factor, and is slow by the second one.
#: In between, it is slow if it takes longer than the one-thread session once did: other work makes no session faster.
_SLOW, _TOO_SLOW = 1.1, 1.5
#: Requests that take less time are not worth the microsecond that recording takes, in ms.
_WORTHWHILE_MS = 0.1
#: Number of slow windows in a row after which the one-thread session is tried.
_SLOW_WINDOWS = 2


class _Trial(NamedTuple):
    """Length of a trial."""

    #: Number of requests at the beginning that do not count, since the session was idle and its caches are cold.
    warm_up: int
    #: Number of requests that count, and their least duration in seconds.
    requests: int
    least_s: float
    #: The trial ends early if this many requests take longer by this factor.
    clear_after: int
    clearly: float


#: Trials of the plan are short, since they are the slowest requests of a session that the one-thread session serves. It
#: has to win for longer: beside other work, some requests in a row are fast, until that has its next time slice.
#: Trials of the one-thread session are longer: its thread first has to leave the core to which the plan has pinned it,
#: and under a quota it waits for the CPU time that the plan has used.
_PLAN_TRIAL = _Trial(warm_up=2, requests=8, least_s=0.1, clear_after=2, clearly=1.3)
_PLAIN_TRIAL = _Trial(warm_up=4, requests=24, least_s=0.15, clear_after=12, clearly=4.0)
#: With slow requests, a trial ends after as few as a window has, if they have taken so many seconds: ten periods of a
#: quota of CPU time, for which 24 requests are needed if they are quick.
_LONG_TRIAL_S = 1.0
#: Number of requests between two trials, at first and at most: of the one-thread session, of the plan, and of the plan
#: while other processes use cores.
_PLAIN_GAPS, _PLAN_GAPS, _BUSY_GAPS = (64, 2048), (256, 2048), (4096, 32768)
#: A trial of the one-thread session is out of date once the plan takes longer than before it by this factor.
_CHANGED = 1.3
#: Maximum share of the time that trials may take longer than the same requests on the other engine: in general, and for
#: trials because of a change since the last one: other processes use fewer cores, or the plan has become far slower.
_EXCESS, _EXCESS_CHANGED = 0.02, 0.1
#: The plan takes over again if its mean latency is at most this share of the one-thread session's.
_RETURN = 0.95
#: Number of windows after a change in which the engine is compared with the other one's last mean latency.
_PROBATION = 2
#: Number of windows of expected latency in a row after which the next trial need not wait.
_CALM = 8
#: A decision is contradicted if the plan has lost this many trials in a row, in at least so many seconds.
_LOST, _LOST_S = 5, 30.0


class LiveComparison:
    """Comparison of one plan with the one-thread session.

    Args:
        latency_ms: The plan's latency when it was selected, in ms; None if it was not timed. The latency of its first
            window without other work is expected then.
        plain_ms: The latency of the one-thread session then, or of the best plain session, in ms; None if not known.
        other_work: Begins to measure the cores that other processes use.

    Attributes:
        diverts: Whether the next request goes to the one-thread session, if that is open.
        plain_serves: Whether the one-thread session serves, apart from trials of the plan, since the plan is slower.
        contradicted: Whether the plan has been slower for so long that the decision should be made again.
        needless: Whether requests take so little time that they should not be recorded.
    """

    #: The engine of trials; None: the session's one-thread session, which is opened when it is needed.
    other = None

    def __init__(
        self, latency_ms: float | None, plain_ms: float | None, other_work: Callable[[], OtherWork] = OtherWork
    ) -> None:
        self.diverts = False
        self.plain_serves = False
        self.contradicted = False
        self.needless = latency_ms is not None and latency_ms < _WORTHWHILE_MS
        #: Expected latency, infinite while it is not known; and the least of the one-thread session, 0 if not known.
        self._expected_ms, self._plain_ms = math.inf, plain_ms or 0.0
        if latency_ms is not None:
            self._expected_ms = min(latency_ms, plain_ms or latency_ms)
        #: Of the current window or trial: number of requests, their total latency, and start of the first one.
        self._count, self._total_ms, self._start_s = 0, 0.0, 0.0
        #: Number of requests of a trial that do not count yet.
        self._cold = 0
        #: Mean latency in the last window, and the lower one of the last two.
        self._mean_ms = self._least_ms = latency_ms or 0.0
        #: Mean latency of the other engine, and the number of windows for which it is still compared.
        self._other_ms, self._probation = 0.0, 0
        #: Numbers of slow windows and of other windows in a row.
        self._slow = self._calm = 0
        #: Number of requests since the last trial and their latency; number of requests before the next one.
        self._since, self._since_ms, self._gap = 0, 0.0, 0
        #: Time that the last trial took longer than the same requests on the other engine.
        self._excess_ms = 0.0
        #: While the plan serves: its mean latency before the other's last trial, or in its first window.
        self._tried_ms = math.inf
        #: Number of trials in a row that the plan has lost, and the time of the first.
        self._lost, self._lost_s = 0, 0.0
        #: While the one-thread session serves: use of the cores by other processes since the last trial.
        self._other_work = other_work
        self._others: OtherWork | None = None
        #: Whether it has eased, and the number of such trials in a row that the plan has lost.
        self._eased, self._vain = False, 0

    @property
    def note(self) -> str:
        """What the session does at present, for :meth:`chrion.HybridSession.explain`; empty if that is usual."""
        if not self.plain_serves:
            return ""
        return "a single-threaded plain session serves at present: on live requests the session above is slower"

    def record(self, start_s: float, end_s: float, *, diverted: bool) -> None:
        """Record a request that was alone.

        Args:
            start_s: Its start, in seconds of any clock.
            end_s: Its end.
            diverted: Whether the one-thread session has served it.
        """
        if diverted is not self.diverts:
            return  # the one-thread session is not open yet, or the request began before a change
        if self._cold:
            self._cold -= 1
            self._excess_ms += max(0.0, (end_s - start_s) * 1e3 - self._mean_ms)
            return
        if not self._count:
            self._start_s = start_s
        self._count += 1
        self._total_ms += (end_s - start_s) * 1e3
        if self.diverts is not self.plain_serves:
            if self._trial_is_over(end_s - self._start_s):
                self._end_trial(end_s)
        elif self._window_is_over(end_s - self._start_s):
            self._end_window()

    def start_anew(self) -> None:
        """Forget that the plan was contradicted, after another decision in its favour."""
        self.contradicted, self._lost = False, 0

    @property
    def _trial(self) -> _Trial:
        """Length of a trial of the engine that does not serve."""
        return _PLAN_TRIAL if self.plain_serves else _PLAIN_TRIAL

    def _window_is_over(self, took_s: float) -> bool:
        enough = self._count >= _WINDOW and took_s >= _WINDOW_S
        return enough or (self._count >= _SHORT_WINDOW and took_s >= _LONG_WINDOW_S)

    def _trial_is_over(self, took_s: float) -> bool:
        trial, mean_ms = self._trial, self._total_ms / self._count
        if self._count >= trial.clear_after and mean_ms > trial.clearly * self._mean_ms:
            return True
        if self._count >= _SHORT_WINDOW and took_s >= _LONG_TRIAL_S:
            return True
        lost = self.plain_serves and not self._is_faster(mean_ms)
        return self._count >= trial.requests and (lost or took_s >= trial.least_s)

    def _end_window(self) -> None:
        self._since += self._count
        self._since_ms += self._total_ms
        before_ms, self._mean_ms = self._mean_ms, self._mean_and_restart()
        self._least_ms = min(before_ms, self._mean_ms)
        if self._probation:
            self._probation -= 1
            if self._is_faster(self._other_ms):
                self._change(self._other_ms)
                return
        if self.plain_serves:
            self._others = self._others or self._other_work()
            self._eased = self._others.has_eased()
            self._try_other()
            return
        if self._tried_ms == math.inf:
            self._tried_ms = self._mean_ms
        slow = self._is_slow()
        if slow:
            self._calm, self._slow = 0, self._slow + 1
            if self._slow >= _SLOW_WINDOWS:
                self._try_other()
        elif slow is not None:
            self._expected_ms = min(self._expected_ms, self._mean_ms)
            self._calm, self._slow = self._calm + 1, 0
            if self._calm >= _CALM:
                self._gap, self._lost = 0, 0

    def _is_slow(self) -> bool | None:
        """Return whether the plan's last window was slow; None if that cannot be told yet."""
        if self._expected_ms < math.inf:
            return self._mean_ms > self._limit_ms
        self.needless = self._mean_ms < _WORTHWHILE_MS
        self._others = self._others or self._other_work()
        return self._others.is_busy()

    @property
    def _limit_ms(self) -> float:
        """Mean latency above which the plan is slow."""
        return min(max(_SLOW * self._expected_ms, self._plain_ms), _TOO_SLOW * self._expected_ms)

    @property
    def _gaps(self) -> tuple[int, int]:
        """Least and greatest number of requests between two trials, unless other work has eased."""
        if not self.plain_serves:
            return _PLAIN_GAPS
        busy = self._others and self._others.counted and self._others.is_busy() is not False
        return _BUSY_GAPS if busy else _PLAN_GAPS

    @property
    def _next_gap(self) -> int:
        """Number of requests before the next trial: none before the first one of the one-thread session."""
        least, most = self._gaps
        return min(max(self._gap, least if self.plain_serves else 0), most)

    def _try_other(self) -> None:
        """Begin a trial of the other engine, unless the last one was too recent."""
        gap, excess = self._next_gap, _EXCESS
        if self._eased:
            gap, excess = min(_PLAIN_GAPS[0] << self._vain, _PLAIN_GAPS[1]), _EXCESS_CHANGED
        elif not self.plain_serves and self._least_ms > _CHANGED * self._tried_ms:
            gap, excess = 0, _EXCESS_CHANGED
        if self._since >= gap and self._excess_ms <= excess * self._since_ms:
            self._tried_ms = self._mean_ms
            self.diverts, self._cold, self._excess_ms = not self.plain_serves, self._trial.warm_up, 0.0

    def _end_trial(self, now_s: float) -> None:
        self._excess_ms += max(0.0, self._total_ms - self._count * self._mean_ms)
        self._since, self._since_ms = 0, 0.0
        least, most = self._gaps
        self._gap = min(max(2 * self._next_gap, least), most)
        mean_ms = self._mean_and_restart()
        if self._is_faster(mean_ms):
            self._change(mean_ms)
            self._probation = _PROBATION
            return
        self.diverts = self.plain_serves
        if self.plain_serves:
            self._lose(now_s)
            return
        self._plain_ms = min(self._plain_ms or mean_ms, mean_ms)
        if self._expected_ms == math.inf:
            self._expected_ms = self._mean_ms
        elif self._gap == most:  # after many trials: both take longer than when they were timed
            self._expected_ms *= mean_ms / max(self._limit_ms, 1e-9)
            self._plain_ms, self._slow = mean_ms, 0

    def _is_faster(self, other_ms: float) -> bool:
        return other_ms < self._mean_ms * (_RETURN if self.plain_serves else 1.0)

    def _change(self, other_ms: float) -> None:
        """Let the other engine serve, whose mean latency is given."""
        self._other_ms, self._mean_ms = self._mean_ms, other_ms
        self._probation = 0
        self.diverts = self.plain_serves = not self.plain_serves
        self._slow = self._calm = self._vain = 0
        self._others, self._eased = None, False
        self._tried_ms = math.inf

    def _lose(self, now_s: float) -> None:
        """Count a trial that the plan has lost."""
        if not self._lost:
            self._lost_s = now_s
        self._lost += 1
        self._vain += self._eased
        self._others, self._eased = None, False
        self.contradicted |= self._lost >= _LOST and now_s - self._lost_s >= _LOST_S

    def _mean_and_restart(self) -> float:
        """Return the mean latency of the window or trial that ends, and begin the next one."""
        mean_ms = self._total_ms / self._count
        self._count, self._total_ms = 0, 0.0
        return mean_ms
