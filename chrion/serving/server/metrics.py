"""Prometheus metrics, with Triton's names and labels where Triton has such a metric."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterator
from itertools import accumulate
from typing import Any

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.utils import floatToGoString

from chrion.common.version import __version__
from chrion.serving.server.core import ServingCore
from chrion.serving.server.core_records import Served
from chrion.serving.server.documents import reserved_bytes
from chrion.serving.server.repository import Key
from chrion.serving.server.statistics import BUCKETS_S, Histogram, ModelStatistics

_MODEL = ("model", "version")
#: Values of the label ``le`` of the buckets of histograms.
_LIMITS = [*map(floatToGoString, BUCKETS_S), "+Inf"]
#: prometheus_client names counters NAME_total; Triton's names have no such ending.
_ENDING = re.compile(r"^(# (?:HELP|TYPE) nv_\w+)_total |^(nv_\w+)_total(?=[{ ])", re.MULTILINE)


def render_metrics(core: ServingCore, unserved: Collection[Key]) -> bytes:
    """Return all metrics in Prometheus's text format.

    Args:
        core: The server.
        unserved: The versions that cannot be served.
    """
    registry = prometheus_client.CollectorRegistry()
    registry.register(_Collector(core, unserved))
    prometheus_client.ProcessCollector(registry=registry)
    text = prometheus_client.generate_latest(registry).decode()
    return _ENDING.sub(lambda m: f"{m[1]} " if m[1] else m[2], text).encode()


class _Collector:
    """Reads the metrics when they are asked for."""

    def __init__(self, core: ServingCore, unserved: Collection[Key]) -> None:
        self._core = core
        self._unserved = unserved

    def collect(self) -> Iterator[Any]:
        """Yield all metrics."""
        yield from self._models()
        yield from self._memory()
        yield from self._server()

    def _models(self) -> Iterator[Any]:
        def us(ns: int) -> float:
            return ns / 1000

        counters: dict[str, tuple[str, Callable[[ModelStatistics], float]]] = {
            "nv_inference_request_success": ("Successful requests", lambda s: s.success.count),
            "nv_inference_request_failure": ("Failed requests", lambda s: s.fail.count),
            "nv_inference_count": ("Rows of successful requests", lambda s: s.inferences),
            "nv_inference_exec_count": ("Batches that ran", lambda s: s.executions),
            "nv_inference_request_duration_us": ("Time from arrival to end", lambda s: us(s.success.ns)),
            "nv_inference_queue_duration_us": ("Time from arrival to start", lambda s: us(s.queue.ns)),
            "nv_inference_compute_input_duration_us": ("Time of joining inputs", lambda s: us(s.compute_input.ns)),
            "nv_inference_compute_infer_duration_us": ("Time of inference", lambda s: us(s.compute_infer.ns)),
            "nv_inference_compute_output_duration_us": ("Time of splitting outputs", lambda s: us(s.compute_output.ns)),
            "chrion_request_cancelled": ("Requests whose client left", lambda s: s.cancelled.count),
            "chrion_slo_violations": ("Requests that took longer than the SLO", lambda s: s.slo_violations),
            "chrion_model_loads": ("Loads into memory", lambda s: s.loads),
            "chrion_model_load_failures": ("Failed loads", lambda s: s.load_failures),
            "chrion_model_load_seconds": ("Time of loads", lambda s: s.load_ms / 1000),
            "chrion_model_loaded_bytes": ("Memory of loaded variants", lambda s: s.loaded_bytes),
            "chrion_model_evictions": ("Evictions from memory", lambda s: s.evictions),
            "chrion_model_shrinks": ("Replacements by a smaller variant", lambda s: s.shrinks),
            "chrion_model_grows": ("Replacements by a larger variant", lambda s: s.grows),
        }
        histograms: dict[str, tuple[str, Callable[[ModelStatistics], Histogram]]] = {
            "chrion_request_seconds": ("Time from arrival to end", lambda s: s.total_times),
            "chrion_request_queue_seconds": ("Time of waiting for cores", lambda s: s.queue_times),
            "chrion_request_load_seconds": ("Time of waiting for the load of the model", lambda s: s.load_times),
            "chrion_request_compute_seconds": ("Time of running", lambda s: s.compute_times),
        }
        models = sorted(self._core.models.items())
        for name, (text, times) in histograms.items():
            histogram = HistogramMetricFamily(name, text, labels=_MODEL)
            for key, served in models:
                observed = times(served.statistics)
                buckets = list(zip(_LIMITS, accumulate(observed.counts), strict=True))
                histogram.add_metric(key, buckets, observed.sum_ms / 1000)
            yield histogram
        for name, (text, read) in counters.items():
            family = CounterMetricFamily(name, text, labels=_MODEL)
            for key, served in models:
                family.add_metric(key, read(served.statistics))
            yield family
        gauges: dict[str, tuple[str, Callable[[Served], float]]] = {
            "nv_inference_pending_request_count": ("Requests that wait", self._core.waiting_for),
            "chrion_model_blocks": (
                "Blocks of a model in memory; 0 if it runs whole",
                lambda served: self._core.blocks.count(served.number),
            ),
        }
        for name, (text, state) in gauges.items():
            family = GaugeMetricFamily(name, text, labels=_MODEL)
            for key, served in models:
                family.add_metric(key, state(served))
            yield family
        ready = GaugeMetricFamily("chrion_model_ready", "1 if requests for a version can be served", labels=_MODEL)
        for key in sorted({*self._core.models, *self._unserved}):
            version = self._core.models.get(key)
            ready.add_metric(key, version is not None and self._core.is_ready(version))
        yield ready

    def _memory(self) -> Iterator[Any]:
        manager = self._core.manager
        resident = GaugeMetricFamily(
            "chrion_model_resident_bytes", "Memory reserved for a model", labels=(*_MODEL, "device", "variant")
        )
        for key, served in sorted(self._core.models.items()):
            _, variant = self._core.place(served)
            for device, size in reserved_bytes(self._core, served).items():
                resident.add_metric((*key, device, variant), size)
        yield resident
        used = GaugeMetricFamily("chrion_memory_used_bytes", "Memory reserved for models", labels=["device"])
        budget = GaugeMetricFamily("chrion_memory_budget_bytes", "Memory for models", labels=["device"])
        for device, size in manager.budgets.items():
            used.add_metric([device], manager.used(device))
            budget.add_metric([device], size)
        yield used
        yield budget

    def _server(self) -> Iterator[Any]:
        core = self._core
        busy = CounterMetricFamily(
            "chrion_lane_busy_seconds", "Time for which a core was leased, or ran blocks", labels=["core"]
        )
        for core_number, ms in core.busy_ms.items():
            busy.add_metric([str(core_number)], ms / 1000)
        yield busy
        yield CounterMetricFamily(
            "chrion_slot_busy_seconds", "Time for which the accelerator was in use", value=core.slot_busy_ms / 1000
        )
        yield GaugeMetricFamily("chrion_lane_cores", "Cores that requests may lease", value=len(core.lane_busy_ms))
        policies = core.manager.policies
        labels = ["version", "eviction", "load_order", "admission", "prefetch", "max_waiting", "keep_alive_s"]
        info = GaugeMetricFamily("chrion_server_info", "Version and policies", labels=labels)
        values = policies.eviction, policies.load_order, policies.admission, str(policies.prefetch).lower()
        info.add_metric([__version__, *values, str(policies.max_waiting), str(policies.keep_alive_s)], 1)
        yield info
        refused = CounterMetricFamily("chrion_requests_refused", "Refused requests", labels=["reason"])
        for reason, count in core.refused.items():
            refused.add_metric([reason.name.lower()], count)
        yield refused
        yield GaugeMetricFamily("chrion_request_bytes", "Memory of requests in flight", value=core.account.used)
        yield GaugeMetricFamily("chrion_uptime_seconds", "Age of the server", value=time.time() - core.started_s)
