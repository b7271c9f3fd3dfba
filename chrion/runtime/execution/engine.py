"""What runs a model of known shapes: a program over lanes, or a plain session with the reason for it."""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime as ort

from chrion.cores import physical_cores
from chrion.devices import CPU_PROVIDER
from chrion.devices.host import allocate, to_host
from chrion.devices.nvml import MemoryMonitor
from chrion.devices.providers import require_working
from chrion.errors import PlanError
from chrion.graph.extract import Extractor
from chrion.graph.model import ELEMENT_BYTES, Graph, TensorInfo
from chrion.lane_numbers import display_order, is_accelerator_lane, is_copy_lane, lane_name
from chrion.native import NativeError
from chrion.runtime.execution.accelerator import Accelerator
from chrion.runtime.execution.executor import Event, Executor
from chrion.runtime.execution.frame import Array
from chrion.runtime.execution.lane_threads import LaneThreads
from chrion.runtime.execution.native_executor import NativeExecutor, fits
from chrion.runtime.execution.program import build_program
from chrion.runtime.execution.segments import Segment, SegmentFactory
from chrion.runtime.execution.transfers import find_transfers
from chrion.runtime.requests import FastPathMatcher
from chrion.scheduler.plan import Plan
from chrion.units import format_mb, format_ms


class CannotCutError(Exception):
    """A graph or a plan that a plain session serves as well or better; says why."""


class CutEngine:
    """A plan being run: sessions for its segments, threads for its lanes.

    Args:
        graph: The graph.
        plan: A plan of this graph.
        options: The caller's session options, or None.
        provider_options: Options of the plan's accelerator.

    Raises:
        PlanError: The plan asks for more cores than there are.
        ProviderError: The plan's accelerator does not work here.
        CannotCutError: The model runs better, or only, in one piece.
    """

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        options: ort.SessionOptions | None,
        provider_options: Mapping[str, Any],
    ) -> None:
        require_tensors(graph)
        if len(plan.segments) < 2:
            raise CannotCutError("the plan runs the whole model as one segment")
        self.graph = graph
        self.plan = plan
        self._options = options
        self._accelerator = accelerator = _accelerator(plan, provider_options)
        self._extractor = Extractor(graph)
        transfers = find_transfers(self._extractor, plan.schedule.lanes, accelerator.device if accelerator else None)
        self.fast_path = FastPathMatcher(graph.inputs)
        self.program = build_program(graph.dag, plan.schedule.lanes, plan.segments, plan.schedule.stages, transfers)
        self._cores = _cores_of(self.program.lanes, plan)
        self._lock = threading.Lock()
        self._closed = False
        monitor = MemoryMonitor()
        self._native = self._open_native() if accelerator is None and fits(graph, self.program) else None
        #: Threads of the interpreter; None until something has to run by them.
        self._executor = None if self._native else self._open()
        #: GPU memory that opening the sessions took, in MB; None where nothing tells.
        self.loaded_mb = monitor.growth_mb() if accelerator else None
        self._outputs = [info.name for info in graph.outputs]
        self._constants = {
            o.name: ort.OrtValue.ortvalue_from_numpy(value)
            for o in graph.outputs
            if (value := graph.constant(o.name)) is not None
        }

    @property
    def native(self) -> bool:
        """Whether requests are carried out without the interpreter."""
        return self._native is not None

    def run_fast_path(self, feeds: Mapping[str, Array]) -> list[Any]:
        """Run one request of the usual kind (see :class:`FastPathMatcher`); all outputs, as arrays."""
        values = self.run(feeds, self._outputs, arrays=True)
        return [values[name] for name in self._outputs]

    def run(  # noqa: PLR0913 - what a request is made of
        self,
        feeds: Mapping[str, ort.OrtValue | Array],
        outputs: Sequence[str],
        *,
        targets: Mapping[str, ort.OrtValue] | None = None,
        staying: Collection[str] = (),
        run_options: ort.RunOptions | None = None,
        events: list[Event] | None = None,
        arrays: bool = False,
    ) -> dict[str, Any]:
        """Run one request; see :meth:`Executor.run`. An output that is an input or a weight is copied."""
        made = [name for name in outputs if name not in feeds and name not in self._constants]
        if self._native and run_options is None:
            values = self._native.run(feeds, made, targets=targets, events=events, arrays=arrays)
        else:
            values = self._interpreted().run(
                feeds,
                made,
                targets=targets,
                staying=staying,
                run_options=run_options,
                events=events,
                arrays=arrays,
            )
        for name in outputs if len(made) < len(outputs) else ():
            if name not in values:
                source = feeds[name] if name in feeds else self._constants[name]
                value = (targets or {}).get(name) or allocate(self.graph.values[name])
                value.update_inplace(source if isinstance(source, np.ndarray) else to_host(source).numpy())
                values[name] = value.numpy() if arrays else value
        return values

    @property
    def accelerated(self) -> bool:
        """Whether any of it is on an accelerator."""
        return self.plan.accelerator is not None

    def explain(self) -> str:
        """What runs where, in a few lines."""
        plan, lanes = self.plan, [lane for lane in self.program.lanes if not is_copy_lane(lane)]
        counts = f"{self.sessions} sessions, {self.program.waits} waits, {self.program.copies} copies"
        counts += f", lanes in {'C' if self._native else 'Python'}"
        lines = [
            f"{plan.model}: {len(plan.operators)} operators in {len(plan.segments)} segments on {len(lanes)} lanes",
            f"policy {plan.policy}, {counts}",
            f"predicted {format_ms(plan.predicted.latency_ms)}, accelerator {format_mb(plan.predicted.memory_mb)}",
        ]
        if self.loaded_mb is not None:
            lines.append(f"GPU memory taken by loading: {format_mb(self.loaded_mb)}")
        sizes: Counter[int] = Counter(plan.schedule.lanes)
        for lane in display_order(lanes):
            segments = sum(plan.schedule.lanes[s[0]] == lane for s in plan.segments)
            where = lane_name(lane) + (f" ({plan.accelerator})" if is_accelerator_lane(lane) else "")
            busy = format_ms(plan.busy_ms[lane])
            lines.append(f"  {where}: {sizes[lane]} operators in {segments} segments, busy {busy}")
        return "\n".join([*lines, *plan.remarks])

    def close(self, until: float | None = None) -> None:
        """Stop the lanes, when runs that have begun have ended; wait no longer than ``until``, if that is given."""
        with self._lock:
            self._closed = True
        for executor in (self._native, self._executor):
            if executor:
                executor.close(until)

    def _open_native(self) -> NativeExecutor | None:
        """The program without the interpreter; None where onnxruntime refuses, which then says why once more."""
        try:
            self.segments, self.sessions = self._open_segments(native=True)
            return NativeExecutor(self.graph, self.program, self.segments, self._cores)
        except (NativeError, RuntimeError):
            return None

    def _interpreted(self) -> Executor:
        """The program by threads of the interpreter."""
        with self._lock:
            if self._executor is None:
                if self._closed:
                    raise RuntimeError("this session is closed")
                self._executor = self._open()
            return self._executor

    def _open(self) -> Executor:
        segments, sessions = self._open_segments(native=False)
        if self._native is None:
            self.segments, self.sessions = segments, sessions
        first = next(iter(self.program.lanes))
        lanes = LaneThreads({lane: core for lane, core in self._cores.items() if lane != first})
        return Executor(self.graph, self.program, segments, lanes, self._cores, self._accelerator)

    def _open_segments(self, *, native: bool) -> tuple[list[Segment], int]:
        """All segments, and how many sessions they have."""
        factory = SegmentFactory(self._extractor, self._options, self._accelerator, native=native)
        lanes = self.plan.schedule.lanes
        return [factory.open(s, lanes[s[0]]) for s in self.plan.segments], factory.sessions


