"""Seams of execution, graphs, devices and the profiler: what tests see and replace of their internals."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import onnxruntime as ort
import pytest

from chrion import HybridSession
from chrion.devices import CPU_PROVIDER, Device
from chrion.profiler import costs, operator_bench
from chrion.profiler.costs import BufferSupport
from chrion.runtime.execution import accelerator, native_executor
from chrion.runtime.execution.device_frame import BufferKey, DeviceFrame
from chrion.runtime.execution.engine import CutEngine, Engine
from chrion.runtime.execution.executor import Executor
from chrion.runtime.execution.lane_groups import LaneGroup, LaneGroups
from chrion.runtime.execution.python_executor import PythonExecutor
from chrion.runtime.selection import guard
from chrion.scheduler import planner
from chrion.scheduler.evaluation.validation import check_solution
from chrion.scheduler.policies import chrion as default_policy
from chrion.scheduler.search import local_search

# Engines, executors and lanes.


def engine_of(session: HybridSession) -> Engine:
    """Return the engine of a session's last request."""
    return session._engine


def cut_engine(session: HybridSession) -> CutEngine:
    """Return the engine that executes the session's plan."""
    engine = engine_of(session)
    assert isinstance(engine, CutEngine)
    return engine


def executor_of(session: HybridSession) -> Executor[Any]:
    """Return the executor that serves a session's requests."""
    engine = cut_engine(session)
    executor = engine._native or engine._python
    assert executor is not None
    return executor


def lane_threads_of(session: HybridSession) -> PythonExecutor:
    """Return the executor on lane threads, opened if necessary."""
    return cut_engine(session)._python_executor()


def idle_frames(executor: Executor[Any]) -> deque[Any]:
    """Return the frames that an executor keeps for later requests."""
    return executor._frames


def groups_of(session: HybridSession) -> LaneGroups[Any]:
    """Return the groups of lanes that serve a session's requests."""
    groups: LaneGroups[Any] = executor_of(session)._groups  # type: ignore[attr-defined] # both kinds have groups
    return groups


def open_groups(groups: LaneGroups[Any]) -> list[LaneGroup[Any]]:
    """Return the groups that have been opened."""
    return groups._groups


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


def without_native_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use Python threads as lanes, as on a machine without a compiler."""
    monkeypatch.setattr(native_executor, "available", lambda: False)


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


# Plans.


def check_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the schedule of every plan that is made."""
    build = planner._PlanBuilder.build

    def checked(draft: Any, chosen: Any, *baselines: Any) -> Any:
        check_solution(chosen.graph.dag, draft.costs_of(chosen.graph.dag), chosen.solution)
        return build(draft, chosen, *baselines)

    monkeypatch.setattr(planner._PlanBuilder, "build", checked)


def check_frames(monkeypatch: pytest.MonkeyPatch, kinds: tuple[type[Device], ...]) -> None:
    """Check that every frame on a device of certain kinds holds exactly what its plan predicts."""
    open_engine = CutEngine.__init__

    def checked_engine(engine: CutEngine, graph: Any, plan: Any, *rest: Any, **options: Any) -> None:
        open_engine(engine, graph, plan, *rest, **options)
        device = engine._accelerator.device if engine._accelerator else None
        if isinstance(device, kinds) or (device is not None and device.name != "cpu"):
            assert engine.frame_buffers.bytes == round(plan.predicted.frame_mb * 1e6)

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
