"""Memory of the requests in flight: bodies, what is parsed of them, and answers that have not been sent."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from types import TracebackType

from chrion.serving.server.failures import RequestFailure, Status


class ByteAccount:
    """Memory of the requests in flight, with a limit.

    Attributes:
        limit: Maximum bytes.
        used: Bytes in use.
        peak: Maximum bytes in use since it was set.
        lock: Held while these change: large bodies are read in threads.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = self.peak = 0
        self.lock = threading.Lock()


class RequestMemory(AbstractContextManager["RequestMemory"]):
    """Memory of one request, which is given back as a whole.

    Args:
        account: The memory of all requests.
    """

    def __init__(self, account: ByteAccount) -> None:
        self._account = account
        self._taken = 0
        self._released = False

    def take(self, size: int) -> None:
        """Take bytes.

        Raises:
            RequestFailure: This request or all of them exceed the limit, or the request has ended; nothing is taken.
        """
        account = self._account
        with account.lock:
            if self._released:  # a thread still works for a client that has left
                raise RequestFailure(Status.CANCELLED, "the request has ended")
            needed, used = self._taken + size, account.used + size
            if needed > account.limit:
                text = f"the request needs {needed} bytes of memory, and all requests together have {account.limit}"
                raise RequestFailure(Status.TOO_LARGE, text)
            if used > account.limit:
                raise RequestFailure(Status.OVERLOADED, "the requests in flight use too much memory", retry_s=1.0)
            self._taken, account.used = needed, used
            account.peak = max(account.peak, used)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()

    def release(self) -> None:
        """Give everything back, and take no more. Idempotent."""
        with self._account.lock:
            self._account.used -= self._taken
            self._taken, self._released = 0, True
