"""MultiSession: several models on the cores of one machine, whose blocks compete by deadlines or another policy."""

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
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, Self, get_args

import onnx
import onnxruntime as ort

from chrion.common.suggestions import did_you_mean
from chrion.common.units import parse_duration_ms
from chrion.common.wrong_values import wrong_value
from chrion.devices.providers import usable_provider
from chrion.errors import DroppedError, OptionError
from chrion.graph.model import TensorInfo
from chrion.machine.core_leases import lease_cores
from chrion.machine.cores import check_cores, physical_cores
from chrion.runtime import process_hooks
from chrion.runtime.block_chain import BlockChain, BlockRun, open_chain
from chrion.runtime.execution.lane_threads import LaneThreads
from chrion.runtime.shared_arena import sweep_shared_arena
from chrion.serving.multi.dispatcher import Action, BlockSpan, Dispatcher, ModelRules, Over, Replan, Run
from chrion.serving.multi.lanes import lay_out_lanes
from chrion.serving.multi.policies import check_policy
from chrion.serving.multi.top import TopDispatcher
from chrion.serving.multi.top_search import TopPlanner

log = logging.getLogger(__name__)
Model = str | Path | bytes | onnx.ModelProto
Drop = Literal["newest", "oldest"]
#: Why tasks are dropped, and hints.
_DROPPED = {
    "full": ("its queue is full", "submit less often, or give a longer queue"),
    "late": ("it cannot meet its deadline", "the machine has too much work"),
    "removed": ("the model was removed", ""),
}


