"""HybridSession: ``onnxruntime.InferenceSession`` that runs a model on several lanes at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import onnxruntime as ort
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument

from chrion.devices.providers import why_unavailable
from chrion.graph.model import Graph
from chrion.machine.cores import check_cores
from chrion.profiler.precision import check_max_error, check_precision
from chrion.runtime.engines import Engines
from chrion.runtime.execution.engine import Engine
from chrion.runtime.execution.executor import Event
from chrion.runtime.interface import InferenceInterface
from chrion.runtime.iobinding import HybridIOBinding
from chrion.runtime.options.session_options import known_arguments, wants_errors
from chrion.runtime.requests import MissingInputError, check_arguments, check_run_options
from chrion.runtime.selection.configuration import SessionConfig, open_model, tuning_mode
from chrion.scheduler.plan import Plan
from chrion.scheduler.plan_options import PlanOptions
from chrion.scheduler.priced_memory import Memory, check_memory

if TYPE_CHECKING:
    import onnx


class HybridSession(InferenceInterface, ort.InferenceSession):  # type: ignore[misc]
    """Runs an ONNX model on an accelerator and CPU cores at once, behind the interface of InferenceSession.

    It is an InferenceSession to ``isinstance``, but wraps one only while the model runs plain.

    A new session serves requests by a plain InferenceSession at once. Meanwhile a process of low priority tunes: it
    profiles the model (measurements are cached), plans it, and times the plans against plain sessions. If a plan is
    faster, the model is cut into segments, each run by a thread pinned to a core, from the next request on. The
    decision is cached for later sessions. A model that cannot be cut, or that a plain session runs faster, stays plain,
    and :meth:`explain` gives the reason. So a session can be created for any model that InferenceSession opens.

    A model with free dimensions is tuned for the most frequently requested shapes; other shapes run plain. Since the
    plain session stays open for them, plans may add 64 MB, or 30 %, to its memory; none is used that would add more.

    Calls are safe from any number of threads. Arrays that :meth:`run` returns belong to the caller.

    Args:
        path_or_bytes: A model file, its bytes, a ModelProto, or a Graph.
        sess_options: As for InferenceSession. Some options make the model run plain; see the page on options in the
            documentation.
        providers: As for InferenceSession. The first one other than the CPU's is the accelerator.
        provider_options: As for InferenceSession.
        plan: A plan, its file, or a function that makes a plan of a graph of known shapes; it is used without tuning.
        slo: Limit of the latency, ``60ms`` for example; tuning selects the candidate with the least accelerator memory
            that meets it.
        alpha: Price of accelerator memory in ms per MB, for tuning.
        memory: The memory that ``alpha`` prices and of which ``slo`` leaves the least: ``resident`` or ``paper``, as
            for :func:`chrion.partition`.
        cores: Maximum number of CPU cores, at most those of the process, of plans that tuning makes, and of threads of
            plain sessions, unless ``sess_options`` gives these.
        strict: Raise if the accelerator fails (it does not start, its memory is full, it is lost, it lacks a kernel),
            if a given plan cannot be opened, or if a segment fails. Otherwise the session warns and falls back to the
            CPU or to a plain session.
        gpu_budget: Limit of accelerator memory, ``600MB`` for example, for plans and for plain sessions: a plain
            session that is not known to fit runs on the CPU.
        tune: ``background`` as above; ``now`` to tune before the first request of each shape is served, which takes
            seconds; ``never`` to use cached decisions only. By default the environment variable ``CHRION_TUNE``, or
            else ``background``.
        precision: Precision of recurrent operators and matrix products of plans, for tuning: ``float32``, or ``bf16``,
            which is faster and less exact. A given plan states its own.
        max_error: Largest error that ``bf16`` may add, relative to the largest output, ``0.01`` for example: it is
            measured on synthetic inputs, and plans that exceed it are not used.
        kwargs: Further arguments of InferenceSession: ``enable_fallback``, ``disabled_optimizers``,
            ``read_config_from_model``. Others are ignored, with a warning in the log, unless they are misspelt.

    Raises:
        TypeError: ``path_or_bytes`` or ``sess_options`` has another type.
        ModelError: ``path_or_bytes`` is empty, or a folder.
        PlanError: The plan is damaged, not for this model, or requires more cores than there are.
        ProviderError: ``strict`` is true, and the accelerator does not work on this machine.
        OptionError: An argument has an invalid value.
        UnsafeModelError: The model names files outside of its folder, or its trees would end the process.
        Exception: Raised by InferenceSession for a model that it cannot run either.
    """

    def __init__(  # noqa: PLR0913 - the arguments of InferenceSession, and keyword-only ones
        self,
        path_or_bytes: str | Path | bytes | onnx.ModelProto | Graph,
        sess_options: ort.SessionOptions | None = None,
        providers: Sequence[Any] | None = None,
        provider_options: Sequence[Mapping[Any, Any]] | None = None,
        *,
        plan: Plan | str | Path | Callable[[Graph], Plan] | None = None,
        slo: str | float | None = None,
        alpha: float | None = None,
        memory: Memory | None = None,
        cores: int | None = None,
        strict: bool = False,
        gpu_budget: str | float | None = None,
        tune: str | None = None,
        precision: str = "float32",
        max_error: float | None = None,
        **kwargs: Any,
    ) -> None:
        if sess_options is not None and not isinstance(sess_options, ort.SessionOptions):
            raise TypeError(f"sess_options: expected onnxruntime.SessionOptions or None, found {sess_options!r}")
        check_cores(cores)
        limits = PlanOptions(slo, alpha, gpu_budget=gpu_budget, memory=memory).limits
        given = Plan.load(plan) if isinstance(plan, str | Path) else plan
        config = SessionConfig(
            open_model(path_or_bytes, weights_given=sess_options is not None),
            sess_options,
            providers,
            provider_options,
            given,
            limits.slo_ms,
            alpha,
            cores,
            strict or wants_errors(kwargs),
            limits.budget_mb,
            known_arguments(kwargs, HybridSession.__init__.__kwdefaults__ or ()),
            check_memory(memory),
            checked := check_precision(precision),
            check_max_error(max_error, checked),
        )
        source = config.model.source
        self._model_path = source if isinstance(source, str) else None
        self._model_bytes = source if isinstance(source, bytes) else None
        graph = path_or_bytes if isinstance(path_or_bytes, Graph) else None
        self._engines = Engines(graph, config, strict=strict, tune=tuning_mode(tune))

    # Methods of InferenceSession.

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
            run_options: Passed to onnxruntime.

        Raises:
            ValueError: An input is missing.
            InvalidArgument: A name is unknown, or an array has another type or shape than the model requires.
            Exception: Raised by onnxruntime while running, with the names of operators.
        """
        return self._engines.run(output_names, input_feed, run_options)

    def run_with_ort_values(
        self,
        output_names: Sequence[str] | None,
        input_dict_ort_values: Mapping[str, ort.OrtValue],
        run_options: ort.RunOptions | None = None,
    ) -> list[ort.OrtValue]:
        """Run the model on OrtValues and return OrtValues; otherwise like :meth:`run`."""
        check_arguments(output_names, input_dict_ort_values, run_options, ort_values=True)
        arguments = output_names, input_dict_ort_values, run_options
        return self._engines.serve(
            input_dict_ort_values, lambda engine: engine.run_with_ort_values(*arguments), run_options
        )

    def io_binding(self) -> HybridIOBinding:
        """Return a new binding for :meth:`run_with_iobinding`."""
        inputs = [info.name for info in (*self.get_inputs(), *self.get_overridable_initializers())]
        return HybridIOBinding(self, inputs, [info.name for info in self.get_outputs()])

    def run_with_iobinding(
        self, iobinding: HybridIOBinding | ort.IOBinding, run_options: ort.RunOptions | None = None
    ) -> None:
        """Run the model on a binding; outputs are written where they are bound.

        A binding created by ``onnxruntime.IOBinding(session)`` runs plain, since the values that it binds cannot be
        read.

        Raises:
            ValueError: The binding belongs to another session.
            RuntimeError: A bound value does not fit the model, or a segment fails, as InferenceSession raises it.
        """
        engines = self._engines
        if isinstance(iobinding, ort.IOBinding) and self._bound_whole(iobinding):
            engines.serve_whole(lambda whole: whole.run_with_iobinding(iobinding, run_options))
            return
        if getattr(iobinding, "owner", self) is not self or isinstance(iobinding, ort.IOBinding):
            raise ValueError("IOBinding must be used with the session that created it.")
        check_run_options(run_options, AttributeError)
        if not iobinding.outputs and not engines.refusal:
            raise RuntimeError("Error in execution: At least one output should be requested.")
        try:
            iobinding.results = engines.serve(
                iobinding.inputs, lambda engine: engine.run_bound(iobinding, run_options), run_options
            )
        except (MissingInputError, InvalidArgument) as error:
            raise RuntimeError(str(error)) from error

    def get_providers(self) -> list[str]:
        """Return the execution providers in use, the accelerator's first."""
        return self._engine.providers

    def get_provider_options(self) -> dict[str, dict[str, str]]:
        """Return the options of each execution provider in use."""
        return self._engine.provider_options

    def get_session_options(self) -> ort.SessionOptions:
        """Return the options that the session was created with."""
        return self._engines.config.options or ort.SessionOptions()

    def set_providers(
        self, providers: Sequence[Any] | None = None, provider_options: Sequence[Mapping[Any, Any]] | None = None
    ) -> None:
        """Use other providers: select between plans and plain sessions again, unless a plan was given.

        Raises:
            Exception: Raised by InferenceSession for such providers.
        """
        before = self._engines
        self._engines = before.with_providers(providers, provider_options)
        if before.refusal:  # closed by another thread meanwhile, which does not know the new engines
            self._engines.close()

    def enable_fallback(self) -> None:
        """Fall back to the CPU if the accelerator fails."""
        self._engines.set_strict(strict=False)

    def disable_fallback(self) -> None:
        """Raise if the accelerator fails."""
        self._engines.set_strict(strict=True)

    # Methods that InferenceSession does not have.

    def __repr__(self) -> str:
        return f"<HybridSession of {self._engines.config.name}: {self._engines.explain().splitlines()[0]}>"

    @property
    def plan(self) -> Plan | None:
        """Plan in use; None while the model runs plain."""
        return self._engine.plan

    def explain(self) -> str:
        """Return the placement and its predicted cost, or the reason why the model runs plain.

        It may take a second if a requested accelerator is not in use, since it is probed once.
        """
        wanted = self._engines.config.accelerator
        missing = why_unavailable(wanted[0]) if wanted and wanted[0] not in self._engine.providers else ""
        return "\n".join(filter(None, [self._engines.explain(), missing]))

    def trace(self, input_feed: Mapping[str, Any]) -> list[Event]:
        """Run one request and return the start and end of each segment; empty while the model runs plain."""
        return self._engines.trace(input_feed)

    def wait_until_tuned(self, timeout: float | None = None) -> bool:
        """Wait until tuning has ended for all shapes requested so far.

        Args:
            timeout: Limit in seconds; None waits without limit.

        Returns:
            Whether tuning has ended. If a plan was faster, it is in use then; if timings were uncertain, the requests
            that follow decide, as :meth:`explain` says. False, without waiting, if tuning could
            not start, because of a limit of processes for example; :meth:`explain` gives the reason.
        """
        return self._engines.wait_until_tuned(timeout)

    def close(self) -> None:
        """Stop tuning and the lanes. Requests in flight are served first; later ones are refused. Idempotent."""
        self._engines.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _engine(self) -> Engine:
        return self._engines.current

    def _bound_whole(self, binding: ort.IOBinding) -> bool:
        """Return whether a binding of onnxruntime was created for the plain session of this session.

        Raises:
            RuntimeError: This session is closed, or its process was forked.
        """
        return self._engines.has_whole_session() and binding._session is self._sess  # noqa: SLF001
