"""Leases of cores: lanes take cores that neither this process nor another one holds, as long as there are any."""

from __future__ import annotations

import gc
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from chrion.machine.core_leases import lease_cores
from seams.machine import forget_leases, pretend_cores


@pytest.fixture(autouse=True)
def _four_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Use four cores, a registry without leases, and a folder without locks."""
    pretend_cores(monkeypatch, range(4))
    forget_leases(monkeypatch)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def descriptors() -> int:
    """Return the number of open files of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def test_leases_take_the_least_used_cores() -> None:
    """Cores are shared only if all are held, and released cores are leased again."""
    first, second = lease_cores(2), lease_cores(2)
    assert (first.cores, second.cores) == ((0, 1), (2, 3))
    third = lease_cores(3)
    assert third.cores == (0, 1, 2)
    assert lease_cores(1).cores == (3,)
    second.release()
    second.release()
    assert lease_cores(2).cores == (3, 2)


def test_a_collected_lease_is_released() -> None:
    """The cores of a lease without references are free."""
    first = lease_cores(2)
    del first
    gc.collect()
    assert lease_cores(2).cores == (0, 1)


def test_a_lease_has_no_more_cores_than_there_are() -> None:
    """A request for more cores is served in part."""
    assert lease_cores(9).cores == (0, 1, 2, 3)


def test_further_leases_count_for_less() -> None:
    """Cores that are held for further lanes only are preferred to those of other leases."""
    first, further = lease_cores(2), lease_cores(2, further=True)
    assert (first.cores, further.cores) == ((0, 1), (2, 3))
    second = lease_cores(1)
    assert second.cores == (2,)
    assert lease_cores(2).cores == (3, 0)
    for lease in (first, further, second):
        lease.release()


def test_a_quota_limits_the_number_and_not_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers with a quota that share a machine do not all use its first cores."""
    pretend_cores(monkeypatch, range(4), quota=2.0)
    found = set()
    for _ in range(100):
        lease = lease_cores(3)
        found.add(lease.cores)
        lease.release()
    assert found == {(0, 1), (1, 2), (2, 3), (3, 0)}


def test_leases_leave_no_descriptors() -> None:
    """One file is open while there are leases, and none without."""
    before = descriptors()
    leases = [lease_cores(2) for _ in range(50)]
    assert descriptors() == before + 1
    for lease in leases:
        lease.release()
    assert descriptors() == before


@pytest.mark.parametrize("obstacle", ["missing", "folder", "link", "pipe"])
def test_processes_without_a_common_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, obstacle: str) -> None:
    """Leases are made without regard to other processes, and nothing is written through a link."""
    path = tmp_path / f"chrion-cores-{os.getuid()}.lock"
    if obstacle == "missing":
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "none"))
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "neither"))
    elif obstacle == "folder":
        path.mkdir()
    elif obstacle == "link":
        path.symlink_to(tmp_path / "target")
    else:
        os.mkfifo(path)
    before = descriptors()
    first, second = lease_cores(2), lease_cores(2)
    assert (first.cores, second.cores) == ((0, 1), (2, 3))
    assert descriptors() == before
    assert not (tmp_path / "target").exists()


def test_leases_from_many_threads() -> None:
    """Leases that threads take at the same time are spread evenly."""
    with ThreadPoolExecutor(8) as pool:
        leases = list(pool.map(lambda _: lease_cores(1), range(100)))
    found = [lease.cores[0] for lease in leases]
    assert [found.count(core) for core in range(4)] == [25] * 4
