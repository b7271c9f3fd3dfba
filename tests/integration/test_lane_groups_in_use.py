"""Groups of lanes of sessions: requests in flight at the same time run on lanes and cores of their own."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from chrion import HybridSession, load
from chrion.machine.core_leases import lease_cores
from chrion.machine.cores import physical_cores
from chrion.runtime.execution.lane_groups import LaneGroup
from chrion.runtime.execution.plain_engine import PlainEngine
from chrion.scheduler import fixed_plan
from helpers import assert_equal, branches, cut_session, remaining_lane_threads, run_plain
from seams.execution import around, cut_engine, groups_of, leases, use_cores

# A deadlock is a failure.
pytestmark = [pytest.mark.timeout(120, method="thread"), pytest.mark.usefixtures("uncrowded")]
FEEDS = [{"x": np.full((2, 4), at, np.float32)} for at in range(12)]
EIGHT = tuple(range(8))


@contextmanager
def meeting(count: int) -> Iterator[list[LaneGroup[Any]]]:
    """Let every request wait, with its lease, until ``count`` requests have one; yield the list of leased groups."""
    barrier, leased = threading.Barrier(count), []

    def meet(lease: Callable[..., LaneGroup[Any]], *given: Any) -> LaneGroup[Any]:
        leased.append(group := lease(*given))
        barrier.wait(60)
        return group

    with pytest.MonkeyPatch.context() as patch:
        around(patch, "lease lanes", meet)
        yield leased


def run_all(session: HybridSession, count: int) -> None:
    """Serve requests of ``count`` threads at the same time, and compare the results with plain onnxruntime."""
    with ThreadPoolExecutor(count) as pool:
        found = list(pool.map(lambda at: session.run(None, FEEDS[at]), range(count)))
    for at in range(count):
        assert_equal(found[at], run_plain(branches(), FEEDS[at]))


@pytest.mark.usefixtures("either_lanes")
def test_requests_in_flight_have_groups_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four requests of two lanes use all eight cores, once each; when the session is collected, all are free."""
    use_cores(monkeypatch, EIGHT)
    session = cut_session(branches())
    session.run(None, FEEDS[0])
    assert cut_engine(session).capacity == 4
    with meeting(4) as leased:
        run_all(session, 4)
    assert sorted(core for group in leased for core in group.cores.values()) == list(EIGHT)
    assert len({id(group.lanes) for group in leased}) == 4
    assert leases(groups_of(session)) == 0
    leased.clear()
    del session
    gc.collect()
    assert not remaining_lane_threads()
    assert lease_cores(8).cores == EIGHT  # in their order, since none is leased


@pytest.mark.usefixtures("either_lanes")
@pytest.mark.parametrize("after", [False, True])
def test_an_interrupted_lease_ends(*, after: bool) -> None:
    """A request that is interrupted before or after it has a group leaves no lease behind."""

    def interrupt(lease: Callable[..., LaneGroup[Any]], *given: Any) -> None:
        if after:
            lease(*given)
        raise KeyboardInterrupt

    with cut_session(branches()) as session:
        with pytest.MonkeyPatch.context() as patch:
            around(patch, "lease lanes", interrupt)
            with pytest.raises(KeyboardInterrupt):
                session.run(None, FEEDS[0])
        assert leases(groups_of(session)) == 0
        run_all(session, 1)


def test_capacity() -> None:
    """A plan can serve as many requests as its lanes fit on the cores; one with an accelerator serves one."""
    graph = load(branches())
    cores = len(physical_cores())
    with cut_session(graph) as session:
        assert cut_engine(session).capacity == max(1, cores // 2)
    plan = fixed_plan(graph, [0, 1, 0, 1], accelerator="CPUExecutionProvider")
    with HybridSession(graph, plan=plan) as session:
        assert cut_engine(session).capacity == 1
    plain = PlainEngine(branches().SerializeToString(), None, ["CPUExecutionProvider"], None, "")
    assert plain.capacity == plain.with_reason("another").capacity == max(1, cores - 1)
