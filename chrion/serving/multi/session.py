"""MultiSession: several models on the cores of one machine, whose blocks compete by deadlines or another policy."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import onnx

from chrion.common.suggestions import did_you_mean
from chrion.common.units import parse_duration_ms
from chrion.errors import DroppedError, OptionError
from chrion.graph.model import TensorInfo
from chrion.machine.core_leases import lease_cores
from chrion.machine.cores import check_cores, physical_cores
from chrion.runtime import process_hooks
from chrion.runtime.block_chain import BlockChain, BlockRun, open_chain
from chrion.runtime.execution.lane_threads import LaneThreads
from chrion.serving.multi.dispatcher import Action, BlockSpan, Dispatcher, ModelRules, Over, Replan, Run
from chrion.serving.multi.policies import check_policy
from chrion.serving.multi.top import TopDispatcher
from chrion.serving.multi.top_search import TopPlanner

log = logging.getLogger(__name__)
T = TypeVar("T")
Model = str | Path | bytes | onnx.ModelProto
#: Hints of dropped tasks.
_HINTS = {
    "full": "submit less often, or give a longer queue",
    "late": "the machine has too much work",
}


@dataclass(slots=True)
class _Entry:
    """A task that is not over."""

    model: str
    future: Future[dict[str, Any]]
    feed: dict[str, Any]
    run: BlockRun | None = None
    error: BaseException | None = None
    #: Held while the task begins; several lanes may run its first blocks.
    lock: threading.Lock = field(default_factory=threading.Lock)


class MultiSession:
    """Serves several ONNX models on the CPU cores of one machine.

    Each model is cut into blocks of a few milliseconds. Lanes, threads that are each pinned to a core, run the blocks
    of all tasks; after each block the policy decides again. Outputs are bit for bit those of a plain session with one
    thread.

    Methods may be called from any number of threads.

    Args:
        models: The models by name: files, their bytes, or ModelProtos.
        deadlines: The time that a task has from :meth:`submit` to its end, ``50ms`` for example (a number is in ms):
            one for all models, or by name.
        rates: Expected tasks per second, for all models or by name; with them ``static`` divides the cores.
        policy: A key of :data:`chrion.serving.multi.policies.SESSION_POLICIES`; ``edf`` if there are deadlines, else
            ``fair``.
        priorities: The order of models for ``priority``, by name; 0, the default, is served first.
        queue: The most tasks that wait to begin, for each model or by name.
        drop: The task that a full queue drops: ``newest``, the one that is submitted, or ``oldest``. With a queue of 1,
            ``oldest`` keeps the latest frame of a stream only.
        drop_late: Drop a task as soon as it cannot meet its deadline any more.
        cores: The number of lanes; all physical cores that this process may use if None.
        block: The limit of a block's time.
        shapes: Shapes of inputs with free dimensions, by model.
        patience: Ageing: a task without a deadline, of a lower priority or beyond its deadline is served before those
            that are submitted this much later.

    Raises:
        ModelError: A model cannot be read, or onnxruntime refuses it.
        OptionError: There is no model, or an option has an invalid value.
    """

    def __init__(  # noqa: PLR0913 - optional arguments are keyword-only
        self,
        models: Mapping[str, Model],
        *,
        deadlines: str | float | Mapping[str, str | float] | None = None,
        rates: float | Mapping[str, float] | None = None,
        policy: str | None = None,
        priorities: Mapping[str, int] | None = None,
        queue: int | Mapping[str, int] = 64,
        drop: Literal["newest", "oldest"] = "newest",
        drop_late: bool = False,
        cores: int | None = None,
        block: str | float = "5ms",
        shapes: Mapping[str, Mapping[str, int | Sequence[int]]] | None = None,
        patience: str | float = "1s",
    ) -> None:
        rules = _rules(models, deadlines, rates, priorities, queue, drop)
        deadlined = any(own.deadline_ms is not None for own in rules.values())
        self.policy = check_policy(policy or ("edf" if deadlined else "fair"))
        check_cores(cores)
        limit_ms, patience_ms = parse_duration_ms(block, "block"), parse_duration_ms(patience, "patience")
        given = _by_name(models, shapes or {}, "shapes", None)
        top = self.policy == "top"
        chains = {name: open_chain(model, limit_ms, given[name], modules=top) for name, model in models.items()}
        rules = {name: replace(own, block_ms=chains[name].block_ms) for name, own in rules.items()}
        lanes = cores or len(physical_cores())
        options: dict[str, Any] = {"drop_late": drop_late, "patience_ms": patience_ms}
        if top:
            planner = TopPlanner(rules, lanes, {name: chain.modules for name, chain in chains.items()})
            new_dispatcher: Callable[[], Dispatcher] = functools.partial(planner.new_dispatcher, **options)
        else:
            new_dispatcher = functools.partial(Dispatcher, rules, lanes, self.policy, **options)
        self._core = _Core(chains, rules, lanes, new_dispatcher)
        process_hooks.register(self._core, _Core.refuse_in_child, _Core.close_at_exit)

    def submit(self, name: str, feed: Mapping[str, Any], deadline: str | float | None = None) -> Future[dict[str, Any]]:
        """Submit a task.

        Args:
            name: The model.
            feed: Its inputs by name, which are copied.
            deadline: The time that the task has, if it is not the model's.

        Returns:
            A future of the outputs by name. It raises DroppedError if the task is dropped, and an exception of
            onnxruntime if a block fails. It can be cancelled until the first block begins. Its callbacks run on a lane,
            so that they should be short.

        Raises:
            OptionError: There is no such model, or the deadline is none.
            RuntimeError: The session is closed, or its process was forked.
            Exception: As InferenceSession raises for wrong inputs.
        """
        return self._core.submit(name, feed, None if deadline is None else parse_duration_ms(deadline, "deadline"))

    @property
    def rules(self) -> dict[str, ModelRules]:
        """The models with the measured times of their blocks, as the dispatcher has them."""
        return dict(self._core.rules)

    @property
    def inputs(self) -> dict[str, tuple[TensorInfo, ...]]:
        """The inputs of each model."""
        return {name: chain.inputs for name, chain in self._core.chains.items()}

    @property
    def lanes(self) -> int:
        """The number of lanes."""
        return self._core.lanes

    def new_dispatcher(self) -> Dispatcher:
        """Return a dispatcher without tasks that decides as this session does, for simulations."""
        return self._core.new_dispatcher()

    def counts(self) -> dict[str, dict[str, int]]:
        """Return the number of each model's tasks so far, by outcome, and those that are ``waiting`` to begin."""
        return self._core.counts()

    @contextlib.contextmanager
    def record(self) -> Iterator[list[BlockSpan]]:
        """Record the blocks that run within this context; a later context takes over from one that is open."""
        spans: list[BlockSpan] = []
        self._core.spans = spans
        try:
            yield spans
        finally:
            self._core.spans = None

    def explain(self) -> str:
        """Return the policy, and the blocks of each model."""
        lines = [f"policy {self.policy} on {self.lanes} lanes"]
        for name, rules in self.rules.items():
            reason = self._core.chains[name].reason
            blocks = f"{len(rules.block_ms)} blocks, the longest {max(rules.block_ms):.1f} ms"
            lines.append(f"{name}: {rules.total_ms:.1f} ms in {blocks}{f' ({reason})' if reason else ''}")
        return "\n".join([*lines, *self._core.plan_lines()])

    def close(self) -> None:
        """Refuse further tasks, and stop the lanes when those that were submitted are over. Idempotent.

        It waits until then, unless a callback of a future calls it.
        """
        self._core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Core:
    """The dispatcher, the lanes and the tasks of a session.

    All decisions are made under one lock; blocks, and callbacks of futures, run outside of it. A lane gets its next
    part only after it has reported the end of the last one, so that actions reach it in order.
    """

    def __init__(
        self,
        chains: Mapping[str, BlockChain],
        rules: Mapping[str, ModelRules],
        lanes: int,
        new_dispatcher: Callable[[], Dispatcher],
    ) -> None:
        self.chains, self.rules, self.lanes, self.new_dispatcher = chains, rules, lanes, new_dispatcher
        self.spans: list[BlockSpan] | None = None
        self._dispatcher = new_dispatcher()
        #: When the next timer calls :meth:`_wake`.
        self._wake_ms = math.inf
        self._entries: dict[int, _Entry] = {}
        self._counts: dict[str, dict[str, int]] = {name: {} for name in chains}
        self._lock = threading.Lock()
        self._refusal = ""
        self._forked = False
        self._drained = threading.Event()
        self._lease = lease_cores(lanes)
        cores = [*self._lease.cores, *[None] * lanes]
        self._threads = LaneThreads({lane: cores[lane] for lane in range(lanes)})

    def submit(self, name: str, feed: Mapping[str, Any], deadline_ms: float | None) -> Future[dict[str, Any]]:
        if name not in self.chains:
            raise OptionError(f"unknown model {name!r}", hint=did_you_mean(str(name), self.chains))
        entry = _Entry(name, Future(), self.chains[name].check(feed))
        with self._lock:
            if self._refusal:
                raise RuntimeError(self._refusal)
            number, actions = self._dispatcher.submit(name, _now_ms(), deadline_ms)
            self._entries[number] = entry
            ended = self._carry_out(actions)
        entry.future.add_done_callback(lambda future: self._cancelled(number) if future.cancelled() else None)
        self._answer(ended)
        return entry.future

    def counts(self) -> dict[str, dict[str, int]]:
        with self._lock:
            return {name: {**own, "waiting": self._dispatcher.waiting(name)} for name, own in self._counts.items()}

    def plan_lines(self) -> list[str]:
        return [str(self._dispatcher.plan)] if isinstance(self._dispatcher, TopDispatcher) else []

    def close(self) -> None:
        if self._forked:
            return
        with self._lock:
            self._refusal = self._refusal or "the session is closed"
            drained = not self._entries
        if drained:
            self._drained.set()
        if threading.current_thread().name.startswith("chrion-lane-"):  # a callback
            return
        self._drained.wait()
        self._threads.close()
        self._lease.release()

    def close_at_exit(self, until: float) -> None:
        with self._lock:
            self._refusal = self._refusal or "the interpreter is exiting"
            drained = not self._entries
        if not drained:
            self._drained.wait(max(0.0, until - time.monotonic()))
        if self._drained.is_set() or drained:
            self._threads.close(until)  # after the callbacks that lanes are calling

    def refuse_in_child(self) -> None:
        """Refuse tasks in a forked child, which has no lanes and in which the lock may be held for ever."""
        self._lock = threading.Lock()
        self._refusal = "the session was created before the process was forked; create it in the child"
        self._entries = {}
        self._forked = True

    def run(self, action: Run) -> None:
        """Run a block on its lane, and report its end."""
        entry = self._entries[action.number]
        chain = self.chains[action.model]
        start_ms = _now_ms()
        failed = False
        try:
            with entry.lock:
                if entry.error is not None:
                    raise entry.error  # noqa: TRY301 - another lane has failed
                if entry.run is None:
                    if not entry.future.set_running_or_notify_cancel():
                        raise InterruptedError("cancelled")  # noqa: TRY301 - as if the block had failed
                    entry.run = chain.begin(entry.feed)
                run = entry.run
            run.run(action.block)
        except BaseException as error:  # noqa: BLE001 - the future raises it, and the lane goes on
            entry.error, entry.run, failed = error, None, True
        end_ms = _now_ms()
        spans = self.spans
        if spans is not None:
            spans.append(BlockSpan(action.lane, action.model, action.number, action.block, start_ms, end_ms))
        with self._lock:
            event = self._dispatcher.fail if failed else self._dispatcher.finish
            ended = self._carry_out(event(action.lane, end_ms))
        self._answer(ended)

    def _cancelled(self, number: int) -> None:
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
            return
        with self._lock:
            ended = self._carry_out(dispatcher.adopt(plan, _now_ms()))
        self._answer(ended)

    def _carry_out(self, actions: Sequence[Action]) -> list[tuple[_Entry, Over]]:
        """Start blocks, and return the tasks that are over; the caller holds the lock."""
        ended = self._start(actions)
        while (wake_ms := self._dispatcher.wake_ms) < math.inf and self._refusal:  # nobody waits for what is closed
            ended += self._start(self._dispatcher.wake(wake_ms))
        if wake_ms < self._wake_ms:
            self._wake_ms = wake_ms
            timer = threading.Timer(max(0.0, wake_ms - _now_ms()) / 1e3, self._wake)
            timer.daemon = True
            timer.start()
        return ended

    def _start(self, actions: Sequence[Action]) -> list[tuple[_Entry, Over]]:
        ended = []
        for action in actions:
            if isinstance(action, Over):
                entry = self._entries.pop(action.number)
                counts = self._counts[entry.model]
                counts[action.outcome] = counts.get(action.outcome, 0) + 1
                ended.append((entry, action))
            elif isinstance(action, Replan):
                if not self._refusal:
                    threading.Thread(target=self._replan, args=(action,), name="chrion-plan", daemon=True).start()
            else:
                self._threads.submit({action.lane: _Part(self, action)})
        return ended

    def _answer(self, ended: Sequence[tuple[_Entry, Over]]) -> None:
        """Give tasks that are over their results, without the lock: futures call their callbacks."""
        for entry, over in ended:
            outputs = self._end_run(entry, over)
            future = entry.future
            if entry.error is not None and future.cancelled():
                continue  # as its first block has noted
            if not (future.running() or future.set_running_or_notify_cancel()):
                continue
            if entry.error is not None:
                future.set_exception(entry.error)
            elif over.outcome == "done":
                future.set_result(outputs)
            else:
                what = "its queue is full" if over.outcome == "full" else "it cannot meet its deadline"
                message = f"a task of {entry.model!r} was dropped: {what}"
                error = DroppedError(message, hint=_HINTS[over.outcome], outcome=over.outcome)
                future.set_exception(error)
        if ended and self._refusal:
            with self._lock:
                drained = not self._entries
            if drained:
                self._threads.close(time.monotonic())  # without waiting for other lanes, which may do the same
                self._drained.set()

    def _end_run(self, entry: _Entry, over: Over) -> dict[str, Any]:
        """Return the outputs of a task that is over, if it is done, and keep its buffers for others."""
        outputs: dict[str, Any] = {}
        chain = self.chains[entry.model]
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

    core: _Core
    action: Run

    def __call__(self) -> None:
        self.core.run(self.action)

    def fail(self) -> None:
        """Do nothing: a block that raises does not end its thread."""


