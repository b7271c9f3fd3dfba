"""The priority of a request: its place among the waiting requests of its model, by both protocols."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from chrion.serving.server.grpc_codec import SERVICE, message
from chrion.serving.server.statistics import RequestTiming
from local_server import LocalServer, local_server
from server_client import wait_until


def by_rest(server: LocalServer, priority: Any) -> float:
    """Send a request; return the time at which it started, in seconds."""
    sent_s = time.monotonic()
    status, found, headers = server.infer("slow", [3e4], parameters={"priority": priority})
    assert status == 200, found
    return sent_s + queue_s(headers["server-timing"])


def by_grpc(server: LocalServer, priority: int) -> float:
    """Send a request; return the time at which it started, in seconds."""
    request = message("ModelInferRequest")(model_name="slow")
    entry = request.inputs.add(name="x", datatype="FP32", shape=[1])
    entry.contents.fp32_contents.append(3e4)
    request.parameters["priority"].uint64_param = priority
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc}") as channel:
        sent_s = time.monotonic()
        _, call = channel.unary_unary(f"/{SERVICE}/ModelInfer").with_call(request.SerializeToString(), timeout=60)
    return sent_s + queue_s(dict(call.trailing_metadata())["server-timing"])


def queue_s(timing: str) -> float:
    """Return the time in the queue in a header ``Server-Timing``, in seconds."""
    found = RequestTiming.of_header(timing)
    assert found is not None
    return found.queue_ms / 1000


@pytest.mark.parametrize("send", [by_rest, by_grpc])
def test_requests_start_in_the_order_of_their_priorities(busy_root: Path, send: Any) -> None:
    """1 is the first, a request without a priority the last, whenever they came."""
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1e15]}]}
    with local_server(busy_root) as server, ThreadPoolExecutor(3) as clients:
        with server.in_flight("/v2/models/slow/infer", body):
            wait_until(server.computes)
            asked = []
            for waiting, priority in enumerate((0, 2, 1), 1):
                asked.append(clients.submit(send, server, priority))
                wait_until(lambda: server.metric("nv_inference_pending_request_count") == waiting)  # noqa: B023
        started = [one.result() for one in asked]
    assert started == sorted(started, reverse=True)


@pytest.mark.parametrize("priority", [-1, 1.5, True, "1", None, 2**63, [1]])
def test_what_is_no_priority_is_refused(server: LocalServer, priority: Any) -> None:
    """A priority is a whole number of at least 0."""
    status, found, _ = server.infer("product", [[1, 2, 3, 4]], parameters={"priority": priority})
    assert (status, "'priority': expected a whole number" in found["error"]) == (400, True), found


def test_texts_have_no_priority(decoders: LocalServer) -> None:
    """A priority that would change nothing is refused, and 0 is none."""
    for priority, expected in ((0, 200), (1, 501)):
        body = {"text_input": "a", "max_tokens": 1, "parameters": {"priority": priority}}
        status, found, _ = decoders.get("/v2/models/llama/generate", body)
        assert status == expected, found
