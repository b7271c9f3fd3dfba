"""Seams of execution, graphs, devices and the profiler: what tests see and replace of their internals."""

from __future__ import annotations

import functools
import itertools
import math
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort
import pytest

import mirror_device
from chrion import Graph, HybridSession, Plan, Profile, core_leases
from chrion.devices import CPU_PROVIDER, Device, providers
from chrion.graph import observation, reading, source_weights, weights_folder
from chrion.graph.model import TensorInfo
from chrion.native import NativeSession, bindings
from chrion.profiler import costs, measure_graph, operator_bench
from chrion.profiler.costs import BufferSupport
from chrion.profiler.operator_bench import OperatorBench
from chrion.runtime import crowding
from chrion.runtime.execution import (
    accelerator,
    device_frame,
    engine,
    host_frame,
    lane_groups,
    lane_threads,
    native_executor,
    segments,
)
from chrion.runtime.execution.device_frame import BufferKey, DeviceFrame
from chrion.runtime.execution.engine import CutEngine, Engine, PlainEngine
from chrion.runtime.execution.executor import Executor
from chrion.runtime.execution.lane_groups import LaneGroup, LaneGroups
from chrion.runtime.execution.program import Copy, Run, Signal, Wait
from chrion.runtime.execution.python_executor import PythonExecutor
from chrion.runtime.options import probe
from chrion.runtime.selection import guard, selector
from chrion.runtime.selection.configuration import SessionConfig
from chrion.runtime.selection.guard import Candidate, Comparison
from chrion.scheduler import planner
from chrion.scheduler.evaluation.validation import check_solution
from chrion.scheduler.policies import chrion as default_policy
from chrion.scheduler.search import local_search
from helpers import FakeInterferenceMonitor

# Engines, executors and lanes.


def engine_of(session: HybridSession) -> Engine:
    """Return the engine of a session's last request."""
    return session._engine


def cut_engine(session: HybridSession) -> CutEngine:
    """Return the engine that executes the session's plan."""
    found = engine_of(session)
    assert isinstance(found, CutEngine)
    return found


def strictness(session: HybridSession) -> set[bool]:
    """Return whether the engines of a session, and those that it selects later, raise the accelerator's errors."""
    engines = session._engines
    return {engines.config.strict, engines._selector._config.strict}


def executor_of(session: HybridSession) -> Executor[Any]:
    """Return the executor that serves a session's requests."""
    cut = cut_engine(session)
    executor = cut._native or cut._python
    assert executor is not None
    return executor


def lane_threads_of(session: HybridSession) -> PythonExecutor:
    """Return the executor on lane threads, opened if necessary."""
    return cut_engine(session)._python_executor()


def segments_of(executor: PythonExecutor) -> Sequence[segments.Segment]:
    """Return the segments that an executor runs."""
    return executor._segments


def idle_frames(executor: Executor[Any]) -> deque[Any]:
    """Return the frames that an executor keeps for later requests."""
    return executor._frames


def groups_of(session: HybridSession) -> LaneGroups[Any]:
    """Return the groups of lanes that serve a session's requests."""
    groups: LaneGroups[Any] = executor_of(session)._groups  # type: ignore[attr-defined] # both kinds have groups
    return groups


def leases(groups: LaneGroups[Any]) -> int:
    """Return how many requests have a group."""
    return len(groups._used)


@contextmanager
def around_requests(session: HybridSession, around: Callable[..., None]) -> Iterator[None]:
    """Call ``around`` in place of the method that serves a request, which is its first argument."""
    executor = executor_of(session)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "_perform", functools.partial(around, executor._perform))
        yield


@contextmanager
def around_leases(session: HybridSession, around: Callable[..., LaneGroup[Any]]) -> Iterator[None]:
    """Call ``around`` in place of the method that leases a group of lanes, which is its first argument."""
    groups = groups_of(session)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "lease", functools.partial(around, groups.lease))
        yield


def use_cores(monkeypatch: pytest.MonkeyPatch, cores: Sequence[int]) -> None:
    """Let lanes be pinned to some cores, none of which is leased; pinning to one that does not exist has no effect."""
    for module in (core_leases, lane_groups):
        monkeypatch.setattr(module, "physical_cores", lambda: tuple(cores))
    monkeypatch.setattr(core_leases, "allowed_cores", lambda: tuple(cores))
    monkeypatch.setattr(core_leases, "_registry", core_leases._Registry())


