"""JSON logs, one object a line on stderr, and the entries for requests of both protocols."""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextvars import ContextVar, copy_context
from typing import TypeVar

from chrion.serving.server.failures import Status

Result = TypeVar("Result")

#: Fields of the entries of libraries.
_subject: ContextVar[Mapping[str, object] | None] = ContextVar("subject", default=None)


class JsonFormatter(logging.Formatter):
    """Formats a record as a JSON object: time, level, logger, event, and the record's ``fields``.

    A record of a library has the event ``message``, its text, and the fields of :func:`run_about`.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the object as text without line breaks."""
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        content: dict[str, object] = {"time": at, "level": record.levelname.lower(), "logger": record.name}
        if record.name == "chrion.server":
            content["event"] = record.getMessage()
        else:
            content |= {"event": "message", "message": record.getMessage(), **(_subject.get() or {})}
        content |= getattr(record, "fields", {})
        if record.exc_info:
            content["exception"] = self.formatException(record.exc_info)
        return json.dumps(content, default=str)


def run_about(fields: Mapping[str, object], work: Callable[[], Result]) -> Result:
    """Run a function, and give the entries of libraries meanwhile these fields."""
    context = copy_context()
    context.run(_subject.set, fields)
    return context.run(work)


def set_up_logs() -> None:
    """Write the records of Chrion, of uvicorn and of gRPC as JSON on stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter())
    for name in ("chrion", "uvicorn", "grpc"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
    server = logging.getLogger("chrion.server")
    server.setLevel(min(logging.INFO, logging.getLogger("chrion").level or logging.INFO))
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


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
