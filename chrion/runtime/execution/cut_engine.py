"""A plan in execution."""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
import onnxruntime as ort
from onnxruntime.capi.onnxruntime_pybind11_state import Fail

from chrion.common.lane_numbers import display_order, is_accelerator_lane, is_copy_lane, lane_name
from chrion.common.units import format_count, format_mb, format_ms
from chrion.devices import CPU_PROVIDER
from chrion.devices.host import allocate, to_host
from chrion.devices.nvml import MemoryMonitor
from chrion.devices.providers import require_working
from chrion.errors import ChrionError, PlanError
from chrion.graph.extract import Extractor
from chrion.graph.model import Graph, Tensors
from chrion.graph.ort_sessions import first_line
from chrion.machine.core_leases import CoreLease, lease_cores
from chrion.machine.cores import physical_cores
from chrion.native import NativeError, bfloat16_available, operators_available
from chrion.profiler.costs import BufferSupport
from chrion.profiler.machine import is_this_machine, this_machine
from chrion.runtime.execution.accelerator import AcceleratorSessions
from chrion.runtime.execution.engine import CannotCutError, Engine, require_tensors
from chrion.runtime.execution.executor import CLOSED, Event, SegmentFailure
from chrion.runtime.execution.host_frame import Array
from chrion.runtime.execution.lane_groups import assign_cores
from chrion.runtime.execution.native_executor import NOT_COMPILED, NativeExecutor, find_obstacle
from chrion.runtime.execution.program import build_program
from chrion.runtime.execution.python_executor import PythonExecutor
from chrion.runtime.execution.segments import Segment, SegmentFactory
from chrion.runtime.execution.transfers import find_buffer_support, find_transfers
from chrion.runtime.iobinding import HybridIOBinding
from chrion.runtime.options.session_options import run_reason
from chrion.runtime.options.terminable import fits_native_lanes
from chrion.runtime.requests import FastPathMatcher, output_names, prepare_request
from chrion.scheduler.evaluation.frame_buffers import plan_frame
from chrion.scheduler.plan import Plan
from chrion.scheduler.priced_memory import MEMORY_NAMES

log = logging.getLogger(__name__)


