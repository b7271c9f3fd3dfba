"""The histograms of request times: they agree with what each answer says, and end with their model."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

import chrion
from chrion.serving.server.statistics import RequestTiming
from local_server import LocalServer, local_server
from model_repository import identity, product, put
from server_client import wait_until

ROWS = np.ones((1, 4), np.float32)
PARTS = ("queue", "load", "compute")


def histograms(server: LocalServer, model: str) -> dict[str, dict[float, float]]:
    """Return the cumulative counts of a model's histograms by limit in seconds, as Prometheus reads them."""
    found: dict[str, dict[float, float]] = defaultdict(dict)
    for family in text_string_to_metric_families(server.get("/metrics")[1].decode()):
        for sample in family.samples:
            if family.type == "histogram" and sample.labels["model"] == model and sample.name.endswith("_bucket"):
                assert sample.labels["version"] == "1"
                found[family.name][float(sample.labels["le"])] = sample.value
    return found


def test_histograms_agree_with_the_times_of_answers(tmp_path: Path) -> None:
    """Counts and sums are those of the header Server-Timing, and only the first request has waited for a load."""
    put(tmp_path, "m", product())
    with local_server(tmp_path) as server:
        assert server.infer("m", np.ones((1, 5), np.float32))[0] == 400
        times = [RequestTiming.of_header(server.infer("m", ROWS)[2]["server-timing"]) for _ in range(8)]
        for part in PARTS:
            own = [ms for time in times if (ms := getattr(time, f"{part}_ms")) is not None]
            assert len(own) == (1 if part == "load" else 8)
            assert server.metric(f"chrion_request_{part}_seconds_count", model="m") == len(own)
            found_s = server.metric(f"chrion_request_{part}_seconds_sum", model="m")
            assert found_s == pytest.approx(sum(own) / 1000, abs=1e-5)
            buckets = histograms(server, "m")[f"chrion_request_{part}_seconds"]
            for limit, count in buckets.items():  # the header is rounded
                least, most = (sum(ms <= 1000 * limit + error for ms in own) for error in (-1e-3, 1e-3))
                assert least <= count <= most
        totals = histograms(server, "m")["chrion_request_seconds"]
        assert [*totals.values()] == sorted(totals.values())
        assert totals[float("inf")] == 8
        total_us = server.metric("nv_inference_request_duration_us", model="m")
        assert server.metric("chrion_request_seconds_sum", model="m") == pytest.approx(total_us / 1e6, rel=1e-3)


def test_a_request_whose_answer_exceeds_the_memory_of_requests_has_failed(tmp_path: Path) -> None:
    """It was run, but its client gets no outputs: as JSON they would take 1.2 MB of the 1 MB for all requests."""
    put(tmp_path, "m", identity("FP32"))
    with local_server(tmp_path, request_bytes=1_000_000) as server:
        assert server.infer("m", ROWS)[0] == 200
        assert server.infer("m", np.ones((1, 20_000), np.float32))[0] == 413
        found = {
            name: server.metric(f"nv_inference_{name}") for name in ("request_success", "request_failure", "count")
        }
        assert found == {"request_success": 1, "request_failure": 1, "count": 1}
        assert server.metric("nv_inference_exec_count") == 2
        assert server.metric("chrion_request_seconds_count", model="m") == 1


def test_the_readiness_of_versions(tmp_path: Path) -> None:
    """Versions that cannot be served have the value 0: damaged ones, and those that do not fit."""
    put(tmp_path, "m", product())
    put(tmp_path, "m", b"not a model", version=2)
    put(tmp_path, "large", product(1300))
    with local_server(tmp_path, memory_mb=10.0) as server:
        for (model, version), value in {("m", "1"): 1, ("m", "2"): 0, ("large", "1"): 0}.items():
            assert server.metric("chrion_model_ready", model=model, version=version) == value
        assert server.metric("chrion_server_info", version=chrion.__version__) == 1


def test_a_model_that_is_removed_has_no_series_any_more(tmp_path: Path) -> None:
    """The number of series is bounded by that of the models which are served."""
    put(tmp_path, "m", product())
    put(tmp_path, "other", product())
    with local_server(tmp_path, control="explicit", load=("*",)) as server:
        assert [server.infer(name, ROWS)[0] for name in ("m", "other")] == [200, 200]
        assert len(histograms(server, "m")) == 4
        assert server.get("/v2/repository/models/m/unload", {})[0] == 200
        wait_until(lambda: not histograms(server, "m"))
        assert len(histograms(server, "other")) == 4
