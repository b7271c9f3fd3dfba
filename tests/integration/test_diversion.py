"""Diversion of requests from sessions of one thread."""

from __future__ import annotations

from collections.abc import Iterator

import onnxruntime as ort
import pytest

from chrion.runtime.arena_contention import voluntary_switches
from chrion.runtime.diversion import Diversion
from chrion.runtime.execution.plain_engine import PlainEngine
from chrion.runtime.process_hooks import in_flight
from helpers import branches


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
