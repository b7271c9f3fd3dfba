"""Tests of single faults at every instruction of a program, while other requests are in flight.

The request in which the fault occurs raises an error with an operator's name; all other requests are served. Lanes are
Python threads, into which faults can be injected; ``test_native.py`` tests faults of native lanes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from chrion import Graph, HybridSession, load
from chrion.runtime.execution import accelerator, device_frame, host_frame
from chrion.runtime.execution.device_frame import DeviceFrame
from chrion.runtime.execution.engine import CutEngine
from chrion.runtime.execution.program import Copy, Instruction, Run, Signal, Wait
from chrion.runtime.execution.python_executor import PythonExecutor
from chrion.scheduler import fixed_plan
from chrion.zoo import RecurrentSpec, build_recurrent
from helpers import alternating_lanes, assert_equal, branches, run_plain
from mirror_device import MirrorDevice

# A fault that is not detected would cause a deadlock.
pytestmark = [pytest.mark.timeout(120, method="thread"), pytest.mark.usefixtures("interpreted", "uncrowded")]

CALLERS, CALLS = 3, 3
STACK = RecurrentSpec(layers=2, batch=1, io=4, seq=3)


class Fault:
    """A fault that occurs once."""

    def __init__(self, make: Callable[[], BaseException]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._left = 1

    def taken(self) -> bool:
        """Return True to the first caller only."""
        with self._lock:
            self._left -= 1
            return self._left == 0

    def strike(self) -> None:
        if self.taken():
            raise self._make()


class FaultySession:
    """An onnxruntime session in which a fault may occur."""

    def __init__(self, session: Any, fault: Fault) -> None:
        self._session = session
        self._fault = fault

    def run_with_iobinding(self, *given: Any) -> None:
        self._fault.strike()
        self._session.run_with_iobinding(*given)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


@dataclass(frozen=True)
class Subject:
    """A session into which faults are injected."""

    session: HybridSession
    feeds: list[dict[str, Any]]
    expected: list[Any]

    @property
    def engine(self) -> CutEngine:
        assert isinstance(self.session._engine, CutEngine)
        return self.session._engine

    @property
    def instructions(self) -> list[tuple[int, int, Instruction]]:
        """Return the instructions, each with its lane and its number."""
        lanes = self.engine.program.lanes
        return [(lane, at, step) for lane, steps in lanes.items() for at, step in enumerate(steps)]

    def call_concurrently(self) -> list[Exception]:
        """Call the session from several threads, check all outputs, and return the exceptions."""
        raised: list[Exception] = []

        def call(caller: int) -> None:
            for _ in range(CALLS):
                try:
                    found = self.session.run(None, self.feeds[caller])
                except Exception as error:  # noqa: BLE001 - returned
                    raised.append(error)
                else:
                    assert_equal(found, self.expected[caller])

        with ThreadPoolExecutor(CALLERS) as pool:
            list(pool.map(call, range(CALLERS)))
        return raised

    def assert_struck_once(self, kind: type[Exception], *named: str) -> None:
        """Assert that one request fails with the injected error, and no other and no later request."""
        (error,) = self.call_concurrently()
        assert isinstance(error, kind)
        assert all(name in str(error) for name in named), f"{error} names none of {named}"
        assert self.call_concurrently() == []


def subject(graph: Graph, lanes: list[int], model: Any, **options: Any) -> Subject:
    rng = np.random.default_rng(0)
    (info,) = graph.inputs
    feeds = [{info.name: rng.standard_normal(info.shape).astype(np.float32)} for _ in range(CALLERS)]
    plan = fixed_plan(graph, lanes, accelerator="CPUExecutionProvider" if 0 in lanes else None)
    session = HybridSession(graph, plan=plan, strict=True, **options)
    return Subject(session, feeds, [run_plain(model, feed) for feed in feeds])


@pytest.fixture(params=["branches", "stack", "accelerator", "copies"])
def opened(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Subject]]:
    """Return a function that opens sessions: on CPU lanes, with an accelerator, or with a device of separate memory."""
    model = build_recurrent(STACK) if request.param == "stack" else branches()
    graph = load(model)
    lanes = {
        "branches": alternating_lanes(graph),
        "stack": [1 + ("l1" in name) for name in graph.dag.names],
        "accelerator": [0, 1, 2, 1],
        "copies": [0, 1, 1, 0],
    }[request.param]
    if request.param == "copies":
        monkeypatch.setattr(accelerator, "Device", MirrorDevice)
    made: list[Subject] = []

    def make() -> Subject:
        made.append(subject(graph, lanes, model))
        return made[-1]

    yield make
    for one in made:
        one.session.close()


def names_of(one: Subject, step: Run | Copy) -> str:
    """Return the name that a message about an instruction must contain."""
    if isinstance(step, Run):
        return repr(one.engine.segments[step.segment].operators[0])
    return repr(step.value)


@pytest.mark.parametrize("make", [lambda: RuntimeError("injected"), lambda: MemoryError("injected")])
def test_a_step_that_fails(
    opened: Callable[[], Subject], make: Callable[[], Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure of any segment or copy fails one request, with a message that names it."""
    one = opened()
    steps = [step for _, _, step in one.instructions if isinstance(step, Run | Copy)]
    assert len(steps) >= len(one.engine.segments)
    copy, executor = DeviceFrame.copy, one.engine._python
    for step in steps:
        fault = Fault(make)
        with monkeypatch.context() as patch:
            if isinstance(step, Run):
                segments = list(one.engine.segments)
                faulty: Any = FaultySession(segments[step.segment].session, fault)
                segments[step.segment] = replace(segments[step.segment], session=faulty)
                patch.setattr(executor, "_segments", segments)
            else:

                def failing(
                    self: DeviceFrame, name: str, *, upload: bool, step: Copy = step, fault: Fault = fault
                ) -> None:
                    if (name, upload) == (step.value, step.upload):
                        fault.strike()
                    copy(self, name, upload=upload)

                patch.setattr(DeviceFrame, "copy", failing)
            one.assert_struck_once(type(make()), names_of(one, step), "injected")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_lane_that_dies(opened: Callable[[], Subject], monkeypatch: pytest.MonkeyPatch) -> None:
    """If a lane's thread ends before any instruction, one request fails and a new thread replaces it."""
    one = opened()
    perform, first = PythonExecutor.run_lane, next(iter(one.engine.program.lanes))
    for lane, at, step in one.instructions:
        fault = Fault(SystemExit)

        def mortal(
            self: PythonExecutor, request: Any, on: int, *, lane: int = lane, at: int = at, fault: Fault = fault
        ) -> None:
            if on != lane or not fault.taken():
                perform(self, request, on)
                return
            for instruction in self._program.lanes[on][: at + 1]:
                if isinstance(instruction, Run | Copy):
                    request.current[on] = instruction
            for instruction in self._program.lanes[on][:at]:
                if isinstance(instruction, Wait):
                    on_timeout = request.group.lanes.replace_dead
                    request.counters[instruction.lane].wait(instruction.count, on_timeout=on_timeout)
                elif isinstance(instruction, Signal):
                    request.counters[on].advance(instruction.count)
                else:
                    self._carry_out(request, on, instruction)
            raise SystemExit  # the thread ends without a report

        if lane != first:
            with monkeypatch.context() as patch:
                patch.setattr(PythonExecutor, "run_lane", mortal)
                named = names_of(one, step) if isinstance(step, Run | Copy) else ""
                one.assert_struck_once(RuntimeError, "died", named)


def test_an_allocation_that_fails(opened: Callable[[], Subject], monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed allocation of any buffer of a frame or a request fails one request, and the error names the segment."""
    reached = True
    at = 0
    while reached:
        one, allocate, seen = opened(), host_frame.allocate, [0]

        def failing(*given: Any, at: int = at, seen: list[int] = seen, allocate: Any = allocate) -> Any:
            seen[0] += 1
            if seen[0] == at + 1:
                raise MemoryError("injected")
            return allocate(*given)

        with monkeypatch.context() as patch:
            patch.setattr(host_frame, "allocate", failing)
            patch.setattr(device_frame, "allocate", failing)
            patch.setattr(MirrorDevice, "allocate", lambda _, info: failing(info))
            raised = one.call_concurrently()
        reached = bool(raised)
        if reached:
            (error,) = raised
            assert isinstance(error, MemoryError)
            assert any(name in str(error) for name in one.engine.graph.dag.names), f"{error} names no operator"
            assert one.call_concurrently() == []
            at += 1
        one.session.close()
        assert at < 200
    assert at >= len(one.engine.graph.outputs)
