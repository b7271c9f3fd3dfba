"""Looking whether the cores are quiet, with looks that are made up."""

from __future__ import annotations

import pytest

from chrion.cores import physical_cores
from chrion.profiler import interference as quiet
from chrion.profiler.interference import CoreMonitor


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the next looks will take, in ms; 1 ms once they are used up."""
    coming: list[float] = []
    monkeypatch.setattr(quiet, "run_on_cores", lambda *_: [coming.pop(0) if coming else 1.0])
    return coming


def test_slow_arithmetic_is_a_disturbance(looks: list[float]) -> None:
    """Lanes that share a core with others take up to half as long again; clocks vary by less."""
    monitor = CoreMonitor([0], patience_s=0.0)
    looks += [1.5, 1.05, 1.0, 2.0]
    assert [monitor.has_interference() for _ in range(4)] == [True, False, False, True]


def test_a_faster_look_moves_the_mark(looks: list[float]) -> None:
    """What was taken for quiet at first was not."""
    monitor = CoreMonitor([0], patience_s=0.0)
    looks += [0.5, 1.0]
    assert [monitor.has_interference() for _ in range(2)] == [False, True]


def test_waiting_ends_with_the_disturbance(looks: list[float]) -> None:
    """And says that it is quiet now."""
    monitor = CoreMonitor([0], patience_s=60.0)
    looks += [2.0, 2.0, 1.0, 2.0]
    assert monitor.wait()
    assert looks == [2.0]


def test_patience_ends(looks: list[float]) -> None:
    """A machine that is never quiet is looked at once each time."""
    monitor = CoreMonitor([0], patience_s=0.0)
    looks += [2.0, 2.0, 2.0]
    assert not monitor.wait()
    assert not monitor.wait()
    assert looks == [2.0]


def test_a_real_look_takes_time() -> None:
    """On all cores of this machine."""
    monitor = CoreMonitor(physical_cores(), patience_s=0.0)
    assert monitor.cores == physical_cores()
    assert monitor.measure_ms() > 0.0