def lock_of(groups: LaneGroups[Any]) -> threading.RLock:
    """Return the lock of groups of lanes."""
    return groups._lock


def serve_crowds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve requests by the plan's lanes, however many are in flight."""
    for name in ("_PATIENCE", "_PATIENCE_S"):
        monkeypatch.setattr(crowding, name, math.inf)


def note_run_options(monkeypatch: pytest.MonkeyPatch) -> list[ort.RunOptions | None]:
    """Return a list of the options of requests that run on plans."""
    seen: list[ort.RunOptions | None] = []
    run = Executor.run

    def noted(executor: Executor[Any], *given: Any, **rest: Any) -> Any:
        seen.append(rest.get("run_options"))
        return run(executor, *given, **rest)

    monkeypatch.setattr(Executor, "run", noted)
    return seen


def note_plain_engines(monkeypatch: pytest.MonkeyPatch) -> list[PlainEngine]:
    """Return a list of the plain engines that are opened."""
    opened: list[PlainEngine] = []
    make = PlainEngine.__init__

    def noted(plain: PlainEngine, *given: Any, **rest: Any) -> None:
        opened.append(plain)
        make(plain, *given, **rest)

    monkeypatch.setattr(PlainEngine, "__init__", noted)
    return opened


def note_segment_options(monkeypatch: pytest.MonkeyPatch) -> list[ort.SessionOptions]:
    """Return a list of the options with which sessions of segments are opened for native lanes."""
    seen: list[ort.SessionOptions] = []

    class Noted(NativeSession):
        def __init__(self, model: bytes, given: ort.SessionOptions) -> None:
            seen.append(given)
            super().__init__(model, given)

    monkeypatch.setattr(segments, "NativeSession", Noted)
    return seen


def note_probes(monkeypatch: pytest.MonkeyPatch, fail: str) -> list[str | None]:
    """Return a list of the accelerators on which options are probed, all on the CPU; one of them fails."""
    tried: list[str | None] = []
    open_probe = probe._open

    def noted(model: bytes | str, given: ort.SessionOptions, device: Any = None) -> ort.InferenceSession:
        tried.append(device and device[0])
        if tried[-1] == fail:
            raise RuntimeError(fail)
        return open_probe(model, given)

    monkeypatch.setattr(probe, "_open", noted)
    return tried


def without_native_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use Python threads as lanes, as on a machine without a compiler."""
    monkeypatch.setattr(native_executor, "available", lambda: False)


def forget_warnings() -> None:
    """Log warnings that a process logs once, again."""
    engine._warn_not_compiled.cache_clear()


def note_releases(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list of the addresses of native frames, bindings and sessions that are made from now on and released."""
    library, released = bindings._loaded(), list[int]()

    def note(release: Callable[[int], object], pointer: int) -> None:
        released.append(pointer)
        release(pointer)

    for name in ("chrion_close", "chrion_unbind", "chrion_free_frame"):
        monkeypatch.setattr(library, name, functools.partial(note, getattr(library, name)))
    return released


