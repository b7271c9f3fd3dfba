"""Entries of the log for requests of both protocols."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping

log = logging.getLogger("chrion.server")

#: Maximum characters of a text in an entry: parts of it may be the client's, which must not fill the log.
_MAX_TEXT = 300
#: Seconds between two entries above DEBUG for requests that failed by the client's fault, with one status.
_SAMPLE_S = 60.0


class ClientFailures:
    """Chooses the entries of failures by the client's fault that are above DEBUG: one a minute for each status.

    They are events of clients, as many as these like, so that all of them would bury those of the server. The field
    ``omitted`` of an entry has the number of those with its status since the one before.
    """

    def __init__(self) -> None:
        self._next_s: dict[object, float] = {}
        self._omitted: Counter[object] = Counter()

    def choose_level(self, status: object) -> tuple[int, dict[str, object]]:
        """Count a failure with a status; return the level of its entry, and further fields."""
        now_s = time.monotonic()
        if now_s < self._next_s.get(status, now_s):
            self._omitted[status] += 1
            return logging.DEBUG, {}
        self._next_s[status] = now_s + _SAMPLE_S
        omitted = self._omitted.pop(status, 0)
        return logging.INFO, {"omitted": omitted} if omitted else {}


def log_request(level: int, fields: Mapping[str, object], began_s: float, error: str = "") -> None:
    """Log a request that has been answered.

    Args:
        level: The level of the entry.
        fields: What the entry says of the request and its answer.
        began_s: Time at which the request began, of ``time.monotonic``.
        error: The text of the answer to a request that failed.
    """
    if not log.isEnabledFor(level):
        return
    duration_ms = round((time.monotonic() - began_s) * 1000, 3)
    texts = {name: value[:_MAX_TEXT] if isinstance(value, str) else value for name, value in fields.items()}
    failed = {"error": error[:_MAX_TEXT]} if error else {}
    log.log(level, "request", extra={"fields": texts | {"duration_ms": duration_ms} | failed})
