"""A cache of measurements that several processes use at the same time."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from chrion.profiler.cache import MeasurementCache
from chrion.profiler.profiles import OperatorCost


def _write_and_read(start: int) -> int:
    cache, whole = MeasurementCache("shared", 1), 0
    for count in range(300):
        cache.put("s", OperatorCost("Relu", (float(start + count),), bytes=10**6))
        found = cache.get("s")
        whole += found is not None and found.op_type == "Relu"
    return whole


def test_many_processes_share_a_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """While four processes write one file, each always reads a complete one, and no temporary file remains."""
    monkeypatch.setenv("CHRION_CACHE", str(tmp_path))
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        assert pool.map(_write_and_read, range(4)) == [300] * 4
    assert len([p for p in tmp_path.rglob("*") if p.is_file()]) == 1
