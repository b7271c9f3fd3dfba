"""Diversion of requests from sessions of one thread."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import onnxruntime as ort
import pytest

from chrion.machine.cores import affinity, current_cpu, pinned
from chrion.runtime.arena_contention import voluntary_switches
from chrion.runtime.diversion import Diversion
from chrion.runtime.execution.plain_engine import PlainEngine
from chrion.runtime.live_comparison import LiveComparison
from chrion.runtime.process_hooks import in_flight
from helpers import branches
from seams.sessions import replace_step


def open_session(arena: bool) -> PlainEngine:  # noqa: FBT001 - as Diversion calls it
    """Open a session of one thread."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.enable_cpu_mem_arena = arena
    return PlainEngine(branches().SerializeToString(), options, ["CPUExecutionProvider"], None, "for a test")


@pytest.fixture
def requests() -> Iterator[None]:
    """Two requests are in flight."""
    in_flight.extend([None, None])
    yield
    in_flight.pop()
    if len(in_flight):
        in_flight.pop()


@pytest.mark.usefixtures("requests")
def test_a_crowd_ends_on_a_session_of_one_thread() -> None:
    """A crowd that began on another session does not stay for ever if tuning selects one thread meanwhile."""
    diversion = Diversion(open_session, arena=True)
    engine = open_session(arena=True)
    diversion.crowding.active = True
    in_flight.pop()
    assert diversion.divert(engine)[0] is None
    assert not diversion.crowding.active


@pytest.mark.usefixtures("requests")
@pytest.mark.parametrize(("arena", "fits"), [(True, True), (True, False), (False, True)])
def test_requests_of_a_session_of_one_thread_are_samples(*, arena: bool, fits: bool) -> None:
    """One in four is, if the session is known to serve them and has an arena; it keeps serving them."""
    diversion = Diversion(open_session, arena=arena)
    engine = open_session(arena=True)
    found = [diversion.divert(engine, fits=fits) for _ in range(4)]
    assert {other for other, _ in found} == {None}
    expected = arena and fits and voluntary_switches() is not None
    assert sum(sample is not None for _, sample in found) == expected


class Trial(LiveComparison):
    """A comparison that begins a trial of the plan at one request, and ends it at the next one."""

    def __init__(self) -> None:
        super().__init__(1.0, 1.0)
        self.diverts = self.plain_serves = True

    def record(self, *_: object, **__: object) -> None:
        """Begin or end the trial."""
        self.diverts = not self.diverts


@pytest.mark.skipif(current_cpu() is None, reason="the system does not tell the CPU of a thread")
@pytest.mark.parametrize("lost", [True, False])
def test_a_thread_returns_to_its_cpu_after_a_trial_of_the_plan(monkeypatch: pytest.MonkeyPatch, *, lost: bool) -> None:
    """It is moved to the CPU on which it was before, unless the plan has won the trial."""
    moved, trial = [], Trial()
    replace_step(monkeypatch, "move to a CPU", moved.append)
    diversion = Diversion(open_session, arena=True)
    with pinned(min(affinity() or ())):
        cpu = current_cpu()
        diversion.record(trial, 0.0, diverted=True)
        assert (trial.diverts, moved) == (False, [])
        trial.plain_serves = lost
        diversion.record(trial, 0.0, diverted=False)
        diversion.record(trial, 0.0, diverted=True)
    assert moved == ([cpu] if lost else [])


@pytest.mark.skipif(current_cpu() is None, reason="the system does not tell the CPU of a thread")
def test_another_thread_is_not_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU is that of the thread whose request began the trial."""
    moved, trial = [], Trial()
    replace_step(monkeypatch, "move to a CPU", moved.append)
    diversion = Diversion(open_session, arena=True)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(diversion.record, trial, 0.0, diverted=True).result()
    diversion.record(trial, 0.0, diverted=False)
    assert trial.diverts
    assert not moved
