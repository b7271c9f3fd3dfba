"""Traces of requests by OpenTelemetry (extra ``otel``): a span for each request, and in it load, queue and compute."""

from __future__ import annotations

import time
from collections.abc import Mapping

from chrion.serving.server.statistics import RequestTiming

_SERVICE = "chrion"


class RequestTracer:
    """Sends spans to a collector, in the background and in batches.

    Args:
        endpoint: The collector: ``http://HOST:4318``.
    """

    def __init__(self, endpoint: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource  # noqa: PLC0415
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator  # noqa: PLC0415

        self._provider = TracerProvider(resource=Resource.create({SERVICE_NAME: _SERVICE}))
        exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer(_SERVICE)
        self._propagator = TraceContextTextMapPropagator()

    def add(
        self,
        carrier: Mapping[str, str],
        attributes: Mapping[str, str],
        began_ns: int,
        timing: RequestTiming | None = None,
        failure: str = "",
    ) -> None:
        """Add the spans of a request that has ended.

        Args:
            carrier: Headers of the request; ``traceparent`` names the span that it belongs to (W3C Trace Context).
            attributes: Attributes of the request's span; ``model`` is part of its name.
            began_ns: Time of its arrival, in ns since 1970.
            timing: Where its time went; None for a request that failed.
            failure: Why it failed; empty if it did not.
        """
        from opentelemetry import trace  # noqa: PLC0415

        parent = self._propagator.extract(carrier)
        name = f"infer {attributes.get('model', '')}".rstrip()
        span = self._tracer.start_span(
            name, parent, trace.SpanKind.SERVER, attributes=dict(attributes), start_time=began_ns
        )
        inside, at_ns = trace.set_span_in_context(span), began_ns
        parts = [("load", timing.load_ms), ("queue", timing.queue_ms), ("compute", timing.compute_ms)] if timing else []
        for part, took_ms in parts:
            if took_ms is not None:
                child = self._tracer.start_span(part, inside, start_time=at_ns)
                at_ns += round(took_ms * 1e6)
                child.end(at_ns)
        if failure:
            span.set_status(trace.Status(trace.StatusCode.ERROR, failure))
        span.end(max(time.time_ns(), at_ns))

    def close(self) -> None:
        """Send what is left, and end the background thread."""
        self._provider.shutdown()