class CutEngine(Engine):
    """The engine of a plan: sessions of its segments, and an executor with its lanes.

    Requests run on native lanes if possible, and otherwise on lane threads. If there are native lanes, lane threads are
    started for the first request that cannot run on native lanes.

    Args:
        graph: The graph.
        plan: A plan of this graph.
        options: The caller's session options, or None.
        provider_options: Options of the plan's accelerator.
        reload: Loads the model again, with the graph's shapes. With it, an engine with native lanes keeps no graph, and
            loads the model for the first request that cannot run on native lanes.

    Raises:
        PlanError: The plan uses more cores than this process may use.
        ProviderError: The plan's accelerator does not work on this machine.
        CannotCutError: A plain session serves the model as well or better, or only a plain session can serve it.
    """

    plan: Plan
    fast_path: FastPathMatcher
    has_one_thread = False

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        options: ort.SessionOptions | None,
        provider_options: Mapping[str, Any],
        reload: Callable[[], Graph] | None = None,
    ) -> None:
        require_tensors(graph)
        self._provider_options = provider_options
        self._accelerator = accelerator = _open_accelerator(plan, provider_options)
        if replace(plan, native=tuple(_native_operators(plan))).is_plain:
            # a plain session serves it on the accelerator, which therefore has to work
            raise CannotCutError("the plan runs the whole model as one segment")
        self.plan = plan
        self._reload = reload
        #: Returns the graph, or None once it is no longer in memory.
        self._held: Callable[[], Graph | None] = lambda: graph
        self.fast_path = FastPathMatcher(graph.inputs)
        self.accelerated = plan.accelerator is not None
        self.selected_for = plan.digest  # changed by the selector if the plan is for a variant, in chunks
        self._options = options
        device = accelerator.device if accelerator else None
        transfers = find_transfers(Extractor(graph), plan.schedule.lanes, device)
        support = find_buffer_support(graph, device) if device else BufferSupport()
        #: Accelerator memory that each request in flight needs for the values between segments.
        self.frame_buffers = plan_frame(graph.dag, plan.schedule, plan.segments, support)
        self.program = build_program(graph.dag, plan.schedule, plan.segments, transfers)
        _require_cores(plan)
        #: Reentrant, since a signal handler may close the engine while its thread holds it.
        self._lock = threading.RLock()
        self._closed = False
        monitor = MemoryMonitor() if accelerator else None
        #: Reason why requests run on lane threads; empty if they run on native lanes.
        self._obstacle = "the plan uses an accelerator" if accelerator else find_obstacle(graph, self.program)
        if self._obstacle == NOT_COMPILED:
            _warn_not_compiled()
        self._native = None if self._obstacle else self._open_native()
        #: Executor on lane threads. If there are native lanes, None until a request needs it.
        self._python = None if self._native else self._open_python()
        #: Types of the values that requests use.
        self._tensors: Tensors = graph
        if self._native and reload:
            self._tensors, self._held = graph.select(()), weakref.ref(graph)
        #: GPU memory that the sessions allocated when they were opened, in MB; None if it cannot be measured.
        self.loaded_mb = monitor.growth_mb() if monitor else None
        self._outputs = [info.name for info in graph.outputs]
        self._constants = {
            o.name: ort.OrtValue.ortvalue_from_numpy(value)
            for o in graph.outputs
            if (value := graph.constant(o.name)) is not None
        }
        #: Whether no output is also an input or a weight, so that none has to be copied.
        self._all_computed = not {*self._constants, *(i.name for i in graph.inputs)}.intersection(self._outputs)

    @property
    def graph(self) -> Graph:
        """The graph of the plan's operators, loaded again if it is no longer in memory.

        Raises:
            RuntimeError: The model can no longer be loaded, or has changed.
        """
        graph = self._held()
        if graph is not None or self._reload is None:
            return graph  # type: ignore[return-value] # without a reload, the graph is held
        try:
            return self.plan.apply(self._reload())
        except ChrionError as error:
            raise RuntimeError(f"model {self.plan.model}: cannot be loaded again: {error}") from error

    @property
    def capacity(self) -> int:
        """Number of requests that the lanes can serve at the same time, each on cores of its own; at least one."""
        executor = self._native or self._python
        return executor.capacity if executor else 1

    def find_obstacle(self, run_options: ort.RunOptions | None) -> str:
        """Return the reason why a request with some run options has to run plain; empty if there is none."""
        return run_reason(run_options, accelerated=self.accelerated)

    def run_usual(
        self,
        names: Sequence[str] | None,
        feed: Mapping[str, Any],
        run_options: ort.RunOptions | None,
        *,
        any_shapes: bool,
    ) -> list[Any] | None:
        """Run a request for all outputs, of arrays that need no conversion, on native lanes."""
        del any_shapes
        if self._native is None or names or not (fits_native_lanes(run_options) and self.fast_path.matches(feed)):
            return None
        self.requests += 1
        if not self._all_computed:
            return self._serve(feed, self._outputs, run_options, arrays=True)
        try:
            values = self._native.run(feed, self._outputs, run_options=run_options, arrays=True)
        except RuntimeError as error:
            _raise_failure(error, run_options)
        return [values[name] for name in self._outputs]

    def run(
        self, names: Sequence[str] | None, feed: Mapping[str, Any], run_options: ort.RunOptions | None
    ) -> list[Any]:
        """Run a request, and return its outputs as arrays that belong to the caller."""
        chosen, feeds = self._prepare(names, feed)
        return self._serve(feeds, chosen, run_options, arrays=True)

    def run_with_ort_values(
        self, names: Sequence[str] | None, feed: Mapping[str, ort.OrtValue], run_options: ort.RunOptions | None
    ) -> list[ort.OrtValue]:
        """Run a request on OrtValues."""
        chosen, feeds = self._prepare(names, feed)
        return self._serve(feeds, chosen, run_options)

    def run_bound(self, binding: HybridIOBinding, run_options: ort.RunOptions | None) -> list[ort.OrtValue]:
        """Run a request on a binding, and return the outputs in the order in which they were bound."""
        chosen, feeds = self._prepare(list(binding.outputs), binding.inputs)
        targets = {name: value for name, value in binding.outputs.items() if value is not None}
        try:
            return self._serve(feeds, chosen, run_options, targets=targets, on_device=set(binding.devices))
        except Fail as error:  # of a request that was terminated
            raise RuntimeError(str(error)) from error

    def trace(self, feed: Mapping[str, Any]) -> list[Event]:
        """Run a request, and return the times of its segments and copies."""
        chosen, feeds = self._prepare(None, feed)
        events: list[Event] = []
        self._serve(feeds, chosen, None, events=events, arrays=True)
        return events

    def _prepare(self, names: Sequence[str] | None, feed: Mapping[str, Any]) -> tuple[list[str], Mapping[str, Any]]:
        """Check a request against the model, and convert its inputs; see :func:`prepare_request`."""
        if self.fast_path.matches(feed):
            return output_names(self._tensors.outputs, names), feed
        return prepare_request(self._tensors.inputs, self._tensors.outputs, names, feed)

    def _serve(  # noqa: PLR0913 - the parts of a request
        self,
        feeds: Mapping[str, ort.OrtValue | Array],
        outputs: Sequence[str],
        run_options: ort.RunOptions | None,
        *,
        targets: Mapping[str, ort.OrtValue] | None = None,
        on_device: Collection[str] = (),
        events: list[Event] | None = None,
        arrays: bool = False,
    ) -> list[Any]:
        """Run one request that has been prepared; see :meth:`chrion.runtime.execution.executor.Executor.run`.

        Outputs that are also inputs or weights of the model are copied.
        """
        self.requests += 1
        computed = [name for name in outputs if name not in feeds and name not in self._constants]
        native = self._native if fits_native_lanes(run_options) else None
        try:
            values = (native or self._python_executor()).run(
                feeds,
                computed,
                targets=targets,
                on_device=on_device,
                run_options=run_options,
                events=events,
                arrays=arrays,
            )
        except RuntimeError as error:
            _raise_failure(error, run_options)
        for name in outputs if len(computed) < len(outputs) else ():
            if name not in values:
                source = feeds[name] if name in feeds else self._constants[name]
                value = (targets or {}).get(name) or allocate(self._tensors.values[name])
                value.update_inplace(source if isinstance(source, np.ndarray) else to_host(source).numpy())
                values[name] = value.numpy() if arrays else value
        return [values[name] for name in outputs]

    @property
    def providers(self) -> list[str]:
        """The execution providers in use, the accelerator's first."""
        return [*dict.fromkeys([self.plan.accelerator or CPU_PROVIDER, CPU_PROVIDER])]

    @property
    def provider_options(self) -> dict[str, dict[str, str]]:
        """The options of each execution provider in use."""
        given = {name: str(value) for name, value in self._provider_options.items()}
        return {name: {} if name == CPU_PROVIDER else given for name in self.providers}

    def explain(self) -> str:
        """Describe the plan in a few lines: its lanes, its segments, its predicted cost, and why it was selected."""
        plan, lanes = self.plan, [lane for lane in self.program.occupied if not is_copy_lane(lane)]
        segments = format_count(len(plan.segments), "segment")
        counts = f"{format_count(self.session_count, 'session')}, {format_count(self.program.waits, 'wait')}, "
        counts += f"{self.program.copies} {'copy' if self.program.copies == 1 else 'copies'}"
        if native := _native_operators(plan):
            counts = f"{format_count(len(native), 'native operator')}, {counts}"
        lane_kind = "native lanes" if self._native else f"lane threads ({self._obstacle})"
        memory = f", {format_mb(plan.predicted.accelerator_mb(plan.memory))} of {MEMORY_NAMES[plan.memory]}"
        lines = [
            f"{plan.model}: {plan.operator_counts} in {segments} on {format_count(len(lanes), 'lane')}",
            f"policy {plan.policy}, {counts}, {lane_kind}",
            f"predicted {format_ms(plan.predicted.latency_ms)}{memory if self.accelerated else ''}",
        ]
        if self.accelerated:
            lines.append(
                f"each request in flight holds {format_mb(self.frame_buffers.bytes / 1e6)} of it between segments"
            )
        if self.loaded_mb is not None:
            lines.append(f"GPU memory taken by loading: {format_mb(self.loaded_mb)}")
        schedule = plan.schedule
        for lane in display_order(lanes):
            own = [s for s in plan.segments if lane in schedule.occupied(s[0])]
            wide = sum(schedule.width(s[0]) > 1 for s in own)
            shared = f" ({wide} on several cores)" if wide else ""
            where = lane_name(lane) + (f" ({plan.accelerator})" if is_accelerator_lane(lane) else "")
            busy = format_ms(plan.busy_ms[lane])
            count = sum(map(len, own))
            counts = f"{format_count(count, 'operator')} in {format_count(len(own), 'segment')}{shared}"
            lines.append(f"  {where}: {counts}, busy {busy}")
        if plan.precision != "float32":
            lines.append(plan.precision_line if _native_operators(plan) else f"{plan.precision}: not on this machine")
        lines += filter(None, [_other_machine(plan)])
        return "\n".join([*lines, *plan.remarks, *([f"selected: {self.reason}"] if self.reason else [])])

    def close(self, until: float | None = None) -> None:
        """Refuse new requests, and stop the lanes when those in flight have finished.

        Args:
            until: Time at which to stop waiting, in seconds of ``time.monotonic``; None waits without limit.
        """
        with self._lock:
            self._closed = True
        for executor in (self._native, self._python):
            if executor:
                executor.close(until)

    def _open_native(self) -> NativeExecutor | None:
        """Open the program on native lanes; warn and return None if onnxruntime or the system refuses."""
        try:
            lease = self._lease(further=False)
            self.segments, self.session_count = self._open_segments(lease, native=True)
            tensors = self.graph.select(name for s in self.segments for _, name in (*s.inputs, *s.outputs))
            return NativeExecutor(tensors, self.program, self.segments, lease)
        except (NativeError, RuntimeError) as error:
            self._obstacle = f"native lanes failed: {first_line(error)}"
            log.warning("model %s runs on lane threads, which are slower: %s", self.plan.model, self._obstacle)
            return None

    def _python_executor(self) -> PythonExecutor:
        """Return the executor on lane threads, opened if necessary."""
        with self._lock:
            if self._python is None and not self._closed:
                self._python = self._open_python()
            if self._python is None:
                raise RuntimeError(CLOSED)
            if self._closed:  # by a signal handler, while it was opened
                self._python.close()
            return self._python

    def _open_python(self) -> PythonExecutor:
        further = self._native is not None
        lease = self._lease(further=further)
        segments, session_count = self._open_segments(lease, native=False)
        if self._native is None:
            self.segments, self.session_count = segments, session_count
        return PythonExecutor(
            self.graph, self.program, segments, self._accelerator, self.frame_buffers, further=further, lease=lease
        )

    def _lease(self, *, further: bool) -> CoreLease | None:
        """Lease cores before the sessions are opened if threads of sessions are pinned to them."""
        wide = any(width > 1 for width in self.plan.schedule.widths)
        return lease_cores(len(self.program.occupied), further=further) if wide else None

    def _open_segments(self, lease: CoreLease | None, *, native: bool) -> tuple[list[Segment], int]:
        """Open all segments; return them and the number of their sessions."""
        cores = assign_cores(self.program.occupied, lease.cores) if lease else {}
        factory = SegmentFactory(
            Extractor(self.graph),
            self._options,
            self._accelerator,
            native=native,
            cores=cores,
            native_operators=_native_operators(self.plan),
            bfloat16=self.plan.precision == "bf16",
        )
        schedule = self.plan.schedule
        segments = [factory.open(s, schedule.lanes[s[0]], schedule.width(s[0])) for s in self.plan.segments]
        return segments, factory.session_count


