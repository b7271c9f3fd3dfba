"""The engines of a session: one for each set of input shapes, created, replaced when they fail, and closed.

A session tunes in one of three ways. ``now``: an engine is selected before the first request of its shapes is served.
``background``: a plain session serves requests until tuning, in another process, has selected an engine, which serves
from the next request on. ``never``: nothing is timed; only cached decisions are used.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import onnx
import onnxruntime as ort

from chrion.devices import usable_provider
from chrion.graph.description import ModelDescription, describe_session
from chrion.graph.model import Graph, TensorInfo
from chrion.graph.ort_sessions import first_line
from chrion.machine.allocator import trim
from chrion.runtime.diversion import Diversion
from chrion.runtime.engine_table import EngineTable, Shapes
from chrion.runtime.execution.engine import CannotCutError, Engine, Footprint, require_tensors
from chrion.runtime.execution.executor import CLOSED, AcceleratorFailure, EngineFailure, Event
from chrion.runtime.execution.plain_engine import PlainEngine
from chrion.runtime.live_comparison import LiveComparison
from chrion.runtime.options.session_options import session_reason
from chrion.runtime.process_hooks import in_flight
from chrion.runtime.requests import check_arguments, check_feed, known_shape, shape_of
from chrion.runtime.selection.configuration import SessionConfig
from chrion.runtime.selection.decisions import Decision
from chrion.runtime.selection.model_loading import load_to_cut, raise_if_unsafe, reason_of_options
from chrion.runtime.selection.plain_sessions import PLAIN, PlainSessions
from chrion.runtime.selection.plan_memory import explain_refusal
from chrion.runtime.selection.selector import EngineSelector, warn_of_slo, why_plain
from chrion.runtime.selection.tuning import NOT_CACHED, NOT_TUNED, UNTUNED, NotedShapes, Tuner
from chrion.runtime.selection.tuning_process import NamedShapes
from chrion.scheduler.plan import Plan

log = logging.getLogger(__name__)

#: Maximum number of requests whose shapes wait for the tuning thread, which counts them a few times a second.
_MAX_NOTED = 64
_FORKED = (
    "this session was created before the process was forked, and {}: create a session in the child, or start processes "
    "with multiprocessing's 'spawn' or 'forkserver'"
)
_WITHOUT_LANES = _FORKED.format("its lanes do not exist in the child")
_IN_FLIGHT = _FORKED.format("requests were in flight then, whose locks in onnxruntime may be held forever in the child")

T = TypeVar("T")


class Engines:
    """The engines of one session.

    Args:
        model: The model as the caller gave it.
        config: The session's configuration.
        strict: Raise errors of plans and segments instead of falling back to a plain session.
        tune: One of :data:`chrion.runtime.selection.tuning_mode.TUNING_MODES`.

    Attributes:
        current: The engine of the last request's shapes.
        refusal: Reason why requests are refused; empty while they are served.
        diversion: Decides which requests go to the one-thread session.
        by_shapes: Whether each set of input shapes has an engine of its own.
    """

    def __init__(
        self, model: str | Path | bytes | onnx.ModelProto | Graph, config: SessionConfig, *, strict: bool, tune: str
    ) -> None:
        self._config = config
        self._strict = strict
        self._selector = EngineSelector(config)
        self._lock = threading.RLock()
        self.refusal = ""
        self.by_shapes = False
        self._table = EngineTable()
        self._plain: PlainEngine | None = None
        #: Whether callers may hold the plain session, so that it must stay open.
        self._lent = False
        self._tuner: Tuner | None = None
        #: The plain session, for shapes that have no engine of their own yet.
        self._untuned: Engine | None = None
        #: Shapes of requests that the plain session has served; None if all requests have the same shapes.
        self.noted: deque[NotedShapes] | None = None
        #: The loaded model; None if the model runs plain for all shapes (``_reason``) or is loaded by another process.
        self._graph: Graph | None = None
        self._reason = ""
        self._description: ModelDescription | None = None
        self._inputs: Sequence[TensorInfo] = ()
        self._overridable: frozenset[str] = frozenset()
        # A given plan needs no tuning, and a graph is loaded already.
        self._tune = "now" if config.plan is not None or isinstance(model, Graph) else tune
        if self._tune == "now":
            self._graph, self._reason = load_to_cut(config, model if isinstance(model, Graph) else None)
        self.diversion = self._new_diversion()
        self.current = self._first()

    @property
    def config(self) -> SessionConfig:
        """Configuration in use."""
        return self._config

    @property
    def _plain_sessions(self) -> PlainSessions:
        return self._selector.plain_sessions

    @property
    def description(self) -> ModelDescription | None:
        """Interface of the model; None if the plain session is open and has it."""
        return self._description if self._graph or self._plain is None else None

    def explain(self) -> str:
        """Describe the engine of the last request, and whether the one-thread session serves in its place."""
        engine, lines = self.current, []
        if engine.reason in UNTUNED and self._tuner and self._tuner.failure:
            engine = self.plain(self._tuner.failure)
        if engine.comparison and engine.comparison.plain_serves:
            slower = "the plan" if engine.plan else "the session above"
            lines = [f"a single-threaded plain session serves at present: on live requests {slower} is slower"]
        if self._config.model.note:
            lines.append(self._config.model.note)
        return "\n".join([engine.explain(), *lines])

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
        if not self.by_shapes or engine.matches(feed):
            return engine
        return self._tuned_now(feed) if self._tune == "now" else self._tuned_in_background(feed)

    def note(self, feed: Mapping[str, Any]) -> None:
        """Note the shapes of a request that the plain session served, for tuning.

        If many are waiting to be counted, the request is not noted: a sample suffices.
        """
        if self.noted is not None and self.current is self._untuned and len(self.noted) < _MAX_NOTED:
            self.noted.append({info.name: known_shape(feed.get(info.name)) for info in self._inputs})

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
        engine, observer, other = self.current, None, None
        try:
            in_flight.append(None)  # inside, since an interrupt may be raised as soon as it returns
            if len(in_flight) > 1 or self.diversion.crowding.active or engine.comparison:
                fits = not self.by_shapes or engine.matches(feed)
                other, observer = self.diversion.divert(engine, fits=fits)
            start_s = time.perf_counter()
            outputs = None
            if not self.refusal:
                any_shapes = other is not None or not self.by_shapes
                outputs = (other or engine).run_usual(names, feed, run_options, any_shapes=any_shapes)
            if outputs is None:
                check_arguments(names, feed, run_options)
                return self._serve(feed, lambda chosen: chosen.run(names, feed, run_options), run_options)
        except EngineFailure as failure:
            return self._recover(engine, feed, lambda chosen: chosen.run(names, feed, run_options), failure)
        else:
            if self.noted is not None:
                self.note(feed)
            if observer:
                self.diversion.record(observer, start_s, diverted=other is not None)
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
        self.note(feed)
        if observer:
            self.diversion.record(observer, start_s, diverted=other is not None)
        return result

    def _recover(
        self,
        engine: Engine,
        feed: Mapping[str, Any],
        run: Callable[[Engine], T],
        failure: EngineFailure,
    ) -> T:
        """Serve a request whose engine has failed: on the CPU, or by the plain session.

        Raises:
            Exception: The original error, if the session is strict or closed.
        """
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
        with self._lock:
            self._replace(engine, plain)
        return result

    def plain(self, reason: str = "") -> PlainEngine:
        """Return the plain session, which serves all requests without an engine of their own; opened once."""
        with self._lock:
            if self._plain is None:
                self._plain = self._plain_sessions.get(reason)
            return self._plain.with_reason(reason) if reason else self._plain

    def whole_session(self) -> ort.InferenceSession:
        """Return a plain session, opened if necessary, for methods that only a single onnxruntime session has.

        Raises:
            RuntimeError: The session is closed, or its process was forked.
        """
        self.require_open()
        with self._lock:
            self._lent = True
            engine = self.current
            if engine.session and not self.by_shapes and self._tuner is None:
                return engine.session
            return self.plain().session

    def has_whole_session(self) -> bool:
        """Return whether the session of :meth:`whole_session` is open, or requests are refused."""
        closed = self._plain is None and (self.current.session is None or self.by_shapes)
        return not closed or bool(self.refusal)

    def set_strict(self, *, strict: bool) -> None:
        """Set whether failures of the accelerator are raised."""
        self._config = self._selector.set_strict(strict=strict)

    def set_providers(self, providers: Sequence[Any] | None, options: Sequence[Mapping[Any, Any]] | None) -> None:
        """Use other providers: select engines again, unless a plan was given.

        Raises:
            RuntimeError: The session is closed, or its process was forked.
            Exception: Raised by InferenceSession for such providers.
        """
        with self._lock:
            self.require_open()
            before = self._config, self._selector, self._plain, self._table, self._tuner
            self._config = replace(self._config, providers=providers, provider_options=options)
            self._selector, self._plain, self._table = EngineSelector(self._config), None, EngineTable()
            self._tuner = None
            try:
                self.current = self._first()
            except BaseException:
                self._config, self._selector, self._plain, self._table, self._tuner = before
                raise
            if before[-1]:
                before[-1].close()
            self.diversion.one_thread.close()
            self.diversion = self._new_diversion()

    def wait_until_tuned(self, timeout_s: float | None = None) -> bool:
        """Wait until all requested tuning has ended; return False if the time is over first, or it could not start."""
        return self._tuner is None or self._tuner.wait(timeout_s)

    def stop_tuning(self) -> None:
        """Stop the tuning process, if there is one; engines stay as they are."""
        if self._tuner:
            self._tuner.close()

    def close(self) -> None:
        """Refuse new requests, and close the engines when those in flight have finished. May be called repeatedly."""
        if self.refusal:
            return
        with self._lock:
            self.refusal = CLOSED
            engines = [self.current, *self._table.engines()]
            self._table = EngineTable()
            if self._graph is not None:  # the graph describes the model from now on
                self._plain = None
            self._plain_sessions.forget()
        self.stop_tuning()
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
            for engine in (self.current, *self._table.engines()):
                engine.close(until)

    def refuse_in_child(self) -> None:
        """Refuse requests in a forked child, where the lanes are missing; a plain session is left to onnxruntime.

        A request on a plain session would wait forever for a lock that another thread of the parent held at the fork,
        as it does with InferenceSession. So it is refused if any request was in flight.
        """
        self._lock = threading.RLock()
        self.diversion = self._new_diversion()  # the thread that opens its session belongs to the parent
        if self._tuner:
            self._tuner.after_fork()
        if any(engine.plan for engine in (self.current, *self._table.engines())):
            self.refusal = _WITHOUT_LANES
        elif in_flight:
            self.refusal = _IN_FLIGHT

    # Tuning now.

    def _first(self) -> Engine:
        """Return the engine in use until a request or tuning selects another one."""
        if self._tune != "now":
            return self._start_plain()
        if self._graph is None:  # if InferenceSession refuses the model as well, its own error is raised
            return self.plain(self._reason)
        graph = self._graph
        self._describe(
            ModelDescription(graph.declared_inputs, graph.declared_outputs, graph.overridable, graph.metadata)
        )
        try:
            require_tensors(self._graph)
        except CannotCutError as reason:
            return self.plain(str(reason))
        self.by_shapes = self._graph.declared_free
        if self._graph.free_dimensions:
            return self.plain("no request has fixed the free dimensions yet")
        engine = self._selector.engine(self._graph)
        self._table.put(tuple(_fixed(i) for i in self._graph.inputs), engine)
        return engine

    def _tuned_now(self, feed: Mapping[str, Any]) -> Engine:
        """Return the engine for a request's shapes, tuned first if they are new."""
        graph = self._graph
        if graph is None:
            return self.current
        try:
            shapes = tuple(shape_of(feed[i.name]) for i in graph.inputs)
        except Exception:
            check_feed(graph.declared_inputs, feed)
            raise
        with self._lock:
            engine = self._table.use(shapes)
            if engine is None:
                check_feed(graph.declared_inputs, feed)  # a request that is refused must not cause tuning
                engine = self._put(shapes, self._limit_memory(self._select(graph, shapes)))
                self._drop_plain()
            self.current = engine
            return engine

    def _select(self, graph: Graph, shapes: Shapes) -> Engine:
        if isinstance(self._config.plan, Plan):
            return self.plain("the plan is for other shapes")
        given = {i.name: shape for i, shape in zip(graph.inputs, shapes, strict=True)}
        try:
            fixed = self._config.load(given, optimise=graph.optimised)
        except Exception as error:  # noqa: BLE001 - whatever keeps the model from being cut, it runs plain
            return self.plain(why_plain(error))
        return self._selector.engine(fixed)

    def _limit_memory(self, engine: Engine) -> Engine:
        """Return the engine; or if its plan has no room, the plain session, beside which other plans may be closed."""
        footprint = engine.footprint
        if footprint is None or self._table.has_room(footprint, plain_open=self._needs_plain()):
            return engine
        engine.close()
        self._table.remove_excess()
        return self.plain(explain_refusal(footprint))

    # Tuning in the background.

    def _tuned_in_background(self, feed: Mapping[str, Any]) -> Engine:
        """Return the engine that was selected for a request's shapes, or else the plain session."""
        try:
            shapes = tuple(shape_of(feed[info.name]) for info in self._inputs)
        except (KeyError, AttributeError, TypeError, ValueError, RuntimeError):  # onnxruntime raises its own error
            return self.plain()
        with self._lock:
            self.current = self._table.use(shapes) or self._untuned or self.plain()
            return self.current

    def _start_plain(self) -> Engine:
        """Return a plain session, and request tuning if the model may be cut."""
        config = self._config
        if config.strict and config.accelerator:
            usable_provider(config.accelerator[0])
        reason = session_reason(config.options, config.rest)
        try:
            engine = self.plain(reason or (NOT_CACHED if self._tune == "never" else NOT_TUNED))
        except Exception as error:
            raise_if_unsafe(config.model, error)
            raise
        self._describe(describe_session(engine.session))
        self._untuned = engine
        if not reason and all(info.type.startswith("tensor(") for info in self._inputs):
            self._tuner = Tuner(config, self._selector, self._install, self._wanted, cached_only=self._tune == "never")
            if any(info.free for info in self._inputs):
                self.noted = self._tuner.noted
            else:
                self._tuner.submit({})
        return engine

    def _reconsider(self, comparison: LiveComparison) -> None:
        """Have a decision made again that live requests contradict: by this session, or by later ones if tuned now."""
        free = any(info.free for info in self._inputs)
        with self._lock:
            for shapes, engine in self._table.items():
                if engine.comparison is comparison:
                    if engine.selected_for:
                        self._selector.known.of_digest(engine.selected_for, free=free).mark_uncertain()
                    if self._tuner:
                        self._tuner.reconsider({info.name: s for info, s in zip(self._inputs, shapes, strict=False)})

    def _install(self, tuner: Tuner, named: NamedShapes, decision: Decision) -> None:
        """Use the engine of a decision from the next request on, unless the session or the tuner was closed.

        Called by the tuning thread.
        """
        warn_of_slo(self._config.name, decision)
        before = self._table.find(self._key(named) if named else ())
        if before and before.plan and before.plan == decision.plan:
            return  # decided again
        try:
            engine = self._make_room(tuner, named, decision.footprint) or self._open(named, decision)
        except Exception as error:  # noqa: BLE001 - the plain session keeps serving
            log.warning("the model runs plain: %s", why_plain(error))
            engine = self.plain(why_plain(error))
        with self._lock:
            if self.refusal or tuner.closed:
                engine.close()
            elif named:
                self._install_for(self._key(named), engine)
            else:
                self.current = engine
                self._table.put((), engine)
                self._drop_plain()
        trim()

    def _install_for(self, shapes: Shapes, engine: Engine) -> None:
        """Use an engine for some shapes of a model with free dimensions, whose plain session serves all others."""
        before = self._table.pop(shapes) or self._untuned
        if self._plain and engine.session is self._plain.session:
            self._untuned = engine  # with the reason of the latest decision
        else:
            # A request reads ``current``, then ``by_shapes``, and takes no lock: set them in the opposite order, so
            # that it does not use this engine for other shapes.
            self.by_shapes = True
            engine = self._put(shapes, engine)
        if self.current is before:
            self.current = engine

    def _wanted(self, tuner: Tuner, named: NamedShapes) -> bool:
        """Return whether a plan for some shapes might have room, as far as the memory of earlier plans tells."""
        engine = self._make_room(tuner, named, self._table.least, evict=False)
        with self._lock:
            if engine and self._table.find(self._key(named)) is None:
                self._install_for(self._key(named), engine)
        return engine is None

    def _make_room(
        self, tuner: Tuner, named: NamedShapes, footprint: Footprint | None, *, evict: bool = True
    ) -> PlainEngine | None:
        """Close plans until one of the given memory has room, if ``evict``; return the plain session if none may."""
        if footprint is None or not named:
            return None
        requests, halvings = tuner.recent_requests(named)
        with self._lock:
            evicted = self._table.find_room(self._key(named), footprint, requests, halvings)
            if evicted is None:
                return self.plain(explain_refusal(footprint))
            for shapes in evicted if evict else ():
                if self._table.pop(shapes) is self.current:
                    self.current = self._untuned or self.plain()
        return None

    def _open(self, named: NamedShapes, decision: Decision) -> Engine:
        if decision.plan is None:
            if decision.winner != PLAIN:
                return self._plain_sessions.of_decision(decision)
            plain = self.plain(decision.evidence)
            # With free dimensions it serves other shapes as well.
            return plain if named else self._plain_sessions.compare_live(plain, decision)
        config = self._config
        graph = config.load(named)
        if reason := reason_of_options(config, graph):
            return self.plain(reason)
        return self._selector.open(graph, decision)

    def _key(self, named: NamedShapes) -> Shapes:
        return tuple(named[info.name] for info in self._inputs)

    # Tuning now and in the background.

    def _new_diversion(self) -> Diversion:
        return Diversion(self._open_one_thread, self._reconsider, arena=self._config.has_arena)

    def _open_one_thread(self, arena: bool) -> PlainEngine | None:  # noqa: FBT001 - called by the session alone
        """Return a plain session of one thread, or None if there cannot be one."""
        return self._plain_sessions.one_thread(
            "several requests are in flight, or other work uses the cores", arena=arena
        )

    def _describe(self, description: ModelDescription) -> None:
        self._description = description
        self._inputs = description.inputs
        self._overridable = frozenset(weight.name for weight in description.overridable)

    def _put(self, shapes: Shapes, engine: Engine) -> Engine:
        """Store an engine for some shapes, evicting the least recently used ones; return the stored engine."""
        if self.by_shapes:
            infos = zip(self._inputs, shapes, strict=True)
            engine = engine.for_shapes([replace(info, shape=shape) for info, shape in infos])
        self._table.put(shapes, engine)
        return engine

    def _drop_plain(self) -> None:
        """Drop the plain session, which holds all weights, if no shapes use it."""
        if not self._needs_plain():
            self._plain = self._untuned = None
            self._plain_sessions.forget()

    def _needs_plain(self) -> bool:
        """Return whether some shapes use the plain session, or callers may hold it."""
        return self._plain is not None and (self._lent or self._table.uses(self._plain.session))

    def _replace(self, engine: Engine, other: Engine) -> None:
        self._table.replace(engine, other)
        if self.current is engine:
            self.current = other

    def _serve_on_cpu(self, engine: Engine, feed: Mapping[str, Any], run: Callable[[Engine], T], error: Exception) -> T:
        """Serve a request on the CPU, and stop using the accelerator.

        Raises:
            Exception: ``error``, if the CPU cannot serve the request either: then the accelerator is not at fault.
        """
        try:
            result = run(self._config.on_cpu(str(error)))
        except Exception:  # noqa: BLE001 - the error of the engine in use says more
            raise error from None
        with self._lock:
            if self._plain_sessions.lose_accelerator(error) or engine in (self.current, *self._table.engines()):
                self._drop_accelerated(feed)
        return result

    def _drop_accelerated(self, feed: Mapping[str, Any]) -> None:
        """Drop the engines that use the accelerator; other ones are selected when their shapes are requested."""
        self._plain = None
        self._table.remove(shapes for shapes, engine in self._table.items() if engine.accelerated)
        if self._tune != "now":
            self.stop_tuning()  # tuning would select the accelerator again
            self.current = self._untuned = self.plain()
        elif not self.by_shapes:
            self.current = self._first()
        else:
            self.for_feed(feed)


def _fixed(info: TensorInfo) -> tuple[int, ...]:
    return tuple(d for d in info.shape or () if isinstance(d, int))
