"""Leases of cores: lanes take cores that neither this process nor another one holds, as long as there are any."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from chrion import core_leases
from chrion.core_leases import lease_cores

#: The program of another process on four cores: leases two, prints them, and keeps them until its input ends.
HOLDER = """
import sys
from chrion import core_leases
core_leases.allowed_cores = core_leases.physical_cores = lambda: (0, 1, 2, 3)
lease = core_leases.lease_cores(2)
print(*lease.cores, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _four_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Use four cores, a registry without leases, and a folder without locks."""
    monkeypatch.setattr(core_leases, "allowed_cores", lambda: (0, 1, 2, 3))
    monkeypatch.setattr(core_leases, "physical_cores", lambda: (0, 1, 2, 3))
    monkeypatch.setattr(core_leases, "_registry", core_leases._Registry())
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@contextmanager
def other_process() -> Iterator[tuple[subprocess.Popen[str], tuple[int, ...]]]:
    """Run another process that holds two cores; yield it and its cores."""
    holder = subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: S603
    with holder:
        assert holder.stdout
        yield holder, tuple(map(int, holder.stdout.readline().split()))
        holder.kill()


def becomes(found: Callable[[], object], expected: object) -> bool:
    """Wait until a function returns a value; return whether it did."""
    end = time.monotonic() + 20
    while (value := found()) != expected and time.monotonic() < end:
        time.sleep(0.01)
    return value == expected


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
    monkeypatch.setattr(core_leases, "physical_cores", lambda: (0, 1))
    found = set()
    for _ in range(100):
        lease = lease_cores(3)
        found.add(lease.cores)
        lease.release()
    assert found == {(0, 1), (1, 2), (2, 3), (3, 0)}


def test_processes_take_different_cores() -> None:
    """The cores of another process are taken last, and are free when it is killed."""
    with other_process() as (holder, cores):
        assert cores == (0, 1)
        own = lease_cores(1)
        assert own.cores == (2,)
        with other_process() as (_, others):
            assert others == (3, 0)
        with lease_of(3) as shared:
            assert shared == (3, 0, 1)
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        with lease_of(2) as free:
            assert free == (0, 1)


def test_a_core_is_held_until_its_last_lease_ends() -> None:
    """Another process sees a core that several leases of this process hold as long as one of them does."""
    first, second = lease_cores(4), lease_cores(4)
    first.release()
    with other_process() as (_, cores):
        assert cores == (0, 1)
        assert lease_cores(2).cores == (2, 3)  # both hold the first two
    second.release()
    with other_process() as (_, cores):
        assert cores == (0, 1)


@contextmanager
def lease_of(count: int) -> Iterator[tuple[int, ...]]:
    """Lease cores for a while."""
    lease = lease_cores(count)
    yield lease.cores
    lease.release()


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
        monkeypatch.setattr(core_leases.tempfile, "gettempdir", lambda: str(tmp_path / "neither"))
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


FORKING = """
import os, sys
from chrion import core_leases
core_leases.allowed_cores = core_leases.physical_cores = lambda: (0, 1, 2, 3)
lease = core_leases.lease_cores(2)
core_leases._registry._lock.acquire()  # held for ever in the child
if os.fork() == 0:
    lease.release()
    assert core_leases.lease_cores(2).cores == (2, 3)
    os._exit(0)
core_leases._registry._lock.release()
assert os.wait()[1] == 0
if os.fork() == 0:
    os.execv(sys.executable, [sys.executable, "-c", sys.argv[1]])
assert os.wait()[1] == 0
"""


def test_a_forked_child_has_no_leases() -> None:
    """The child sees the parent's cores as those of another process, and the parent keeps them when the child exits."""
    other = HOLDER.replace("sys.stdin.read()", "assert lease.cores == (2, 3)")
    done = subprocess.run([sys.executable, "-c", FORKING, other], stderr=subprocess.PIPE, timeout=60, check=False)  # noqa: S603
    assert done.returncode == 0, done.stderr


def test_leases_from_many_threads() -> None:
    """Leases that threads take at the same time are spread evenly."""
    from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415

    with ThreadPoolExecutor(8) as pool:
        leases = list(pool.map(lambda _: lease_cores(1), range(100)))
    found = [lease.cores[0] for lease in leases]
    assert [found.count(core) for core in range(4)] == [25] * 4
