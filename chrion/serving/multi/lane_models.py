"""Several models on lanes, and the dispatcher that decides: what a session and its prediction have in common."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from numbers import Integral, Real
from typing import Any, Literal, Protocol, get_args

from chrion.common.suggestions import did_you_mean
from chrion.common.units import format_count, format_ms, parse_duration_ms
from chrion.common.wrong_values import wrong_value
from chrion.devices.providers import usable_provider
from chrion.errors import OptionError
from chrion.graph.blocks import ModuleChain, parse_block_ms
from chrion.serving.multi.dispatcher import Dispatcher, ModelRules
from chrion.serving.multi.lanes import lay_out_lanes
from chrion.serving.multi.policies import check_policy
from chrion.serving.multi.top import TopDispatcher
from chrion.serving.multi.top_search import TopPlanner
from chrion.serving.multi.virtual_lanes import BlockTimes, PinnedLanes, SharedCores, VirtualLanes

Drop = Literal["newest", "oldest"]
#: The limit of a block's time if none is given: a lane is free for a task with a short deadline after half of it, but
#: shorter blocks take more time in all. SqueezeNet, an LSTM with a deadline of 4 ms and BERT, at 0.9 of the capacity:
#: 18 and 20 % of the tasks are late with 5 ms, 7.5 and 10 % with 2 ms in the same runs, 13 % with 1 ms.
_BLOCK_MS, _SHORT_BLOCK_MS = 5.0, 2.0


class CutModel(Protocol):
    """A model in blocks."""

    @property
    def block_ms(self) -> tuple[float, ...]:
        """The time of each block alone on a core."""

    @property
    def modules(self) -> ModuleChain:
        """The modules whose pieces are the blocks."""

    @property
    def reason(self) -> str:
        """Why it is one block; empty if it is cut or short."""


class LaneModels:
    """Several models, the lanes that serve them, and the dispatcher that decides.

    A subclass cuts the models by ``_limit_ms`` and ``_in_modules``, and gives their blocks to :meth:`_use`.

    Args:
        models: The models by name.
        cores: The number of lanes on the CPU, or of cores that threads of the mode ``background`` share.

    The others are those of :class:`chrion.MultiSession`.

    Raises:
        ProviderError: An accelerator does not work on this machine.
        OptionError: There is no model, or an option has an invalid value.
    """

    def __init__(  # noqa: PLR0913 - optional arguments are keyword-only
        self,
        models: Mapping[str, Any],
        cores: int,
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
        block: str | float | None = None,
        patience: str | float = "1s",
    ) -> None:
        self._rules = _rules(models, deadlines, rates, priorities, queue, drop)
        deadlined = any(own.deadline_ms is not None for own in self._rules.values())
        self.policy = check_policy(policy or ("edf" if deadlined else "fair"))
        limit_ms = _block_ms(self._rules) if block is None else parse_block_ms(block, "block")
        patience_ms = parse_duration_ms(patience, "patience")
        self._limit_ms = math.inf if background else limit_ms
        self._in_modules = self.policy == "top"
        if self.policy in {"static", "top"} and background:
            raise OptionError(f"background: policy {self.policy} divides the cores, and each class has threads on all")
        self._providers = _providers(models, accelerators)
        if self._in_modules and self._providers:
            raise OptionError("accelerators: policy top runs all models on the cores of the CPU")
        self._cores = cores
        self._layout = lay_out_lanes(self._rules, cores, self._providers, background=background)
        self._options: dict[str, Any] = {"drop_late": drop_late, "patience_ms": patience_ms}

    def _use(self, chains: Mapping[str, CutModel]) -> None:
        """Take the models in blocks."""
        self._reasons = {name: chain.reason for name, chain in chains.items()}
        self._rules = {name: replace(own, block_ms=chains[name].block_ms) for name, own in self._rules.items()}
        rules, lanes, options = self._rules, self._layout.lanes, self._options
        if self._in_modules:
            modules = {name: chain.modules for name, chain in chains.items()}
            planner = TopPlanner(rules, lanes, modules)
            self._new_dispatcher: Callable[[], Dispatcher] = functools.partial(
                TopDispatcher, rules, lanes, modules, planner.first, planner.table, replan=planner.replan, **options
            )
        else:
            own_lanes = self._layout.own_lanes
            self._new_dispatcher = functools.partial(
                Dispatcher, rules, lanes, self.policy, own_lanes=own_lanes, **options
            )

    @property
    def rules(self) -> dict[str, ModelRules]:
        """The models with the times of their blocks, as the dispatcher has them."""
        return dict(self._rules)

    @property
    def lanes(self) -> int:
        """The number of lanes."""
        return self._layout.lanes

    @property
    def cpu_lanes(self) -> int:
        """The number of lanes of the CPU, which come first; the others are of accelerators."""
        return self._layout.cpu_lanes

    @property
    def niceness(self) -> dict[str, int]:
        """The niceness of the lanes of each model in the mode ``background``."""
        levels = self._layout.niceness
        return {name: levels[own[0]] for name, own in self._layout.own_lanes.items() if own[0] in levels}

    def new_dispatcher(self) -> Dispatcher:
        """Return a dispatcher without tasks, for simulations."""
        return self._new_dispatcher()

    def virtual_lanes(self, times: BlockTimes) -> VirtualLanes:
        """Return lanes on a virtual clock, for simulations."""
        if self._layout.niceness:
            return SharedCores(self._cores, self._layout.niceness, times)
        return PinnedLanes(self.lanes, times)

    def explain(self) -> str:
        """Return the policy, and the blocks of each model."""
        lines = [f"policy {self.policy} on {format_count(self.lanes, 'lane')}"]
        for name, rules in self._rules.items():
            blocks = f"{format_count(len(rules.block_ms), 'block')}, the longest {format_ms(max(rules.block_ms))}"
            place = f" on {self._providers[name]}" if name in self._providers else ""
            niceness = f", niceness {self.niceness[name]}" if name in self.niceness else ""
            note = f" ({self._reasons[name]})" if self._reasons[name] else ""
            lines.append(f"{name}: {format_ms(rules.total_ms)} in {blocks}{note}{place}{niceness}")
        return "\n".join(lines)


def _rules(  # noqa: PLR0913, PLR0917 - the options of a session
    models: Mapping[str, Any],
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
    times, per_s = by_name(models, deadlines, "deadlines", None), by_name(models, rates, "rates", None)
    levels, lengths = by_name(models, priorities, "priorities", 0), by_name(models, queue, "queue", 64)
    dropped = by_name(models, drop, "drop", "newest")
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


def _block_ms(rules: Mapping[str, ModelRules]) -> float:
    """Return the limit of a block's time, by the shortest deadline."""
    shortest_ms = min((own.deadline_ms for own in rules.values() if own.deadline_ms is not None), default=math.inf)
    return min(_BLOCK_MS, max(_SHORT_BLOCK_MS, shortest_ms / 2))


def _providers(models: Mapping[str, Any], accelerators: Mapping[str, str] | None) -> dict[str, str]:
    """Return the execution provider of each model that runs on an accelerator.

    Raises:
        OptionError: An option has an invalid value.
        ProviderError: An accelerator does not work on this machine.
    """
    if not isinstance(accelerators, Mapping | None) or any(
        not isinstance(a, str) for a in (accelerators or {}).values()
    ):
        raise wrong_value("accelerators", "an execution provider by model", accelerators)
    given = by_name(models, {} if accelerators is None else accelerators, "accelerators", "none")
    found = {accelerator: usable_provider(accelerator) for accelerator in dict.fromkeys(given.values())}
    return {name: provider for name, accelerator in given.items() if (provider := found[accelerator])}


def _is_number(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def by_name(models: Mapping[str, Any], given: Any, option: str, default: Any) -> dict[str, Any]:
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
