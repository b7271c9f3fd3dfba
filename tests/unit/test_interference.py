"""Detection of interference, with given measurements."""

from __future__ import annotations

import pytest

from chrion.machine.cores import physical_cores
from chrion.machine.cpu_use import CpuUse
from chrion.profiler import interference as interference_module
from chrion.profiler.interference import CoreMonitor, UsageMonitor


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the list of the next measurements in ms; measurements after the last of them take 1 ms."""
    coming: list[float] = []
    monkeypatch.setattr(interference_module, "run_on_cores", lambda *_: [coming.pop(0) if coming else 1.0])
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


@pytest.mark.parametrize(("others_s", "interference"), [(0.1, False), (0.4, True)])
def test_the_use_of_cores_by_other_processes_is_interference(
    measurements: list[float], monkeypatch: pytest.MonkeyPatch, others_s: float, *, interference: bool
) -> None:
    """On two cores for one second, 0.1 s of other processes are tolerated and 0.4 s are not, whatever we use."""
    times = [(0.0, 10.0, 5.0), (1.0, 11.5 + others_s, 6.5), (1.1, 12.0, 6.6), (2.0, 12.9, 7.5), (2.1, 13.0, 7.6)]
    used = [CpuUse(*each) for each in times]
    monkeypatch.setattr(interference_module, "cpu_use", lambda _: used.pop(0))
    monitor = UsageMonitor([0, 1])
    assert monitor.has_interference() is interference
    assert not monitor.has_interference()  # only time since the last check counts
    assert measurements == []


def test_without_counted_times_only_arithmetic_is_measured(measurements: list[float]) -> None:
    """On a CPU whose time the system does not count, slow arithmetic is still found."""
    monitor = UsageMonitor([1 << 20])
    measurements += [1.5, 1.0]
    assert [monitor.has_interference() for _ in range(2)] == [True, False]


def test_a_real_measurement_takes_time() -> None:
    """The measured arithmetic runs on all cores of this machine."""
    monitor = CoreMonitor(physical_cores(), patience_s=0.0)
    assert monitor.cores == physical_cores()
    assert monitor.measure_ms() > 0.0
