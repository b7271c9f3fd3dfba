"""What tests ask of a server, wherever it runs."""

from __future__ import annotations

import json
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Body = bytes | Sequence[bytes] | None
Answer = tuple[int, Any, Mapping[str, str]]


class ServerClient(ABC):
    """Sends requests to a server.

    Attributes:
        grpc: The port of gRPC; 0 if there is none.
    """

    grpc: int

    @abstractmethod
    def send(self, method: str, path: str, body: Body, headers: Mapping[str, str]) -> Answer:
        """Send a request, several parts of a body in chunks; return status, content, and headers in lower case."""

    def get(self, path: str, body: Any = None, **headers: str) -> Answer:
        """Send a request, with a body by POST; return status, JSON or bytes, and headers."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        status, content, found = self.send("GET" if data is None else "POST", path, data, named)
        return status, json.loads(content) if found.get("content-type") == "application/json" else content, found

    def infer(self, model: str, x: Any, datatype: str = "FP32", **more: Any) -> Answer:
        """Send an inference request with one input x."""
        return self.get(f"/v2/models/{model}/infer", infer_body(x, datatype) | more)

    def metric(self, name: str, *, missing_ok: bool = False, **labels: str) -> float:
        """Return the sum of a metric's samples that have some labels."""
        total, found = 0.0, missing_ok
        for line in self.get("/metrics")[1].decode().splitlines():
            match = re.fullmatch(rf"{name}(?:\{{(.*)\}})? (\S+)", line)
            if match and all(f'{key}="{value}"' in (match[1] or "") for key, value in labels.items()):
                total, found = total + float(match[2]), True
        assert found, f"no {name} with {labels}"
        return total

    def live_status(self) -> int:
        """Return the status of the answer whether the server is live; 0 if there is none."""
        try:
            return self.get("/v2/health/live")[0]
        except OSError:
            return 0

    def computes(self) -> bool:
        """Return whether requests for inference are in flight and none of them waits."""
        return self.metric("chrion_request_bytes") > 0 and self.metric("nv_inference_pending_request_count") == 0


def infer_body(x: Any, datatype: str = "FP32") -> dict[str, Any]:
    """Return an inference request with one input x."""
    array = np.asarray(x)
    entry = {"name": "x", "datatype": datatype, "shape": list(array.shape), "data": array.ravel().tolist()}
    return {"inputs": [entry]}


def wait_until(condition: Callable[[], Any], limit_s: float = 60.0) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "the condition did not hold in time"
        time.sleep(0.01)
