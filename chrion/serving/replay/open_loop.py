"""Open-loop replay: every request is sent at its time, whether earlier ones have been answered or not.

Response times count from the time at which a request was due, so that a client that falls behind does not make the
server look faster.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from chrion.common.files import parse_json
from chrion.errors import ChrionError, ServerError
from chrion.serving.replay.http_client import HttpAnswer, HttpClient
from chrion.serving.replay.target import HttpCall
from chrion.serving.simulator.averages import BinnedAverage
from chrion.serving.simulator.histograms import BINS, Counts, bin_index, quantile
from chrion.serving.simulator.metrics import RequestMetrics
from chrion.serving.simulator.requests import Details, Requests
from chrion.serving.simulator.workload import Workload

#: Statuses with which a server refuses a request that it could serve at another time.
REFUSED = (429, 503, 504)
#: Requests that are sent without a pause if the client is behind: answers are read after so many, or they would seem
#: slow.
_BURST = 32
#: Time until the first request is due, in which the first connections are opened.
_BEGIN_S = 0.05
#: Parts of the header ``Server-Timing``, in ms.
TIMING = re.compile(r"(queue|load|compute);dur=([0-9.]+)")
_NAN = float("nan")


@dataclass(frozen=True, slots=True)
class LimitedWorkload:
    """The first requests of a workload, as many as are given."""

    whole: Workload
    requests: int

    @property
    def details(self) -> Details | None:
        """The figures of single requests of the whole workload."""
        return self.whole.details

    def chunks(self) -> Iterator[Requests]:
        """Yield chunks of requests; see :class:`chrion.serving.simulator.workload.Workload`."""
        remaining = self.requests
        for times, models, details in self.whole.chunks():
            count = min(remaining, len(times))
            remaining -= count
            if count:
                yield Requests(times[:count], models[:count], details.rows(np.arange(count)) if details else None)
            if not remaining:
                return


def count_requests(workload: Workload, limit: float = math.inf, until_ms: float = math.inf) -> int:
    """Return the number of requests before a time, at most ``limit``.

    The requests are drawn to count them: the number of a scaled trace's requests is only an expected value.
    """
    count = 0
    for times, _, _ in workload.chunks():
        before = int(np.searchsorted(times, until_ms))
        count += before
        if before < len(times) or count >= limit:
            break
    return int(min(count, limit))


@dataclass(slots=True)
class Outcome:
    """What a replay has measured; the metrics are those of a simulation."""

    metrics: RequestMetrics
    memory: BinnedAverage = field(default_factory=BinnedAverage)
    #: Requests that were refused, and that failed, by reason.
    refused: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    #: Histogram of the times by which requests were sent late.
    lags: Counts = field(default_factory=lambda: np.zeros(BINS, np.int64))

    def lag_ms(self, share: float) -> float:
        """Return a quantile of the times by which requests were sent late."""
        return float(quantile(self.lags, share))


class OpenLoop:
    """A replay.

    Args:
        client: The client of the server.
        calls: What is sent for each model.
        outcome: Receives what is measured.
        timeout_s: Time after which a request is given up.
        gone_s: Time for which connections fail, without any answer, after which the server is given up.
    """

    def __init__(
        self, client: HttpClient, calls: Sequence[HttpCall], outcome: Outcome, timeout_s: float, gone_s: float
    ) -> None:
        self._client = client
        self._calls = calls
        self._outcome = outcome
        self._timeout_s, self._gone_s = timeout_s, gone_s
        self._began_s = 0.0
        #: Time of the first connection that failed after the last answer.
        self._failed_s = math.inf
        self._gone = ""
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, workload: Workload, progress: Callable[[int], None]) -> None:
        """Send all requests, and wait for their answers.

        Raises:
            ServerError: The server stopped to answer.
        """
        loop = asyncio.get_running_loop()
        self._began_s = loop.time() + _BEGIN_S
        number = 0
        try:
            for times, models, details in workload.chunks():
                if details:
                    self._outcome.metrics.objectives.add(details)
                for due_ms, model in zip(times.tolist(), models.tolist(), strict=True):
                    await self._wait_until(due_ms, number)
                    task = asyncio.create_task(self._send(number, model, due_ms))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                    number += 1
                    progress(number)
            while self._tasks:
                self._check()
                await asyncio.wait(self._tasks, timeout=1.0)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        self._check()
        self._outcome.metrics.flush(force=True)

    def now_ms(self) -> float:
        """Return the time since the beginning."""
        return (asyncio.get_running_loop().time() - self._began_s) * 1000

    async def _wait_until(self, due_ms: float, number: int) -> None:
        self._check()
        delay_ms = due_ms - self.now_ms()
        if delay_ms > 0:
            await asyncio.sleep(delay_ms / 1000)
        elif number % _BURST == 0:
            await asyncio.sleep(0)

    def _check(self) -> None:
        if self._gone:
            answered = int(self._outcome.metrics.arrivals.sum())
            text = f"no answer for {self._gone_s:g} s: {self._gone} ({answered} requests had ended before)"
            raise ServerError(f"the connection to the server was lost: {text}")

    async def _send(self, number: int, model: int, due_ms: float) -> None:
        call, outcome = self._calls[model], self._outcome
        start_ms = end_ms = lag_ms = _NAN
        cold = False

        def note_lag() -> None:
            nonlocal lag_ms
            lag_ms = self.now_ms() - due_ms

        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self._client.request("POST", call.path, call.body, call.headers, note_lag)
        except TimeoutError:
            outcome.failed[f"no answer within {self._timeout_s:g} s"] += 1
        except OSError as error:
            reason = error.strerror or str(error) or type(error).__name__
            outcome.failed[reason] += 1
            self._note_failure(reason)
        else:
            self._failed_s, self._gone = math.inf, ""
            if answer.status == 200:
                end_ms = self.now_ms()
                parts = dict(TIMING.findall(answer.headers.get("server-timing", "")))
                start_ms = max(due_ms, end_ms - float(parts.get("compute", 0.0)))
                cold = "load" in parts
            else:
                kind = outcome.refused if answer.status in REFUSED else outcome.failed
                kind[f"{answer.status} {error_text(answer)}"] += 1
        if math.isnan(lag_ms):  # given up before it was sent
            note_lag()
        outcome.lags[bin_index(np.array([max(0.0, lag_ms)]))] += 1
        outcome.metrics.record((number, model, 0, due_ms, start_ms, end_ms, cold, model))
        outcome.metrics.flush()

    def _note_failure(self, reason: str) -> None:
        now_s = asyncio.get_running_loop().time()
        self._failed_s = min(self._failed_s, now_s)
        if now_s - self._failed_s > self._gone_s:
            self._gone = reason


@contextlib.asynccontextmanager
async def repeated(work: Callable[[], Awaitable[None]], interval_s: float) -> AsyncIterator[None]:
    """Await ``work()`` in intervals while the block runs; errors of the server are ignored."""

    async def repeat() -> None:
        while True:
            with contextlib.suppress(ChrionError):
                await work()
            await asyncio.sleep(interval_s)

    task = asyncio.create_task(repeat())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def error_text(answer: HttpAnswer) -> str:
    """Return the message of an answer that is an error; empty if it has none."""
    try:
        return str(parse_json(answer.body)["error"])[:200]
    except (KeyError, TypeError, ValueError):
        return ""
