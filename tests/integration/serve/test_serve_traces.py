"""Traces: the spans that a collector receives."""

from __future__ import annotations

import http.server
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from chrion.serving.server.grpc_codec import SERVICE, message
from local_server import local_server
from model_repository import product, put
from server_client import infer_body

ROWS = [[1.0, 2.0, 3.0, 4.0]]
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def collector() -> Iterator[tuple[str, list[Any]]]:
    """Run a collector; return its URL and the spans that it receives."""
    messages = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    spans: list[Any] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/v1/traces":
                found = messages.ExportTraceServiceRequest.FromString(body)
                spans.extend(s for r in found.resource_spans for scope in r.scope_spans for s in scope.spans)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", spans
    server.shutdown()
    thread.join()
    server.server_close()


def test_spans_of_requests(tmp_path: Path, collector: tuple[str, list[Any]]) -> None:
    """A request belongs to the trace of its client, and contains load, queue and compute, one after another."""
    url, spans = collector
    put(tmp_path, "m", product())
    with local_server(tmp_path, otlp=url) as server:
        parent = f"00-{TRACE}-{SPAN}-01"
        for _ in range(2):  # the first waits for the load
            assert server.get("/v2/models/m/infer", infer_body(ROWS), traceparent=parent)[0] == 200
        assert server.get("/v2/models/nothing/infer", infer_body(ROWS))[0] == 404
        with grpc.insecure_channel(f"127.0.0.1:{server.grpc}") as channel:
            kind = message("ModelInferRequest")
            call = channel.unary_unary(
                f"/{SERVICE}/ModelInfer", kind.SerializeToString, message("ModelInferResponse").FromString
            )
            request = kind(model_name="m", id="7")
            request.inputs.add(name="x", datatype="FP32", shape=[1, 4]).contents.fp32_contents.extend(ROWS[0])
            call(request, metadata=(("traceparent", parent),), timeout=20)
    by_id = {span.span_id: span for span in spans}
    roots = [span for span in spans if span.parent_span_id not in by_id]
    assert sorted(span.name for span in roots) == ["infer m", "infer m", "infer m", "infer nothing"]
    for root in roots:
        children = sorted((s for s in spans if s.parent_span_id == root.span_id), key=lambda s: s.start_time_unix_nano)
        if root.name == "infer nothing":
            assert root.status.code == 2
            assert "unknown model" in root.status.message
            assert not children
            continue
        assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, SPAN)
        assert [child.name for child in children][-2:] == ["queue", "compute"]
        assert children[0].start_time_unix_nano == root.start_time_unix_nano
        for earlier, later in itertools.pairwise(children):
            assert earlier.end_time_unix_nano == later.start_time_unix_nano
        assert children[-1].end_time_unix_nano <= root.end_time_unix_nano
    assert sum(span.name == "load" for span in spans) == 1
    assert [a.value.string_value for r in roots for a in r.attributes if a.key == "request_id"].count("7") == 1
