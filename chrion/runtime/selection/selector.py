"""Engine selection: profile a model, plan it, and compare the plans with plain sessions."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import onnxruntime as ort

from chrion.common.units import format_share
from chrion.devices import usable_provider
from chrion.errors import ChrionError, InputError, ModelError, ProviderError
from chrion.graph.model import Graph
from chrion.graph.ort_sessions import first_line
from chrion.machine.allocator import trim
from chrion.profiler.interference import TOO_BUSY
from chrion.profiler.precision import relative_error
from chrion.profiler.profiles import Profile
from chrion.profiler.synthetic_inputs import synthetic_inputs
from chrion.runtime.execution.engine import CannotCutError, Engine, require_tensors
from chrion.runtime.selection.comparison_summary import NOT_PARALLEL, PLAIN, describe, missed_slo
from chrion.runtime.selection.configuration import SessionConfig
from chrion.runtime.selection.decisions import Decision
from chrion.runtime.selection.guard import SHARE, Candidate, compare
from chrion.runtime.selection.known_decisions import KnownDecisions
from chrion.runtime.selection.plain_sessions import PlainOpener, PlainSessions
from chrion.runtime.selection.tuning_lock import BusyError, tuning_lock
from chrion.scheduler.plan import Plan, Prediction

if TYPE_CHECKING:
    from chrion.runtime.execution.cut_engine import CutEngine

log = logging.getLogger(__name__)

#: Plans stay open between their trials if the weights of all of them take at most this many bytes, and if they add at
#: most this much to the memory of the process, in MB and in sizes of the weights. Opening a plan of SqueezeNet takes as
#: long as opening a plain session, and 34 sessions with an arena each hold 140 MB (the limits are choices).
_KEPT_OPEN_BYTES, _KEPT_OPEN_MB, _KEPT_OPEN_WEIGHTS = 256e6, 50.0, 2.0
#: A plan of a model with free dimensions holds all weights a second time, since the plain session stays open for other
#: shapes. It must have a clear gain: it is selected if it takes at most this share of a plain session's latency.
SHARE_BESIDE_PLAIN = 0.8
#: Longest time to wait for another process that tunes, in seconds (a choice, not measured).
PATIENCE_S = 20.0


class EngineSelector:
    """Selects engines for a model, one for each set of input shapes.

    Args:
        config: The session's configuration.
        of_file: Whether graphs are those of the model's file, so that decisions are also for later sessions of it;
            otherwise the caller has given a graph, which may be another one.

    Attributes:
        plain_sessions: The plain sessions of the model, and the configuration in use.
        patience_s: Longest time to wait for another process that tunes, in seconds.
    """

    def __init__(self, config: SessionConfig, *, of_file: bool = True) -> None:
        self._of_file = of_file
        self.plain_sessions = PlainSessions(config)
        self.patience_s = PATIENCE_S
        #: Profile of the first shapes; the costs of further shapes are scaled from it.
        self._profile: Profile | None = None
        #: Whether the profile is one of those that are measured beside other work.
        self._is_brief = False

    @property
    def known(self) -> KnownDecisions:
        """Decisions that were made before."""
        return KnownDecisions(self._config)

    @property
    def _config(self) -> SessionConfig:
        return self.plain_sessions.config

    @property
    def _lost(self) -> str:
        return self.plain_sessions.lost

    def engine(self, graph: Graph, decision: Decision | None = None) -> Engine:
        """Return the engine for a graph of known shapes, by a decision if it is made already.

        A given plan is used as it is; any other plan has to beat the plain sessions. If the accelerator fails and
        ``strict`` is false, return a CPU engine. If anything else fails, return a plain engine with the reason.

        Raises:
            InputError: The given plan does not fit, or an option cannot be met.
            ProviderError: The accelerator fails, and ``strict`` is true.
            Exception: Raised by the function that the caller gave as ``plan``.
        """
        config = self._config
        plan = config.plan(graph) if callable(config.plan) and not self._lost else config.plan
        try:
            return self._engine(graph, plan if isinstance(plan, Plan) else None, decision)
        except Exception as error:
            if self._concerns_caller(error):
                raise
            if not isinstance(error, CannotCutError):
                log.warning("model %s runs plain: %s", graph.name, why_plain(error))
            return self.plain_sessions.get(self._lost or why_plain(error))
        finally:
            trim()

    def decide(self, graph: Graph, *, anew: bool = False, busy: bool = False) -> Decision:
        """Return the cached decision for a graph, or compare the candidates and cache the result.

        Args:
            graph: The graph, of known shapes.
            anew: Whether to compare the candidates even if a decision is cached.
            busy: Whether the cores are in use, perhaps by live requests, on which the session can compare a plan.
                Then costs are measured briefly, and candidates are not timed.

        Raises:
            CannotCutError: A plain session is the only candidate.
            ChrionError: The model cannot be profiled or planned.
        """
        require_tensors(graph)
        return (None if anew else self.known.recall(graph)) or self._decide_anew(graph, busy=busy)

    def open(self, graph: Graph, decision: Decision) -> Engine:
        """Open the engine that a decision selects.

        Raises:
            ChrionError: The decision does not fit this graph or release.
        """
        if decision.plan:
            from chrion.runtime.execution.cut_engine import CutEngine  # noqa: PLC0415 - plain sessions do not need it

            engine = self._open(graph, replace(decision.plan, model=graph.name))  # an equal graph may have made it
            if isinstance(engine, CutEngine):
                return self.adopt(engine, decision)
            return engine  # the accelerator has failed
        return self.plain_sessions.of_decision(decision)

    def adopt(self, engine: CutEngine, decision: Decision) -> CutEngine:
        """Use the open engine of a plan for a decision."""
        engine.footprint = decision.footprint
        engine.reason = decision.evidence
        return self.plain_sessions.compare_live(engine, decision)

    def set_strict(self, *, strict: bool) -> SessionConfig:
        """Set whether failures of the accelerator are raised; return the new configuration."""
        self.plain_sessions.config = replace(self._config, strict=strict)
        return self._config

    def _engine(self, graph: Graph, plan: Plan | None, decision: Decision | None) -> Engine:
        if self._lost:
            return self._select_on_cpu(graph)
        if plan is not None:
            return self._open(graph, plan)
        require_tensors(graph)
        decision = decision or self.known.recall(graph)
        if decision is not None:
            try:
                return self._use(graph, decision)
            except (ChrionError, CannotCutError) as error:
                log.warning("model %s: ignoring cached decision: %s", graph.name, error)
        return self._use(graph, self._decide_alone(graph))

    def _use(self, graph: Graph, decision: Decision) -> Engine:
        """Open the engine of a decision, which later sessions of the model's file find."""
        engine = self.open(graph, decision)
        warn_of_slo(graph.name, decision)
        if self._of_file:
            self.known.keep_for_source(graph, decision)
        return engine

    def _decide_alone(self, graph: Graph) -> Decision:
        """Compare the candidates while no other process tunes, unless another process has just done it.

        Several processes that start together would disturb each other, and decide the same.
        """
        waits: list[None] = []
        with ExitStack() as held:
            with suppress(BusyError):  # another process tunes other models, or hangs
                held.enter_context(tuning_lock(self.patience_s, lambda: waits.append(None)))
            return (self.known.recall(graph) if waits else None) or self._decide_anew(graph)

    def _decide_anew(self, graph: Graph, *, busy: bool = False) -> Decision:
        """Compare the candidates and cache the decision."""
        if self._drop_broken_accelerator(graph) and (decision := self.known.of_graph(graph).recall()):
            return decision
        return self.known.keep(graph, self._weighed(graph, self._compare(graph, live=busy)))

    def _weighed(self, graph: Graph, decision: Decision) -> Decision:
        """Return the decision with the memory of its plan or candidate, if the plain session stays open beside it.

        Without a measurement, select the plain session: a plan might double the memory.
        """
        from chrion.runtime.selection.footprint import (  # noqa: PLC0415 - as above
            MeasurementError,
            can_measure,
            measure_footprint,
        )

        plan = decision.plan or decision.candidate
        if plan is None or plan.accelerator or not (graph.declared_free and can_measure()):
            return decision
        try:
            return replace(decision, footprint=measure_footprint(self._config, graph, plan))
        except MeasurementError as error:
            log.warning("model %s runs plain: %s", graph.name, error)
            return replace(decision, winner=PLAIN, plan=None, candidate=None, why=str(error))

    def _concerns_caller(self, error: Exception) -> bool:
        """Return whether an error is about an argument of the session, so that a plain session would hide it."""
        given = self._config.plan is not None
        if isinstance(error, InputError):
            return given or not isinstance(error, ModelError)
        return self._config.strict and (isinstance(error, ProviderError) or (given and not _is_reason(error)))

    def _select_on_cpu(self, graph: Graph) -> Engine:
        """Select an engine without the accelerator; a plain session if nothing was profiled yet."""
        if self._profile is None:
            return self.plain_sessions.get(self._lost)
        decision = self._compare(graph)
        if decision.plan is None:
            return self.plain_sessions.of_decision(replace(decision, why=f"{self._lost}; {decision.why}"))
        return self._cut(graph, replace(decision.plan, remarks=(*decision.plan.remarks, self._lost)))

    def _open(self, graph: Graph, plan: Plan) -> Engine:
        """Return the engine of a plan, or a CPU engine if the accelerator fails.

        Raises:
            ProviderError: The accelerator fails, and ``strict`` is true.
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
            self.plain_sessions.lose_accelerator(error)
            return self._select_on_cpu(graph)

    def _cut(self, graph: Graph, plan: Plan) -> CutEngine:
        from chrion.runtime.execution.cut_engine import CutEngine  # noqa: PLC0415 - as above

        config = self._config
        reload = partial(config.load, graph.shapes, optimise=graph.optimised)
        provider_options = config.accelerator[1] if config.accelerator else {}
        engine = CutEngine(plan.apply(graph), plan, config.options, provider_options, reload)
        engine.selected_for = graph.digest
        return engine

    def _compare(self, graph: Graph, *, live: bool = False) -> Decision:
        """Time the plans with the best predictions against the plain sessions, or leave it to live requests."""
        live = live and self._can_compare_live()
        made, precision = self._precise_plans(graph, brief=live)
        parallel = (plan for plan in made if not plan.is_plain)
        plans = {plan_name(at): plan for at, plan in enumerate(parallel, start=1)}
        candidate = next(iter(plans.values()), None) if self._can_compare_live() else None
        if live:
            why = "; ".join(filter(None, [TOO_BUSY if candidate else NOT_PARALLEL, precision]))
            return Decision(PLAIN, None, why, uncertain=True, candidate=candidate)
        comparison = compare(self._candidates(graph, plans, made[0]), self._config.slo_ms)
        winner, results, interference, *_ = comparison
        threads = self._config.threads
        relation = describe(comparison, self._config.slo_ms, planned=bool(plans), threads=threads)
        why = "; ".join(filter(None, [relation, precision]))
        log.info("model %s: selected %s (%s)", graph.name, winner, why)
        missed = missed_slo(results, self._config.slo_ms)
        timings = tuple(result for result in results if 0 < result.latency_ms < math.inf)
        plan = plans.get(winner)
        compared = candidate if interference and plan is None else None
        return Decision(winner, plan, why, uncertain=interference, missed=missed, timings=timings, candidate=compared)

    def _precise_plans(self, graph: Graph, *, brief: bool = False) -> tuple[list[Plan], str]:
        """Return the plans whose error is within the limit, and a line on the error, or on why there is no bfloat16.

        The error is that of the outputs for synthetic inputs. If no plan is within the limit, plan in float32.
        """
        from chrion.scheduler.native_kernels import remark_on_precision  # noqa: PLC0415 - as above

        made, limit = self._plans(graph, brief=brief), self._config.max_error
        if not any(plan.precision == "bf16" for plan in made):
            return made, remark_on_precision(graph.dag, self._profile, ()) if self._profile else ""
        if limit is None and brief:
            return made, ""
        feed = synthetic_inputs(graph)
        expected = self.plain_sessions.opener(PLAIN)("").session.run(None, feed)
        rounded = [plan for plan in made if plan.precision == "bf16"][: 1 if limit is None else None]
        errors = {id(plan): self._error(graph, plan, feed, expected) for plan in rounded}
        if limit is None:
            return made, _describe_error(max(errors.values()))
        kept = [plan for plan in made if errors.get(id(plan), 0.0) <= limit]
        if within := [error for error in errors.values() if error <= limit]:
            return kept, _describe_error(max(within))
        measured = _describe_error(min(errors.values()))
        config, self._profile = self._config, None  # that of bfloat16
        self.plain_sessions.config = replace(config, precision="float32", max_error=None)
        try:
            made = self._plans(graph, brief=brief)
            return made, f"float32 in place of bf16: {measured}, more than {format_share(limit)}"
        finally:
            self.plain_sessions.config, self._profile = config, None

    def _error(self, graph: Graph, plan: Plan, feed: Mapping[str, Any], expected: Sequence[Any]) -> float:
        """Return the error of a plan's outputs, which is infinite if it cannot be executed."""
        try:
            with contextlib.closing(self._cut(graph, plan)) as engine:
                return relative_error(engine.run(None, feed, None), expected)
        except Exception as error:  # noqa: BLE001 - any failure of the plan; another one, or none, is used
            log.warning("model %s: a plan in bf16 cannot be executed: %s", graph.name, first_line(error))
            return math.inf

    def _can_compare_live(self) -> bool:
        """Return whether live requests can decide between a plan and the plain session.

        They cannot with an accelerator, whose memory may hold only one of both, or an SLO, within which the guard
        prefers less memory.
        """
        return self._config.accelerator is None and self._config.slo_ms is None

    def _plans(self, graph: Graph, *, brief: bool = False) -> list[Plan]:
        from chrion.profiler.measure_graph import profile  # noqa: PLC0415 - sessions of known plans do not need them
        from chrion.runtime.selection.proposals import propose_plans  # noqa: PLC0415

        config = self._config
        if self._profile is None or (self._is_brief and not brief):
            self._is_brief = brief
            accelerator, precision = self._usable_accelerator(graph), config.precision
            self._profile = profile(graph, config.lanes, accelerator, brief=brief, plain=False, precision=precision)
        usable = replace(self._profile, accelerator=None) if self._lost else self._profile
        return propose_plans(graph, usable, config, self.known.earlier_plans(graph))

    def _drop_broken_accelerator(self, graph: Graph) -> bool:
        """Drop the accelerator if onnxruntime offers it and it does not work; return whether it was dropped.

        Each session that named it would try to open it and print onnxruntime's error. Decisions made without it are
        cached as such, so that candidates are compared again once the accelerator works.
        """
        accelerator = self._config.accelerator
        if accelerator is None or accelerator[0] not in ort.get_available_providers():
            return False
        if self._usable_accelerator(graph) is not None:
            return False
        self.plain_sessions.config = self._config.without_accelerator()
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

    def _candidates(self, graph: Graph, plans: Mapping[str, Plan], first: Plan) -> list[Candidate]:
        """Return all candidates within the memory budget, plain ones first.

        Args:
            graph: The graph.
            plans: Plans by name.
            first: The best plan, whose prediction for the accelerator alone is that of the plain session.
        """
        feed = synthetic_inputs(graph)

        def open_plain(make: PlainOpener) -> tuple[Callable[[], object], Callable[[], None]]:
            session = make("").session
            return lambda: session.run(None, feed), lambda: None

        def open_plan(plan: Plan) -> tuple[Callable[[], object], Callable[[], None]]:
            engine = self._cut(graph, plan)
            return lambda: engine.run(None, feed, None), engine.close

        weight_bytes = sum(graph.dag.weight_bytes)
        few_weights = weight_bytes * len(plans) <= _KEPT_OPEN_BYTES
        room_mb = _KEPT_OPEN_MB + _KEPT_OPEN_WEIGHTS * weight_bytes / 1e6
        candidates = []
        for name in self.plain_sessions.names(graph):
            held = first.accelerator_only if name == PLAIN else None
            if not held or self._fits(held):
                held_mb = held.accelerator_mb(first.memory) if held else 0.0
                candidates.append(Candidate(name, partial(open_plain, self.plain_sessions.opener(name)), held_mb))
        for name, plan in plans.items():
            if not self._fits(plan.predicted):
                continue
            own_mb = room_mb if few_weights and plan.accelerator is None else 0.0
            memory_mb = plan.predicted.accelerator_mb(plan.memory)
            share = SHARE_BESIDE_PLAIN if graph.declared_free else SHARE
            opener = partial(open_plan, plan)
            candidates.append(Candidate(name, opener, memory_mb, plain=False, room_mb=own_mb, share=share))
        return candidates

    def _fits(self, predicted: Prediction) -> bool:
        """Return whether a prediction is within the memory budget."""
        return self._config.budget_mb is None or predicted.resident_mb <= self._config.budget_mb


def plan_name(number: int) -> str:
    """Return the name of a plan in decisions; they are numbered from the one with the best prediction."""
    return f"plan {number}"


def why_plain(error: Exception) -> str:
    """Return an error as the reason why a model runs plain; errors of libraries with their type."""
    return str(error) if _is_reason(error) else f"{type(error).__name__}: {first_line(error)}"


def _is_reason(error: Exception) -> bool:
    """Return whether an error is raised by Chrion itself, with a message that is a reason."""
    return isinstance(error, ChrionError | CannotCutError)


def warn_of_slo(name: str, decision: Decision) -> None:
    """Log a warning if no candidate of a decision met the SLO."""
    if decision.missed:
        log.warning("model %s: %s", name, decision.missed)


def _describe_error(error: float) -> str:
    return f"measured error of bf16 {format_share(error)} for synthetic inputs"
