"""The thread that runs the iterations of a generator.

Only this thread changes the scheduler and the requests, and takes caches back; the thread that runs the first batch of
a request gets its cache. Other threads append to queues that take no lock, and wake it: so an interrupt, a signal
handler, a fork or a callback, whatever the moment, finds nothing half done and waits for nothing. With one batch in
flight the thread runs it itself; with several, each has a thread of its own, and a request that arrives while one of
them is idle does not wait for the others.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

from chrion.errors import GenerationError
from chrion.generation.cache import CacheManager
from chrion.generation.iteration import DecoderEngine, Outcome, Work
from chrion.generation.requests import GenerationRequest, of_unknown_context
from chrion.generation.scheduling import Batch, IterationScheduler, Share
from chrion.generation.session_threads import IterationCores
from chrion.generation.streams import FINISH_REASONS, Stream
from chrion.machine.cores import pin

log = logging.getLogger(__name__)

_FORKED = (
    "the generator was opened before the process was forked, and nothing generates in the child: open one in the child"
)


@dataclass(slots=True)
class _Flight:
    """A batch in flight."""

    batch: Batch
    requests: Sequence[GenerationRequest]
    #: What it has returned, if it has.
    outcomes: list[Outcome] | None = None


@dataclass(slots=True)
class Counts:
    """Numbers of a loop since it began."""

    #: Iterations that have returned, and the requests in them.
    iterations: int = 0
    iteration_requests: int = 0
    generated_tokens: int = 0
    finished_requests: int = 0
    #: The requests that have ended by their ``finish_reason``.
    finish_reasons: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FINISH_REASONS, 0))


class IterationLoop:
    """The thread of a generator, and its requests. It runs until :meth:`close`.

    Args:
        engine: The decoder.
        scheduler: A scheduler without requests.
        caches: The caches of its requests.
        context: The most tokens that the model has positions for; 0 if that is not known.
        cores: The cores of the engine, if there is one batch in flight; released with the loop.

    Raises:
        RuntimeError: The system refuses a thread.
    """

    def __init__(
        self,
        engine: DecoderEngine,
        scheduler: IterationScheduler,
        caches: CacheManager,
        context: int,
        cores: IterationCores | None = None,
    ) -> None:
        self.engine, self.scheduler, self.caches = engine, scheduler, caches
        self.counts = Counts()
        #: Held while arrivals are taken and batches are selected. Iterations do not begin while it is held.
        self.gate = threading.Lock()
        self._context, self._cores = context, cores
        self._requests: dict[int, GenerationRequest] = {}
        self._arrivals: deque[GenerationRequest] = deque()
        self._cancelled: deque[int] = deque()
        self._leaving: GenerationRequest | None = None  # one that ends in this moment
        self._flights: deque[_Flight] = deque()
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._jobs: SimpleQueue[_Flight | None] = SimpleQueue()
        #: Why no request is accepted; empty while the loop runs.
        self.refused = ""
        self._failure: GenerationError | None = None  # why it ended, if it was not closed
        self._over = False  # the thread has ended, or will end without reading its queues again
        self._workers = scheduler.n_workers if scheduler.n_workers > 1 else 0
        self._threads: list[threading.Thread] = []
        try:
            for target in (*[self._work] * self._workers, self._run):
                thread = threading.Thread(target=target, name="chrion-generation", daemon=True)
                thread.start()
                self._threads.append(thread)
        except BaseException:  # the system refuses a thread, or an interrupt
            self.request_close()
            self._end_workers()
            raise

    @property
    def requests(self) -> int:
        """The requests that run or wait."""
        return len(self._arrivals) + len(self._requests)

    @property
    def waiting(self) -> int:
        """The requests that have not begun."""
        return len(self._arrivals) + self.scheduler.waiting

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request whose slots the scheduler has."""
        self._arrivals.append(request)
        self._wake.put(None)
        if self._over:  # it ended after the caller had looked
            self._fail_rest()

    def cancel(self, number: int, stream: Stream) -> None:
        """End a request and its stream; its slots are free after the iteration that runs now."""
        self._cancelled.append(number)
        self._wake.put(None)
        stream.finish("cancelled")  # the thread repeats that if this call is interrupted

    def request_close(self) -> None:
        """Cancel all requests, refuse further ones, and end the iteration that runs, without waiting for it."""
        self.refused = self.refused or "the generator is closed"
        self.engine.stop()
        self._wake.put(None)

    def close(self, until: float | None = None) -> None:
        """Close the loop and wait for its end, unless this is one of its threads.

        Args:
            until: The time of ``time.monotonic()`` at which the wait ends.
        """
        self.request_close()
        if threading.current_thread() in self._threads:  # a callback closes the loop; the others wait for this thread
            return
        for thread in self._threads:
            thread.join(None if until is None else max(until - time.monotonic(), 0))

    def after_fork(self) -> None:
        """Fail the requests in a forked child, where no thread serves them."""
        self.refused, self._over = _FORKED, True
        self._threads, self._wake = [], SimpleQueue()
        leaving = [] if self._leaving is None else [self._leaving]
        for request in (*self._requests.values(), *self._arrivals, *leaving):
            request.stream.after_fork(GenerationError(_FORKED))
        self._requests.clear()
        self._arrivals.clear()

    def _run(self) -> None:
        """Run iterations until the loop is closed. An unexpected error closes it and fails all requests."""
        try:
            if self._cores is not None:
                pin(self._cores.caller)
            self._iterate()
        except BaseException as error:
            log.exception("the generator failed")
            self.refused = f"the generator failed: {error}"
            self._failure = GenerationError(self.refused)
            for number, request in self._requests.items():
                self.caches.release(number)
                request.cache = None  # a batch in flight still has the request
                self._finish(request, "error", self._failure)
            self._requests.clear()
            self.caches.give_back()
        finally:
            self._over = True
            self._end_workers()
            self._fail_rest()
            if self._cores is not None:
                self._cores.release()

    def _iterate(self) -> None:
        """Take what has arrived, start batches, and return their tokens, until the loop is closed."""
        while True:
            with self.gate:
                self._take_queued()
                while batch := self.scheduler.select():
                    self._flights.append(_Flight(batch, [self._requests[share.number] for share in batch]))
                    if self._workers:
                        self._jobs.put(self._flights[-1])
            if self._flights and not self._workers:
                self._run_batch(self._flights[0])
            if self._flights and self._flights[0].outcomes is not None:  # in the order of their selection
                self._return(self._flights.popleft())
            elif self._flights or not self.refused:
                self._wake.get()
            else:
                return

    def _take_queued(self) -> None:
        """Take arrivals and cancellations; if the loop is closed, cancel all requests."""
        while not self._wake.empty():  # no other thread takes from it
            self._wake.get_nowait()
        while self._arrivals:
            request = self._arrivals[0]
            self._requests[request.number] = request  # before it leaves the queue: it counts at every moment
            self.scheduler.submit(request.number, len(request.prompt), request.max_new_tokens)
            self._arrivals.popleft()
        while self._cancelled:
            self._end(self._cancelled.popleft())
        if self.refused:
            for number in [*self._requests]:
                self._end(number)

    def _end(self, number: int) -> None:
        """Cancel a request, if it has not left."""
        request = self._requests.get(number)
        if request is not None:
            request.reason = request.reason or "cancelled"
            request.stream.finish("cancelled")
            self._leave(self.scheduler.cancel(number))

    def _leave(self, numbers: Sequence[int]) -> None:
        """Release the slots of requests and end their streams, and then give back the memory of their caches."""
        for number in numbers:
            self.caches.release(number)
            self._leaving = self._requests[number]  # before it leaves the others: a child forked meanwhile finds it
            request = self._requests.pop(number)
            held = ""
            try:
                if request.text is not None:
                    held = request.text.finish()
                    if request.text.stopped and request.reason == "length":  # by the text that was held back
                        request.reason = "stop"
            except BaseException as error:  # noqa: BLE001 - a tokenizer may raise what it likes
                request.reason, request.error = "error", GenerationError(f"no end of the text: {error}")
            self._finish(request, request.reason, request.error, held)
            self._leaving = None
        if numbers:
            self.caches.give_back()

    def _finish(self, request: GenerationRequest, reason: str, error: Exception | None = None, text: str = "") -> None:
        """End the stream of a request and count it."""
        self.counts.finished_requests += 1
        request.stream.finish(reason, error, text)
        self.counts.finish_reasons[request.stream.finish_reason] += 1

    def _work(self) -> None:
        """Run batches in a thread of their own."""
        while (flight := self._jobs.get()) is not None:
            self._run_batch(flight)
            del flight  # its requests keep the generator alive
            self._wake.put(None)

    def _end_workers(self) -> None:
        for _ in range(self._workers):
            self._jobs.put(None)

    def _fail_rest(self) -> None:
        """End requests that arrived while the loop ended."""
        while self._arrivals:
            try:
                request = self._arrivals.popleft()
            except IndexError:  # another thread has taken the last one
                return
            if not request.stream.finish_reason:  # it may also have been among the requests
                self._finish(request, "error" if self._failure else "cancelled", self._failure)

    def _run_batch(self, flight: _Flight) -> None:
        """Run one iteration; an error of the whole batch is the error of each of its requests."""
        try:
            flight.outcomes = self._outcomes(flight)
        except BaseException as error:  # noqa: BLE001 - the loop must go on for other requests
            flight.outcomes = [GenerationError(f"the iteration failed: {error}")] * len(flight.requests)

    def _outcomes(self, flight: _Flight) -> list[Outcome]:
        """Return what an iteration gives each request: an error without running it, if its cache has no memory."""
        works: list[Work] = []
        errors: dict[int, Outcome] = {}
        for at, (share, request) in enumerate(zip(flight.batch, flight.requests, strict=True)):
            if request.cache is None:
                try:
                    request.cache = self.caches.get(request.number, request.capacity)
                except Exception as error:  # noqa: BLE001 - the others have their caches
                    message = f"no memory for the keys and values of {request.capacity} tokens: {error}"
                    errors[at] = GenerationError(message)
                    continue
            works.append(request.work(share, request.cache))
        outcomes = [*self.engine.run(works)] if works else []
        if len(outcomes) != len(works):
            raise ValueError(f"the engine returned {len(outcomes)} outcomes for {len(works)} requests")
        for at, outcome in errors.items():
            outcomes.insert(at, outcome)
        return outcomes

    def _return(self, flight: _Flight) -> None:
        """Give the requests of a batch their tokens, and take back the batch."""
        if self.refused:  # the iteration was ended, and its errors are not those of the requests
            self._take_queued()
        for share, request, outcome in zip(flight.batch, flight.requests, flight.outcomes or (), strict=True):
            if not request.reason:
                self._advance(share, request, outcome)
        self.counts.iterations += 1
        self.counts.iteration_requests += len(flight.batch)
        self._leave(self.scheduler.complete([request.number for request in flight.requests if request.reason]))

    def _advance(self, share: Share, request: GenerationRequest, outcome: Outcome) -> None:
        if isinstance(outcome, Exception):
            request.reason, request.error = "error", outcome if self._context else of_unknown_context(outcome, request)
            return
        request.past += share.tokens
        if outcome is not None:
            try:
                self.counts.generated_tokens += request.append(outcome)
            except BaseException as error:  # noqa: BLE001 - a tokenizer may raise what it likes
                request.reason, request.error = "error", GenerationError(f"no next token: {error}")
