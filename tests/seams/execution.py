"""Seams of execution, graphs, devices and the profiler: what tests see and replace of their internals."""

from __future__ import annotations

import itertools
import math
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import onnx
import onnxruntime as ort
import pytest

import mirror_device
from chrion import Graph, HybridSession, Plan, Profile
from chrion.devices import CPU_PROVIDER, Device, providers
from chrion.generation.rewrites import observation
from chrion.graph import reading, source_weights, weights_folder
from chrion.graph.rewrite import Rewriter
from chrion.machine import core_leases
from chrion.native import bindings
from chrion.profiler import costs, measure_graph, operator_bench
from chrion.profiler.costs import BufferSupport
from chrion.runtime import diversion
from chrion.runtime.execution import (
    accelerator,
    device_frame,
    host_frame,
    lane_groups,
    lane_threads,
    native_executor,
    segments,
)
from chrion.runtime.execution import (
    cut_engine as cut_engines,
)
from chrion.runtime.execution.cut_engine import CutEngine
from chrion.runtime.execution.device_frame import BufferKey, DeviceFrame
from chrion.runtime.execution.engine import Engine
from chrion.runtime.execution.executor import Executor
from chrion.runtime.execution.lane_groups import LaneGroups
from chrion.runtime.execution.plain_engine import PlainEngine
from chrion.runtime.execution.program import Copy, RunSegment, Signal, Wait
from chrion.runtime.execution.python_executor import PythonExecutor
from chrion.runtime.options import probe
from chrion.runtime.selection import guard, proposals, selector
from chrion.runtime.selection.configuration import SessionConfig
from chrion.runtime.selection.guard import Candidate, Comparison
from chrion.scheduler import planner
from chrion.scheduler.policies import chrion as default_policy
from chrion.scheduler.policies import ios_search
from chrion.scheduler.search import local_search
from helpers import FakeInterferenceMonitor
from rewrite_checks import check_model
from solution_checks import check_solution

#: Functions, methods and classes that tests replace or watch: their owner and name.
_CALLS: dict[str, tuple[Any, str]] = {
    # of requests
    "run a plan": (Executor, "run"),
    "lease lanes": (LaneGroups, "lease"),
    "run a lane": (PythonExecutor, "run_lane"),
    "spin": (lane_threads, "spin"),
    # of engines
    "open segments": (cut_engines, "SegmentFactory"),
    "open a native segment": (segments, "NativeSession"),
    "find native lanes": (native_executor, "available"),
    "start native lanes": (cut_engines, "NativeExecutor"),
    "open a cut engine": (CutEngine, "__init__"),
    "open a plain engine": (PlainEngine, "__init__"),
    "probe options": (probe, "_open"),
    # of devices
    "open on the accelerator": (accelerator.AcceleratorSessions, "open"),
    "run on the accelerator": (accelerator.AcceleratorSessions, "run"),
    "want graphs": (accelerator, "wants_graphs"),
    "make a device frame": (DeviceFrame, "__init__"),
    "keep a buffer": (DeviceFrame, "_keep"),
    "copy a value": (DeviceFrame, "copy"),
    "find the reason of a provider": (providers, "failure_reason"),
    "find a provider": (providers, "provider_name"),
    # of graphs
    "serialise a model": (onnx.ModelProto, "SerializeToString"),
    "observe values": (observation, "open_analysis"),
    "finish a rewrite": (Rewriter, "finish"),
    # of planning
    "time an operator": (operator_bench.OperatorBench, "time"),
    "find the cores to measure": (measure_graph, "physical_cores"),
    "watch for interference": (measure_graph, "UsageMonitor"),
    "find the size of a cache": (operator_bench, "private_cache_bytes"),
    "plan": (proposals, "alternatives"),
    "build a plan": (planner.Planner, "_build"),
    "compare": (selector, "compare"),
}
#: Limits that tests lower or raise.
_LIMITS: dict[str, tuple[Any, str]] = {
    "bytes of a model": (reading, "MAX_BYTES"),
    "bytes of a weight that is read": (source_weights, "LARGE_BYTES"),
    "pressure on native lanes": (bindings, "_PRESSURE_LIMIT"),
}


class Call(NamedTuple):
    """The arguments of a call; the first one of a method is its object."""

    given: tuple[Any, ...]
    options: dict[str, Any]


def around(monkeypatch: pytest.MonkeyPatch, call: str, act: Callable[..., Any]) -> None:
    """Call ``act`` in place of a function, method or class, which is its first argument."""
    owner, name = _CALLS[call]
    original = getattr(owner, name)

    def replaced(*given: Any, **options: Any) -> Any:
        return act(original, *given, **options)

    monkeypatch.setattr(owner, name, replaced)


