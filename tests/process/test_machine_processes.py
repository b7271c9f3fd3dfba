"""Cores, memory and control groups, as processes of their own see them."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from chrion.machine.core_leases import lease_cores
from seams.machine import forget_leases, pretend_cores

#: Lets a process use four cores.
FOUR_CORES = """
import os, pytest, sys
from seams.machine import pretend_cores
pretend_cores(pytest.MonkeyPatch(), range(4))
from chrion.machine import core_leases
lease = core_leases.lease_cores(2)
"""
#: Another process, which leases two cores, prints them, and keeps them until its input ends.
HOLDER = f"{FOUR_CORES}print(*lease.cores, flush=True); sys.stdin.read()"
#: A process that forks, once while a thread holds the lock of the leases, and once to start another program.
FORKING = (
    FOUR_CORES
    + """
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
)
#: A program that frees 80 MB in fragments below one that stays in use, so that glibc does not return them itself.
FRAGMENTS = """
import numpy as np, psutil
from chrion.machine.allocator import trim
rss = psutil.Process().memory_info
pieces = [np.ones(250) for _ in range(40_000)]
last = pieces[-1]
del pieces
before = rss().rss
trim()
print((before - rss().rss) / 1e6)
"""
_V1 = Path("/sys/fs/cgroup/cpu")


@pytest.fixture
def _four_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Use four cores, a registry without leases, and a folder without locks; let programs import the seams."""
    pretend_cores(monkeypatch, range(4))
    forget_leases(monkeypatch)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))


@contextmanager
def other_process() -> Iterator[tuple[subprocess.Popen[str], tuple[int, ...]]]:
    """Run another process that holds two cores; yield it and its cores."""
    holder = subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: S603
    with holder:
        assert holder.stdout
        yield holder, tuple(map(int, holder.stdout.readline().split()))
        holder.kill()


@contextmanager
def lease_of(count: int) -> Iterator[tuple[int, ...]]:
    """Lease cores for a while."""
    lease = lease_cores(count)
    yield lease.cores
    lease.release()


@pytest.mark.usefixtures("_four_cores")
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


@pytest.mark.usefixtures("_four_cores")
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


@pytest.mark.usefixtures("_four_cores")
def test_a_forked_child_has_no_leases() -> None:
    """The child sees the parent's cores as those of another process, and the parent keeps them when the child exits."""
    other = f"{FOUR_CORES}assert lease.cores == (2, 3)"
    done = subprocess.run([sys.executable, "-c", FORKING, other], stderr=subprocess.PIPE, timeout=60, check=False)  # noqa: S603
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not hasattr(ctypes.pythonapi, "malloc_trim"), reason="the C library is not glibc")
def test_freed_fragments_are_returned() -> None:
    """Most of 80 MB of freed fragments is returned to the system."""
    command = [sys.executable, "-c", FRAGMENTS]
    done = subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603 - this interpreter
    assert float(done.stdout) > 40


@pytest.fixture
def real_group() -> Iterator[Path]:
    """Return a real group of version 1 in one with a quota of 1.5 CPUs, if this process may create groups."""
    outer = _V1 / f"chrion-test-{os.getpid()}"
    inner = outer / "inner"
    try:
        inner.mkdir(parents=True)
    except OSError:
        pytest.skip("no control groups of version 1 that this process may change")
    try:
        (outer / "cpu.cfs_quota_us").write_text("150000")
        yield inner
    finally:
        inner.rmdir()
        outer.rmdir()


def test_a_real_group_of_version_1(real_group: Path) -> None:
    """A process in a group without a quota, inside one with a quota, reads the outer quota."""
    code = (
        f"import os; open({str(real_group / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
        "from chrion.machine.cgroups import cpu_quota; print(cpu_quota())"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)  # noqa: S603
    assert float(found.stdout) == 1.5
