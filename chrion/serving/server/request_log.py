"""Entries of the log for requests of both protocols."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

log = logging.getLogger("chrion.server")

#: Maximum characters of a text in an entry: parts of it may be the client's, which must not fill the log.
_MAX_TEXT = 300


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
