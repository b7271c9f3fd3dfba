"""Selection between the plain session and a plan on live requests, where timings in the tuning process are uncertain.

The requests of the application itself disturb the tuning process, and it disturbs them. On live requests both engines
take turns under the same conditions, in pairs of blocks of a few requests. Every second pair is in the opposite order,
so that a drift favours none, and so that the engine changes only once in a pair. The mean latencies of blocks decide by
the test of :mod:`chrion.common.sign_test`; if it does not, the plain session is selected.

**Regret.** Both engines have the same number of blocks, at most ``MOST_PAIRS`` and without noise five, and a block
lasts :data:`_LONG_S` at most, or its last request. So a plan that takes r times as long as the plain session costs at
most the (r - 1) / 2r-th part of the time of the comparison. If r is above two, its blocks end after two requests.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

from chrion.common.sign_test import MOST_PAIRS, is_faster

#: What :meth:`LiveSelection.note` says while an engine is not selected.
COMPARING = "a plan is compared with the plain session on live requests: some hundreds of them decide"
#: Time in seconds since the other engine's last request from which on requests count. The threads of a plain session
#: spin on after its last request: the first requests of a plan took 1.5 to 2.5 times as long as later ones, for 60 to
#: 90 ms (GRUs 160 wide, two cores, no pauses).
_UNSETTLED_S = 0.09
#: Requests of a block that count, and their total latency at least, in ms (choices, not measured). A block ends earlier
#: when it has taken so many seconds, of which pauses between requests are a part.
_REQUESTS, _LEAST_MS, _LONG_S = 6, 20.0, 0.1
#: A block of the plan ends early if this number of requests takes longer than those of the plain session by this factor
#: (a choice, not measured).
_FEW_REQUESTS, _FAR_SLOWER = 2, 2.0


class LiveSelection:
    """Comparison of a plan with the plain session on live requests, until one of them is selected.

    Args:
        plan: The engine of the plan, which is open; engines know this class, which only keeps it.
        on_end: Called once with this object, by a thread that serves a request, when one is selected.
        share: The plan wins a pair if its mean latency is at most this share of the plain session's.

    Attributes:
        other: The engine of the plan.
        share: The same.
        diverts: Whether the next request goes to the plan.
        plan_wins: Whether the plan is selected; None before the end.
    """

    #: As for :class:`chrion.runtime.live_comparison.LiveComparison`.
    needless = False

    def __init__(self, plan: Any, on_end: Callable[[LiveSelection], None], share: float) -> None:
        self.other = plan
        self.diverts = False
        self.plan_wins: bool | None = None
        self._on_end, self.share = on_end, share
        #: Mean latencies of the blocks of complete pairs, in ms: of the plain session, and of the plan.
        self._plain_ms: list[float] = []
        self._plan_ms: list[float] = []
        #: Mean latency of the first block of the current pair; None before its end.
        self._first_ms: float | None = None
        #: Latencies of the current block, and the start of its first request.
        self._block_ms: list[float] = []
        self._block_s = 0.0
        #: End of the last request before the engine changed.
        self._changed_s = -math.inf

    @property
    def note(self) -> str:
        """What the session does at present, for :meth:`chrion.HybridSession.explain`."""
        if self.plan_wins is not None:
            return ""
        return COMPARING

    @property
    def plain_ms(self) -> float:
        """Median over blocks of the plain session's mean latency, in ms."""
        return statistics.median(self._plain_ms)

    @property
    def plan_ms(self) -> float:
        """Median over blocks of the plan's mean latency, in ms."""
        return statistics.median(self._plan_ms)

    @property
    def pairs(self) -> int:
        """Number of complete pairs."""
        return min(len(self._plain_ms), len(self._plan_ms))

    def record(self, start_s: float, end_s: float, *, diverted: bool) -> None:
        """Record a request that was alone.

        Args:
            start_s: Its start, in seconds of any clock.
            end_s: Its end.
            diverted: Whether the plan has served it.
        """
        if self.plan_wins is not None or diverted is not self.diverts:
            return  # it began before a change
        if start_s - self._changed_s < _UNSETTLED_S:
            return
        if not self._block_ms:
            self._block_s = start_s
        self._block_ms.append((end_s - start_s) * 1e3)
        if self._block_is_over(end_s - self._block_s):
            self._end_block(end_s)

    def end(self) -> None:
        """Send no further requests to the plan: it has failed, or another decision was made."""
        self.plan_wins, self.diverts = bool(self.plan_wins), False

    def _block_is_over(self, took_s: float) -> bool:
        count, total_ms = len(self._block_ms), sum(self._block_ms)
        if self.diverts and count >= _FEW_REQUESTS:  # the first block of all is the plain session's
            reference_ms = self._plain_ms[-1] if self._first_ms is None else self._first_ms
            if total_ms > _FAR_SLOWER * count * reference_ms:
                return True
        return took_s >= _LONG_S or (count >= _REQUESTS and total_ms >= _LEAST_MS)

    def _end_block(self, now_s: float) -> None:
        mean_ms, self._block_ms = statistics.fmean(self._block_ms), []
        if self._first_ms is None:
            self._first_ms = mean_ms
            self.diverts, self._changed_s = not self.diverts, now_s
            return
        plan_ms, plain_ms = (mean_ms, self._first_ms) if self.diverts else (self._first_ms, mean_ms)
        self._first_ms = None
        self._plain_ms.append(plain_ms)
        self._plan_ms.append(plan_ms)
        faster = is_faster(zip(self._plan_ms, self._plain_ms, strict=True), self.share)
        if faster is not None or len(self._plan_ms) >= MOST_PAIRS:
            self.diverts = False
            self.plan_wins = bool(faster)
            self._on_end(self)
