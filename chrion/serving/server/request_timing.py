"""The times of a request, and the header that has them."""

from __future__ import annotations

import re
from dataclasses import dataclass

#: The header with the times of a request (W3C).
SERVER_TIMING = "Server-Timing"
_TIMING = re.compile(r"(queue|load|compute);dur=(\d+(?:\.\d+)?)")


@dataclass(frozen=True, slots=True)
class RequestTiming:
    """Where the time of a request went: waiting for cores, waiting for the model's load, and running."""

    queue_ms: float
    #: None if the model was in memory.
    load_ms: float | None
    compute_ms: float

    def header(self) -> str:
        """Return the value of the header :data:`SERVER_TIMING`."""
        load = "" if self.load_ms is None else f"load;dur={self.load_ms:.3f}, "
        return f"queue;dur={self.queue_ms:.3f}, {load}compute;dur={self.compute_ms:.3f}"

    @classmethod
    def of_header(cls, text: str) -> RequestTiming | None:
        """Return the times of such a header; None without them."""
        parts = {name: float(ms) for name, ms in _TIMING.findall(text)}
        return cls(parts["queue"], parts.get("load"), parts["compute"]) if {"queue", "compute"} <= {*parts} else None
