"""GPU memory of processes, with a fake driver."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from chrion.devices import nvml
from chrion.devices.nvml import Gpu
from chrion.report.benchmark.latency import RunRequest, memory_held_mb
from seams.machine import install_nvml


class Driver:
    """A fake driver of GPUs, given the bytes of each process on each of them."""

    NVMLError = RuntimeError

    def __init__(self, held: list[dict[int, int | None]]) -> None:
        self.held = held
        self._read = threading.Semaphore(0)

    def await_readings(self, count: int) -> None:
        """Wait until the processes have been read ``count`` more times."""
        while self._read.acquire(blocking=False):
            pass
        for _ in range(count):
            assert self._read.acquire(timeout=60)

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802 - NVML's own names
        return len(self.held)

    def nvmlDeviceGetHandleByIndex(self, at: int) -> int:  # noqa: N802
        return at

    def nvmlDeviceGetName(self, at: int) -> bytes:  # noqa: N802
        return f"GPU {at}".encode()

    def nvmlDeviceGetMemoryInfo(self, at: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(total=8_000_000_000, used=sum(b or 0 for b in self.held[at].values()))

    def nvmlDeviceGetComputeRunningProcesses(self, at: int) -> list[SimpleNamespace]:  # noqa: N802
        found = [SimpleNamespace(pid=pid, usedGpuMemory=b) for pid, b in self.held[at].items()]
        self._read.release()
        return found


Install = Callable[..., Driver]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return a function that installs a fake driver; ``shown`` is true if it uses this process's numbers."""

    def put(held: list[dict[int, int | None]], *, shown: bool = True) -> Driver:
        driver = Driver(held)
        install_nvml(monkeypatch, driver, shown=shown)
        return driver

    return put


def test_without_a_driver_the_memory_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions return None or an empty result, and do not raise."""
    install_nvml(monkeypatch, None)
    assert nvml.gpus() == ()
    assert nvml.used_mb() is None
    assert nvml.MemoryMonitor().growth_mb() is None


def test_memory_is_summed_over_gpus(install: Install) -> None:
    """Other processes and withheld sizes do not count."""
    me = os.getpid()
    install([{me: 300_000_000, 1: 900_000_000}, {me: 20_000_000, 2: None}])
    assert nvml.used_mb() == 320.0
    assert nvml.used_mb(1) == 900.0
    assert nvml.used_mb(12345) == 0.0
    assert nvml.gpus() == (Gpu("GPU 0", 8000.0, 1200.0), Gpu("GPU 1", 8000.0, 20.0))


def test_in_a_container_all_processes_count(install: Install) -> None:
    """The driver numbers processes differently in a container, so only growth can be measured."""
    driver = install([{999: 500_000_000}], shown=False)
    assert nvml.used_mb() == 500.0
    monitor = nvml.MemoryMonitor()
    driver.held[0][999] = 740_000_000
    assert monitor.growth_mb() == 240.0


def test_growth_of_the_process(install: Install) -> None:
    """The growth is the difference of two readings."""
    driver = install([{}])
    monitor = nvml.MemoryMonitor()
    driver.held[0][os.getpid()] = 345_000_000
    assert monitor.growth_mb() == 345.0


def test_the_peak_within_a_run_is_found(install: Install) -> None:
    """Memory that is released before the end counts for the peak, but not for the growth."""
    me = os.getpid()
    driver = install([{me: 100_000_000}])
    monitor = nvml.MemoryMonitor()
    with monitor.sampled():
        driver.held[0] = {me: 700_000_000}
        driver.await_readings(2)  # the first one may have started earlier
        driver.held[0] = {me: 300_000_000}
    assert monitor.growth_mb() == 200.0
    assert monitor.peak_mb() == 600.0


def test_without_a_driver_no_thread_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a driver no thread is started, and the peak is unknown."""
    install_nvml(monkeypatch, None)
    monitor = nvml.MemoryMonitor()
    before = threading.active_count()
    with monitor.sampled():
        assert threading.active_count() == before
    assert monitor.peak_mb() is None


def test_sampling_ends_if_the_run_fails(install: Install) -> None:
    """The error is raised, and the thread has ended."""
    install([{}])
    with pytest.raises(ValueError, match="broken"), nvml.MemoryMonitor().sampled():
        raise ValueError("broken")
    assert not [t for t in threading.enumerate() if t.name == "chrion-nvml"]


def test_the_memory_of_a_session_is_its_peak(install: Install) -> None:
    """The peak includes memory of loading and running, even if it is released before the end."""
    me = os.getpid()
    driver = install([{}])

    def make() -> tuple[RunRequest, Callable[[], None]]:
        driver.held[0] = {me: 200_000_000}

        def run() -> list[Any]:
            driver.held[0] = {me: 500_000_000}
            driver.await_readings(2)
            driver.held[0] = {me: 250_000_000}
            return []

        return run, driver.held[0].clear

    assert memory_held_mb(make, nvml.MemoryMonitor()) == 500.0
