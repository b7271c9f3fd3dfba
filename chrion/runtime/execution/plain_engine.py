"""A plain session of the whole model."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import onnxruntime as ort

from chrion.common.units import format_count
from chrion.devices import CPU_PROVIDER
from chrion.graph.model import TensorInfo
from chrion.machine.cores import physical_cores
from chrion.runtime.execution.engine import Engine
from chrion.runtime.execution.executor import AcceleratorFailure
from chrion.runtime.iobinding import HybridIOBinding
from chrion.runtime.options.thread_limit import limited_threads, thread_count
from chrion.runtime.requests import FastPathMatcher


class PlainEngine(Engine):
    """The engine of one onnxruntime session, which runs the whole model and checks requests itself.

    Args:
        source: The model's file or bytes.
        options: The caller's session options, or None.
        providers: As for InferenceSession.
        provider_options: As for InferenceSession.
        reason: Reason why the model runs plain.
        cores: Maximum number of threads, unless the options give one; None for all cores.
        rest: Further arguments of InferenceSession.
    """

    session: ort.InferenceSession

    def __init__(  # noqa: PLR0913, PLR0917 - the arguments of InferenceSession, and two more
        self,
        source: str | bytes,
        options: ort.SessionOptions | None,
        providers: Sequence[Any] | None,
        provider_options: Sequence[Mapping[Any, Any]] | None,
        reason: str,
        cores: int | None = None,
        **rest: Any,
    ) -> None:
        with limited_threads(options, cores) as limited:
            self.session = ort.InferenceSession(source, limited, providers, provider_options, **rest)
        self.accelerated = list(self.session.get_providers()) != [CPU_PROVIDER]
        self.reason = reason

    def run_usual(
        self,
        names: Sequence[str] | None,
        feed: Mapping[str, Any],
        run_options: ort.RunOptions | None,
        *,
        any_shapes: bool,
    ) -> list[Any] | None:
        """Run a request of the shapes that this engine was chosen for."""
        return self.run(names, feed, run_options) if any_shapes or self.matches(feed) else None

    def run(
        self, names: Sequence[str] | None, feed: Mapping[str, Any], run_options: ort.RunOptions | None
    ) -> list[Any]:
        """Run a request, and return its outputs as arrays that belong to the caller."""
        try:
            return self.session.run(names, feed, run_options)  # type: ignore[no-any-return]
        except Exception as error:
            self._blame_accelerator(error)
            raise

    def run_with_ort_values(
        self, names: Sequence[str] | None, feed: Mapping[str, ort.OrtValue], run_options: ort.RunOptions | None
    ) -> list[ort.OrtValue]:
        """Run a request on OrtValues."""
        try:
            return list(self.session.run_with_ort_values(names, feed, run_options))
        except Exception as error:
            self._blame_accelerator(error)
            raise

    def run_bound(self, binding: HybridIOBinding, run_options: ort.RunOptions | None) -> list[ort.OrtValue]:
        """Run a request on a binding, and return the outputs in the order in which they were bound."""
        try:
            return binding.run_plain(self.session, run_options)
        except Exception as error:
            self._blame_accelerator(error)
            raise

    def _blame_accelerator(self, error: Exception) -> None:
        """Raise an error as a failure of the accelerator if it may be one."""
        if self.accelerated:
            raise AcceleratorFailure(error) from error

    @functools.cached_property
    def capacity(self) -> int:
        """Number of requests in flight for which several threads each are worthwhile, at least one.

        Without limit if the session has one thread anyway.
        """
        return sys.maxsize if self.has_one_thread else max(1, len(physical_cores()) - 1)

    @functools.cached_property
    def has_one_thread(self) -> bool:
        """Whether each request has a single thread."""
        return bool(self.session.get_session_options().intra_op_num_threads == 1)

    @property
    def providers(self) -> list[str]:
        """The execution providers in use, the accelerator's first."""
        return list(self.session.get_providers())

    @property
    def provider_options(self) -> dict[str, dict[str, str]]:
        """The options of each execution provider in use."""
        return dict(self.session.get_provider_options())

    def for_shapes(self, inputs: Sequence[TensorInfo]) -> PlainEngine:
        """Return an engine of the same session, chosen for inputs of known shapes."""
        twin = copy.copy(self)
        twin.fast_path = FastPathMatcher(inputs)
        return twin

    def with_reason(self, reason: str) -> PlainEngine:
        """Return an engine of the same session with another reason."""
        twin = copy.copy(self)
        twin.reason = reason
        return twin

    def explain(self) -> str:
        """Return the execution providers, the number of threads, and why the model runs plain."""
        threads = format_count(thread_count(self.session.get_session_options()), "thread")
        return f"plain onnxruntime on {', '.join(self.providers)}, {threads}: {self.reason}"
