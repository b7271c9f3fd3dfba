"""Seams of the machine: its cores, its memory and its GPUs, as the package sees them."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from chrion.devices import nvml
from chrion.machine import core_leases, cores


def pretend_cores(
    monkeypatch: pytest.MonkeyPatch,
    allowed: Collection[int],
    *,
    quota: float | None = None,
    topology: Path = Path("/nonexistent"),
) -> None:
    """Let this process use some logical CPUs only, each a core of its own by default.

    Args:
        monkeypatch: The fixture.
        allowed: Numbers of the CPUs.
        quota: Quota of CPU time in CPUs.
        topology: Folder that describes the CPUs.
    """
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(allowed))
    monkeypatch.setattr(cores, "cpu_quota", lambda: quota)
    monkeypatch.setattr(cores, "_TOPOLOGY", topology)


def forget_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin without leases of cores."""
    monkeypatch.setattr(core_leases, "_registry", core_leases._Registry())


def set_free_memory(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Let the system have a number of bytes of free memory."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=count))


def install_nvml(monkeypatch: pytest.MonkeyPatch, library: Any, *, shown: bool = True) -> None:
    """Replace the library of the GPUs' driver.

    Args:
        monkeypatch: The fixture.
        library: The library; None if there is no driver.
        shown: Whether the driver uses this process's numbers of processes.
    """
    monkeypatch.setattr(nvml, "_library", lambda: library)
    monkeypatch.setattr(nvml, "_shows_processes", lambda: shown)