class TaskFuture(Future[dict[str, Any]]):
    """The outputs of a task by name, or why there are none.

    It can be cancelled until the task is over; the block that runs then is the last one. ``running`` is false.
    """

    #: When the first block began, as :func:`time.perf_counter` has it, in ms; None before.
    begun_ms: float | None = None


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
        drop: The task that a full queue drops: ``newest``, the one that is submitted, or ``oldest``; for all models or
            by name. With a queue of 1, ``oldest`` keeps the latest frame of a stream only.
        drop_late: Drop a task as soon as it cannot meet its deadline any more.
        background: Serve whole models side by side instead of blocks: those of later ``priorities``, or of later
            deadlines, on threads of a higher niceness. Linux only.
        accelerators: The execution provider of models that run on an accelerator, by name: ``cuda`` for example, or
            ``auto`` for the first one that works. They run whole, on two lanes of each accelerator.
        cores: The number of lanes; all physical cores that this process may use if None.
        block: The limit of a block's time.
        shapes: Shapes of inputs with free dimensions, by model.
        patience: Ageing: a task without a deadline, of a lower priority or beyond its deadline is served before those
            that are submitted this much later.

    Raises:
        ModelError: A model cannot be read, or onnxruntime refuses it.
        ProviderError: An accelerator does not work on this machine.
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
        drop: Drop | Mapping[str, Drop] = "newest",
        drop_late: bool = False,
        background: bool = False,
        accelerators: Mapping[str, str] | None = None,
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
        given = _by_name(models, {} if shapes is None else shapes, "shapes", None)
        if any(not isinstance(own, Mapping | None) for own in given.values()):
            raise wrong_value("shapes", "shapes by input for each model", shapes)
        top = self.policy == "top"
        if self.policy in {"static", "top"} and background:
            raise OptionError(f"background: policy {self.policy} divides the cores, and each class has threads on all")
        self._providers = _providers(models, accelerators)
        if top and self._providers:
            raise OptionError("accelerators: policy top runs all models on the cores of the CPU")
        if fixed := [name for name in self._providers if given[name]]:
            raise OptionError(f"shapes: model {fixed[0]!r} runs whole on an accelerator, with any shapes")
        layout = lay_out_lanes(rules, cores or len(physical_cores()), self._providers, background=background)
        self._niceness = {
            n: layout.niceness[own[0]] for n, own in layout.own_lanes.items() if own[0] in layout.niceness
        }
        options: dict[str, Any] = {"drop_late": drop_late, "patience_ms": patience_ms}
        limit_ms = math.inf if background else limit_ms
        chains = {
            name: open_chain(model, limit_ms, given[name], self._providers.get(name, ""), modules=top)
            for name, model in models.items()
        }
        rules = {name: replace(own, block_ms=chains[name].block_ms) for name, own in rules.items()}
        if top:
            planner = TopPlanner(rules, layout.lanes, {name: chain.modules for name, chain in chains.items()})
            new_dispatcher: Callable[[], Dispatcher] = functools.partial(planner.new_dispatcher, **options)
        else:
            options["own_lanes"] = layout.own_lanes
            new_dispatcher = functools.partial(Dispatcher, rules, layout.lanes, self.policy, **options)
        self._core = BlockLanes(
            chains, rules, layout.lanes, new_dispatcher, cores=layout.pinned, niceness=layout.niceness
        )
        process_hooks.register(self._core, BlockLanes.refuse_in_child, BlockLanes.close_at_exit)

    def submit(self, name: str, feed: Mapping[str, Any], deadline: str | float | None = None) -> TaskFuture:
        """Submit a task.

        Args:
            name: The model.
            feed: Its inputs by name, arrays or OrtValues, which are copied.
            deadline: The time that the task has, if it is not the model's.

        Returns:
            A future of the outputs by name. It raises DroppedError if the task is dropped, and an exception of
            onnxruntime if a block fails. It can be cancelled until the task is over, after the block that runs then.
            Its callbacks run on a lane, so that they should be short.

        Raises:
            OptionError: There is no such model, or the deadline is none.
            RuntimeError: The session is closed, or its process was forked.
            Exception: As InferenceSession raises for wrong inputs.
        """
        deadline_ms = None if deadline is None else parse_duration_ms(deadline, "deadline")
        return self._core.submit(name, self._core.chain(name).check(feed), deadline_ms)

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
        """Record the blocks that end within this context."""
        with self._core.record() as spans:
            yield spans

    def explain(self) -> str:
        """Return the policy, and the blocks of each model."""
        lines = [f"policy {self.policy} on {self.lanes} lanes"]
        for name, rules in self.rules.items():
            reason = self._core.chains[name].reason
            blocks = f"{len(rules.block_ms)} blocks, the longest {max(rules.block_ms):.1f} ms"
            place = f" on {self._providers[name]}" if name in self._providers else ""
            niceness = f", niceness {self._niceness[name]}" if name in self._niceness else ""
            note = f" ({reason})" if reason else ""
            lines.append(f"{name}: {rules.total_ms:.1f} ms in {blocks}{note}{place}{niceness}")
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
        self.lanes, self.new_dispatcher = lanes, new_dispatcher
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
        own = weakref.ref(self)  # a future does not keep the models alive

        def note(future: Future[dict[str, Any]]) -> None:
            if future.cancelled() and (lanes := own()) is not None:
                lanes.cancel(number)

        entry.future.add_done_callback(note)
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

    @property
    def open(self) -> int:
        """The number of tasks that are not over."""
        return len(self._entries)

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

    def waiting(self, name: str) -> int:
        """Return the number of a model's tasks that wait to begin."""
        with self._lock:
            return self._dispatcher.waiting(name)

    def counts(self) -> dict[str, dict[str, int]]:
        """Return the number of each model's tasks by outcome, and of those that wait."""
        with self._lock:
            return {name: {**own, "waiting": self._dispatcher.waiting(name)} for name, own in self._counts.items()}

    def plan_lines(self) -> list[str]:
        """Return the plan of the policy ``top`` in words; nothing for other policies."""
        return [str(self._dispatcher.plan)] if isinstance(self._dispatcher, TopDispatcher) else []

    def close(self) -> None:
        """Refuse further tasks, and stop when those that were submitted are over; wait for that, except on a lane."""
        if self._forked:
            return
        with self._lock:
            self._refusal = self._refusal or "the session is closed"
            drained = not self._entries
        if drained:
            self._stop(time.monotonic())
        if self._threads.are_calling:  # a callback
            return
        self._drained.wait()
        self._threads.close()  # after the callbacks that lanes are calling
        sweep_shared_arena()

    def _stop(self, until: float) -> None:
        """Stop the lanes after the parts that they have; further calls do nothing new."""
        self._threads.close(until)
        self._lease.release()
        self._drained.set()

    def close_at_exit(self, until: float) -> None:
        """Refuse further tasks, and wait for those that were submitted until a time of ``time.monotonic``."""
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
        """Note that the future of a task was cancelled."""
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
                ended.append((self._entries.pop(action.number), action))
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
            # From here on it cannot be cancelled any more; it may have been in the meantime.
            outcome = over.outcome if entry.future.set_running_or_notify_cancel() else "cancelled"
            if outcome == "done" and entry.error is not None:
                outcome = "failed"
            with self._lock:
                counts = self._counts.get(entry.model, {})  # the model may have been removed
                counts[outcome] = counts.get(outcome, 0) + 1
            if outcome == "done":
                entry.future.set_result(outputs)
            elif outcome == "failed":
                entry.future.set_exception(entry.error)
            elif outcome != "cancelled":
                cause, hint = _DROPPED[outcome]
                message = f"a task of {entry.model!r} was dropped: {cause}"
                entry.future.set_exception(DroppedError(message, hint=hint, outcome=outcome))
        if ended and self._refusal:
            with self._lock:
                drained = not self._entries
            if drained:
                self._stop(time.monotonic())  # without waiting for other lanes, which may do the same

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


