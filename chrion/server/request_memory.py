"""Memory of the requests in flight: bodies, what is parsed of them, and answers that have not been sent."""

from __future__ import annotations

from chrion.server.failures import RequestFailure, Status

#: The most values of a JSON document. Its parser blocks all threads, for about a second for so many.
_MOST_VALUES = 1 << 22
#: Bytes of a value beside its text, and more of a list and of an object.
_VALUE_BYTES, _LIST_BYTES, _OBJECT_BYTES = 64, 32, 170
#: Bytes of a character of text that is not ASCII.
_CHARACTER_BYTES = 4


def json_bytes(document: bytes) -> int:
    """Return a bound on the memory of the values in a JSON document.

    Each value but the first follows a bracket, a comma or a colon. Those in texts are counted, too.

    Raises:
        RequestFailure: It may have too many values.
    """
    objects, lists = document.count(b"{"), document.count(b"[")
    values = 1 + objects + lists + document.count(b",") + document.count(b":")
    if values > _MOST_VALUES:
        raise RequestFailure(Status.TOO_LARGE, f"the body may have {values} values of JSON, more than {_MOST_VALUES}")
    width = 1 if document.isascii() and b"\\u" not in document else _CHARACTER_BYTES
    return width * len(document) + _VALUE_BYTES * values + _LIST_BYTES * lists + _OBJECT_BYTES * objects


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
