"""HybridSession: ``onnxruntime.InferenceSession`` that runs a model on several lanes at once."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypeVar

import onnx
import onnxruntime as ort
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument

from chrion.devices import CPU_PROVIDER
from chrion.graph.loader import load
from chrion.graph.model import Graph, TensorInfo
from chrion.runtime import process_hooks
from chrion.runtime.execution.engine import CannotCutError, CutEngine, Engine, PlainEngine, require_tensors
from chrion.runtime.execution.executor import Event
from chrion.runtime.fallback import Fallbacks
from chrion.runtime.interface import InferenceInterface
from chrion.runtime.iobinding import HybridIOBinding
from chrion.runtime.options.session_options import known_arguments, wants_errors
from chrion.runtime.requests import (
    MissingInputError,
    as_array,
    as_ort_value,
    check_call,
    check_feed,
    check_kinds,
    check_ort_value,
    check_outputs,
    check_run_options,
    shape_of,
)
from chrion.runtime.selection.admission import admit, plain_source
from chrion.runtime.selection.configuration import SessionConfig
from chrion.runtime.selection.selector import EngineSelector, why_plain
from chrion.scheduler.plan import Plan
from chrion.units import parse_duration_ms, parse_size_mb

#: Programs for so many feed shapes are kept.
_SHAPES_KEPT = 8
log = logging.getLogger(__name__)

_CLOSED = "this session is closed"

Shapes = tuple[tuple[int, ...], ...]
T = TypeVar("T")


class HybridSession(Fallbacks, InferenceInterface, ort.InferenceSession):  # type: ignore[misc]
    """Runs an ONNX model on an accelerator and CPU cores at once, behind the interface of InferenceSession.

    It is an InferenceSession to ``isinstance``, but holds one only where the model runs plain.

    The model is profiled (measurements are kept between runs), planned, cut into segments, and run by threads pinned
    to a core each. A plan that is made here is first timed against plain sessions, for about a second, and only kept
    if it wins; the choice is remembered. A model that cannot be cut, or that plain onnxruntime runs faster, runs in a
    plain InferenceSession, and :meth:`explain` says why; so a session can be made of whatever InferenceSession takes.

    A model with free dimensions is planned when a new shape first comes: measured for the first shape, with costs
    scaled from those for later ones, and timed against plain sessions each time. Engines of the shapes used last are
    kept.

    Calls are safe from any number of threads. Arrays that :meth:`run` returns are the caller's own.

    Args:
        path_or_bytes: A model file, its bytes, a ModelProto, or a Graph.
        sess_options: As for InferenceSession. A model with options that are of one session runs plain; see
            ``docs/options.md``.
        providers: As for InferenceSession. The first one that is not the CPU's is the accelerator.
        provider_options: As for InferenceSession.
        plan: A plan, its file, or what makes a plan of a graph of known shapes; one is made here if missing.
        slo: Latency to stay within, ``60ms`` for example, for the plan that is made here.
        alpha: What a megabyte of accelerator memory is worth in ms, for the plan that is made here.
        cores: CPU cores to use at most, for the plan that is made here.
        strict: Raise if the accelerator fails (it does not start, its memory is full, it is lost, it lacks a kernel),
            if a given plan cannot be opened, or if a segment fails. Otherwise the session warns and falls back to the
            CPU or to a plain session.
        gpu_budget: Accelerator memory that must not be exceeded, ``600MB`` for example, for the plan that is made here
            and for plain sessions in its place: what is not known to fit runs on the CPU.
        kwargs: Further arguments of InferenceSession: ``enable_fallback``, ``disabled_optimizers``,
            ``read_config_from_model``. Others are ignored, with a warning in the log.

    Raises:
        PlanError: The plan is damaged, not for this model, or asks for more cores than there are.
        ProviderError: ``strict``, and the accelerator does not work here.
        OptionError: An option's value is not one it takes.
        UnsafeModelError: The model names files outside of its folder.
        Exception: What InferenceSession raises for a model that it does not run either.
    """

    def __init__(  # noqa: PLR0913 - InferenceSession's own, and five more by name only
        self,
        path_or_bytes: str | Path | bytes | onnx.ModelProto | Graph,
        sess_options: ort.SessionOptions | None = None,
        providers: Sequence[Any] | None = None,
        provider_options: Sequence[Mapping[Any, Any]] | None = None,
        *,
        plan: Plan | str | Path | Callable[[Graph], Plan] | None = None,
        slo: str | float | None = None,
        alpha: float | None = None,
        cores: int | None = None,
        strict: bool = False,
        gpu_budget: str | float | None = None,
        **kwargs: Any,
    ) -> None:
        if sess_options is not None and not isinstance(sess_options, ort.SessionOptions):
            raise TypeError(f"sess_options: expected onnxruntime.SessionOptions or None, found {sess_options!r}")
        slo_ms = None if slo is None else parse_duration_ms(slo, "slo")
        budget_mb = None if gpu_budget is None else parse_size_mb(gpu_budget, "gpu budget")
        given = Plan.load(plan) if isinstance(plan, str | Path) else plan
        self._config = SessionConfig(
            plain_source(path_or_bytes),
            sess_options,
            providers,
            provider_options,
            given,
            slo_ms,
            alpha,
            cores,
            strict or wants_errors(kwargs),
            budget_mb,
            known_arguments(kwargs),
        )
        #: Raise what keeps a plan from being opened or carried out, wherever it runs.
        self._strict = strict
        self._source = self._config.source
        self._selector = EngineSelector(self._config)
        self._lock = threading.RLock()
        #: Why nothing can be run any more; empty while it can.
        self._refusal = ""
        self._engines: OrderedDict[Shapes, Engine] = OrderedDict()
        self._plain: PlainEngine | None = None
        #: None for a model that runs plain whatever its shapes, for that reason.
        self._graph, self._reason = admit(path_or_bytes, self._config)
        #: Whether callers may hold onnxruntime's object of the plain session.
        self._lent = False
        #: Whether each set of input shapes has an engine of its own.
        self._by_shapes = False
        self._engine = self._first_engine()
        process_hooks.register(self, HybridSession._refuse_in_child, HybridSession._close_at_exit)

    # What InferenceSession has.

    def run(
        self,
        output_names: Sequence[str] | None,
        input_feed: Mapping[str, Any],
        run_options: ort.RunOptions | None = None,
    ) -> list[Any]:
        """Run the model.

        Args:
            output_names: Outputs to return; None or empty for all.
            input_feed: Arrays (or OrtValues) by input name.
            run_options: Handed to onnxruntime.

        Raises:
            ValueError: An input is missing.
            InvalidArgument: An unknown name, or an array of another type or shape than the model's.
            Exception: What onnxruntime raises while running, with the operators' names.
        """

        def serve(engine: Engine) -> list[Any]:
            if isinstance(engine, PlainEngine):
                return list(engine.session.run(output_names, input_feed, run_options))
            return self._run_cut(engine, output_names, input_feed, run_options, arrays=True)

        engine = self._engine
        if isinstance(engine, PlainEngine) and (
            not self._by_shapes or (engine.fast_path and engine.fast_path.matches(input_feed))
        ):
            if not engine.accelerated and not self._refusal:
                outputs: list[Any] = engine.session.run(output_names, input_feed, run_options)  # it checks the call
                return outputs
        elif (  # nearly every request, and nothing of the below makes a difference to it
            isinstance(engine, CutEngine)
            and engine.native
            and not (output_names or run_options or self._refusal)
            and engine.fast_path.matches(input_feed)
        ):
            try:
                return engine.run_fast_path(input_feed)
            except RuntimeError as error:
                if self._strict or self._refusal:
                    raise
                return self._served_plain(engine, serve, error)
        else:
            check_call(output_names, input_feed, run_options)
            check_kinds(input_feed)
        return self._served(input_feed, serve, run_options)

    def run_with_ort_values(
        self,
        output_names: Sequence[str] | None,
        input_dict_ort_values: Mapping[str, ort.OrtValue],
        run_options: ort.RunOptions | None = None,
    ) -> list[ort.OrtValue]:
        """Like :meth:`run`, with OrtValues in and out."""
        check_call(output_names, input_dict_ort_values, run_options)
        for name, value in input_dict_ort_values.items():
            check_ort_value(name, value)

        def serve(engine: Engine) -> list[ort.OrtValue]:
            if isinstance(engine, PlainEngine):
                return list(engine.session.run_with_ort_values(output_names, input_dict_ort_values, run_options))
            return self._run_cut(engine, output_names, input_dict_ort_values, run_options, arrays=False)

        return self._served(input_dict_ort_values, serve, run_options)

    def io_binding(self) -> HybridIOBinding:
        """A new binding for :meth:`run_with_iobinding`."""
        inputs = [*self.get_inputs(), *self.get_overridable_initializers()]
        return HybridIOBinding(self, inputs, self.get_outputs())

    def run_with_iobinding(
        self, iobinding: HybridIOBinding | ort.IOBinding, run_options: ort.RunOptions | None = None
    ) -> None:
        """Run the model on what is bound; outputs are written where they are bound to.

        A binding that was made as ``onnxruntime.IOBinding(session)`` runs plain: what it binds cannot be read.

        Raises:
            ValueError: The binding is another session's.
            RuntimeError: What is bound does not fit the model, or a segment fails, as InferenceSession has it.
        """
        if isinstance(iobinding, ort.IOBinding) and iobinding._session is self._opened_session():  # noqa: SLF001
            self._whole_session().run_with_iobinding(iobinding, run_options)
            return
        if getattr(iobinding, "owner", self) is not self or isinstance(iobinding, ort.IOBinding):
            raise ValueError("IOBinding must be used with the session that created it.")
        check_run_options(run_options, AttributeError)
        if not iobinding.outputs and not self._refusal:
            raise RuntimeError("Error in execution: At least one output should be requested.")
        targets = {name: value for name, value in iobinding.outputs.items() if value is not None}

        def serve(engine: Engine) -> list[ort.OrtValue]:
            if isinstance(engine, PlainEngine):
                return iobinding.run_plain(engine.session, run_options)
            names, feeds = self._checked(engine, list(iobinding.outputs), iobinding.inputs)
            staying = set(iobinding.devices)
            values = engine.run(feeds, names, targets=targets, staying=staying, run_options=run_options)
            return [values[name] for name in names]

        try:
            iobinding.results = self._served(iobinding.inputs, serve, run_options)
        except (MissingInputError, InvalidArgument) as error:
            raise RuntimeError(str(error)) from error

    def get_providers(self) -> list[str]:
        """Execution providers in use, the accelerator's first."""
        if isinstance(self._engine, PlainEngine):
            return list(self._engine.session.get_providers())
        first = self._engine.plan.accelerator
        return [first, CPU_PROVIDER] if first and first != CPU_PROVIDER else [CPU_PROVIDER]

    def get_provider_options(self) -> dict[str, dict[str, str]]:
        """Options of each execution provider in use."""
        if isinstance(self._engine, PlainEngine):
            return dict(self._engine.session.get_provider_options())
        given = self._config.accelerator
        options = {name: str(value) for name, value in given[1].items()} if given else {}
        return {name: {} if name == CPU_PROVIDER else options for name in self.get_providers()}

    def get_session_options(self) -> ort.SessionOptions:
        """The options that the session was made with."""
        return self._config.options or ort.SessionOptions()

    def set_providers(
        self,
        providers: Sequence[Any] | None = None,
        provider_options: Sequence[Mapping[Any, Any]] | None = None,
    ) -> None:
        """Use other providers: choose again between plans and plain sessions, unless a plan was given.

        Raises:
            Exception: What InferenceSession raises for such providers.
        """
        with self._lock:
            if self._refusal:
                raise RuntimeError(self._refusal)
            before = self._config, self._selector, self._plain, self._engines
            self._config = replace(self._config, providers=providers, provider_options=provider_options)
            self._selector, self._plain, self._engines = EngineSelector(self._config), None, OrderedDict()
            try:
                self._engine = self._first_engine()
            except BaseException:
                self._config, self._selector, self._plain, self._engines = before
                raise

    def enable_fallback(self) -> None:
        """Go on without the accelerator where it fails."""
        self._config = self._selector.set_strict(strict=False)

    def disable_fallback(self) -> None:
        """Raise where the accelerator fails."""
        self._config = self._selector.set_strict(strict=True)

    # What it adds.

    @property
    def plan(self) -> Plan | None:
        """The plan in use; None while the model runs plain."""
        return self._engine.plan if isinstance(self._engine, CutEngine) else None

    def explain(self) -> str:
        """What runs where and what that is predicted to cost, or why the model runs in one piece."""
        return self._engine.explain()

    def trace(self, input_feed: Mapping[str, Any]) -> list[Event]:
        """Run once and tell when each segment ran; empty while the model runs plain."""
        engine = self._engine_for(input_feed)
        events: list[Event] = []
        if isinstance(engine, CutEngine):
            names, feeds = self._checked(engine, None, input_feed)
            engine.run(feeds, names, events=events, arrays=True)
        return events

    def close(self) -> None:
        """Stop the lanes. Runs that have begun end first; later ones are refused. May be called twice."""
        if self._refusal:
            return
        with self._lock:
            self._refusal = _CLOSED
            engines = [self._engine, *self._engines.values()]
            self._engines.clear()
            if self._graph is not None:  # which describes inputs and outputs from now on
                self._plain = None
            self._selector.forget()
        for engine in engines:
            engine.close()

    def _refuse_in_child(self) -> None:
        """Refuse to run in a forked child, where the lanes are missing; a plain session is left to onnxruntime."""
        self._lock = threading.RLock()
        if any(isinstance(engine, CutEngine) for engine in (self._engine, *self._engines.values())):
            self._refusal = (
                "this session was made before the process was forked, and its lanes are not in the child: make one "
                "there, or start processes with multiprocessing's 'spawn' or 'forkserver'"
            )

    def _close_at_exit(self, until: float) -> None:
        """Close, but wait for runs in flight no longer than ``until``, a time of ``time.monotonic()``."""
        if not self._refusal:
            self._refusal = _CLOSED
            for engine in (self._engine, *tuple(self._engines.values())):
                engine.close(until)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Engines.

    def _first_engine(self) -> Engine:
        if self._graph is None:  # where InferenceSession refuses the model too, its own error says so
            return self._plain_engine(self._reason)
        try:
            require_tensors(self._graph)
        except CannotCutError as reason:
            return self._plain_engine(str(reason))
        self._by_shapes = self._graph.declared_free
        if self._graph.free_dimensions:
            return self._plain_engine("no request has come yet to fix the free dimensions")
        engine = self._selector.engine(self._graph)
        self._engines[tuple(_fixed(i) for i in self._graph.inputs)] = engine
        return engine

    def _engine_for(self, feed: Mapping[str, Any]) -> Engine:
        """The engine for a request's shapes; made, and kept, when they are new.

        A request that brings weights of its own runs plain: they are constants of everything else.
        """
        if self._refusal:
            raise RuntimeError(self._refusal)
        if self._graph is not None and any(weight.name in feed for weight in self._graph.overridable):
            return self._plain_engine("weights were given")
        engine = self._engine
        if self._graph is None or not self._by_shapes or (engine.fast_path and engine.fast_path.matches(feed)):
            return engine
        check_feed(self._graph.declared_inputs, feed)
        shapes = tuple(shape_of(feed[i.name]) for i in self._graph.inputs)
        with self._lock:
            if shapes not in self._engines:
                engine = self._new_shapes(self._graph, shapes)
                if isinstance(engine, PlainEngine):
                    inputs = zip(self._graph.inputs, shapes, strict=True)
                    engine = engine.for_shapes([replace(info, shape=shape) for info, shape in inputs])
                self._engines[shapes] = engine
                self._drop_plain()
            self._engines.move_to_end(shapes)
            self._engine = self._engines[shapes]
            if len(self._engines) > _SHAPES_KEPT:
                self._engines.popitem(last=False)  # its lanes stop once no run uses it any more
            return self._engine

    def _drop_plain(self) -> None:
        """Drop the plain session that was there before the first request, if no shape uses it: it holds all weights."""
        if not self._lent and all(isinstance(engine, CutEngine) for engine in self._engines.values()):
            self._plain = None
            self._selector.forget()

    def _new_shapes(self, graph: Graph, shapes: Shapes) -> Engine:
        if isinstance(self._config.plan, Plan):
            return self._plain_engine("the plan is for other shapes")
        given = {i.name: shape for i, shape in zip(graph.inputs, shapes, strict=True)}
        try:
            fixed = load(graph.source, given, optimise=graph.optimised)
        except Exception as error:  # noqa: BLE001 - whatever keeps the model from being cut, it runs plain
            return self._plain_engine(why_plain(error))
        return self._selector.engine(fixed)

    def _whole_session(self) -> ort.InferenceSession:
        """Return a plain session for what only one onnxruntime session does; opened if none is.

        Raises:
            RuntimeError: This session is closed, or its process was forked.
        """
        if self._refusal:
            raise RuntimeError(self._refusal)
        engine = self._engine
        if isinstance(engine, CutEngine) or self._by_shapes:
            engine, self._lent = self._plain_engine(), True
        return engine.session

    def _opened_session(self) -> Any:
        """Return onnxruntime's object of that session; None if none is open.

        Raises:
            RuntimeError: This session is closed, or its process was forked.
        """
        if not self._refusal and self._plain is None and (isinstance(self._engine, CutEngine) or self._by_shapes):
            return None
        return self._sess

    def _plain_engine(self, reason: str = "") -> PlainEngine:
        """The plain session for whatever has no engine of its own; made once, whatever the reasons."""
        with self._lock:
            if self._plain is None:
                self._plain = self._selector.plain(reason)
            return self._plain.because(reason) if reason else self._plain

    def _run_cut(
        self,
        engine: CutEngine,
        output_names: Sequence[str] | None,
        feed: Mapping[str, Any],
        run_options: ort.RunOptions | None,
        *,
        arrays: bool,
    ) -> list[Any]:
        names, feeds = self._checked(engine, output_names, feed)
        try:
            values = engine.run(feeds, names, run_options=run_options, arrays=arrays)
        except RuntimeError as error:
            if run_options is not None and run_options.terminate:
                raise Fail(str(error)) from error  # as InferenceSession's run has it; segments raise RuntimeError
            raise
        return [values[name] for name in names]

    def _checked(
        self, engine: CutEngine, names: Sequence[str] | None, feed: Mapping[str, Any]
    ) -> tuple[list[str], Mapping[str, Any]]:
        outputs = check_outputs(engine.graph.outputs, names)
        if engine.fast_path.matches(feed):
            return outputs, feed
        check_feed(engine.graph.inputs, feed)
        infos = {i.name: i for i in engine.graph.inputs}
        arrays = {n: as_array(infos[n], value) if isinstance(value, list) else value for n, value in feed.items()}
        return outputs, {name: as_ort_value(name, value) for name, value in arrays.items()}


def _fixed(info: TensorInfo) -> tuple[int, ...]:
    return tuple(d for d in info.shape or () if isinstance(d, int))