def note_spins(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list of the spins of lane threads, which then take no time."""
    spins: list[int] = []
    monkeypatch.setattr(lane_threads, "spin", spins.append)
    return spins


def press(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """Set the pressure of other work from which new native lanes are no longer pinned."""
    monkeypatch.setattr(bindings, "_PRESSURE_LIMIT", limit)


# Devices and their frames.


def use_device(monkeypatch: pytest.MonkeyPatch, kind: type[Device], *, views: bool = True) -> None:
    """Use a kind of device in place of the CPU as accelerator; ``views`` is whether its buffers have addresses."""
    monkeypatch.setattr(accelerator, "Device", kind)
    monkeypatch.setitem(costs._BUFFERS, CPU_PROVIDER, BufferSupport(views=views))


def capture_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capture the graphs of any accelerator, as of CUDA with its option for them."""
    monkeypatch.setattr(accelerator, "wants_graphs", lambda *_: True)


def after_frames(monkeypatch: pytest.MonkeyPatch, act: Callable[..., object]) -> None:
    """Act on every frame of a device after it has been made, with the arguments of its constructor."""
    make = DeviceFrame.__init__

    def made(frame: DeviceFrame, *given: Any) -> None:
        make(frame, *given)
        act(frame, *given)

    monkeypatch.setattr(DeviceFrame, "__init__", made)


def buffers_of(frame: DeviceFrame) -> Mapping[BufferKey, ort.OrtValue]:
    """Return the buffers that a frame keeps between requests, without those of constants."""
    return {key: kept for key, kept in frame._buffers.items() if frame._graph.constant(key.name) is None}


#: Calls that use the accelerator or open sessions of segments.
_CALLS: dict[str, tuple[object, str]] = {
    "open a session": (accelerator.Accelerator, "open"),
    "run a session": (accelerator.Accelerator, "run"),
    "keep a buffer": (DeviceFrame, "_keep"),
    "open segments": (engine, "SegmentFactory"),
    "start native lanes": (engine, "NativeExecutor"),
    "run a request": (Executor, "run"),
}


def fail_call(monkeypatch: pytest.MonkeyPatch, call: str, error: Exception, after: int = 0) -> None:
    """Let a call raise an error, except the first ``after`` times.

    Each error is a new one, since an error keeps all frames that it has passed.
    """
    owner, name = _CALLS[call]
    original, counter = getattr(owner, name), itertools.count()

    def fail(*given: Any, **options: Any) -> Any:
        if next(counter) >= after:
            raise type(error)(*error.args)
        return original(*given, **options)

    monkeypatch.setattr(owner, name, fail)


def fail_copy(monkeypatch: pytest.MonkeyPatch, copied: Copy, strike: Callable[[], None]) -> None:
    """Strike before the copies of one instruction."""
    copy = DeviceFrame.copy

    def failing(frame: DeviceFrame, name: str, *, upload: bool) -> None:
        if (name, upload) == (copied.value, copied.upload):
            strike()
        copy(frame, name, upload=upload)

    monkeypatch.setattr(DeviceFrame, "copy", failing)


def fail_allocation(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Let one allocation of a buffer fail, counted from 0 over all frames and all memories."""
    allocate, counter = host_frame.allocate, itertools.count()

    def failing(info: TensorInfo) -> ort.OrtValue:
        if next(counter) == at:
            raise MemoryError("injected")
        return allocate(info)

    monkeypatch.setattr(host_frame, "allocate", failing)
    monkeypatch.setattr(device_frame, "allocate", failing)
    monkeypatch.setattr(mirror_device, "allocate", failing)


def kill_lane(monkeypatch: pytest.MonkeyPatch, killed: int, at: int) -> None:
    """Let the thread of a lane end without a report, once, before one of its instructions."""
    run_lane, left = PythonExecutor.run_lane, iter([True])

    def mortal(executor: PythonExecutor, request: Any, lane: int) -> None:
        if lane != killed or not next(left, False):
            run_lane(executor, request, lane)
            return
        steps = executor._program.lanes[lane]
        for step in steps[:at]:
            if isinstance(step, Wait):
                request.counters[step.lane].wait(step.count, on_timeout=request.group.lanes.replace_dead)
            elif isinstance(step, Signal):
                request.counters[lane].advance(step.count)
            else:
                request.current[lane] = step
                executor._carry_out(request, lane, step)
        if isinstance(steps[at], Run | Copy):
            request.current[lane] = steps[at]
        raise SystemExit

    monkeypatch.setattr(PythonExecutor, "run_lane", mortal)


def fail_provider(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    """Offer all execution providers, and give the reason why they do not work on this machine."""
    monkeypatch.setattr(providers, "failure_reason", lambda _: reason)
    monkeypatch.setattr(providers, "provider_name", lambda name: providers.PROVIDER_NAMES.get(name, name))


# Graphs.


def limit_model_bytes(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Set the size up to which protobuf reads models."""
    monkeypatch.setattr(reading, "_MAX_BYTES", count)


def fail_serialisation(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Let protobuf raise an error for every model that it writes, as for one above its limit."""

    def refuse(*_: object, **__: object) -> bytes:
        raise error

    monkeypatch.setattr(onnx.ModelProto, "SerializeToString", refuse)


def note_observed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list of the values of decoders that become outputs to be observed."""
    outputs, open_analysis = list[str](), observation.open_analysis

    def noted(proto: onnx.ModelProto, *given: Any) -> Any:
        outputs.extend(output.name for output in proto.graph.output)
        return open_analysis(proto, *given)

    monkeypatch.setattr(observation, "open_analysis", noted)
    return outputs


def hide_weights_from(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Set the size in bytes from which external weights are neither read nor copied."""
    monkeypatch.setattr(source_weights, "LARGE_BYTES", count)


@contextmanager
def temporary_files_in(folder: Path) -> Iterator[None]:
    """Create weights folders in a folder, as in a new process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(folder))
        weights_folder._parent_folder.cache_clear()
        yield
    weights_folder._parent_folder.cache_clear()


# The profiler.


def simulate_cores(
    monkeypatch: pytest.MonkeyPatch, cores: Sequence[int], time_ms: Callable[[int], float]
) -> list[tuple[int, ...]]:
    """Measure operators on cores of which each may be given several times.

    Args:
        monkeypatch: The fixture.
        cores: Logical CPUs.
        time_ms: Returns the time of any operator by the number of busy cores.

    Returns:
        The busy cores of each measurement.
    """
    measured: list[tuple[int, ...]] = []

    def time(_: OperatorBench, busy: Sequence[int] = ()) -> list[float]:
        measured.append(tuple(busy))
        return [time_ms(len(busy))] * 3

    monkeypatch.setattr(OperatorBench, "time", time)
    monkeypatch.setattr(measure_graph, "physical_cores", lambda: tuple(cores))
    return measured


def interfere_at(monkeypatch: pytest.MonkeyPatch, checks: Sequence[int]) -> None:
    """Find interference at some checks during a measurement of operators, counted from 0."""
    monkeypatch.setattr(measure_graph, "UsageMonitor", lambda _: FakeInterferenceMonitor(checks))


def set_cache_size(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Set the size in bytes of the private cache of each core; 0 if it is unknown."""
    monkeypatch.setattr(operator_bench, "private_cache_bytes", lambda _: count)


# Plans.


def select_by(monkeypatch: pytest.MonkeyPatch, plan: Callable[[Graph, Profile], Plan]) -> None:
    """Use the CPU as accelerator of sessions that select their engine, and select the plan of a function."""
    monkeypatch.setattr(SessionConfig, "accelerator", property(lambda _: (CPU_PROVIDER, {})))
    monkeypatch.setattr(selector, "alternatives", lambda graph, profile, *_, **__: [plan(graph, profile)])
    monkeypatch.setattr(selector, "compare", lambda candidates, _: Comparison(candidates[-1].name, ()))


def note_candidates(monkeypatch: pytest.MonkeyPatch) -> list[Candidate]:
    """Return a list of the candidates that sessions compare; the plain session is selected."""
    seen: list[Candidate] = []

    def compare(candidates: Sequence[Candidate], *_: object) -> Comparison:
        seen.extend(candidates)
        return Comparison("plain", ())

    monkeypatch.setattr(selector, "compare", compare)
    return seen


def check_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the schedule of every plan that is made."""
    build = planner._PlanBuilder.build

    def checked(draft: Any, chosen: Any, *baselines: Any) -> Any:
        check_solution(chosen.graph.dag, draft.costs_of(chosen.graph.dag), chosen.solution)
        return build(draft, chosen, *baselines)

    monkeypatch.setattr(planner._PlanBuilder, "build", checked)


def check_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that every frame on a device of separate memory holds exactly what its plan predicts."""
    open_engine = CutEngine.__init__

    def checked_engine(cut: CutEngine, graph: Any, plan: Any, *rest: Any, **options: Any) -> None:
        open_engine(cut, graph, plan, *rest, **options)
        device = cut._accelerator.device if cut._accelerator else None
        if isinstance(device, mirror_device.MirrorDevice) or (device is not None and device.name != "cpu"):
            assert cut.frame_buffers.bytes == round(plan.predicted.frame_mb * 1e6)

    def check_frame(frame: DeviceFrame, _graph: Any, _segments: Any, _device: Any, planned: Any) -> None:
        assert frame.device_bytes == planned.bytes

    monkeypatch.setattr(CutEngine, "__init__", checked_engine)
    after_frames(monkeypatch, check_frame)


def shorten_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten measurements and searches as far as possible, where it does not matter which plan they find."""
    values: Sequence[tuple[object, Mapping[str, float]]] = (
        (operator_bench, {"_WINDOW_S": 0.0, "_ROUNDS": 2, "_FIRST_CALLS": 1}),
        (guard, {"_TRIAL_S": 0.0, "_MIN_ROUNDS": 1, "_BUDGET_S": 0.0}),
        (default_policy, {"_FASTEST_WORK": 1, "_DESCENT_WORK": 1, "_REFINEMENT_WORK": 1}),
        (local_search, {"_PERTURBED": 0}),
    )
    for module, constants in values:
        for name, value in constants.items():
            monkeypatch.setattr(module, name, value)
