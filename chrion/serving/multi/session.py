"""MultiSession: several models on the cores of one machine, whose blocks compete by deadlines or another policy."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, Self, get_args

import onnx

from chrion.common.suggestions import did_you_mean
from chrion.common.units import format_count, parse_duration_ms
from chrion.common.wrong_values import wrong_value
from chrion.devices.providers import usable_provider
from chrion.errors import OptionError
from chrion.graph.blocks import parse_block_ms
from chrion.graph.model import TensorInfo
from chrion.machine.cores import check_cores, physical_cores
from chrion.runtime.block_chain import open_chain
from chrion.serving.multi.block_lanes import BlockLanes, TaskFuture
from chrion.serving.multi.dispatcher import BlockSpan, Dispatcher, ModelRules
from chrion.serving.multi.lanes import lay_out_lanes
from chrion.serving.multi.policies import check_policy
from chrion.serving.multi.top import TopDispatcher
from chrion.serving.multi.top_search import TopPlanner
from chrion.serving.multi.virtual_lanes import BlockTimes, PinnedLanes, SharedCores, VirtualLanes

Model = str | Path | bytes | onnx.ModelProto
Drop = Literal["newest", "oldest"]


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
        policy: A key of :data:`chrion.serving.multi.policies.POLICIES`; ``edf`` if there are deadlines, else
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
        limit_ms, patience_ms = parse_block_ms(block, "block"), parse_duration_ms(patience, "patience")
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
        self._cores = cores or len(physical_cores())
        layout = lay_out_lanes(rules, self._cores, self._providers, background=background)
        self._cpu_lanes, self._lane_niceness = layout.cpu_lanes, layout.niceness
        #: The niceness of the lanes of each model in the mode ``background``.
        self.niceness = {n: layout.niceness[own[0]] for n, own in layout.own_lanes.items() if own[0] in layout.niceness}
        options: dict[str, Any] = {"drop_late": drop_late, "patience_ms": patience_ms}
        limit_ms = math.inf if background else limit_ms
        chains = {
            name: open_chain(model, limit_ms, given[name], self._providers.get(name, ""), modules=top)
            for name, model in models.items()
        }
        rules = {name: replace(own, block_ms=chains[name].block_ms) for name, own in rules.items()}
        if top:
            modules = {name: chain.modules for name, chain in chains.items()}
            planner = TopPlanner(rules, layout.lanes, modules)
            options["replan"] = planner.replan
            new_dispatcher: Callable[[], Dispatcher] = functools.partial(
                TopDispatcher, rules, layout.lanes, modules, planner.first, planner.table, **options
            )
        else:
            options["own_lanes"] = layout.own_lanes
            new_dispatcher = functools.partial(Dispatcher, rules, layout.lanes, self.policy, **options)
        self._core = BlockLanes(
            chains, rules, layout.lanes, new_dispatcher, cores=layout.pinned, niceness=layout.niceness
        )

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

    @property
    def cpu_lanes(self) -> int:
        """The number of lanes of the CPU, which come first; the others are of accelerators."""
        return self._cpu_lanes

    def new_dispatcher(self) -> Dispatcher:
        """Return a dispatcher without tasks that decides as this session does, for simulations."""
        return self._core.new_dispatcher()

    def virtual_lanes(self, times: BlockTimes) -> VirtualLanes:
        """Return lanes as this session has them, for simulations."""
        if self._lane_niceness:
            return SharedCores(self._cores, self._lane_niceness, times)
        return PinnedLanes(self.lanes, times)

    def counts(self) -> dict[str, dict[str, int]]:
        """Return the number of each model's tasks so far, by outcome, and those that are ``waiting`` to begin."""
        return self._core.counts()

    def record(self) -> AbstractContextManager[list[BlockSpan]]:
        """Record the blocks that end within this context."""
        return self._core.record()

    def explain(self) -> str:
        """Return the policy, and the blocks of each model."""
        lines = [f"policy {self.policy} on {format_count(self.lanes, 'lane')}"]
        for name, rules in self.rules.items():
            reason = self._core.chains[name].reason
            blocks = f"{format_count(len(rules.block_ms), 'block')}, the longest {max(rules.block_ms):.1f} ms"
            place = f" on {self._providers[name]}" if name in self._providers else ""
            niceness = f", niceness {self.niceness[name]}" if name in self.niceness else ""
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