def note(monkeypatch: pytest.MonkeyPatch, call: str) -> list[Call]:
    """Return a list of the calls of a function, method or class that return."""
    calls: list[Call] = []

    def noted(original: Callable[..., Any], *given: Any, **options: Any) -> Any:
        result = original(*given, **options)
        calls.append(Call(given, options))
        return result

    around(monkeypatch, call, noted)
    return calls


def fail(monkeypatch: pytest.MonkeyPatch, call: str, error: Exception, after: int = 0) -> None:
    """Let a call raise an error, except the first ``after`` times.

    Each error is a new one, since an error keeps all frames that it has passed.
    """
    counter = itertools.count()

    def failing(original: Callable[..., Any], *given: Any, **options: Any) -> Any:
        if next(counter) >= after:
            raise type(error)(*error.args)
        return original(*given, **options)

    around(monkeypatch, call, failing)


def answer(monkeypatch: pytest.MonkeyPatch, call: str, result: Any) -> None:
    """Let a call return a result in any case."""
    around(monkeypatch, call, lambda *_, **__: result)


def limit(monkeypatch: pytest.MonkeyPatch, what: str, value: float) -> None:
    """Set a limit."""
    monkeypatch.setattr(*_LIMITS[what], value)


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
    return executor_of(session)._groups


def leases(groups: LaneGroups[Any]) -> int:
    """Return how many requests have a group."""
    return len(groups._used)


def lock_of(groups: LaneGroups[Any]) -> threading.RLock:
    """Return the lock of groups of lanes."""
    return groups._lock


def use_cores(monkeypatch: pytest.MonkeyPatch, cores: Sequence[int]) -> None:
    """Let lanes be pinned to some cores, none of which is leased; pinning to one that does not exist has no effect."""
    functions = ((core_leases, "physical_cores"), (core_leases, "allowed_cores"), (lane_groups, "physical_cores"))
    for module, name in functions:
        monkeypatch.setattr(module, name, lambda: tuple(cores))
    monkeypatch.setattr(core_leases, "_registry", core_leases._Registry())


def serve_crowds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve requests by the plan's lanes, however many are in flight."""
    for name in ("_PATIENCE", "_PATIENCE_S"):
        monkeypatch.setattr(diversion, name, math.inf)


def kill_lane(monkeypatch: pytest.MonkeyPatch, killed: int, at: int) -> None:
    """Let the thread of a lane end without a report, once, before one of its instructions."""
    left = iter([True])

    def mortal(run_lane: Callable[..., None], executor: PythonExecutor, request: Any, lane: int) -> None:
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
        if isinstance(steps[at], RunSegment | Copy):
            request.current[lane] = steps[at]
        raise SystemExit

    around(monkeypatch, "run a lane", mortal)


def forget_warnings() -> None:
    """Log warnings that a process logs once, again."""
    cut_engines._warn_not_compiled.cache_clear()