def _native_operators(plan: Plan) -> frozenset[str]:
    """Return the operators that run on native kernels: those of a plan that was made for this machine."""
    available = bfloat16_available if plan.precision == "bf16" else operators_available
    if not plan.native or not available():
        return frozenset()
    return frozenset(plan.native if is_this_machine(plan.machine) else ())


def _other_machine(plan: Plan) -> str:
    """Return a line on a plan that was made for another machine; empty if it was made for this one."""
    difference = plan.machine.difference(this_machine(plan.machine.accelerator))
    native = ", and its native operators run as onnxruntime's" if plan.native else ""
    return difference and f"made for another machine ({difference}): its predictions do not hold here{native}"


@functools.cache
def _warn_not_compiled() -> None:
    log.warning("models run on lane threads, which are slower: %s", NOT_COMPILED)


def _open_accelerator(plan: Plan, provider_options: Mapping[str, Any]) -> AcceleratorSessions | None:
    if plan.accelerator is None:
        return None
    if plan.accelerator != CPU_PROVIDER:
        require_working(plan.accelerator, f"plan of {plan.model!r} for {plan.machine}")
    return AcceleratorSessions(plan.accelerator, provider_options)


def _require_cores(plan: Plan) -> None:
    """Raise if a plan needs more cores than there are.

    Raises:
        PlanError: The plan uses more cores than this process may use.
    """
    available = len(physical_cores())
    if plan.schedule.cores > available:
        raise PlanError(
            f"plan of {plan.model!r}: uses {plan.schedule.cores} cores, but this process may use {available}",
            hint="make a new plan with: chrion partition",
        )


def _raise_failure(error: RuntimeError, run_options: ort.RunOptions | None) -> NoReturn:
    """Raise the error of a request as the failure of a segment, or as ``Fail`` if the request was terminated.

    Raises:
        Fail: As InferenceSession raises it.
        SegmentFailure: The request may be served by a plain session.
    """
    if run_options is not None and run_options.terminate:
        raise Fail(str(error)) from error
    raise SegmentFailure(error) from error
