"""Groups of lanes: requests in flight at the same time run on lanes and cores of their own."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chrion import HybridSession, core_leases, load
from chrion.cores import physical_cores
from chrion.runtime.execution import lane_groups
from chrion.runtime.execution.engine import CutEngine, PlainEngine
from chrion.runtime.execution.lane_groups import LaneGroup, LaneGroups
from chrion.runtime.execution.native_executor import NativeExecutor
from chrion.runtime.execution.python_executor import PythonExecutor
from chrion.scheduler import fixed_plan
from helpers import (
    assert_equal,
    branches,
    cut_session,
    remaining_lane_threads,
    run_plain,
)

# A deadlock is a failure.
pytestmark = [pytest.mark.timeout(120, method="thread"), pytest.mark.usefixtures("uncrowded")]
FEEDS = [{"x": np.full((2, 4), at, np.float32)} for at in range(12)]
EIGHT = tuple(range(8))


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let lanes be pinned to eight cores; pinning to one that this machine lacks has no effect."""
    for module, name in (
        (core_leases, "allowed_cores"),
        (core_leases, "physical_cores"),
        (lane_groups, "physical_cores"),
    ):
        monkeypatch.setattr(module, name, lambda: EIGHT)
    monkeypatch.setattr(core_leases, "_registry", core_leases._Registry())


def groups_of(session: HybridSession) -> LaneGroups[Any]:
    """Return the groups that serve a session's requests."""
    engine = session._engine
    assert isinstance(engine, CutEngine)
    executor = engine._native or engine._python
    assert isinstance(executor, NativeExecutor | PythonExecutor)
    return executor._groups


@contextmanager
def meeting(monkeypatch: pytest.MonkeyPatch, session: HybridSession, count: int) -> Iterator[list[LaneGroup[Any]]]:
    """Let every request wait, with its lease, until ``count`` requests have one; yield the list of leased groups."""
    groups, barrier, leased = groups_of(session), threading.Barrier(count), []
    lease = groups.lease

    def lease_together(token: object) -> LaneGroup[Any]:
        leased.append(group := lease(token))
        barrier.wait(60)
        return group

    with monkeypatch.context() as patch:
        patch.setattr(groups, "lease", lease_together)
        yield leased


def run_all(session: HybridSession, count: int) -> None:
    """Serve requests of ``count`` threads at the same time, and compare the results with plain onnxruntime."""
    with ThreadPoolExecutor(count) as pool:
        found = list(pool.map(lambda at: session.run(None, FEEDS[at]), range(count)))
    for at in range(count):
        assert_equal(found[at], run_plain(branches(), FEEDS[at]))


@pytest.mark.usefixtures("eight_cores", "either_lanes")
def test_requests_in_flight_have_groups_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four requests of two lanes use all eight cores, once each."""
    with cut_session(branches()) as session:
        assert session._engine.capacity == 4
        with meeting(monkeypatch, session, 4) as leased:
            run_all(session, 4)
        assert sorted(core for group in leased for core in group.cores.values()) == list(EIGHT)
        assert len({id(group.lanes) for group in leased}) == 4
        assert not groups_of(session)._used
    assert not remaining_lane_threads()


@pytest.mark.usefixtures("eight_cores", "either_lanes")
def test_more_requests_than_groups_share_them_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve requests are spread over four groups."""
    with cut_session(branches()) as session:
        with meeting(monkeypatch, session, 12) as leased:
            run_all(session, 12)
        assert sorted(Counter(id(group) for group in leased).values()) == [3, 3, 3, 3]


@pytest.mark.usefixtures("eight_cores", "either_lanes")
def test_a_single_caller_has_one_group() -> None:
    """Requests one after another open no further group."""
    with cut_session(branches()) as session:
        for _ in range(20):
            session.run(None, FEEDS[0])
        assert len(groups_of(session)._groups) == 1


@pytest.mark.usefixtures("eight_cores", "either_lanes")
def test_sessions_have_cores_of_their_own() -> None:
    """Sessions of one process use different cores, and the cores of a closed session are used again."""

    def cores(session: HybridSession) -> set[int | None]:
        return set(groups_of(session)._groups[0].cores.values())

    with cut_session(branches()) as first, cut_session(branches()) as second:
        assert (cores(first), cores(second)) == ({0, 1}, {2, 3})
        first.close()
        with cut_session(branches()) as third:
            assert cores(third) == {0, 1}


