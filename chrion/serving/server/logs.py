"""JSON logs: one object a line on stderr."""

from __future__ import annotations

import json
import logging
import time


class JsonFormatter(logging.Formatter):
    """Formats a record as a JSON object: time, level, logger, event, and the record's ``fields``."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the object as text without line breaks."""
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        content = {"time": at, "level": record.levelname.lower(), "logger": record.name, "event": record.getMessage()}
        content |= getattr(record, "fields", {})
        if record.exc_info:
            content["exception"] = self.formatException(record.exc_info)
        return json.dumps(content, default=str)


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
