"""Metrics of generation: times to tokens, batches, ends of requests, and slots for keys and values."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from chrion.generation import Token
from chrion.generation.streams import Events
from chrion.serving.server.generators import ServedGenerator
from chrion.serving.server.statistics import BUCKETS_S


class GenerationMetrics:
    """Histograms of the times of tokens, and the numbers of the generators.

    Args:
        served: The models by name.
    """

    def __init__(self, served: Mapping[str, ServedGenerator]) -> None:
        self._registry = prometheus_client.CollectorRegistry()
        self._registry.register(_Collector(served))
        self._first, self._between = (
            prometheus_client.Histogram(name, text, ["model"], buckets=BUCKETS_S, registry=self._registry)
            for name, text in (
                ("chrion_time_to_first_token_seconds", "Time from the arrival of a request to its first token"),
                ("chrion_time_between_tokens_seconds", "Time from one token to the next"),
            )
        )

    def render(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        text: bytes = prometheus_client.generate_latest(self._registry)
        return text

    async def timed(self, model: str, events: Events, arrival_s: float) -> AsyncIterator[Token]:
        """Yield the tokens of a stream, and observe when they were generated, however late they are read.

        Args:
            model: The name of the model.
            events: The tokens.
            arrival_s: The time of the arrival of the request, in seconds of ``time.perf_counter``.
        """
        before, histogram = arrival_s, self._first
        async for token in events:
            if token.id is not None:  # text that was held back until the end is no token
                histogram.labels(model).observe(token.time - before)
                before, histogram = token.time, self._between
            yield token


class _Collector:
    """Reads the numbers of the generators when they are asked for."""

    def __init__(self, served: Mapping[str, ServedGenerator]) -> None:
        self._served = served

    def collect(self) -> Iterator[Any]:
        """Yield all metrics."""
        by_model = {name: served.generator.statistics() for name, served in sorted(self._served.items())}
        counters = {
            "chrion_generation_iterations": ("Iterations", "iterations"),
            "chrion_generation_batched_requests": ("Requests of all iterations", "iteration_requests"),
            "chrion_generated_tokens": ("Tokens", "generated_tokens"),
            "chrion_generation_finished_requests": ("Requests that have ended", "finished_requests"),
        }
        gauges = {
            "chrion_generation_requests": ("Requests that run or wait", "requests"),
            "chrion_kv_reserved_slots": ("Tokens whose keys and values are reserved", "reserved_slots"),
            "chrion_kv_slots": ("Tokens whose keys and values fit", "slots"),
        }
        for kind, families in ((CounterMetricFamily, counters), (GaugeMetricFamily, gauges)):
            for name, (text, field) in families.items():
                family = kind(name, text, labels=["model"])
                for model, statistics in by_model.items():
                    family.add_metric([model], getattr(statistics, field))
                yield family
        ends = CounterMetricFamily("chrion_generation_finish_reasons", "Why requests ended", labels=["model", "reason"])
        for model, statistics in by_model.items():
            for reason, count in statistics.finish_reasons.items():
                ends.add_metric([model, reason], count)
        yield ends