def _now_ms() -> float:
    return time.perf_counter() * 1e3


def _rules(  # noqa: PLR0913, PLR0917 - the options of a session
    models: Mapping[str, Model],
    deadlines: str | float | Mapping[str, str | float] | None,
    rates: float | Mapping[str, float] | None,
    priorities: Mapping[str, int] | None,
    queue: int | Mapping[str, int],
    drop: Drop | Mapping[str, Drop],
) -> dict[str, ModelRules]:
    """Return the rules of the models, without the times of blocks.

    Raises:
        OptionError: An option has an invalid value.
    """
    if not isinstance(models, Mapping) or not models:
        raise wrong_value("models", "at least one model by name", models)
    times, per_s = _by_name(models, deadlines, "deadlines", None), _by_name(models, rates, "rates", None)
    levels, lengths = _by_name(models, priorities, "priorities", 0), _by_name(models, queue, "queue", 64)
    dropped = _by_name(models, drop, "drop", "newest")
    rules = {}
    for name in models:
        if per_s[name] is not None and not (_is_number(per_s[name], Real) and 0 < per_s[name] < math.inf):
            raise wrong_value("rates", f"a number above 0 for {name!r}", per_s[name])
        if not _is_number(lengths[name], Integral) or lengths[name] < 1:
            raise wrong_value("queue", f"a whole number of at least 1 for {name!r}", lengths[name])
        if not _is_number(levels[name], Integral) or levels[name] < 0:
            raise wrong_value("priorities", f"a whole number from 0 for {name!r}", levels[name])
        if dropped[name] not in get_args(Drop):
            raise wrong_value("drop", f"newest or oldest for {name!r}", dropped[name])
        rules[name] = ModelRules(
            block_ms=(),
            deadline_ms=None if times[name] is None else parse_duration_ms(times[name], "deadlines"),
            rate=per_s[name],
            priority=levels[name],
            queue=lengths[name],
            drop=dropped[name],
        )
    return rules


def _providers(models: Mapping[str, Model], accelerators: Mapping[str, str] | None) -> dict[str, str]:
    """Return the execution provider of each model that runs on an accelerator.

    Raises:
        OptionError: An option has an invalid value.
        ProviderError: An accelerator does not work on this machine.
    """
    if not isinstance(accelerators, Mapping | None) or any(
        not isinstance(a, str) for a in (accelerators or {}).values()
    ):
        raise wrong_value("accelerators", "an execution provider by model", accelerators)
    given = _by_name(models, {} if accelerators is None else accelerators, "accelerators", "none")
    found = {accelerator: usable_provider(accelerator) for accelerator in dict.fromkeys(given.values())}
    return {name: provider for name, accelerator in given.items() if (provider := found[accelerator])}


def _is_number(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


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
