"""The cores that this process may use, and pinned threads."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from chrion.machine import cores
from seams.machine import pretend_cores


def test_cores_are_among_the_allowed_ones() -> None:
    """The result has one logical CPU of each physical core, in ascending order."""
    found = cores.physical_cores()
    assert found
    assert set(found) <= os.sched_getaffinity(0)
    assert list(found) == sorted(set(found))


def test_affinity_is_respected() -> None:
    """A thread that is limited to one CPU has one core."""
    one = min(os.sched_getaffinity(0))
    seen: list[tuple[int, ...]] = []

    def record() -> None:
        with cores.pinned(one):
            seen.append(cores.physical_cores())

    thread = threading.Thread(target=record)
    thread.start()
    thread.join()
    assert seen == [(one,)]


@pytest.mark.parametrize(("quota", "limit"), [(None, 4), (3.0, 3), (1.5, 1), (0.5, 1), (64.0, 4)])
def test_the_quota_limits_cores(monkeypatch: pytest.MonkeyPatch, quota: float | None, limit: int) -> None:
    """A quota counts in whole CPUs, and half a CPU counts as one."""
    pretend_cores(monkeypatch, range(4), quota=quota)
    assert len(cores.physical_cores()) == limit


def test_the_affinity_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cores that are taken from the process later are not in the result."""
    for allowed in ({0, 1, 2}, {2}, {1, 2}):
        pretend_cores(monkeypatch, allowed)
        assert cores.physical_cores() == tuple(sorted(allowed))


def test_siblings_share_a_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If CPUs 0 and 2, and 1 and 3, are siblings, the cores are 0 and 1."""
    for cpu in range(4):
        (tmp_path / f"cpu{cpu}" / "topology").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}" / "topology" / "thread_siblings_list").write_text(f"{cpu % 2},{cpu % 2 + 2}\n")
    pretend_cores(monkeypatch, range(4), topology=tmp_path)
    assert cores.physical_cores() == (0, 1)


def test_pinning_is_undone() -> None:
    """The affinity is restored even if the work fails."""
    before = os.sched_getaffinity(0)
    core = max(before)

    def work() -> None:
        with cores.pinned(core):
            assert os.sched_getaffinity(0) == {core}
            raise RuntimeError

    with pytest.raises(RuntimeError):
        work()
    assert os.sched_getaffinity(0) == before


def test_work_runs_on_several_cores() -> None:
    """Each thread may use its core only, and results are in the order of the cores."""
    allowed = sorted(os.sched_getaffinity(0))
    assert cores.run_on_cores(allowed, lambda: os.sched_getaffinity(0)) == [{cpu} for cpu in allowed]
    assert sorted(os.sched_getaffinity(0)) == allowed


def test_an_exception_on_a_core_reaches_the_caller() -> None:
    """The call raises the exception of the work."""
    with pytest.raises(ZeroDivisionError):
        cores.run_on_cores(sorted(os.sched_getaffinity(0)), lambda: 1 // 0)


@pytest.mark.parametrize(
    ("caches", "size"),
    [
        ([("0,4", "32K"), ("0,4", "1024K"), ("0-7", "32768K")], 1 << 20),
        ([("0-1,4-5", "1024K")], 0),
        ([("0,4", "32K"), ("0,4", "many")], 1 << 15),
        ([], 0),
    ],
)
def test_the_private_cache_is_the_largest_of_one_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caches: list[tuple[str, str]], size: int
) -> None:
    """The hardware threads of a core share its caches; an unreadable cache counts as missing."""
    pretend_cores(monkeypatch, [0], topology=tmp_path)
    topology = tmp_path / "cpu0" / "topology"
    topology.mkdir(parents=True)
    (topology / "thread_siblings_list").write_text("0,4\n")
    for at, (shared, text) in enumerate(caches):
        folder = tmp_path / "cpu0" / "cache" / f"index{at}"
        folder.mkdir(parents=True)
        (folder / "shared_cpu_list").write_text(shared + "\n")
        (folder / "size").write_text(text + "\n")
    assert cores.private_cache_bytes(0) == size
