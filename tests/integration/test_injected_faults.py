"""Tests of single faults at every instruction of a program, while other requests are in flight.

The request in which the fault occurs raises an error with an operator's name; all other requests are served. Lanes are
Python threads, into which faults can be injected; ``test_native.py`` tests faults of native lanes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from chrion import Graph, HybridSession, load
from chrion.runtime.execution.cut_engine import CutEngine
from chrion.runtime.execution.program import Copy, Instruction, RunSegment
from chrion.scheduler import fixed_plan
from chrion.zoo import RecurrentSpec, build_recurrent
from helpers import alternating_lanes, assert_equal, branches, run_plain
from mirror_device import MirrorDevice
from seams.execution import cut_engine, fail_allocation, fail_copy, kill_lane, use_device

# A fault that is not detected would cause a deadlock.
pytestmark = [pytest.mark.timeout(120, method="thread"), pytest.mark.usefixtures("interpreted", "uncrowded")]

CALLERS, CALLS = 3, 2
STACK = RecurrentSpec(layers=2, batch=1, io=4, seq=3)


class Fault:
    """A fault that occurs once."""

    def __init__(self, kind: type[Exception]) -> None:
        self._errors = iter([kind("injected")])

    def strike(self) -> None:
        """Raise the error the first time; one call that runs no Python code decides which caller is first."""
        for error in self._errors:
            raise error


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
        return cut_engine(self.session)

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
        use_device(monkeypatch, MirrorDevice)
    made: list[Subject] = []

    def make() -> Subject:
        made.append(subject(graph, lanes, model))
        return made[-1]

    yield make
    for one in made:
        one.session.close()


def names_of(one: Subject, step: RunSegment | Copy) -> str:
    """Return the name that a message about an instruction must contain."""
    if isinstance(step, RunSegment):
        return repr(one.engine.segments[step.segment].operators[0])
    return repr(step.value)


def test_a_step_that_fails(opened: Callable[[], Subject]) -> None:
    """A failure of any segment or copy fails one request, with a message that names it."""
    one = opened()
    steps = [step for _, _, step in one.instructions if isinstance(step, RunSegment | Copy)]
    segments = one.engine.segments
    assert len(steps) >= len(segments)
    for kind, step in zip(itertools.cycle([RuntimeError, MemoryError]), steps, strict=False):
        fault = Fault(kind)
        with pytest.MonkeyPatch.context() as patch:
            if isinstance(step, RunSegment):
                whole = segments[step.segment]
                segments[step.segment] = replace(whole, session=FaultySession(whole.session, fault))
            else:
                fail_copy(patch, step, fault.strike)
            one.assert_struck_once(kind, names_of(one, step), "injected")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_lane_that_dies(opened: Callable[[], Subject]) -> None:
    """If a lane's thread ends before any instruction, one request fails and a new thread replaces it."""
    one = opened()
    first = next(iter(one.engine.program.lanes))
    for lane, at, step in one.instructions:
        if lane != first:
            with pytest.MonkeyPatch.context() as patch:
                kill_lane(patch, lane, at)
                named = names_of(one, step) if isinstance(step, RunSegment | Copy) else ""
                one.assert_struck_once(RuntimeError, "died", named)


def test_an_allocation_that_fails(opened: Callable[[], Subject]) -> None:
    """A failed allocation of any buffer of a frame or a request fails one request, and the error names the segment."""
    for at in itertools.count():
        one = opened()
        with pytest.MonkeyPatch.context() as patch:
            fail_allocation(patch, at)
            raised = one.call_concurrently()
        if not raised:
            break
        (error,) = raised
        assert isinstance(error, MemoryError)
        assert any(name in str(error) for name in one.engine.graph.dag.names), f"{error} names no operator"
        assert one.call_concurrently() == []
        one.session.close()
    assert at >= len(one.engine.graph.outputs)
