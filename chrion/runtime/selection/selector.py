"""What to run a model with: profile it, plan it, and let the guard compare the plan with plain sessions."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import onnxruntime as ort

from chrion.allocator import trim
from chrion.cores import physical_cores
from chrion.devices import CPU_PROVIDER, usable_provider
from chrion.errors import ChrionError, InputError, ModelError, ProviderError
from chrion.graph.loader import first_line
from chrion.graph.model import Graph
from chrion.profiler.machine import this_machine
from chrion.profiler.measure import synthetic_inputs
from chrion.profiler.measure_graph import profile
from chrion.profiler.profiles import Profile
from chrion.runtime.execution.engine import CannotCutError, CutEngine, Engine, PlainEngine, require_tensors
from chrion.runtime.options.session_options import fingerprint
from chrion.runtime.selection.guard import Candidate, Decision, Memory, Trial, decide
from chrion.scheduler.plan import Plan
from chrion.scheduler.planner import alternatives
from chrion.units import format_ms

log = logging.getLogger(__name__)

#: A plain session that is not the caller's own, beside which that one may have to stay, holds no more weights.
_BESIDE_BYTES = 32e6
#: Plans stay open while they are compared if all their weights together take no more.
_LASTING_BYTES = 256e6
_PLAIN = "plain"
_PLAIN_CPU = "plain, on the CPU"


@dataclass(frozen=True)
class SessionConfig:
    """What the caller of HybridSession asked for."""

    #: What InferenceSession is made of.
    source: str | bytes
    options: ort.SessionOptions | None
    providers: Sequence[Any] | None
    provider_options: Sequence[Mapping[Any, Any]] | None
    plan: Plan | Callable[[Graph], Plan] | None
    slo_ms: float | None
    alpha: float | None
    cores: int | None
    #: Raise where something fails on the accelerator, instead of going on without it.
    strict: bool = False
    #: Resident accelerator memory that must not be exceeded, or None.
    budget_mb: float | None = None
    #: Further keyword arguments of InferenceSession.
    rest: Mapping[str, Any] = field(default_factory=dict)

    @property
    def accelerator(self) -> tuple[str, Mapping[str, Any]] | None:
        """The first provider that is not the CPU's, with its options."""
        for at, provider in enumerate(self.providers or ()):
            beside = self.provider_options[at] if self.provider_options else {}
            name, options = provider if isinstance(provider, tuple) else (provider, beside)
            if name != CPU_PROVIDER:
                return name, options
        return None

    def without_accelerator(self) -> SessionConfig:
        """Return the configuration without the first provider that is not the CPU's."""
        providers = list(self.providers or ())
        names = [provider[0] if isinstance(provider, tuple) else provider for provider in providers]
        first = next(at for at, name in enumerate(names) if name != CPU_PROVIDER)
        options = self.provider_options and [o for at, o in enumerate(self.provider_options) if at != first]
        left = providers[:first] + providers[first + 1 :]
        return replace(self, providers=left or [CPU_PROVIDER], provider_options=options if left else None)

    @property
    def lanes(self) -> int | None:
        """CPU cores to use at most: ``cores``, or else the threads that the session options allow; None for all."""
        threads = self.options.intra_op_num_threads if self.options and self.cores is None else 0
        return min(threads, len(physical_cores())) if threads > 0 else self.cores

    def plain(self, reason: str) -> PlainEngine:
        """A plain session in place of a plan: the caller's, or under a budget, one that takes none of it."""
        return self.as_asked(reason) if self.budget_mb is None else self.on_cpu(reason)

    def as_asked(self, reason: str) -> PlainEngine:
        """The plain session the caller would have had; on the accelerator of the given plan where none is named."""
        providers = self.providers
        if providers is None and isinstance(self.plan, Plan) and self.plan.accelerator not in {None, CPU_PROVIDER}:
            providers = [self.plan.accelerator, CPU_PROVIDER]
        return PlainEngine(self.source, self.options, providers, self.provider_options, reason, **self.rest)

    def on_cpu(self, reason: str) -> PlainEngine:
        """The same without an accelerator."""
        return PlainEngine(self.source, self.options, [CPU_PROVIDER], None, reason, **self.rest)


