"""The engines of a session: found for each request, selected, replaced when they fail, and closed.

A session tunes in one of three ways. ``now``: an engine is selected before the first request of its shapes is served.
``background``: a plain session serves requests until tuning has selected an engine
(:mod:`chrion.runtime.background_tuning`). ``never``: nothing is timed; only cached decisions are used.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import onnxruntime as ort

from chrion.common.units import format_shapes
from chrion.devices import usable_provider
from chrion.graph.description import ModelDescription, describe_session
from chrion.graph.model import Graph
from chrion.graph.ort_sessions import first_line
from chrion.machine.allocator import trim
from chrion.runtime import process_hooks
from chrion.runtime.background_tuning import NOT_LOOKED_UP, NOT_TUNED, BackgroundTuner
from chrion.runtime.diversion import CROWDED, Diversion, Observer
from chrion.runtime.engine_table import EngineTable, Shapes
from chrion.runtime.execution.engine import CannotCutError, Engine, input_obstacle, require_tensors
from chrion.runtime.execution.executor import CLOSED, AcceleratorFailure, EngineFailure, Event
from chrion.runtime.execution.plain_engine import PlainEngine
from chrion.runtime.options.session_options import session_reason
from chrion.runtime.process_hooks import in_flight
from chrion.runtime.requests import check_arguments, check_feed, shape_of
from chrion.runtime.selection.comparison_summary import PLAIN
from chrion.runtime.selection.configuration import SessionConfig
from chrion.runtime.selection.decision_source import NOT_CACHED, decide_now
from chrion.runtime.selection.decisions import Decision
from chrion.runtime.selection.plan_memory import explain_refusal
from chrion.runtime.selection.selector import EngineSelector, warn_of_slo, why_plain
from chrion.runtime.selection.tuning_lock import BusyError
from chrion.scheduler.plan import Plan

log = logging.getLogger(__name__)

_FORKED = (
    "this session was created before the process was forked, and {}: create a session in the child, or start processes "
    "with multiprocessing's 'spawn' or 'forkserver'"
)
_WITHOUT_LANES = _FORKED.format("its lanes do not exist in the child")
_IN_FLIGHT = _FORKED.format("requests were in flight then, whose locks in onnxruntime may be held forever in the child")

T = TypeVar("T")


class Engines:
    """The engines of one session with one configuration.

    Args:
        graph: The model, if the caller has loaded it.
        config: The session's configuration.
        strict: Raise errors of plans and segments instead of falling back to a plain session.
        tune: One of :data:`chrion.runtime.selection.configuration.TUNING_MODES`; a session with a given plan or graph
            selects its engines before it serves.

    Attributes:
        description: Interface of the model.
        refusal: Reason why requests are refused; empty while they are served.
        diversion: Decides which requests go to the one-thread session.
    """

    description: ModelDescription

    def __init__(self, graph: Graph | None, config: SessionConfig, *, strict: bool, tune: str) -> None:
        self._config = config
        self._strict = strict
        self._tune = "now" if config.plan is not None or graph is not None else tune
        self._selector = EngineSelector(config, of_file=graph is None)
        self._plain_sessions = self._selector.plain_sessions
        self._table = EngineTable(self._plain_sessions)
        self._tuner: BackgroundTuner | None = None
        #: The model, of which engines are selected now; None if it runs plain for all shapes, or in the other modes.
        self._graph: Graph | None = None
        self._overridable: frozenset[str] = frozenset()
        self.refusal = ""
        self.diversion = self._new_diversion()
        if self._tune == "now":
            self._table.current = self._tune_now(graph)
        else:
            self._start_plain()
        process_hooks.register(self, Engines.refuse_in_child, Engines.close_at_exit)
        if self._tuner:  # while its thread opens an engine, it may outlive this object
            process_hooks.register(self._tuner, BackgroundTuner.after_fork, BackgroundTuner.close)

    @property
    def config(self) -> SessionConfig:
        """Configuration of the session."""
        return self._config

    @property
    def current(self) -> Engine:
        """The engine of the last request's shapes."""
        return self._table.current

    def explain(self) -> str:
        """Describe the engine of the last request, whether another one serves in its place, and those of other shapes.

        If several sets of shapes have engines, the first line begins with those of the last request.
        """
        with self._table.lock:
            engine, known = self.current, self._table.items()
        lines, others = [], [other for _, other in known if other is not engine]
        own = next((f"{self._named(shapes)}: " for shapes, other in known if others and other is engine), "")
        tuner, undecided = self._tuner, engine.reason in {NOT_TUNED, NOT_LOOKED_UP, NOT_CACHED}
        if tuner and undecided and isinstance(engine, PlainEngine):
            engine = engine.with_reason(tuner.failure or tuner.opening or engine.reason)
        if engine.comparison and engine.comparison.note:
            lines = [engine.comparison.note]
        if self.diversion.serves_crowd:
            lines.append(CROWDED)
        if self._config.model.note:
            lines.append(self._config.model.note)
        if others:
            planned = sum(other.plan is not None for other in others)
            lines.append(f"other shapes: {planned} with a plan, {len(others) - planned} plain")
        return "\n".join([own + engine.explain(), *lines])

    def for_feed(self, feed: Mapping[str, Any]) -> Engine:
        """Return the engine for a request's shapes.

        A request that gives values to weights runs plain, since segments hold the weights as constants.

        Raises:
            RuntimeError: The session is closed, or its process was forked.
            Exception: The request does not fit the model, as InferenceSession raises it.
        """
        self.require_open()
        if self._overridable and not self._overridable.isdisjoint(feed):
            return self.plain("the request gives values to weights")
        engine = self.current
        if not self._table.by_shapes or engine.matches(feed):
            return engine
        return self._tuned_now(self._graph, feed) if self._graph else self._tuned_in_background(feed)

    def require_open(self) -> None:
        """Raise if requests are refused.

        Raises:
            RuntimeError: The session is closed, or its process was forked.
        """
        if self.refusal:
            raise RuntimeError(self.refusal)

    def run(
        self, names: Sequence[str] | None, feed: Mapping[str, Any], run_options: ort.RunOptions | None
    ) -> list[Any]:
        """Serve :meth:`HybridSession.run`; nearly every request is one that :meth:`Engine.run_usual` takes."""
        table = self._table
        engine, observer, other = table.current, None, None
        try:
            in_flight.append(None)  # inside, since an interrupt may be raised as soon as it returns
            if len(in_flight) > 1 or self.diversion.crowding.active or engine.comparison:
                fits = not table.by_shapes or engine.matches(feed)
                other, observer = self.diversion.divert(engine, fits=fits)
            start_s = time.perf_counter()
            outputs = None
            if not self.refusal:
                any_shapes = other is not None or not table.by_shapes
                outputs = (other or engine).run_usual(names, feed, run_options, any_shapes=any_shapes)
            if outputs is None:
                check_arguments(names, feed, run_options)
                return self._serve(feed, lambda chosen: chosen.run(names, feed, run_options), run_options)
        except EngineFailure as failure:
            return self._recover(other or engine, feed, lambda chosen: chosen.run(names, feed, run_options), failure)
        else:
            tuner = self._tuner
            if tuner and tuner.noted is not None:
                tuner.note(feed)
            if observer:
                self._record(observer, start_s, diverted=other is not None)
            if tuner and tuner.yields:
                tuner.give_way(time.perf_counter() - start_s)
            return outputs
        finally:
            in_flight.pop()

    def trace(self, feed: Mapping[str, Any]) -> list[Event]:
        """Run a request on the engine for its shapes; see :meth:`Engine.trace`."""
        try:
            return self.for_feed(feed).trace(feed)
        except EngineFailure as failure:
            failure.raise_reason()

    def serve(self, feed: Mapping[str, Any], run: Callable[[Engine], T], run_options: ort.RunOptions | None) -> T:
        """Serve a request. If its engine fails and ``strict`` is false, repeat the request on a fallback.

        Args:
            feed: Inputs by name.
            run: Runs the request on an engine.
            run_options: The request's options.
        """
        try:
            in_flight.append(None)
            return self._serve(feed, run, run_options)
        finally:
            in_flight.pop()

    def serve_whole(self, run: Callable[[ort.InferenceSession], None]) -> None:
        """Serve a request by a function that runs it on the session of :meth:`whole_session`."""
        try:
            in_flight.append(None)
            run(self.whole_session())
        finally:
            in_flight.pop()

    def _serve(self, feed: Mapping[str, Any], run: Callable[[Engine], T], run_options: ort.RunOptions | None) -> T:
        engine = self.for_feed(feed)
        other, observer = self.diversion.divert(engine)
        engine = other or engine
        start_s = time.perf_counter()
        if reason := engine.find_obstacle(run_options):
            engine, observer = self.plain(reason), None
        try:
            result = run(engine)
        except EngineFailure as failure:
            return self._recover(engine, feed, run, failure)
        if self._tuner:
            self._tuner.note(feed)
        if observer:
            self._record(observer, start_s, diverted=other is not None)
        if self._tuner and self._tuner.yields:
            self._tuner.give_way(time.perf_counter() - start_s)
        return result

    def _record(self, observer: Observer, start_s: float, *, diverted: bool) -> None:
        """Record a request that ends now. If live requests contradict a decision, have it made again.

        With background tuning, this session makes it; otherwise later ones do.
        """
        if not self.diversion.record(observer, start_s, diverted=diverted):
            return
        free = any(info.free for info in self._table.inputs)
        with self._table.lock:
            for shapes, engine in self._table.items():
                if engine.comparison is observer:
                    if engine.selected_for:
                        names = [info.name for info in self._table.inputs] if free else []
                        named = dict(zip(names, shapes, strict=False))
                        self._selector.known.mark_uncertain(engine.selected_for, named)
                    if self._tuner:
                        self._tuner.reconsider(shapes)

    def _recover(
        self, engine: Engine, feed: Mapping[str, Any], run: Callable[[Engine], T], failure: EngineFailure
    ) -> T:
        """Serve a request whose engine has failed: on the CPU, or by the plain session.

        Raises:
            Exception: The original error, if the session is strict or closed.
        """
        with self._table.lock:
            self._table.end_trial_of(engine)
        if isinstance(failure, AcceleratorFailure):
            raises, recover = self._config.strict, self._serve_on_cpu
        else:
            raises, recover = self._strict or bool(self.refusal), self._serve_plain
        if raises:
            failure.raise_reason()
        return recover(engine, feed, run, failure.reason)

    def _serve_plain(self, engine: Engine, feed: Mapping[str, Any], run: Callable[[Engine], T], error: Exception) -> T:
        """Serve a request by the plain session after a segment failed; if that succeeds, later requests as well.

        Raises:
            Exception: Raised by InferenceSession for the request.
        """
        plain = self.plain(f"a segment failed: {first_line(error)}")
        try:
            result = run(plain)
        except AcceleratorFailure as failure:
            return self._recover(plain, feed, run, failure)
        log.warning("the model runs plain from now on: %s", plain.reason)
        with self._table.lock:
            self._table.replace(engine, plain)
        return result

    def plain(self, reason: str = "") -> PlainEngine:
        """Return the plain session, which serves all requests without an engine of their own; opened once."""
        return self._table.plain(reason)

    def whole_session(self) -> ort.InferenceSession:
        """Return a plain session, opened if necessary, for methods that only a single onnxruntime session has.

        Raises:
            RuntimeError: The session is closed, or its process was forked.
        """
        self.require_open()
        with self._table.lock:
            self._table.lent = True
            engine = self.current
            if engine.session and not self._table.by_shapes and self._tuner is None:
                return engine.session
            return self.plain().session

    def has_whole_session(self) -> bool:
        """Return whether the session of :meth:`whole_session` is open, or requests are refused."""
        current_serves = self.current.session is not None and not self._table.by_shapes
        return self._plain_sessions.opened is not None or current_serves or bool(self.refusal)

    def set_strict(self, *, strict: bool) -> None:
        """Set whether failures of the accelerator are raised."""
        self._config = self._selector.set_strict(strict=strict)

    def with_providers(self, providers: Sequence[Any] | None, options: Sequence[Mapping[Any, Any]] | None) -> Engines:
        """Return the engines of the same model with other providers, and stop tuning these.

        Raises:
            RuntimeError: The session is closed, or its process was forked.
            Exception: Raised by InferenceSession for such providers.
        """
        self.require_open()
        config = replace(self._config, providers=providers, provider_options=options)
        others = Engines(self._graph, config, strict=self._strict, tune=self._tune)
        self._stop_tuning()
        self.diversion.one_thread.close()
        return others

    def wait_until_tuned(self, timeout_s: float | None = None) -> bool:
        """Wait until all requested tuning has ended; return False if the time is over first, or it could not start."""
        return self._tuner is None or self._tuner.wait(timeout_s)

    def close(self) -> None:
        """Refuse new requests, and close the engines when those in flight have finished. May be called repeatedly."""
        if self.refusal:
            return
        self._stop_tuning()  # an engine that is installed later is closed at once
        with self._table.lock:
            self.refusal = CLOSED
            engines = self._table.clear()
            self._plain_sessions.forget()
        self.diversion.one_thread.close()
        for engine in engines:
            engine.close()

    def close_at_exit(self, until: float) -> None:
        """Close, but stop waiting for requests in flight at ``until``, a time of ``time.monotonic()``."""
        if self._tuner:
            self._tuner.close(until)
        self.diversion.one_thread.close(until)
        if not self.refusal:
            self.refusal = CLOSED
            for engine in self._table.engines():
                engine.close(until)

    def refuse_in_child(self) -> None:
        """Refuse requests in a forked child, where the lanes are missing; a plain session is left to onnxruntime.

        A request on a plain session would wait forever for a lock that another thread of the parent held at the fork,
        as it does with InferenceSession. So it is refused if any request was in flight.
        """
        self._table.lock = threading.RLock()
        self.diversion = self._new_diversion()  # the thread that opens its session belongs to the parent
        if self._table.trial:
            self._table.trial.end()  # kept, so that the child does not stop lanes that it does not have
        if any(engine.plan for engine in self._table.serving()):
            self.refusal = _WITHOUT_LANES
        elif in_flight:
            self.refusal = _IN_FLIGHT

    # Tuning now.

    def _tune_now(self, graph: Graph | None) -> Engine:
        """Return the engine that is selected before the first request, or the plain session until shapes are known.

        What loading, profiling and planning a model leaves in a process cannot all be returned to the system. So the
        decision for a model of fixed shapes is made in another process, and this one loads it if a plan is selected.
        """
        decision = self._decide_elsewhere() if graph is None else None
        trim()
        if decision and not decision.plan:
            warn_of_slo(self._config.name, decision)
            return self._plain_sessions.of_decision(decision)
        from chrion.runtime.selection.model_loading import load_to_cut  # noqa: PLC0415 - plain sessions do not need it

        loaded, reason = load_to_cut(self._config, graph)
        if loaded is None:
            return self._stay_plain(reason)
        engine = self._select_first(loaded, decision)
        # A plain session needs it for other shapes, or if the accelerator fails.
        if graph or engine.plan or self._table.by_shapes or self._config.accelerator:
            self._graph = loaded
        return engine

    def _decide_elsewhere(self) -> Decision | None:
        """Return the decision for a model of fixed shapes; None if it has to be made in this process."""
        config, decision = self._config, None
        if config.plan is not None or config.accelerator or session_reason(config.options, config.rest):
            return None
        try:
            self._describe(describe_session(self.plain().session))
        except Exception:  # noqa: BLE001 - the error is raised when the model is loaded
            return None
        if all(info.type.startswith("tensor(") and not info.free for info in self._table.inputs):
            try:
                decision = decide_now(config)
            except BusyError:
                self._selector.patience_s = 0.0  # it was waited for
            if decision is None or decision.winner != PLAIN:
                self._plain_sessions.forget()
        return decision

    def _stay_plain(self, reason: str) -> Engine:
        """Return the engine of a model that runs plain for all shapes; InferenceSession may refuse it as well."""
        engine = self.plain(reason)
        self._describe(describe_session(engine.session))
        return engine

    def _select_first(self, graph: Graph, decision: Decision | None) -> Engine:
        """Return the engine for the shapes of the model, or the plain session if a request has to fix them first."""
        self._describe(
            ModelDescription(graph.declared_inputs, graph.declared_outputs, graph.overridable, graph.metadata)
        )
        try:
            require_tensors(graph)
        except CannotCutError as reason:
            return self.plain(str(reason))
        self._table.by_shapes = graph.declared_free
        if graph.free_dimensions:
            return self.plain("no request has fixed the free dimensions yet")
        engine = self._selector.engine(graph, decision)
        return self._table.put(tuple(i.fixed_dimensions for i in graph.inputs), engine)

    def _tuned_now(self, graph: Graph, feed: Mapping[str, Any]) -> Engine:
        """Return the engine for a request's shapes, tuned first if they are new."""
        table = self._table
        try:
            shapes = tuple(shape_of(feed[i.name]) for i in graph.inputs)
        except Exception:
            check_feed(graph.declared_inputs, feed)
            raise
        with table.lock:
            engine = table.use(shapes)
            if engine is None:
                check_feed(graph.declared_inputs, feed)  # a request that is refused must not cause tuning
                engine = self._select(graph, shapes)
                if engine.footprint and not table.fits_or_make_room(engine.footprint):
                    engine.close()
                    engine = self.plain(explain_refusal(engine.footprint))
                elif not engine.plan:
                    table.make_room_for_plain()
                engine = table.put(shapes, engine)
                table.drop_plain()
            self._table.current = engine
            return engine

    def _select(self, graph: Graph, shapes: Shapes) -> Engine:
        if isinstance(self._config.plan, Plan):
            own = tuple(i.fixed_dimensions for i in graph.inputs)
            if shapes == own:  # its engine was evicted, or lost the accelerator
                return self._selector.engine(graph)
            return self.plain(f"the plan is for other shapes, {self._named(own)}")
        given = {i.name: shape for i, shape in zip(graph.inputs, shapes, strict=True)}
        try:
            fixed = self._config.load(given, optimise=graph.optimised)
        except Exception as error:  # noqa: BLE001 - whatever keeps the model from being cut, it runs plain
            return self.plain(why_plain(error))
        return self._selector.engine(fixed)

    # Tuning in the background.

    def _tuned_in_background(self, feed: Mapping[str, Any]) -> Engine:
        """Return the engine that was selected for a request's shapes, or else the plain session."""
        table = self._table
        try:
            shapes = tuple(shape_of(feed[info.name]) for info in table.inputs)
        except (KeyError, AttributeError, TypeError, ValueError, RuntimeError):  # onnxruntime raises its own error
            return self.plain()
        with table.lock:
            self._table.current = table.use(shapes) or self.plain()
            return self.current

    def _start_plain(self) -> None:
        """Serve by a plain session, and tune if the model may be cut."""
        config = self._config
        if config.strict and config.accelerator:
            usable_provider(config.accelerator[0])
        reason = session_reason(config.options, config.rest)
        cached_only = self._tune == "never"
        engine = self.plain(reason or (NOT_LOOKED_UP if cached_only else NOT_TUNED))
        self._describe(describe_session(engine.session))
        if not reason and (reason := input_obstacle(self._table.inputs)):
            self._plain_sessions.keep_reason(engine.with_reason(reason))
        self._table.current = self.plain()  # itself, not a copy: tuning replaces it
        if not reason:
            crowding = self.diversion.crowding  # the tuner does not keep this object alive
            self._tuner = BackgroundTuner(
                config, self._selector, self._table, lambda: crowding.active, cached_only=cached_only
            )
            #: Stops tuning when this object is collected, which the tuner's thread does not prevent.
            self._finaliser = weakref.finalize(self, self._tuner.close)
            self._finaliser.atexit = False

    def _stop_tuning(self) -> None:
        if self._tuner:
            self._tuner.close()

    # Tuning now and in the background.

    def _new_diversion(self) -> Diversion:
        return Diversion(self._plain_sessions.one_thread, arena=self._config.has_arena)

    def _named(self, shapes: Shapes) -> str:
        """Return the shapes of all inputs, with their names."""
        return format_shapes({info.name: shape for info, shape in zip(self._table.inputs, shapes, strict=True)})

    def _describe(self, description: ModelDescription) -> None:
        self.description = description
        self._table.inputs = description.inputs
        self._overridable = frozenset(weight.name for weight in description.overridable)

    def _serve_on_cpu(self, engine: Engine, feed: Mapping[str, Any], run: Callable[[Engine], T], error: Exception) -> T:
        """Serve a request on the CPU, and stop using the accelerator.

        Raises:
            Exception: ``error``, if the CPU cannot serve the request either: then the accelerator is not at fault.
        """
        try:
            result = run(self._config.on_cpu(str(error)))
        except Exception:  # noqa: BLE001 - the error of the engine in use says more
            raise error from None
        with self._table.lock:
            if self._plain_sessions.lose_accelerator(error) or engine in self._table.engines():
                self._drop_accelerated(feed)
        return result

    def _drop_accelerated(self, feed: Mapping[str, Any]) -> None:
        """Drop the engines that use the accelerator; other ones are selected when their shapes are requested."""
        self._table.remove_accelerated()
        if not self._graph:
            self._stop_tuning()  # tuning would select the accelerator again
            self._table.current = self.plain()
        elif not self._table.by_shapes:
            self._table.current = self._select_first(self._graph, None)
        else:
            self.for_feed(feed)
