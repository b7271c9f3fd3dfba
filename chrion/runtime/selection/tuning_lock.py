"""The lock that lets one process of a user tune at a time, since several would disturb each other's measurements."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from chrion.common.files import cache_folder, is_trusted
from chrion.common.imports import import_late

log = logging.getLogger(__name__)


class BusyError(Exception):
    """Another process tunes."""


@contextmanager
def tuning_lock(timeout_s: float = 0.0, on_wait: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Hold the lock. The system releases it if the process ends.

    If the cache folder cannot be written to or trusted, or the file system has no locks, any number of processes may
    tune.

    Args:
        timeout_s: Time to wait for another process; below 0 to wait without a limit.
        on_wait: Called before waiting.

    Raises:
        BusyError: Another process still tunes after that time.
    """
    import_late("filelock")  # takes as long as a small model's session
    from filelock import FileLock, Timeout  # noqa: PLC0415

    lock = FileLock(cache_folder() / "tuning.lock", mode=0o600, thread_local=False)
    try:
        if is_trusted(cache_folder()):
            try:
                lock.acquire(timeout=0)
            except Timeout:
                on_wait()
                lock.acquire(timeout=timeout_s)
    except Timeout:
        raise BusyError from None
    except (OSError, NotImplementedError) as error:
        log.debug("tuning without a lock: %s", error)
    try:
        yield
    finally:
        lock.release()
