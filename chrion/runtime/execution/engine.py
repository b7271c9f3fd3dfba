"""What runs a model: the base class of engines, and the failures that they report."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import onnxruntime as ort

from chrion.graph.model import ELEMENT_BYTES, Graph, TensorInfo
from chrion.runtime.execution.executor import Event
from chrion.runtime.iobinding import HybridIOBinding
from chrion.runtime.live_comparison import LiveComparison
from chrion.runtime.live_selection import LiveSelection
from chrion.runtime.requests import FastPathMatcher
from chrion.scheduler.plan import Plan


class CannotCutError(Exception):
    """Refusal to cut a model that a plain session serves as well or better, or that only a plain session can serve."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Resident memory that a process gained, in MB; see :mod:`chrion.runtime.selection.footprint`."""

    #: By the plain session, with what onnxruntime's first session takes once.
    plain_mb: float
    #: By the plan, beside the plain session; 0 if no plan was opened.
    plan_mb: float


class Engine(ABC):
    """Runs a model: a plan on lanes (:class:`chrion.runtime.execution.cut_engine.CutEngine`), or one plain session.

    The methods that run a request raise what InferenceSession raises for it, and besides
    :class:`chrion.runtime.execution.executor.EngineFailure`, after which another engine may serve it.

    Attributes:
        session: The plain session; None for a plan.
        plan: The plan; None for a plain session.
        reason: Reason why the engine was selected; empty if the caller gave its plan.
        footprint: Memory of the plan; None if it is not limited.
        selected_for: Digest of the graph for which the plan was selected; empty for a plain session.
        comparison: Comparison with the one-thread session, or of a plain session with a plan; None if the engine
            serves in any case.
        requests: Number of requests; counted for plans only, without a lock, since a lost count does not matter.
        accelerated: Whether any operator may run on an accelerator.
        fast_path: Recognises requests of the shapes that this engine was chosen for; None if it was chosen for any.
    """

    session: ort.InferenceSession | None = None
    plan: Plan | None = None
    reason = ""
    footprint: Footprint | None = None
    selected_for = ""
    comparison: LiveComparison | LiveSelection | None = None
    requests = 0
    accelerated: bool
    fast_path: FastPathMatcher | None = None

    @property
    @abstractmethod
    def capacity(self) -> int:
        """Number of requests in flight that are served best by this engine; at least one."""

    @property
    @abstractmethod
    def has_one_thread(self) -> bool:
        """Whether each request has a single thread."""

    @property
    @abstractmethod
    def providers(self) -> list[str]:
        """The execution providers in use, the accelerator's first."""

    @property
    @abstractmethod
    def provider_options(self) -> dict[str, dict[str, str]]:
        """The options of each execution provider in use."""

    def matches(self, feed: Mapping[str, Any]) -> bool:
        """Return whether a request has the shapes that this engine was chosen for, in arrays without conversion."""
        return self.fast_path is not None and self.fast_path.matches(feed)

    def find_obstacle(self, run_options: ort.RunOptions | None) -> str:
        """Return the reason why a request with some run options has to run plain; empty if there is none."""
        del run_options
        return ""

    @abstractmethod
    def run_usual(
        self,
        names: Sequence[str] | None,
        feed: Mapping[str, Any],
        run_options: ort.RunOptions | None,
        *,
        any_shapes: bool,
    ) -> list[Any] | None:
        """Run a request of the usual kind without checking it first; return None for any other, which is not run.

        Args:
            names: Outputs to return; None or empty for all.
            feed: Values by input name.
            run_options: As for InferenceSession.
            any_shapes: Whether this engine serves requests of any shapes that the model accepts.
        """

    @abstractmethod
    def run(
        self, names: Sequence[str] | None, feed: Mapping[str, Any], run_options: ort.RunOptions | None
    ) -> list[Any]:
        """Run a request, and return its outputs as arrays that belong to the caller."""

    @abstractmethod
    def run_with_ort_values(
        self, names: Sequence[str] | None, feed: Mapping[str, ort.OrtValue], run_options: ort.RunOptions | None
    ) -> list[ort.OrtValue]:
        """Run a request on OrtValues."""

    @abstractmethod
    def run_bound(self, binding: HybridIOBinding, run_options: ort.RunOptions | None) -> list[ort.OrtValue]:
        """Run a request on a binding, and return the outputs in the order in which they were bound."""

    def trace(self, feed: Mapping[str, Any]) -> list[Event]:
        """Run a request, and return the times of its segments and copies; a plain session does nothing."""
        del feed
        return []

    def for_shapes(self, inputs: Sequence[TensorInfo]) -> Self:
        """Return the engine, chosen for inputs of known shapes; a plan is for its own."""
        del inputs
        return self

    @abstractmethod
    def explain(self) -> str:
        """Describe the engine, and why it was selected, in a few lines."""

    def close(self, until: float | None = None) -> None:
        """Refuse new requests, and wait for those in flight, no longer than ``until`` of ``time.monotonic``.

        A plain session has no lanes to stop, and does nothing.
        """
        del until


def input_obstacle(inputs: Sequence[TensorInfo]) -> str:
    """Return which input is not a tensor of numbers, so that it cannot be bound; empty if all are."""
    odd = next((info for info in inputs if info.type not in ELEMENT_BYTES), None)
    return f"input {odd.name!r} is a {odd.type or 'value of unknown type'}, not numbers" if odd else ""


def require_tensors(graph: Graph) -> None:
    """Raise if the inputs or outputs of a graph cannot be bound.

    Raises:
        CannotCutError: An input is not a tensor of numbers, or an output is not a tensor, or is a constant text.
    """
    if obstacle := input_obstacle(graph.inputs):
        raise CannotCutError(obstacle)
    for info in graph.outputs:
        if not info.type.startswith("tensor("):
            raise CannotCutError(f"output {info.name!r} is a {info.type or 'value of unknown type'}, not a tensor")
        if info.type == "tensor(string)" and graph.constant(info.name) is not None:
            raise CannotCutError(f"output {info.name!r} is a constant text")  # an OrtValue cannot be made of one
