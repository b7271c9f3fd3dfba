"""Seams of the tests of commands and scripts: each function replaces one collaborator until the test ends."""

from __future__ import annotations

import functools
import io
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import onnx
import onnxruntime as ort
import pytest
import typer

from chrion import Generator, HybridSession, zoo
from chrion.cli import bench, demo, devices, multi, report, steps
from chrion.devices import providers
from chrion.devices.probe import ProbeResult
from chrion.generation.scheduling import IterationScheduler
from chrion.report.benchmark import comparison, latency
from chrion.runtime.selection import guard
from helpers import FakeInterferenceMonitor

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class _CalmMonitor(FakeInterferenceMonitor):
    """A monitor that finds no interference."""

    gave_up = False

    def __init__(self, _cores: object, patience_s: float) -> None:  # noqa: ARG002 - that of CoreMonitor
        super().__init__()


class _BusyMonitor(_CalmMonitor):
    """A monitor whose patience is used up."""

    gave_up = True


class _Terminal(io.StringIO):
    """A standard input that seems to be a terminal."""

    def isatty(self) -> bool:
        """Return true."""
        return True


#: The command of an application, which takes longer to build than most tests to run it.
_build_once = functools.cache(typer.main.get_command)


def quicken_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Build the command once.

    Let sessions decide in a tenth of the time. Let trials of other comparisons have the minimum number of runs without
    a warm-up or a garbage collection before them, and repeat none of them because of other processes.
    """
    monkeypatch.setattr(typer.main, "get_command", _build_once)
    monkeypatch.setattr(guard, "_TRIAL_S", 0.002)
    for name in ("_BUDGET_S", "_PAIRS_S"):
        monkeypatch.setattr(guard, name, 0.1)
    monkeypatch.setattr(latency, "_WARM_UP_S", 0.0)
    monkeypatch.setattr(latency, "gc", SimpleNamespace(collect=lambda: 0))
    for function in (latency.time_candidates, comparison.time_plans):
        monkeypatch.setitem(function.__kwdefaults__, "trial_s", 0.0)
    for module in (latency, steps, comparison):
        monkeypatch.setattr(module, "CoreMonitor", _CalmMonitor)


def occupy_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands that time sessions find other processes on the cores all the time."""
    for module in (steps, comparison):
        monkeypatch.setattr(module, "CoreMonitor", _BusyMonitor)


def watch_runs(monkeypatch: pytest.MonkeyPatch, *, busy: bool) -> None:
    """Let ``chrion report`` and ``multi`` find other processes on the cores while they run models, or find none."""
    for module in (report, multi):
        monkeypatch.setattr(module, "UsageMonitor", lambda _cores: FakeInterferenceMonitor([0] if busy else []))


def set_arguments(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    """Set the command line that a script reads: its name and its arguments."""
    monkeypatch.setattr(sys, "argv", list(words))


def answer_on_a_terminal(monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    """Let standard input be a terminal on which one line is typed."""
    monkeypatch.setattr(sys, "stdin", _Terminal(f"{line}\n"))


def shrink_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``chrion demo`` build stacks of two steps in place of its models."""

    def build(name: str, parameters: dict[str, Any] | None = None) -> onnx.ModelProto:
        return zoo.build(name, {"layers": 2, "seq": 2} | ({"chunk": 2, "io": 8} if parameters else {}))

    monkeypatch.setattr(demo, "zoo", SimpleNamespace(build=build))


def lack_cores_and_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``chrion demo`` find one core, and no native lanes."""
    monkeypatch.setattr(demo, "physical_cores", lambda: (0,))
    monkeypatch.setattr(demo, "available", lambda: False)


def offer_providers(monkeypatch: pytest.MonkeyPatch, reasons: Mapping[str, str | None]) -> None:
    """Let onnxruntime offer these execution providers, each with the reason why it does not work, or None."""
    monkeypatch.setattr(ort, "get_available_providers", lambda: list(reasons))
    monkeypatch.setattr(providers, "failure_reason", lambda name: reasons[name])
    monkeypatch.setattr(providers, "load_libraries", lambda _: None)
    monkeypatch.setattr(devices, "probe_provider", lambda name: ProbeResult(reasons[name]))


def set_driver(monkeypatch: pytest.MonkeyPatch, *, exists: bool) -> None:
    """Let NVIDIA's driver be the only file that exists, or let no file exist."""
    monkeypatch.setattr(Path, "exists", lambda path: exists and path.name == "nvidiactl")


def replace_probes(monkeypatch: pytest.MonkeyPatch, exit_code: int, stdout: str = "", stderr: str = "") -> None:
    """Let the process that probes an execution provider end with an exit code and outputs."""
    done = subprocess.CompletedProcess([], exit_code, stdout, stderr)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)


def note_sessions(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return a list that gets the options of each HybridSession that ``chrion bench`` opens in its trials."""
    opened: list[dict[str, Any]] = []

    def open_session(graph: Any, **options: Any) -> HybridSession:
        opened.append(options)
        return HybridSession(graph, **options)

    monkeypatch.setattr(bench, "HybridSession", open_session)
    return opened


def choose_plan(monkeypatch: pytest.MonkeyPatch, plan: Path) -> None:
    """Let sessions of ``chrion run`` choose a plan, as if it had been the fastest."""
    monkeypatch.setattr(steps, "HybridSession", lambda graph, **_: HybridSession(graph, plan=plan))


def catch_figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Return a list that gets every figure that is drawn, in place of its file."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - an optional dependency

    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    return drawn


def replace_clock(monkeypatch: pytest.MonkeyPatch, module: ModuleType, clock: object) -> None:
    """Let a module of the package or of the scripts use a made clock in place of the module ``time``."""
    monkeypatch.setattr(module, "time", clock)


def scheduler_of(generator: Generator) -> IterationScheduler:
    """Return the scheduler of a generator's iterations."""
    return generator._loop.scheduler
