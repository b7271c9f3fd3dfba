"""The core of the server: carries out what the manager decides, for requests of every protocol.

All state belongs to the thread of the event loop. One thread opens and closes sessions, in the order of the manager's
actions, so that memory is released before it is used again. As many threads as there are cores and slots run batches.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from chrion.common.units import format_ms
from chrion.errors import ModelError
from chrion.graph.ort_sessions import first_line
from chrion.runtime.options.terminable import TerminableRunOptions
from chrion.runtime.shared_arena import SharedArena
from chrion.serving.manager import Action, LiveManager, Load, Reason, Refuse, Request, Run, Unload
from chrion.serving.manager.device_memory import TICK_MS
from chrion.serving.manager.records import HOST
from chrion.serving.manager.residency import Place
from chrion.serving.server import batching
from chrion.serving.server.block_runs import BlockJob, BlockRuns, drop_reason
from chrion.serving.server.core_records import Pending, Result, Served
from chrion.serving.server.failures import (
    ModelRemoved,
    RequestFailure,
    Status,
    describe_delay,
    describe_need,
    refusal,
)
from chrion.serving.server.grace import Grace
from chrion.serving.server.logs import run_about
from chrion.serving.server.repository import FILES_CHANGED, Key, ServedVersion
from chrion.serving.server.request_memory import ByteAccount
from chrion.serving.server.run_watch import RunWatch, WatchedRun
from chrion.serving.server.sessions import OpenedFiles, Session, is_out_of_memory, pin_worker, run_failure
from chrion.serving.server.statistics import RequestTiming
from chrion.serving.server.tensors import Array, TensorSpec, check_request, unequal_sizes
from chrion.serving.server.trials import try_session

log = logging.getLogger("chrion.server")

#: Memory of requests whose release leaves gaps that are worth returning to the system, in bytes: several of the blocks
#: of 4 MB that :func:`chrion.machine.allocator.return_large_blocks` returns at once.
_LARGE_BYTES = 1 << 24
_DRAINING = "the server is shutting down"
#: The event of a version that cannot be served, in the log.
CANNOT_BE_SERVED = "model cannot be served"


class ServingCore:
    """Serves requests for the models that have been added.

    Args:
        manager: The manager, with no models.
        cores: The CPU cores that the manager leases.
        slots: The accelerator's slots.
        provider: The accelerator, if there is one.
        request_bytes: Limit of the memory of requests in flight.
        max_run_ms: Time that a run may take, unless its model has a limit of its own.

    Attributes:
        models: The versions that are served, by name and version.
        account: The memory of requests in flight.
        blocks: The requests of models in blocks.
        lane_busy_ms: Time for which each core was leased.
        slot_busy_ms: Time for which the accelerator's slots were taken.
        refused: Number of refused requests by reason.
        memory_changes: Number of loads that began, ended or failed, and of unloads.
    """

    def __init__(  # noqa: PLR0913 - what a server is made of
        self,
        manager: LiveManager,
        cores: Sequence[int],
        *,
        slots: int = 0,
        provider: tuple[str, Mapping[str, Any]] | None = None,
        request_bytes: int = 1 << 30,
        max_run_ms: float = math.inf,
    ) -> None:
        self.manager = manager
        self.models: dict[Key, Served] = {}
        #: Versions that are tried before they replace those of ``models``.
        self.candidates: dict[Key, Served] = {}
        self.account = ByteAccount(request_bytes)
        self._arena = SharedArena(manager.budgets[HOST] + request_bytes)
        self._swept = True
        self.blocks = BlockRuns(cores, drop_late=manager.policies.admission == "deadline")
        self.lane_busy_ms = dict.fromkeys(cores, 0.0)
        self.slot_busy_ms = 0.0
        self.refused: dict[Reason, int] = dict.fromkeys(Reason, 0)
        self.memory_changes = 0
        self.draining = False
        self.started_s = time.time()
        self._provider = provider
        self._max_run_ms = max_run_ms
        self._by_number: dict[int, Served] = {}
        self._pending: dict[int, Pending] = {}
        self._watch = RunWatch()
        self._closed = False
        self._ids = itertools.count()
        self._loader = ThreadPoolExecutor(1, "chrion-loader")
        self._workers = ThreadPoolExecutor(max(1, len(cores) + slots), "chrion-worker")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    def start(self) -> None:
        """Begin to use free memory; called in the event loop."""
        self._loop = asyncio.get_running_loop()
        self._ticker = asyncio.create_task(self._tick())

    async def close(self, grace: Grace) -> None:
        """Refuse new requests, serve those in flight as long as the grace lasts, and release everything.

        Runs that have not ended by then are terminated.
        """
        self.draining = True
        self.manager.trials.clear()
        for served in self._by_number.values():
            served.attempted.set()
        if not await grace.wait_for(self._idle):
            for pending in list(self._pending.values()):
                self._fail(pending, RequestFailure(Status.UNAVAILABLE, _DRAINING))
        self._closed = True
        self._watch.close()
        for timer in (self._ticker, self._timer):
            if timer:
                timer.cancel()
        self._workers.shutdown(wait=False, cancel_futures=True)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._loader, self.blocks.close)
        for served in list(self._by_number.values()):
            if served.session:
                await loop.run_in_executor(self._loader, served.session.close)
        self._loader.shutdown(wait=False, cancel_futures=True)
        self._arena.close()

    def add(self, version: ServedVersion) -> Served:
        """Serve a version, in place of an earlier one of the same name and number."""
        self._compare(version)
        self.remove(version.key)
        served = self.models[version.key] = self._register(version)
        if version.managed.pinned and self.manager.fits(served.number):
            self._apply(self.manager.request(_now_ms(), served.number))
        return served

    def try_out(self, served: Served, *, keep: bool = False) -> None:
        """Open a version and run it once, after the loads that requests wait for; then ``served.attempted`` is set.

        Args:
            served: The version.
            keep: Whether it stays in memory, as after a request.
        """
        if served.attempted.is_set():
            return
        if not self.manager.fits(served.number):
            self._reject_size(served)
        elif keep and self.place(served)[0] is Place.ABSENT:
            self._apply(self.manager.request(_now_ms(), served.number))
        else:
            self._apply(self.manager.try_out(_now_ms(), served.number))

    def propose(self, version: ServedVersion) -> Served:
        """Try a version, which is to replace one that is served until then; ends with ``replace`` or ``reject``."""
        current = self.models[version.key]
        self.reject(version.key)
        served = self.candidates[version.key] = self._register(version)
        for one in (current, served):  # in memory for one of them, both have to give way
            self.manager.pin(one.number, pinned=False)
        self.try_out(served, keep=self.place(current)[0] is Place.RESIDENT)
        return served

    def replace(self, served: Served) -> None:
        """Serve a version that has been tried."""
        key = served.version.key
        del self.candidates[key]
        self._compare(served.version)
        self.remove(key)
        self.manager.pin(served.number, pinned=served.version.managed.pinned)
        self.models[key] = served

    def reject(self, key: Key) -> None:
        """Give up a version that was to replace another one, if there is one."""
        candidate, current = self.candidates.pop(key, None), self.models.get(key)
        if candidate is None:
            return
        self._discard(candidate)
        if current is not None:
            self.manager.pin(current.number, pinned=current.version.managed.pinned)

    def remove(self, key: Key) -> None:
        """Stop serving a version; running requests are served."""
        served = self.models.pop(key, None)
        self.reject(key)
        if served is not None:
            log.info("removed", extra=_fields(served))
            self._discard(served)

    def _compare(self, version: ServedVersion) -> None:
        """Log if a version has other inputs or outputs than the one that it replaces, to which requests are sent."""
        current = self.models.get(version.key)
        if current and (current.version.inputs, current.version.outputs) != (version.inputs, version.outputs):
            interfaces = {"before": current.version.interface(), "now": version.interface()}
            log.warning("inputs or outputs have changed", extra=_fields(current, **interfaces))

    def _register(self, version: ServedVersion) -> Served:
        number = self.manager.add(_now_ms(), version.managed)
        served = self._by_number[number] = Served(version, number)
        return served

    def _discard(self, served: Served) -> None:
        served.removed = True
        served.failure = served.failure or Reason.REMOVED.value
        served.attempted.set()
        self._apply(self.manager.remove(_now_ms(), served.number))
        self._forget_if_unused(served)

    def is_ready(self, served: Served) -> bool:
        """Return whether requests for a version can be served: it has run, and is in memory or can be loaded again."""
        return served.tried and not served.failure and not self.draining

    @property
    def busy_ms(self) -> dict[int, float]:
        """Time for which each core was leased, or ran blocks."""
        return {core: ms + self.blocks.busy_ms(core) for core, ms in self.lane_busy_ms.items()}

    @property
    def in_flight(self) -> int:
        """Number of requests without an answer: they wait or run."""
        return len(self._pending)

    def waiting_for(self, served: Served) -> int:
        """Return the number of a version's requests that have not started."""
        return self.manager.waiting(served.number) + self.blocks.waiting().get(served.number, 0)

    def place(self, served: Served) -> tuple[Place, str]:
        """Return the state of a version, and the variant that is in memory or being loaded."""
        place = self.manager.place(served.number)
        if place is Place.ABSENT:
            return place, ""
        entry = self.manager.entries[served.number]
        return place, entry.model.variants[entry.variant].name

    async def infer(
        self,
        served: Served,
        feeds: Mapping[str, tuple[str, Array]],
        outputs: Sequence[str] = (),
        timeout_ms: float = math.inf,
        priority: int = 0,
    ) -> Result:
        """Serve a request; it counts as a failure if this fails, else by :meth:`Result.counted`.

        Args:
            served: The model.
            feeds: Datatype and array of each input.
            outputs: Names of the outputs to return; empty for all.
            timeout_ms: Time within which the request must start.
            priority: Its place in the queue of its model: 1 is the first, and 0, for none, the last.

        Raises:
            RequestFailure: The request does not fit the model, is refused, or fails.
            asyncio.CancelledError: The client has left.
        """
        arrival = _now_ms()
        try:
            chosen = check_request(served.version.inputs, served.version.outputs, feeds, outputs)
            return await self._queue(served, feeds, chosen, timeout_ms, arrival, priority)
        except RequestFailure as failure:
            replacement = self.models.get(served.version.key)
            if isinstance(failure, ModelRemoved) and replacement is not None and replacement is not served:
                return await self.infer(replacement, feeds, outputs, timeout_ms - (_now_ms() - arrival), priority)
            self.refused[Reason.REMOVED] += isinstance(failure, ModelRemoved)
            served.statistics.fail.add(_now_ms() - arrival)
            raise

    async def _queue(  # noqa: PLR0913, PLR0917 - of one request
        self,
        served: Served,
        feeds: Mapping[str, tuple[str, Array]],
        outputs: tuple[TensorSpec, ...],
        timeout_ms: float,
        arrival: float,
        priority: int,
    ) -> Result:
        if self.draining:
            raise RequestFailure(Status.UNAVAILABLE, _DRAINING, retry_s=1.0)
        rows, batch_key = batching.rows_and_key(served.version.managed.max_batch, feeds)
        deadline = arrival + min(timeout_ms, served.version.settings.timeout_ms)
        request = Request(next(self._ids), served.number, arrival, deadline, batch_key, rows, priority)
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        pending = self._pending[request.id] = Pending(served, request, feeds, outputs, future)
        if self.place(served)[0] is not Place.RESIDENT:
            served.cold[request.id] = pending
        self._idle.clear()
        self._apply(self.manager.submit(arrival, request, self.blocks.waiting()))
        try:
            return await future
        except asyncio.CancelledError:
            served.statistics.cancelled.add(_now_ms() - arrival)
            self._apply(self.manager.cancel(_now_ms(), request))
            if pending.run:
                pending.run.end_if_unwanted()
            raise
        finally:
            self._pending.pop(request.id, None)
            served.cold.pop(request.id, None)
            if not self._pending:
                self._idle.set()

    def _apply(self, actions: Sequence[Action]) -> None:
        """Carry out actions of the manager; none after the end, when runs that were terminated still report."""
        if self._closed:
            return
        for action in actions:
            if isinstance(action, Refuse):
                self._refuse(action)
            elif isinstance(action, Run):
                self._run(action)
            elif isinstance(action, Load):
                self._load(action)
            else:
                self._unload(action)
        self._set_timer()

    def _refuse(self, action: Refuse) -> None:
        self.refused[action.reason] += action.reason is not Reason.REMOVED  # its replacement may answer
        pending = self._pending.get(action.request.id)
        if pending is not None:
            served, retry_ms = pending.served, action.retry_ms
            if action.reason is Reason.QUEUE_FULL:
                retry_ms = max(retry_ms, self.blocks.retry_ms(served.number))
            detail = served.failure if action.reason is Reason.LOAD_FAILED else ""
            if action.reason is Reason.TOO_LARGE:
                detail = describe_need(served.version.managed, self.manager.budgets)
            elif action.reason is Reason.NO_TIME:
                detail = describe_delay(action.expected_ms, served.version.managed.slo_ms)
            self._fail(pending, refusal(served.version.name, action.reason, retry_ms, detail))

    def _load(self, action: Load) -> None:
        self.memory_changes += 1
        served = self._by_number[action.model]
        source = served.version.sources[action.variant]
        began = _now_ms()
        cores = self._least_pinned(source.cores) if source.plan else ()

        def open_session() -> Session:
            opened = served.opened or OpenedFiles(served.version.sources)
            if not opened.are_readable():
                raise ModelError(FILES_CHANGED)
            session = Session(source, opened, self._provider, cores)
            try:
                if served.opened is None:
                    served.version.require_unchanged()
                    try_session(session, served.version)
            except BaseException:
                session.close()
                raise
            served.opened = opened
            return session

        extra = _fields(served, variant=source.name)
        log.info("load", extra=extra)
        work = functools.partial(run_about, extra["fields"], open_session)
        self._in_background(self._loader, work, functools.partial(self._loaded, served, source.name, began))

    def _least_pinned(self, count: int) -> tuple[int, ...]:
        """Return the cores that the fewest sessions in memory are pinned to."""
        pinned = Counter(core for entry in self.manager.entries.values() for core in entry.cores)
        return tuple(sorted(sorted(self.lane_busy_ms, key=lambda core: pinned[core])[:count]))

    def _loaded(self, served: Served, variant: str, began: float, done: Future[Session]) -> None:
        now = _now_ms()
        self.memory_changes += 1
        error = done.exception()
        if error is None:
            served.session = done.result()
            served.failure = ""
            served.tried = True
            size = self._bytes(served)
            extra: dict[str, object] = {"variant": variant, "duration_ms": round(now - began, 3)}
            if chain := served.session.chain:
                self.blocks.add(served.number, chain)
                extra |= {"blocks": len(chain.block_ms), **({"whole": chain.reason} if chain.reason else {})}
            for pending in served.cold.values():
                pending.loaded_ms = now
            served.cold.clear()
            log.info("loaded", extra=_fields(served, **extra))
            actions = self.manager.loaded(now, served.number, now - began, served.session.cores)
            if not any(isinstance(a, Unload) and (a.model, a.cause) == (served.number, "trial") for a in actions):
                served.statistics.add_load(now - began, size)
        else:
            served.failure = first_line(error) or type(error).__name__
            served.statistics.load_failures += 1
            log.warning("load failed", extra=_fields(served, variant=variant, reason=served.failure))
            actions = self.manager.load_failed(now, served.number, out_of_memory=is_out_of_memory(error))
        if error is None or (self.place(served)[0] is Place.ABSENT and served.number not in self.manager.cold):
            served.attempted.set()  # else a smaller variant is loaded
        self._apply(actions)
        self._forget_if_unused(served)

    def _bytes(self, served: Served) -> int:
        """Return the bytes of the variant in memory on the device that variants differ in."""
        return self.manager.entries[served.number].resident.bytes

    def _unload(self, action: Unload) -> None:
        self.memory_changes += 1
        served = self._by_number[action.model]
        session, served.session = served.session, None
        statistics = served.statistics
        statistics.evictions += action.cause in {"evict", "expire"}
        statistics.shrinks += action.cause == "shrink"
        statistics.grows += action.cause == "grow"
        log.info(action.cause, extra=_fields(served, variant=served.version.sources[action.variant].name))
        self.blocks.remove(served.number)
        if session:
            self._loader.submit(session.close)

    def _run(self, action: Run) -> None:
        served = self._by_number[action.model]
        batch = [self._pending[r.id] for r in action.requests if r.id in self._pending]
        options = TerminableRunOptions()
        limit_ms = served.version.settings.max_run_ms or self._max_run_ms
        expired = functools.partial(self._expired, served, batch, limit_ms)
        run = WatchedRun(options, [pending.future for pending in batch], limit_ms, expired)
        for pending in batch:
            pending.run = run
        self._watch.add(action.id, run)
        session = served.session
        if batch and session is not None and session.chain:
            self._start_blocks(served, action, batch[0], run)
            return
        job = batching.Batch([p.feeds for p in batch], [p.outputs for p in batch], served.version.outputs)

        def work() -> batching.BatchResult:
            pin_worker(action.cores)
            if session is None or not batch:  # all clients have left
                return batching.BatchResult([], (0.0, 0.0, 0.0))
            return job.run(session, options)

        self._in_background(self._workers, work, functools.partial(self._finished, served, action, batch))

    def _start_blocks(self, served: Served, run: Run, pending: Pending, watched: WatchedRun) -> None:
        """Submit a request to the dispatcher of blocks; it runs when its first block begins."""

        def ended(result: batching.BatchResult, took_ms: float) -> None:
            if not self._closed:
                self._ended(served, replace(run, started_ms=_now_ms() - took_ms), [pending], result)

        now = _now_ms()
        start_ms = pending.request.deadline_ms - now
        objective_ms = pending.request.arrival_ms + served.version.managed.slo_ms - now
        job = BlockJob(pending.feeds, pending.outputs, watched.options, start_ms, objective_ms, ended)
        watched.task = self.blocks.start(served.number, job)

    def _expired(self, served: Served, batch: list[Pending], limit_ms: float) -> None:
        """Answer the requests of a terminated run at once, since it may be in an operator that takes long."""
        log.warning("run terminated", extra=_fields(served, requests=len(batch), limit_ms=limit_ms))
        text = f"model {served.version.name!r}: a run took longer than its max_run of {format_ms(limit_ms)}"
        for pending in batch:
            self._fail(pending, RequestFailure(Status.EXPIRED, text))

    def _finished(self, served: Served, run: Run, batch: list[Pending], done: Future[batching.BatchResult]) -> None:
        error = done.exception()
        if isinstance(error, Exception):  # before the batch could run
            result = batching.BatchResult([error] * len(batch), (0.0, 0.0, 0.0))
        else:
            result = done.result()
        self._ended(served, run, batch, result)

    def _ended(self, served: Served, run: Run, batch: list[Pending], result: batching.BatchResult) -> None:
        self._watch.remove(run.id)
        for pending in batch:
            pending.run = None  # else a cycle would hold the outputs until the next garbage collection
        now = _now_ms()
        self._swept = False
        for core in run.cores:
            self.lane_busy_ms[core] += now - run.started_ms
        self.slot_busy_ms += run.slots * (now - run.started_ms)
        self._deliver(served, run, batch, result, now)
        took = None if result.failed or not batch else now - run.started_ms
        self._apply(self.manager.finish(now, run.id, took))
        self._forget_if_unused(served)

    def _deliver(
        self, served: Served, run: Run, batch: list[Pending], result: batching.BatchResult, now: float
    ) -> None:
        statistics = served.statistics
        answered = []
        for pending, outcome in zip(batch, result.outputs, strict=True):
            if isinstance(outcome, Exception) and (reason := drop_reason(outcome)):
                self._refuse(Refuse(pending.request, reason, self.blocks.retry_ms(served.number)))
            elif isinstance(outcome, Exception):
                unequal = unequal_sizes(served.version.inputs, pending.feeds)
                self._fail(pending, run_failure(served.version.name, outcome, self._arena.limit, unequal))
            else:
                answered.append((pending, outcome))
        if answered:
            statistics.add_run(sum(pending.request.rows for pending, _ in answered), *result.parts_ms)
        for pending, outputs in answered:
            queued = run.started_ms - pending.request.arrival_ms
            loaded = pending.loaded_ms
            load_ms = None if loaded is None else loaded - pending.request.arrival_ms
            timing = RequestTiming(queued - (load_ms or 0.0), load_ms, now - run.started_ms)
            statistics.slo_violations += timing.total_ms > served.version.managed.slo_ms
            if not pending.future.done():
                named = list(zip(pending.outputs, outputs, strict=True))
                pending.future.set_result(Result(served, named, timing, pending.request.rows, result.parts_ms))

    def _fail(self, pending: Pending, failure: RequestFailure) -> None:
        if not pending.future.done():
            pending.future.set_exception(failure)

    def _forget_if_unused(self, served: Served) -> None:
        if served.removed and served.number not in self.manager.entries:
            self._by_number.pop(served.number, None)

    def _in_background(
        self, executor: ThreadPoolExecutor, work: Callable[[], Any], done: Callable[[Future[Any]], None]
    ) -> None:
        """Run work in a thread, and then ``done`` in the event loop."""
        loop = asyncio.get_running_loop()

        def hand_over(future: Future[Any]) -> None:
            if not (future.cancelled() or loop.is_closed() or self._closed):
                loop.call_soon_threadsafe(done, future)

        executor.submit(work).add_done_callback(hand_over)

    def _set_timer(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None
        now = _now_ms()
        at = self.manager.next_event_ms(now)
        if at < math.inf and self._loop:
            self._timer = self._loop.call_later((at - now) / 1000 + 1e-4, self._advance)

    def _advance(self) -> None:
        self._apply(self.manager.advance(_now_ms()))

    def _check_sizes(self) -> None:
        """Reject versions that no longer fit beside the pinned models, and try those again that do since."""
        versions = {number: served for number, served in self._by_number.items() if not served.removed}
        fitting = self.manager.fitting(versions)
        for number, served in versions.items():
            fits, works_as_generator = number in fitting, served.tried and not served.opened
            if not (fits or served.failure or works_as_generator):
                self.manager.trials.pop(number, None)
                self._reject_size(served)
            elif fits and served.too_large and not self.candidates:  # for which pinned models give way meanwhile
                served.failure = ""
                served.attempted.clear()
                self.try_out(served)

    def _reject_size(self, served: Served) -> None:
        """End the trial of a version that does not fit into the budgets."""
        smallest, budgets = served.version.managed.variants[-1].bytes, self.manager.budgets
        served.failure = f"{Reason.TOO_LARGE.value}: {describe_need(served.version.managed, budgets)}"
        served.attempted.set()
        sizes = {"bytes": {device: smallest.get(device, 0) for device in budgets}, "budget_bytes": dict(budgets)}
        if self.candidates.get(served.version.key) is not served:  # else the one before is served on
            log.warning(CANNOT_BE_SERVED, extra=_fields(served, reason=served.failure, **sizes))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_MS / 1000)
            self._check_sizes()
            self._advance()
            self._apply(self.manager.rebalance(_now_ms()))
            if not self._swept or self.account.peak > _LARGE_BYTES:
                self._swept, self.account.peak = True, self.account.used
                self._loader.submit(self._arena.sweep)


def _fields(served: Served, **more: object) -> dict[str, Any]:
    return {"fields": {"model": served.version.name, "version": served.version.version, **more}}


def _now_ms() -> float:
    return time.monotonic() * 1000