def note_releases(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list of the addresses of native frames, bindings and sessions that are made from now on and released."""
    library, released = bindings._loaded(), list[int]()

    def noting(release: Callable[[int], object]) -> Callable[[int], None]:
        def noted(pointer: int) -> None:
            released.append(pointer)
            release(pointer)

        return noted

    for name in ("chrion_close", "chrion_unbind", "chrion_free_frame"):
        monkeypatch.setattr(library, name, noting(getattr(library, name)))
    return released


# Devices and their frames.


def use_device(monkeypatch: pytest.MonkeyPatch, kind: type[Device], *, views: bool = True) -> None:
    """Use a kind of device as accelerator, also for plans whose accelerator is the CPU.

    Args:
        monkeypatch: The fixture.
        kind: The class.
        views: Whether buffers of the CPU as accelerator have addresses.
    """
    monkeypatch.setattr(accelerator, "Device", kind)
    monkeypatch.setitem(costs._BUFFERS, CPU_PROVIDER, BufferSupport(views=views))


def buffers_of(frame: DeviceFrame) -> Mapping[BufferKey, ort.OrtValue]:
    """Return the buffers that a frame keeps between requests, without those of constants."""
    return {key: kept for key, kept in frame._buffers.items() if frame._graph.constant(key.name) is None}


def check_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that every frame on a device of separate memory holds exactly what its plan predicts."""

    def check_engine(
        make: Callable[..., None], cut: CutEngine, graph: Graph, plan: Plan, *given: Any, **options: Any
    ) -> None:
        make(cut, graph, plan, *given, **options)
        device = cut._accelerator.device if cut._accelerator else None
        if isinstance(device, mirror_device.MirrorDevice) or (device is not None and device.name != "cpu"):
            assert cut.frame_buffers.bytes == round(plan.predicted.frame_mb * 1e6)

    def check_frame(make: Callable[..., None], frame: DeviceFrame, *given: Any) -> None:
        make(frame, *given)
        *_, planned = given
        assert frame.device_bytes == planned.bytes

    around(monkeypatch, "open a cut engine", check_engine)
    around(monkeypatch, "make a device frame", check_frame)


def fail_copy(monkeypatch: pytest.MonkeyPatch, copied: Copy, strike: Callable[[], None]) -> None:
    """Strike before the copies of one instruction."""

    def failing(copy: Callable[..., None], frame: DeviceFrame, name: str, *, upload: bool) -> None:
        if (name, upload) == (copied.value, copied.upload):
            strike()
        copy(frame, name, upload=upload)

    around(monkeypatch, "copy a value", failing)


def fail_allocation(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Let one allocation of a buffer fail, counted from 0 over all frames and all memories."""
    allocate, counter = host_frame.allocate, itertools.count()

    def failing(*given: Any) -> ort.OrtValue:
        if next(counter) == at:
            raise MemoryError("injected")
        return allocate(*given)

    for module in (host_frame, device_frame, mirror_device):
        monkeypatch.setattr(module, "allocate", failing)


def fail_provider(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    """Offer all execution providers, whose drivers are loaded, and give the reason why they do not work here."""
    monkeypatch.setattr(providers, "_has_driver", lambda _: True)
    answer(monkeypatch, "find the reason of a provider", reason)
    around(monkeypatch, "find a provider", lambda _, name: providers.PROVIDER_NAMES.get(name, name))


# Graphs.


@contextmanager
def temporary_files_in(folder: Path) -> Iterator[None]:
    """Create weights folders in a folder, as in a new process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(folder))
        weights_folder._parent_folder.cache_clear()
        yield
    weights_folder._parent_folder.cache_clear()


# Measurements and plans.


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

    def time(_: object, _bench: object, busy: Sequence[int] = ()) -> list[float]:
        measured.append(tuple(busy))
        return [time_ms(len(busy))] * 3

    around(monkeypatch, "time an operator", time)
    answer(monkeypatch, "find the cores to measure", tuple(cores))
    return measured


def interfere_at(monkeypatch: pytest.MonkeyPatch, checks: Sequence[int]) -> None:
    """Find interference at some checks during a measurement of operators, counted from 0."""
    answer(monkeypatch, "watch for interference", FakeInterferenceMonitor(checks))


def select_by(monkeypatch: pytest.MonkeyPatch, plan: Callable[[Graph, Profile], Plan]) -> None:
    """Use the CPU as accelerator of sessions that select their engine, and select the plan of a function."""
    monkeypatch.setattr(SessionConfig, "accelerator", property(lambda _: (CPU_PROVIDER, {})))
    around(monkeypatch, "plan", lambda _, graph, profile, *__, **___: [plan(graph, profile)])
    around(monkeypatch, "compare", lambda _, candidates, __: Comparison(candidates[-1].name, ()))


def note_candidates(monkeypatch: pytest.MonkeyPatch) -> list[Candidate]:
    """Return a list of the candidates that sessions compare; the plain session is selected."""
    seen: list[Candidate] = []

    def compare(_: object, candidates: Sequence[Candidate], __: object) -> Comparison:
        seen.extend(candidates)
        return Comparison("plain", ())

    around(monkeypatch, "compare", compare)
    return seen


def check_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the schedule of every plan that is made."""

    def checked(build: Callable[..., Plan], owner: Any, chosen: Any, *given: Any) -> Plan:
        check_solution(chosen.graph.dag, owner._costs_of(chosen.graph.dag), chosen.solution)
        return build(owner, chosen, *given)

    around(monkeypatch, "build a plan", checked)


def check_rewrites(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check every model before and after it is rewritten."""

    def checked(finish: Callable[..., onnx.ModelProto], rewriter: Rewriter, *given: Any) -> onnx.ModelProto:
        check_model(rewriter.model)
        rewritten = finish(rewriter, *given)
        check_model(rewritten)
        return rewritten

    around(monkeypatch, "finish a rewrite", checked)


def shorten_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten measurements and searches as far as possible, where it does not matter which plan they find."""
    values: Sequence[tuple[object, Mapping[str, Any]]] = (
        (operator_bench, {"_WINDOW_S": 0.0, "_ROUNDS": 2, "_FIRST_CALLS": 1}),
        (guard, {"_TRIAL_S": 0.0, "_MIN_ROUNDS": 1, "_BUDGET_S": 0.0, "_PAIRS_S": 0.0}),
        (default_policy, {"_POWERS": ((math.inf, (-2, 2)),)}),
        (default_policy, {"_FASTEST_WORK": 1, "_DESCENT_WORK": 1, "_REFINEMENT_WORK": 1}),
        (ios_search, {"_MOST_ENDINGS": 2_000, "_MOST_IN_ALL": 5_000, "_MOST_AFTERWARDS": 200}),
        (local_search, {"_TINY": 0}),
    )
    for module, constants in values:
        for name, value in constants.items():
            monkeypatch.setattr(module, name, value)