class PlainEngine:
    """The model in one onnxruntime session."""

    def __init__(
        self,
        source: str | bytes,
        options: ort.SessionOptions | None,
        providers: Sequence[Any] | None,
        provider_options: Sequence[Mapping[Any, Any]] | None,
        reason: str,
        **rest: Any,
    ) -> None:
        self.session = ort.InferenceSession(source, options, providers, provider_options, **rest)
        #: Whether any of it may be on an accelerator.
        self.accelerated = list(self.session.get_providers()) != [CPU_PROVIDER]
        self.reason = reason
        #: Recognises requests of the shapes that it was chosen for; None if it was not chosen for any.
        self.fast_path: FastPathMatcher | None = None

    def for_shapes(self, inputs: Sequence[TensorInfo]) -> PlainEngine:
        """Return the same session, chosen for inputs of known shapes."""
        twin = copy.copy(self)
        twin.fast_path = FastPathMatcher(inputs)
        return twin

    def because(self, reason: str) -> PlainEngine:
        """The same session, for another reason."""
        twin = copy.copy(self)
        twin.reason = reason
        return twin

    def explain(self) -> str:
        """Why the model runs in one piece."""
        return f"plain onnxruntime on {', '.join(self.session.get_providers())}: {self.reason}"

    def close(self, until: float | None = None) -> None:
        """Nothing to stop."""


Engine = CutEngine | PlainEngine


def require_tensors(graph: Graph) -> None:
    """Make sure that requests can be bound.

    Raises:
        CannotCutError: An input is not a tensor of numbers, or an output is not a tensor, or a constant text.
    """
    for info in graph.inputs:
        if info.type not in ELEMENT_BYTES:
            raise CannotCutError(f"input {info.name!r} is a {info.type or 'value of unknown type'}, not numbers")
    for info in graph.outputs:
        if not info.type.startswith("tensor("):
            raise CannotCutError(f"output {info.name!r} is a {info.type or 'value of unknown type'}, not a tensor")
        if info.type == "tensor(string)" and graph.constant(info.name) is not None:
            raise CannotCutError(f"output {info.name!r} is a constant text")  # no OrtValue can be made of one


def _accelerator(plan: Plan, provider_options: Mapping[str, Any]) -> Accelerator | None:
    if plan.accelerator is None:
        return None
    if plan.accelerator != CPU_PROVIDER:
        require_working(plan.accelerator, f"plan of {plan.model!r}")
    return Accelerator(plan.accelerator, provider_options)


def _cores_of(lanes: Mapping[int, object], plan: Plan) -> dict[int, int | None]:
    """The core each lane is pinned to; lanes that use none take those that are left over, or none of their own."""
    available = physical_cores()
    if plan.schedule.cores > len(available):
        raise PlanError(
            f"plan of {plan.model!r}: it uses {plan.schedule.cores} cores, this process may use {len(available)}",
            hint="make one with: chrion partition",
        )
    spare = available[plan.schedule.cores :]
    others = [lane for lane in lanes if is_accelerator_lane(lane) or is_copy_lane(lane)]
    owned = dict(zip(others, spare, strict=False))
    return {lane: owned.get(lane) if lane in others else available[lane - 1] for lane in lanes}
