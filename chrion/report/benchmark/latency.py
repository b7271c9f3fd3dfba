"""Latency of candidates measured side by side, in alternating trials in which each has the machine to itself.

The threads of a plain session spin for a while after a run, so that two live sessions in one process slow each other
down. So each trial opens one candidate, warms it up, times it and closes it. A round is one trial of each candidate;
every round starts with another candidate, and medians over all trials are compared. A trial with interference (other
processes used the cores right before or after it) is repeated.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from chrion.common.timing import time_calls_until
from chrion.devices import CPU_PROVIDER
from chrion.devices.nvml import MemoryMonitor
from chrion.graph.model import Graph
from chrion.graph.opened_model import OpenedModel
from chrion.machine.cores import physical_cores
from chrion.profiler.interference import CoreMonitor
from chrion.runtime.session import HybridSession
from chrion.scheduler.plan import Plan

#: Default duration of a trial in seconds: hundreds of runs of a model of a millisecond (a choice, not measured).
TRIAL_S = 0.4
#: Time of warm-up runs, in which threads and caches reach their steady state.
_WARM_UP_S = 0.03
#: Minimum number of runs in a trial, for a median of models that take longer than the trial.
_MIN_RUNS = 5
#: Maximum number of attempts at a trial without interference; on a machine with permanent interference, the last one
#: counts.
_ATTEMPTS = 8

Feed = Mapping[str, np.ndarray[Any, Any]]
#: Runs one request and returns its outputs.
RunRequest = Callable[[], Sequence[Any]]
#: Opens a session; returns the function that runs one request and the function that closes the session.
SessionFactory = Callable[[], tuple[RunRequest, Callable[[], None]]]


@dataclass(frozen=True, slots=True)
class Timing:
    """Latency of one candidate."""

    name: str
    median_ms: float
    #: First and third quartile, in ms.
    low_ms: float
    high_ms: float
    runs: int
    #: Median of each trial, in ms.
    trials_ms: tuple[float, ...] = ()


def time_candidates(
    candidates: Mapping[str, SessionFactory],
    *,
    rounds: int = 5,
    trial_s: float = TRIAL_S,
    progress: Callable[[int, int, str], None] | None = None,
    monitor: CoreMonitor | None = None,
) -> list[Timing]:
    """Time candidates side by side.

    Args:
        candidates: Session factories by name.
        rounds: Number of trials of each candidate.
        trial_s: Duration of a trial in seconds; a trial has at least five runs.
        progress: Called after each trial with the number of finished trials, their total, and the candidate's name.
        monitor: Detects interference on the cores. The default monitors all physical cores and waits at most as long
            as all trials take.

    Returns:
        Timings in the order of ``candidates``.
    """
    times: dict[str, list[list[float]]] = {name: [] for name in candidates}
    names = list(candidates)
    monitor = monitor or CoreMonitor(physical_cores(), patience_s=rounds * len(names) * trial_s)
    for done in range(rounds):
        start = done % len(names)
        for at, name in enumerate(names[start:] + names[:start], start=1):
            times[name].append(_run_trial(candidates[name], trial_s, monitor))
            if progress:
                progress(done * len(names) + at, rounds * len(names), name)
    return [_timing(name, trials) for name, trials in times.items()]


def plain_baselines(
    source: str | Path | bytes | OpenedModel, feed: Feed, prefix: str = "onnxruntime"
) -> dict[str, SessionFactory]:
    """Return factories of plain CPU sessions: with one thread, a thread per core, and onnxruntime's default."""
    cores = len(physical_cores())
    return {
        f"{prefix}, 1 thread": plain_baseline(source, feed, 1),
        f"{prefix}, {cores} threads": plain_baseline(source, feed, cores),
        f"{prefix}, default": plain_baseline(source, feed, None),
    }


def plain_baseline(
    source: str | Path | bytes | OpenedModel, feed: Feed, threads: int | None, provider: str = CPU_PROVIDER
) -> SessionFactory:
    """Return a factory of plain sessions.

    Args:
        source: A model file, a model's bytes, or an opened model.
        feed: The request.
        threads: Intra-op threads; None for onnxruntime's default.
        provider: Execution provider, before the CPU's.
    """
    providers = list(dict.fromkeys([provider, CPU_PROVIDER]))
    model = source if isinstance(source, OpenedModel) else OpenedModel(source)

    def open_session() -> tuple[RunRequest, Callable[[], None]]:
        options = ort.SessionOptions()
        if threads is not None:
            options.intra_op_num_threads = threads
        session = model.use(lambda opened: ort.InferenceSession(opened, options, providers=providers))
        return lambda: session.run(None, feed), lambda: None

    return open_session


def hybrid_candidate(graph: Graph, plan: Plan, feed: Feed) -> SessionFactory:
    """Return a factory of HybridSessions that run a given plan."""

    def open_session() -> tuple[RunRequest, Callable[[], None]]:
        session = HybridSession(graph, plan=plan, strict=True)
        return lambda: session.run(None, feed), session.close

    return open_session


def memory_held_mb(factory: SessionFactory, monitor: MemoryMonitor) -> float | None:
    """Return the peak accelerator memory of this process in MB while a session is opened and run.

    Returns:
        The peak; None without NVML.
    """
    run, close = factory()
    try:
        with monitor.sampled():
            run()
        return monitor.peak_mb()
    finally:
        close()


def _run_trial(factory: SessionFactory, trial_s: float, monitor: CoreMonitor) -> list[float]:
    """Return the latencies of one trial in ms; it is repeated after interference if the monitor may still wait."""
    run, close = factory()
    try:
        run()
        for _ in range(_ATTEMPTS):  # the cores are checked right before and after: opening a session takes a while
            undisturbed = monitor.wait()
            time_calls_until(run, time.perf_counter() + _WARM_UP_S)
            times = time_calls_until(run, time.perf_counter() + trial_s, _MIN_RUNS)
            if not undisturbed or not monitor.has_interference():
                break
        return times
    finally:
        close()
        del run, close
        gc.collect()


def _timing(name: str, trials: list[list[float]]) -> Timing:
    times = [ms for trial in trials for ms in trial]
    low, median, high = statistics.quantiles(times, n=4)
    return Timing(name, median, low, high, len(times), tuple(statistics.median(trial) for trial in trials))