@pytest.mark.usefixtures("eight_cores", "either_lanes")
def test_further_groups_leave_cores_to_other_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session does not share the first group's cores while cores of further groups can be shared."""
    with cut_session(branches()) as first:
        with meeting(monkeypatch, first, 4):
            run_all(first, 4)
        with cut_session(branches()) as second:
            assert not {0, 1} & set(groups_of(second)._groups[0].cores.values())


@pytest.mark.usefixtures("eight_cores", "either_lanes")
def test_sessions_that_are_collected_release_their_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads of all groups stop, and their leases end."""
    session = cut_session(branches())
    with meeting(monkeypatch, session, 3):
        run_all(session, 3)
    assert not set(core_leases._registry._leases.elements()) ^ {0, 1}
    del session
    gc.collect()
    assert not remaining_lane_threads()
    assert not list(core_leases._registry._leases.elements())
    assert not list(core_leases._registry._further.elements())


@pytest.mark.usefixtures("eight_cores", "either_lanes")
def test_a_system_without_further_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """If no further group can be opened, the open ones serve all requests."""
    with cut_session(branches()) as session:
        groups = groups_of(session)

        def refuse(_: object) -> None:
            raise RuntimeError("no threads")

        monkeypatch.setattr(groups, "_open_lanes", refuse)
        with meeting(monkeypatch, session, 3):
            run_all(session, 3)
        assert (session._engine.capacity, len(groups._groups)) == (1, 1)


@pytest.mark.usefixtures("either_lanes")
@pytest.mark.parametrize("after", [False, True])
def test_an_interrupted_lease_ends(monkeypatch: pytest.MonkeyPatch, after: bool) -> None:  # noqa: FBT001
    """A request that is interrupted before or after it has a group leaves no lease behind."""
    with cut_session(branches()) as session:
        groups = groups_of(session)
        lease = groups.lease

        def interrupt(token: object) -> None:
            if after:
                lease(token)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(groups, "lease", interrupt)
            with pytest.raises(KeyboardInterrupt):
                session.run(None, FEEDS[0])
        assert not groups._used
        run_all(session, 1)


def test_capacity() -> None:
    """A plan can serve as many requests as its lanes fit on the cores; one with an accelerator serves one."""
    graph = load(branches())
    cores = len(physical_cores())
    with cut_session(graph) as session:
        assert session._engine.capacity == max(1, cores // 2)
    plan = fixed_plan(graph, [0, 1, 0, 1], accelerator="CPUExecutionProvider")
    with HybridSession(graph, plan=plan) as session:
        assert session._engine.capacity == 1
    plain = PlainEngine(branches().SerializeToString(), None, ["CPUExecutionProvider"], None, "")
    assert plain.capacity == plain.because("another").capacity == max(1, cores - 1)


def test_a_forked_child_can_drop_a_session_with_groups() -> None:
    """The child refuses requests and closes its copy; the parent's groups keep serving."""
    code = """
import os, threading
import numpy as np
from concurrent.futures import ThreadPoolExecutor
from chrion import core_leases
from chrion.runtime.execution import lane_groups
lane_groups.physical_cores = core_leases.physical_cores = core_leases.allowed_cores = lambda: tuple(range(8))
from chrion.runtime import crowding
crowding._PATIENCE = crowding._PATIENCE_S = 1e9
from helpers import branches, cut_session
session, feed = cut_session(branches()), {"x": np.ones((2, 4), np.float32)}
def serve(count):
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(lambda _: session.run(None, feed), range(50)))
serve(8)
groups = session._engine._native._groups if session._engine._native else session._engine._python._groups
held = threading.Thread(target=lambda: (groups._lock.acquire(), release.wait(), groups._lock.release()))
release = threading.Event()
held.start()
if os.fork() == 0:
    try:
        session.run(None, feed)
    except RuntimeError as error:
        assert "fork" in str(error)
        session.close()
        os._exit(0)
    os._exit(1)
release.set()
assert os.wait()[1] == 0
serve(8)
session.close()
"""
    path = os.pathsep.join([str(Path(__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