class EngineSelector:
    """Makes engines for a model, one for each set of input shapes."""

    def __init__(self, config: SessionConfig) -> None:
        self._config = config
        self._provider_options = config.accelerator[1] if config.accelerator else {}
        #: Measured for the first shapes; the costs of others are scaled from it.
        self._profile: Profile | None = None
        #: How the accelerator has failed, after which it is not used any more; empty while it works.
        self._lost = ""
        #: Plain sessions by name; one serves all shapes.
        self._opened: dict[str, PlainEngine] = {}

    def engine(self, graph: Graph) -> Engine:
        """The engine for a graph of known shapes.

        A given plan is used as it is; otherwise a plan has to beat the plain sessions. If the accelerator fails and
        ``strict`` is false, return a CPU engine. If anything else fails, return a plain engine with the reason.

        Raises:
            InputError: The given plan does not fit, or an option cannot be met.
            ProviderError: The accelerator fails, and the caller wants to be told.
            Exception: What the caller's function raises that makes plans.
        """
        config = self._config
        plan = config.plan(graph) if callable(config.plan) and not self._lost else config.plan
        try:
            return self._engine(graph, plan if isinstance(plan, Plan) else None)
        except Exception as error:
            if self._concerns_caller(error):
                raise
            if not isinstance(error, CannotCutError):
                log.warning("model %s runs plain: %s", graph.name, why_plain(error))
            return self.plain(why_plain(error))
        finally:
            trim()

    def _engine(self, graph: Graph, plan: Plan | None) -> Engine:
        if self._lost:
            return self._chosen_on_cpu(graph)
        if plan is not None:
            return self._open(graph, plan)
        require_tensors(graph)
        return self._guarded(graph)

    def _concerns_caller(self, error: Exception) -> bool:
        """Return whether an error is about what the caller asked for, so that a plain session would hide it."""
        given = self._config.plan is not None
        if isinstance(error, InputError):
            return given or not isinstance(error, ModelError)
        return self._config.strict and (isinstance(error, ProviderError) or (given and not _is_reason(error)))

    def be_strict(self, *, strict: bool) -> SessionConfig:
        """From now on raise, or not, where the accelerator fails; returns the caller's config with that."""
        self._config = replace(self._config, strict=strict)
        return self._config

    def lose(self, error: Exception) -> bool:
        """The accelerator has failed: do without it from now on, and say so in a warning; false if that is known."""
        if self._lost:
            return False
        self._lost = f"the accelerator failed: {error}"
        self._opened.clear()
        log.warning("the model runs on the CPU: %s", self._lost)
        return True

    def plain(self, reason: str) -> PlainEngine:
        """The plain session the caller would have had, or one on the CPU where the accelerator cannot open the model.

        Raises:
            Exception: What InferenceSession raises where the CPU cannot either, or where the caller wants to be told.
        """
        config = self._config
        if self._lost:
            return self._shared(_PLAIN, config.on_cpu, self._lost)
        try:
            return self._shared(_PLAIN if config.budget_mb is None else _PLAIN_CPU, config.plain, reason)
        except Exception as error:
            if config.strict or config.accelerator is None:
                raise
            try:
                engine = config.on_cpu(f"the accelerator failed: {error}")
            except Exception:  # noqa: BLE001 - the model is at fault
                raise error from None
            self.lose(error)
            self._opened[_PLAIN] = engine
            return engine

    def forget(self) -> None:
        """Drop the plain sessions; they end when no request uses them any more."""
        self._opened.clear()

    def _shared(self, name: str, make: Callable[[str], PlainEngine], reason: str) -> PlainEngine:
        """Return the plain session of a name, opened once, with a reason of its own."""
        if name not in self._opened:
            self._opened[name] = make(reason)
        return self._opened[name].because(reason)

    def _chosen_on_cpu(self, graph: Graph) -> Engine:
        """What runs without the accelerator.

        A plan on the CPU cores if one made from the costs at hand is fastest, or else a plain session; where no costs
        are at hand, a plain session.
        """
        if self._profile is None:
            return self.plain(self._lost)
        makers = self._plain_makers(graph)
        decision = self._decide(graph, makers)
        if decision.plan is None:
            return self._shared(decision.winner, makers[decision.winner], f"{self._lost}; {decision.why}")
        return self._cut(graph, replace(decision.plan, remarks=(*decision.plan.remarks, self._lost)))

    def _open(self, graph: Graph, plan: Plan) -> Engine:
        """The engine of a plan, or one without the accelerator if that fails.

        Raises:
            ProviderError: It fails, and the caller wants to be told.
        """
        try:
            return self._cut(graph, plan)
        except (CannotCutError, InputError):
            raise
        except Exception as error:
            if plan.accelerator is None:
                raise
            if self._config.strict:
                if isinstance(error, ProviderError):
                    raise
                raise ProviderError(f"plan of {plan.model!r}: {plan.accelerator} failed: {error}") from error
            self.lose(error)
            return self._chosen_on_cpu(graph)

    def _cut(self, graph: Graph, plan: Plan) -> CutEngine:
        return CutEngine(plan.apply(graph), plan, self._config.options, self._provider_options)

    def _guarded(self, graph: Graph) -> Engine:
        provider = self._config.accelerator[0] if self._config.accelerator else None
        memory = Memory(this_machine(provider).fingerprint, graph.digest, self._goal())
        decision = memory.recall()
        if decision is None and self._drop_broken_accelerator(graph):
            return self._guarded(graph)
        plain = self._plain_makers(graph)
        if decision is not None:
            try:
                return self._chosen(graph, plain, decision)
            except (ChrionError, CannotCutError, KeyError) as error:  # of another release, perhaps
                log.warning("model %s: ignoring cached decision: %s", graph.name, error)
        decision = self._decide(graph, plain)
        memory.keep(decision)
        return self._chosen(graph, plain, decision)

    def _chosen(self, graph: Graph, plain: Mapping[str, Callable[[str], PlainEngine]], decision: Decision) -> Engine:
        if decision.plan:
            return self._open(graph, decision.plan)
        return self._shared(decision.winner, plain[decision.winner], decision.why)

    def _decide(self, graph: Graph, plain: Mapping[str, Callable[[str], PlainEngine]]) -> Decision:
        """Time the plans that look best against the plain sessions."""
        made = self._plans(graph)
        plans = {f"plan {at}": plan for at, plan in enumerate(made, start=1) if len(plan.segments) > 1}
        reference = made[0].accelerator_only
        plain_mb = reference.resident_mb if reference else 0.0
        budget_mb = self._config.budget_mb
        contenders = self._contenders(graph, plans, plain, plain_mb)
        fitting = [c for c in contenders if budget_mb is None or c.resident_mb <= budget_mb]
        winner, trials = decide(fitting, self._config.slo_ms)
        why = _reason(trials) if plans else "the plan runs the whole model as one segment"
        log.info("model %s: %s wins (%s)", graph.name, winner, why)
        return Decision(winner, plans.get(winner), why)

    def _goal(self) -> tuple[object, ...]:
        config = self._config
        name, options = config.accelerator or (None, {})
        accelerator = name, tuple(sorted((str(key), str(value)) for key, value in options.items()))
        return config.slo_ms, config.alpha, config.cores, config.budget_mb, accelerator, fingerprint(config.options)

    def _plans(self, graph: Graph) -> list[Plan]:
        config = self._config
        if self._profile is None:
            self._profile = profile(graph, config.lanes, self._usable_accelerator(graph))
        usable = replace(self._profile, accelerator=None) if self._lost else self._profile
        return alternatives(graph, usable, config.slo_ms, config.alpha, gpu_budget=config.budget_mb)

    def _drop_broken_accelerator(self, graph: Graph) -> bool:
        """Drop an accelerator that onnxruntime offers and that does not work; return whether there was one.

        Each session that named it would try it again and print onnxruntime's error. Decisions made without it are
        stored as such, so that the model is compared anew once the accelerator works.
        """
        accelerator = self._config.accelerator
        if accelerator is None or accelerator[0] not in ort.get_available_providers():
            return False
        if self._usable_accelerator(graph) is not None:
            return False
        self._config = self._config.without_accelerator()
        self._provider_options = self._config.accelerator[1] if self._config.accelerator else {}
        return True

    def _usable_accelerator(self, graph: Graph) -> str | None:
        if self._config.accelerator is None:
            return None
        try:
            return usable_provider(self._config.accelerator[0])
        except ChrionError as error:
            if self._config.strict:
                raise
            log.warning("model %s runs without an accelerator: %s", graph.name, error)
            return None

    def _plain_makers(self, graph: Graph) -> dict[str, Callable[[str], PlainEngine]]:
        """Plain sessions worth trying: as the caller made it, and on the CPU with other numbers of threads."""
        config = self._config
        makers: dict[str, Callable[[str], PlainEngine]] = {_PLAIN: config.on_cpu if self._lost else config.as_asked}
        if config.options is None and sum(graph.dag.weight_bytes) <= _BESIDE_BYTES:
            cores = len(physical_cores())
            counts = [1] if cores < 8 else [1, cores // 2]
            makers |= {f"plain, threads: {count}": _with_threads(config.source, count) for count in counts}
        if config.budget_mb is not None and config.accelerator:
            makers[_PLAIN_CPU] = config.plain
        return makers

    def _contenders(
        self,
        graph: Graph,
        plans: Mapping[str, Plan],
        plain: Mapping[str, Callable[[str], PlainEngine]],
        plain_mb: float,
    ) -> list[Candidate]:
        """All that are to be timed; ``plain_mb`` is what the plain session holds of the accelerator."""
        feed = synthetic_inputs(graph)
        names = [o.name for o in graph.outputs]

        def open_plain(make: Callable[[str], PlainEngine]) -> tuple[Callable[[], object], Callable[[], None]]:
            session = make("").session
            return lambda: session.run(None, feed), lambda: None

        def open_plan(plan: Plan) -> tuple[Callable[[], object], Callable[[], None]]:
            engine = self._cut(graph, plan)
            return lambda: engine.run(feed, names, arrays=True), engine.close

        lasting = sum(graph.dag.weight_bytes) * len(plans) <= _LASTING_BYTES
        contenders = []
        for name, make in plain.items():
            held_mb = plain_mb if name == _PLAIN else 0.0
            contenders.append(Candidate(name, partial(open_plain, make), held_mb))
        for name, plan in plans.items():
            idle = lasting and plan.accelerator is None
            memory_mb = plan.predicted.resident_mb
            contenders.append(Candidate(name, partial(open_plan, plan), memory_mb, plain=False, lasting=idle))
        return contenders


def why_plain(error: Exception) -> str:
    """Return the reason for which a model runs plain after an error; errors of libraries with their type."""
    return str(error) if _is_reason(error) else f"{type(error).__name__}: {first_line(error)}"


def _is_reason(error: Exception) -> bool:
    """Return whether an error is raised by Chrion itself, with a message that is a reason."""
    return isinstance(error, ChrionError | CannotCutError)


def _reason(trials: Sequence[Trial]) -> str:
    timed = ", ".join(f"{t.name}: {format_ms(t.median_ms)}" for t in trials if t.median_ms < math.inf)
    if timed:
        return f"fastest when tried ({timed})"
    failure = next((t.failure for t in trials if t.failure), "none was tried")
    return f"no candidate could be timed on synthetic inputs ({failure})"


def _with_threads(source: str | bytes, count: int) -> Callable[[str], PlainEngine]:
    def make(reason: str) -> PlainEngine:
        options = ort.SessionOptions()
        options.intra_op_num_threads = count
        return PlainEngine(source, options, [CPU_PROVIDER], None, reason)

    return make
