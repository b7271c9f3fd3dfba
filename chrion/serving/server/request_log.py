"""Entries of the log for requests of both protocols."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping

from chrion.serving.server.failures import Status

log = logging.getLogger("chrion.server")

#: Maximum characters of a text in an entry: parts of it may be the client's, which must not fill the log.
_MAX_TEXT = 300
#: Seconds between two entries above DEBUG for failed requests with one status.
_SAMPLE_S = 60.0


class FailureSampler:
    """Chooses the entries of failed requests that are above DEBUG: one a minute for each status, and all of status 500.

    All others are as many as clients like (wrong requests, models that are not loaded, an overloaded server), and would
    bury the events of the server, which are logged by themselves. The field ``omitted`` of an entry has the number of
    failures with its status since the one before.
    """

    def __init__(self) -> None:
        self._next_s: dict[int, float] = {}
        self._omitted: Counter[int] = Counter()

    def choose_level(self, status: int) -> tuple[int, dict[str, object]]:
        """Count a failure with a status of HTTP; return the level of its entry, and further fields."""
        level, now_s = logging.INFO if status < 500 else logging.WARNING, time.monotonic()
        if status == Status.INTERNAL.http:
            return level, {}
        if now_s < self._next_s.get(status, now_s):
            self._omitted[status] += 1
            return logging.DEBUG, {}
        self._next_s[status] = now_s + _SAMPLE_S
        omitted = self._omitted.pop(status, 0)
        return level, {"omitted": omitted} if omitted else {}


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
