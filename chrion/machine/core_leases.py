"""Leases of CPU cores: lanes that may be busy at the same time are pinned to different cores.

Within the process, a lease takes the cores that the fewest other leases hold. Among those it prefers cores that no
other process of the same user holds. Leases never fail and never wait: if all cores are held, they are shared.

Processes see each other by locks on single bytes of one file, the byte at offset n for core n. Such a lock (``fcntl``,
POSIX) ends with its process, however that ends, and a forked child does not inherit it. An exclusive lock can be had
only if no other process holds the core; it then becomes a shared one, so that later processes can share the core if
they must. Without such a file, in a read-only system for example, processes do not see each other.
"""

from __future__ import annotations

import contextlib
import os
import random
import stat
import tempfile
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from chrion.machine.cores import allowed_cores, physical_cores

try:
    import fcntl
except ImportError:  # not Unix
    fcntl = None  # type: ignore[assignment]


class CoreLease:
    """Cores that lanes are pinned to.

    The cores are released when this object is collected, or earlier by :meth:`release`.

    Attributes:
        cores: Logical CPUs of different physical cores, the best choice first.
    """

    def __init__(self, registry: _Registry, cores: tuple[int, ...], *, further: bool) -> None:
        self.cores = cores
        self._finaliser = weakref.finalize(self, registry.release, cores, further=further)
        self._finaliser.atexit = False

    def release(self) -> None:
        """Release the cores; further calls do nothing."""
        self._finaliser()


def lease_cores(count: int, *, further: bool = False) -> CoreLease:
    """Lease cores that this process may use: at most ``count``, and fewer if there are not that many.

    Args:
        count: Number of cores.
        further: Whether the lanes are used only while the lanes of another lease of their owner are busy. Such leases
            count for less than others, and other processes do not see them.
    """
    return _registry.lease(count, further=further)


class _Registry:
    """The leases of this process."""

    def __init__(self) -> None:
        #: Reentrant, since a lease may be released by the garbage collector while its thread holds the lock.
        self._lock = threading.RLock()
        #: Numbers of leases of each core: of lanes in general, and of further ones.
        self._leases: Counter[int] = Counter()
        self._further: Counter[int] = Counter()
        self._locks = _SharedLocks()

    def lease(self, count: int, *, further: bool) -> CoreLease:
        with self._lock:
            allowed, usable = allowed_cores(), len(physical_cores())
            # With a quota, other containers probably share the machine. They cannot be seen, and would all take the
            # first cores.
            start = random.randrange(len(allowed)) if usable < len(allowed) else 0  # noqa: S311 - not a secret
            order = sorted(
                allowed[start:] + allowed[:start], key=lambda core: (self._leases[core], self._further[core])
            )
            number = min(count, usable)
            chosen = tuple(order[:number]) if further else self._choose(order, number)
            (self._further if further else self._leases).update(chosen)
            return CoreLease(self, chosen, further=further)

    def release(self, cores: Sequence[int], *, further: bool) -> None:
        with self._lock:
            held = self._further if further else self._leases
            held.subtract(cores)
            if not further:
                self._locks.unlock(core for core in cores if not held[core])
            if not +self._leases:
                self._locks.close()

    def forget(self) -> None:
        """Forget all leases in a forked child, which lacks their lanes and in which a lock may be held for ever."""
        self._lock = threading.RLock()
        self._locks.close()

    def _choose(self, order: Sequence[int], count: int) -> tuple[int, ...]:
        """Choose and lock cores, those of other processes last among cores with as many leases in this process."""
        chosen: list[int] = []
        shared: list[int] = []
        for at, core in enumerate(order):
            if shared and self._leases[core] > self._leases[order[at - 1]]:
                chosen += shared
                shared = []
            if len(chosen) >= count:
                break
            (chosen if self._locks.lock_free(core) else shared).append(core)
        chosen = [*chosen, *shared][:count]
        self._locks.share(chosen)
        return tuple(chosen)


class _SharedLocks:
    """Locks by which the processes of one user see which cores the others hold.

    The file is open while this process holds a core.
    """

    def __init__(self) -> None:
        self._file: int | None = None

    def lock_free(self, core: int) -> bool:
        """Lock a core if no other process holds it; return whether none does, as far as can be seen."""
        if self._file is None:
            self._file = _open_file()
        if self._file is None:
            return True
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, core)
        except OSError:
            return False
        return True

    def share(self, cores: Iterable[int]) -> None:
        """Hold cores, and let other processes hold them as well."""
        if self._file is not None:
            _apply(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB, cores)

    def unlock(self, cores: Iterable[int]) -> None:
        """Hold cores no longer."""
        if self._file is not None:
            _apply(self._file, fcntl.LOCK_UN, cores)

    def close(self) -> None:
        """Hold no cores."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)


def _apply(file: int, operation: int, cores: Iterable[int]) -> None:
    for core in cores:
        # It fails if another process is choosing the core just now; the core then counts as held by fewer.
        with contextlib.suppress(OSError):
            fcntl.lockf(file, operation, 1, core)


def _open_file() -> int | None:
    """Open the file of locks; return None if it cannot be opened or is not a file of this user."""
    if fcntl is None:
        return None
    try:
        path = _folder() / f"chrion-cores-{os.getuid()}.lock"
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    status = os.fstat(file)
    if status.st_uid == os.getuid() and stat.S_ISREG(status.st_mode):
        return file
    os.close(file)
    return None


def _folder() -> Path:
    """Return the folder of files of the user's running processes."""
    given = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(given) if given else Path(f"/run/user/{os.getuid()}")
    return folder if os.access(folder, os.W_OK) else Path(tempfile.gettempdir())


_registry = _Registry()


def _forget_in_child() -> None:
    global _registry  # noqa: PLW0603 - leases of the parent still refer to the old one
    _registry.forget()
    _registry = _Registry()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
