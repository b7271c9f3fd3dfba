"""Memory of the requests in flight: bodies, what is parsed of them, and answers that have not been sent."""

from __future__ import annotations

from chrion.server.failures import RequestFailure, Status


class ByteAccount:
    """Memory of the requests in flight, with a limit.

    Attributes:
        used: Bytes in use.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0

    def take(self, size: int) -> None:
        """Take bytes.

        Raises:
            RequestFailure: The limit is exceeded; nothing is taken.
        """
        if self.used + size > self.limit:
            raise RequestFailure(Status.OVERLOADED, "the requests in flight use too much memory", retry_s=1.0)
        self.used += size

    def give(self, size: int) -> None:
        """Give bytes back."""
        self.used -= size


class RequestMemory:
    """Memory of one request, which is given back as a whole.

    Args:
        account: The memory of all requests.
    """

    def __init__(self, account: ByteAccount) -> None:
        self._account = account
        self._taken = 0

    def take(self, size: int) -> None:
        """Take bytes.

        Raises:
            RequestFailure: The limit of all requests is exceeded; nothing is taken.
        """
        self._account.take(size)
        self._taken += size

    def release(self) -> None:
        """Give everything back. Idempotent."""
        self._account.give(self._taken)
        self._taken = 0
