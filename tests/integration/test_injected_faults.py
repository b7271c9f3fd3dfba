"""One fault at a time, at every instruction of a program, while other requests are in flight.

The request that meets it gets the error, with an operator's name; the others are served, and so is whatever comes next.
Lanes are the interpreter's here, where faults can be put; ``test_native.py`` has those of the others.
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

# A fault that nobody notices would hang.
pytestmark = [pytest.mark.timeout(120, method="thread"), pytest.mark.usefixtures("interpreted")]

CALLERS, CALLS = 3, 3
STACK = RecurrentSpec(layers=2, batch=1, io=4, seq=3)


class Fault:
    """Strikes once."""

    def __init__(self, make: Callable[[], BaseException]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._left = 1

    def taken(self) -> bool:
        """True for the first who asks."""
        with self._lock:
            self._left -= 1
            return self._left == 0

    def strike(self) -> None:
        if self.taken():
            raise self._make()


class FaultySession:
    """An onnxruntime session that a fault may strike."""

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
    """A session to inject faults into."""

    session: HybridSession
    feeds: list[dict[str, Any]]
    expected: list[Any]

    @property
    def engine(self) -> CutEngine:
        assert isinstance(self.session._engine, CutEngine)
        return self.session._engine

    @property
    def instructions(self) -> list[tuple[int, int, Instruction]]:
        """Lane, number and instruction."""
        lanes = self.engine.program.lanes
        return [(lane, at, step) for lane, steps in lanes.items() for at, step in enumerate(steps)]

    def storm(self) -> list[Exception]:
        """Call from several threads at once; what was raised. All that was returned is right."""
        raised: list[Exception] = []

        def call(caller: int) -> None:
            for _ in range(CALLS):
                try:
                    found = self.session.run(None, self.feeds[caller])
                except Exception as error:  # noqa: BLE001 - looked at below
                    raised.append(error)
                else:
                    assert_equal(found, self.expected[caller])

        with ThreadPoolExecutor(CALLERS) as pool:
            list(pool.map(call, range(CALLERS)))
        return raised

    def assert_struck_once(self, kind: type[Exception], *named: str) -> None:
        """One request fails as it should, the others do not, nor does any after that."""
        (error,) = self.storm()
        assert isinstance(error, kind)
        assert all(name in str(error) for name in named), f"{error} names none of {named}"
        assert self.storm() == []


def subject(graph: Graph, lanes: list[int], model: Any, **options: Any) -> Subject:
    rng = np.random.default_rng(0)
    (info,) = graph.inputs
    feeds = [{info.name: rng.standard_normal(info.shape).astype(np.float32)} for _ in range(CALLERS)]
    plan = fixed_plan(graph, lanes, accelerator="CPUExecutionProvider" if 0 in lanes else None)
    session = HybridSession(graph, plan=plan, strict=True, **options)
    return Subject(session, feeds, [run_plain(model, feed) for feed in feeds])


@pytest.fixture(params=["branches", "stack", "accelerator", "copies"])
def opened(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Subject]]:
    """Opens sessions of one program: on CPU lanes; with an accelerator; and with copies between two memories."""
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
    """What a message about an instruction has to say."""
    if isinstance(step, Run):
        return repr(one.engine.segments[step.segment].operators[0])
    return repr(step.value)


@pytest.mark.parametrize("make", [lambda: RuntimeError("injected"), lambda: MemoryError("injected")])
def test_a_step_that_fails(
    opened: Callable[[], Subject], make: Callable[[], Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each run of a segment and each copy, one after the other."""
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
    """Before each instruction of every lane that has a thread of its own: a new thread goes on in its place."""
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
                    request.counters[instruction.lane].wait(instruction.count, on_timeout=self._lane_threads.tend)
                elif isinstance(instruction, Signal):
                    request.counters[on].advance(instruction.count)
                else:
                    self._carry_out(request, on, instruction)
            raise SystemExit  # the thread is gone, and has told nobody

        if lane != first:
            with monkeypatch.context() as patch:
                patch.setattr(PythonExecutor, "run_lane", mortal)
                named = names_of(one, step) if isinstance(step, Run | Copy) else ""
                one.assert_struck_once(RuntimeError, "died", named)


def test_an_allocation_that_fails(opened: Callable[[], Subject], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each buffer of a new frame and of a request: the error names who would have written or read it."""
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
            raised = one.storm()
        reached = bool(raised)
        if reached:
            (error,) = raised
            assert isinstance(error, MemoryError)
            assert any(name in str(error) for name in one.engine.graph.dag.names), f"{error} names no operator"
            assert one.storm() == []
            at += 1
        one.session.close()
        assert at < 200
    assert at >= len(one.engine.graph.outputs)