def _now_ms() -> float:
    return time.perf_counter() * 1e3


def _rules(  # noqa: PLR0913, PLR0917 - the options of a session
    models: Mapping[str, Model],
    deadlines: str | float | Mapping[str, str | float] | None,
    rates: float | Mapping[str, float] | None,
    priorities: Mapping[str, int] | None,
    queue: int | Mapping[str, int],
    drop: Literal["newest", "oldest"],
) -> dict[str, ModelRules]:
    """Return the rules of the models, without the times of blocks.

    Raises:
        OptionError: An option has an invalid value.
    """
    if not models:
        raise OptionError("models: expected at least one model by name, found none")
    if drop not in {"newest", "oldest"}:
        raise OptionError(f"drop: expected newest or oldest, found {drop!r}")
    times, per_s = _by_name(models, deadlines, "deadlines", None), _by_name(models, rates, "rates", None)
    levels, lengths = _by_name(models, priorities or {}, "priorities", 0), _by_name(models, queue, "queue", 64)
    for name in models:
        if per_s[name] is not None and not per_s[name] > 0:
            raise OptionError(f"rates: expected a number above 0 for {name!r}, found {per_s[name]!r}")
        if not isinstance(lengths[name], int) or lengths[name] < 1:
            raise OptionError(f"queue: expected a whole number of at least 1 for {name!r}, found {lengths[name]!r}")
        if not isinstance(levels[name], int) or levels[name] < 0:
            raise OptionError(f"priorities: expected a whole number from 0 for {name!r}, found {levels[name]!r}")
    return {
        name: ModelRules(
            block_ms=(),
            deadline_ms=None if times[name] is None else parse_duration_ms(times[name], "deadline"),
            rate=per_s[name],
            priority=levels[name],
            queue=lengths[name],
            drop=drop,
        )
        for name in models
    }


def _by_name(models: Mapping[str, Any], given: Any, option: str, default: Any) -> dict[str, Any]:
    """Return the value of an option for every model: one for all, or by name.

    Raises:
        OptionError: A name is no model's.
    """
    if not isinstance(given, Mapping):
        return dict.fromkeys(models, default if given is None else given)
    for name in given:
        if name not in models:
            raise OptionError(f"{option}: unknown model {name!r}", hint=did_you_mean(str(name), models))
    return {name: given.get(name, default) for name in models}
