"""Detection of interference, with given measurements."""

from __future__ import annotations

import pytest

from chrion.cores import physical_cores
from chrion.profiler import interference
from chrion.profiler.interference import CoreMonitor


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the list of the next measurements in ms; measurements after the last of them take 1 ms."""
    coming: list[float] = []
    monkeypatch.setattr(interference, "run_on_cores", lambda *_: [coming.pop(0) if coming else 1.0])
    return coming


def test_slow_arithmetic_is_interference(measurements: list[float]) -> None:
    """Arithmetic that takes half as long again is interference, and a variation of 5 % is not."""
    monitor = CoreMonitor([0], patience_s=0.0)
    measurements += [1.5, 1.05, 1.0, 2.0]
    assert [monitor.has_interference() for _ in range(4)] == [True, False, False, True]


def test_a_faster_measurement_becomes_the_reference(measurements: list[float]) -> None:
    """A faster measurement replaces the reference, since all earlier ones may have had interference."""
    monitor = CoreMonitor([0], patience_s=0.0)
    measurements += [0.5, 1.0]
    assert [monitor.has_interference() for _ in range(2)] == [False, True]


def test_waiting_ends_with_the_interference(measurements: list[float]) -> None:
    """The wait returns true when the interference has ended."""
    monitor = CoreMonitor([0], patience_s=60.0)
    measurements += [2.0, 2.0, 1.0, 2.0]
    assert monitor.wait()
    assert measurements == [2.0]


def test_waiting_is_limited(measurements: list[float]) -> None:
    """Without patience, each wait takes one measurement."""
    monitor = CoreMonitor([0], patience_s=0.0)
    measurements += [2.0, 2.0, 2.0]
    assert not monitor.wait()
    assert not monitor.wait()
    assert measurements == [2.0]


def test_a_real_measurement_takes_time() -> None:
    """The measured arithmetic runs on all cores of this machine."""
    monitor = CoreMonitor(physical_cores(), patience_s=0.0)
    assert monitor.cores == physical_cores()
    assert monitor.measure_ms() > 0.0
