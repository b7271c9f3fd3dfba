"""JSON logs: one object a line on stderr."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar, copy_context
from typing import TypeVar

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
