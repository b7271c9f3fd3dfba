"""Block lanes: lane threads that run the blocks of models, and the dispatcher that they ask."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import onnxruntime as ort

from chrion.common.suggestions import did_you_mean
from chrion.errors import DroppedError, OptionError
from chrion.machine.core_leases import lease_cores
from chrion.runtime import process_hooks
from chrion.runtime.block_chain import BlockChain, BlockRun
from chrion.runtime.execution.lane_threads import LaneThreads
from chrion.runtime.shared_arena import sweep_shared_arena
from chrion.serving.multi.dispatcher import Action, BlockSpan, Dispatcher, ModelRules, Over, Replan, Run
from chrion.serving.multi.top import TopDispatcher

log = logging.getLogger(__name__)
#: Why tasks are dropped, and hints.
_DROPPED = {
    "full": ("its queue is full", "submit less often, or give a longer queue"),
    "late": ("it cannot meet its deadline", "the machine has too much work"),
    "removed": ("the model was removed", ""),
    "cancelled": ("it was stopped", ""),
}


class TaskFuture(Future[dict[str, Any]]):
    """The outputs of a task by name, or why there are none.

    It can be cancelled until the task is over; the block that runs then is the last one. ``running`` is false.
    """

    #: When the first block began, as :func:`time.perf_counter` has it, in ms; None before.
    begun_ms: float | None = None
    #: Lets no further block run. Unlike a cancelled one, the future is done when no block of the task runs any more.
    stop: Callable[[], None]


@dataclass(slots=True)
class _Entry:
    """A task that is not over."""

    model: str
    chain: BlockChain
    feed: Mapping[str, Any]
    options: ort.RunOptions | None
    future: TaskFuture = field(default_factory=TaskFuture)
    run: BlockRun | None = None
    error: BaseException | None = None
    #: Held while the task begins; several lanes may run its first blocks.
    lock: threading.Lock = field(default_factory=threading.Lock)


class BlockLanes:
    """Lanes that run the blocks of models, the dispatcher that they ask, and the tasks.

    All decisions are made under one lock; blocks, and callbacks of futures, run outside of it. A lane gets its next
    part only after it has reported the end of the last one, so that actions reach it in order.

    Args:
        chains: The chains of the models.
        rules: The models as the dispatcher has them.
        lanes: The number of lanes.
        new_dispatcher: Returns a dispatcher of these models and lanes.
        cores: The cores of the first lanes, or their number if they are leased; other lanes are not pinned.
        niceness: The niceness of lanes; 0 if not given.

    Attributes:
        chains: The chains of the models, also of those that were added.
        rules: These models as the dispatcher has them.
        busy_ms: The time for which each lane has run blocks.
    """

    def __init__(  # noqa: PLR0913 - optional arguments are keyword-only
        self,
        chains: Mapping[str, BlockChain],
        rules: Mapping[str, ModelRules],
        lanes: int,
        new_dispatcher: Callable[[], Dispatcher],
        *,
        cores: int | Sequence[int],
        niceness: Mapping[int, int] | None = None,
    ) -> None:
        self.chains, self.rules = dict(chains), dict(rules)
        self.lanes = lanes
        self.busy_ms = [0.0] * lanes
        #: Lists to which the blocks that run are added.
        self._recorders: tuple[list[BlockSpan], ...] = ()
        self._dispatcher = new_dispatcher()
        #: When the next timer calls :meth:`_wake`.
        self._wake_ms = math.inf
        self._entries: dict[int, _Entry] = {}
        self._counts: dict[str, dict[str, int]] = {name: {} for name in chains}
        self._lock = threading.Lock()
        self._refusal = ""
        self._forked = False
        self._drained = threading.Event()
        self._lease = lease_cores(cores if isinstance(cores, int) else 0)
        own = [*(self._lease.cores if isinstance(cores, int) else cores), *[None] * lanes]
        self._threads = LaneThreads({lane: own[lane] for lane in range(lanes)}, niceness)
        process_hooks.register(self, BlockLanes.refuse_in_child, BlockLanes.close_at_exit)

    def add(self, name: str, chain: BlockChain, rules: ModelRules) -> None:
        """Add a model, which no other one has the name of."""
        with self._lock:
            self._dispatcher.add(name, rules)
            self.chains[name], self.rules[name], self._counts[name] = chain, rules, {}

    def remove(self, name: str) -> None:
        """Remove a model: its tasks raise DroppedError, those that run when their blocks have ended."""
        with self._lock:
            del self.chains[name], self.rules[name], self._counts[name]
            ended = self._carry_out(self._dispatcher.remove(name, _now_ms()))
        self._answer(ended)

    def submit(
        self,
        name: str,
        feed: Mapping[str, Any],
        deadline_ms: float | None = None,
        options: ort.RunOptions | None = None,
    ) -> TaskFuture:
        """Submit a task with checked inputs; with the options, another thread can terminate a block that runs."""
        with self._lock:
            entry = _Entry(name, self.chain(name), feed, options)
            if self._refusal:
                raise RuntimeError(self._refusal)
            number, actions = self._dispatcher.submit(name, _now_ms(), deadline_ms)
            self._entries[number] = entry
            ended = self._carry_out(actions)
        entry.future.stop = stop = functools.partial(_stop, weakref.ref(self), number)
        entry.future.add_done_callback(lambda future: stop() if future.cancelled() else None)
        self._answer(ended)
        return entry.future

    def chain(self, name: str) -> BlockChain:
        """Return the chain of a model.

        Raises:
            OptionError: There is no such model.
        """
        chain = self.chains.get(name)
        if chain is None:
            raise OptionError(f"unknown model {name!r}", hint=did_you_mean(str(name), self.chains))
        return chain

    @contextlib.contextmanager
    def record(self) -> Iterator[list[BlockSpan]]:
        """Record the blocks that end within this context."""
        spans: list[BlockSpan] = []
        with self._lock:
            self._recorders = (*self._recorders, spans)
        try:
            yield spans
        finally:
            with self._lock:
                self._recorders = tuple(other for other in self._recorders if other is not spans)

    def waiting(self) -> dict[str, int]:
        """Return the number of each model's tasks that wait to begin."""
        with self._lock:
            return {name: self._dispatcher.waiting(name) for name in self.chains}

    def counts(self) -> dict[str, dict[str, int]]:
        """Return the number of each model's tasks by outcome, and of those that wait."""
        with self._lock:
            return {name: {**own, "waiting": self._dispatcher.waiting(name)} for name, own in self._counts.items()}

    def plan_lines(self) -> list[str]:
        """Return the plan of the policy ``top`` in words; nothing for other policies."""
        return [str(self._dispatcher.plan)] if isinstance(self._dispatcher, TopDispatcher) else []

    def close(self, wait_s: float | None = None) -> None:
        """Refuse further tasks, and stop when those that were submitted are over; wait for that, except on a lane.

        Args:
            wait_s: The time to wait; None for no limit.
        """
        if self._forked:
            return
        self._refuse("the session is closed")
        if self._threads.are_calling:  # a callback
            return
        self._wait(None if wait_s is None else time.monotonic() + wait_s)
        sweep_shared_arena()

    def close_at_exit(self, until: float) -> None:
        """Refuse further tasks, and wait for those that were submitted until a time of ``time.monotonic``."""
        if not self._forked:
            self._refuse("the interpreter is exiting")
            self._wait(until)

    def _refuse(self, reason: str) -> None:
        """Refuse further tasks; without any, stop the lanes."""
        with self._lock:
            self._refusal = self._refusal or reason
            ended = self._carry_out(self._dispatcher.hurry(_now_ms()))
        self._answer(ended)

    def _wait(self, until: float | None) -> None:
        if self._drained.wait(None if until is None else max(0.0, until - time.monotonic())):
            self._threads.close(until)  # after the callbacks that lanes are calling

    def _stop(self) -> None:
        """Stop the lanes after the parts that they have, without waiting; further calls do nothing new."""
        self._threads.close(time.monotonic())
        self._lease.release()
        self._drained.set()

    def refuse_in_child(self) -> None:
        """Refuse tasks in a forked child, which has no lanes and in which the lock may be held for ever."""
        self._lock = threading.Lock()
        self._refusal = "the session was created before the process was forked; create it in the child"
        self._entries = {}
        self._forked = True

    def run(self, action: Run) -> None:
        """Run a block on its lane, and report its end."""
        entry = self._entries[action.number]
        chain = entry.chain
        start_ms = _now_ms()
        failed = False
        try:
            with entry.lock:
                if entry.error is not None:
                    raise entry.error  # noqa: TRY301 - another lane has failed
                if entry.run is None:
                    entry.future.begun_ms = start_ms
                    entry.run = chain.begin(entry.feed)
                run = entry.run
            run.run(action.block, entry.options)
        except BaseException as error:  # noqa: BLE001 - the future raises it, and the lane goes on
            entry.error, entry.run, failed = error, None, True
        end_ms = _now_ms()
        self.busy_ms[action.lane] += end_ms - start_ms
        for spans in self._recorders:
            spans.append(BlockSpan(action.lane, action.model, action.number, action.block, start_ms, end_ms))
        with self._lock:
            event = self._dispatcher.fail if failed else self._dispatcher.finish
            ended = self._carry_out(event(action.lane, end_ms))
        self._answer(ended)

    def cancel(self, number: int) -> None:
        """Let no further block of a task run."""
        with self._lock:
            ended = self._carry_out(self._dispatcher.cancel(number, _now_ms()))
        self._answer(ended)

    def _wake(self) -> None:
        with self._lock:
            self._wake_ms = math.inf
            ended = self._carry_out(self._dispatcher.wake(_now_ms()))
        self._answer(ended)

    def _replan(self, request: Replan) -> None:
        """Search for another plan while tasks go on."""
        dispatcher = self._dispatcher
        assert isinstance(dispatcher, TopDispatcher)  # noqa: S101 - no other one asks
        assert dispatcher.replan  # noqa: S101 - it asks only then
        try:
            plan = dispatcher.replan(request)
        except Exception:
            log.exception("the plan stays as it is, since the search for another one failed")
            plan = dispatcher.plan
        with self._lock:
            if self._refusal:  # nothing is held back any more
                return
            ended = self._carry_out(dispatcher.adopt(plan, _now_ms()))
        self._answer(ended)

    def _carry_out(self, actions: Sequence[Action]) -> list[tuple[_Entry, Over]]:
        """Start blocks, and return the tasks that are over; the caller holds the lock."""
        ended = []
        for action in actions:
            if isinstance(action, Over):
                ended.append((self._entries.pop(action.number), action))
            elif isinstance(action, Replan):
                if not self._refusal:
                    threading.Thread(target=self._replan, args=(action,), name="chrion-plan", daemon=True).start()
            else:
                self._threads.submit({action.lane: _Part(self, action)})
        if (wake_ms := self._dispatcher.wake_ms) < self._wake_ms:
            self._wake_ms = wake_ms
            timer = threading.Timer(max(0.0, wake_ms - _now_ms()) / 1e3, self._wake)
            timer.daemon = True
            timer.start()
        return ended

    def _answer(self, ended: Sequence[tuple[_Entry, Over]]) -> None:
        """Give tasks that are over their results, without the lock: futures call their callbacks.

        Then stop the lanes if further tasks are refused and none is left.
        """
        for entry, over in ended:
            outputs = self._end_run(entry, over)
            # From here on it cannot be cancelled any more; it may have been in the meantime.
            awaited = entry.future.set_running_or_notify_cancel()
            outcome = over.outcome if awaited else "cancelled"
            if outcome == "done" and entry.error is not None:
                outcome = "failed"
            with self._lock:
                counts = self._counts.get(entry.model, {})  # the model may have been removed
                counts[outcome] = counts.get(outcome, 0) + 1
            if outcome == "done":
                entry.future.set_result(outputs)
            elif outcome == "failed":
                entry.future.set_exception(entry.error)
            elif awaited:
                cause, hint = _DROPPED[outcome]
                message = f"a task of {entry.model!r} was dropped: {cause}"
                entry.future.set_exception(DroppedError(message, hint=hint, outcome=outcome))
        if self._refusal:
            with self._lock:
                drained = not self._entries
            if drained:
                self._stop()

    def _end_run(self, entry: _Entry, over: Over) -> dict[str, Any]:
        """Return the outputs of a task that is over, if it is done, and keep its buffers for others."""
        outputs: dict[str, Any] = {}
        chain = entry.chain
        if entry.run is None:
            return outputs
        try:
            if over.outcome == "done":
                outputs = dict(zip(chain.output_names, entry.run.outputs(), strict=True))
            chain.end(entry.run)
        except Exception as error:  # noqa: BLE001 - the future raises it
            entry.error = error
        return outputs


@dataclass(frozen=True, slots=True)
class _Part:
    """A block for a lane thread."""

    core: BlockLanes
    action: Run

    def __call__(self) -> None:
        self.core.run(self.action)

    def fail(self) -> None:
        """Do nothing: a block that raises does not end its thread."""


def _stop(lanes: weakref.ref[BlockLanes], number: int) -> None:
    """Stop a task; its future does not keep the models alive."""
    if (own := lanes()) is not None:
        own.cancel(number)


def _now_ms() -> float:
    return time.perf_counter() * 1e3
