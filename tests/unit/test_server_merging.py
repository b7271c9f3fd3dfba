"""Documents of several replicas, merged."""

from __future__ import annotations

from typing import Any

import pytest

from chrion.serving.server import merging


def entry(name: str, count: int, last: int, sizes: dict[int, int]) -> dict[str, Any]:
    """Return statistics of a model."""
    duration = {"count": count, "ns": 10 * count}
    batches = [{"batch_size": size, "compute_infer": {"count": n, "ns": n}} for size, n in sizes.items()]
    return {
        "name": name,
        "version": "1",
        "last_inference": last,
        "inference_count": count,
        "inference_stats": {"success": duration},
        "batch_stats": batches,
        "memory_usage": [{"type": "CPU", "id": 0, "byte_size": count}],
    }


def test_statistics_are_added() -> None:
    """Counts and times are sums, the last inference is the latest one, and batches of a size are added."""
    found = merging.sum_statistics(
        [[entry("a", 1, 5, {1: 1, 4: 2})], [entry("a", 2, 3, {4: 1, 8: 1}), entry("b", 1, 1, {})]]
    )
    assert [model["name"] for model in found] == ["a", "b"]
    first = found[0]
    assert (first["version"], first["last_inference"], first["inference_count"]) == ("1", 5, 3)
    assert first["inference_stats"] == {"success": {"count": 3, "ns": 30}}
    assert [(b["batch_size"], b["compute_infer"]["count"]) for b in first["batch_stats"]] == [(1, 1), (4, 3), (8, 1)]
    assert [used["byte_size"] for used in first["memory_usage"]] == [1, 2]


def test_metrics_are_one_valid_text() -> None:
    """Samples get the labels of their replica, families stay together, and Prometheus's own parser reads the text."""
    parser = pytest.importorskip("prometheus_client.parser")
    one = merging.gauge("up", "Whether it is up", 1) + merging.counter("seen", "Seen", 3)
    one += '# HELP load Load\n# TYPE load gauge\nload{model="x y",version="1"} 0.5\n'
    text = merging.merge_metrics(
        [({"replica": "a", "node": "n"}, one), ({"replica": "b", "node": "n"}, one), ({}, one)]
    )
    families = {family.name: family for family in parser.text_string_to_metric_families(text)}
    assert list(families) == ["up", "seen", "load"]
    samples = families["load"].samples
    assert [sample.labels.get("replica") for sample in samples] == ["a", "b", None]
    assert all((sample.labels["model"], sample.value) == ("x y", 0.5) for sample in samples)
    assert [sample.value for sample in families["seen"].samples] == [3, 3, 3]


def test_indices_and_snapshots() -> None:
    """A version is ready if it is on one replica; the models of a snapshot say where they are."""
    bad, good = ({"name": "a", "version": "1", "state": state, "reason": ""} for state in ("UNAVAILABLE", "READY"))
    assert merging.merge_indices([[bad], [good]]) == merging.merge_indices([[good], [bad]]) == [good]
    own = {
        "devices": {"host": {"used": 1, "budget": 2}},
        "cores": {"count": 2, "busy_ms": 1.5},
        "models": [{"name": "a", "version": "1"}],
        "unserved": [{"name": "b", "version": "1", "reason": "damaged"}],
        "uptime_s": 3.0,
    }
    found = merging.merge_snapshots({"n/r1": own, "n/r0": own}, draining=False)
    assert list(found["devices"]) == ["n/r1 host", "n/r0 host"]
    assert [model["replica"] for model in found["models"]] == ["n/r0", "n/r1"]
    assert found["cores"] == {"count": 4, "busy_ms": 3.0}
    assert found["unserved"] == own["unserved"]
    assert merging.merge_snapshots({}, draining=False)["uptime_s"] == 0
