"""Timing rivals fairly: each has the machine to itself, in turns that alternate.

The threads of a plain session spin on after a run, so that two live sessions in one process slow each other down. So
in every turn one rival is made, warmed up, timed and taken down again; turns go round several times, each round
starting with another rival, and medians over all of a rival's turns are compared. What was timed right before or after
somebody else was using the cores is timed again, whoever's turn it is.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import onnxruntime as ort
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument

from chrion.cores import physical_cores
from chrion.devices import CPU_PROVIDER
from chrion.devices.nvml import MemoryMonitor
from chrion.errors import OptionError
from chrion.graph.model import Graph
from chrion.profiler.interference import CoreMonitor, InterferenceMonitor
from chrion.runtime.requests import check_feed
from chrion.runtime.session import HybridSession
from chrion.scheduler.plan import Plan

_WARM_UP_S = 0.03
_LEAST_RUNS = 5
#: How often a turn is taken at most.
_TRIES = 8

Feed = Mapping[str, np.ndarray[Any, Any]]
#: Runs one request and gives its outputs.
Run = Callable[[], Sequence[Any]]
#: Makes a rival: what runs one request, and what takes the rival down.
Maker = Callable[[], tuple[Run, Callable[[], None]]]


@dataclass(frozen=True, slots=True)
class Timing:
    """Latency of one rival."""

    name: str
    median_ms: float
    #: First and third quartile.
    low_ms: float
    high_ms: float
    runs: int
    #: The median of each turn.
    turns_ms: tuple[float, ...] = ()


def race(
    rivals: Mapping[str, Maker],
    *,
    cycles: int = 5,
    turn_s: float = 0.4,
    progress: Callable[[int, int, str], None] | None = None,
    monitor: InterferenceMonitor | None = None,
) -> list[Timing]:
    """Time rivals against each other.

    Args:
        rivals: Makers by name.
        cycles: Turns of each rival.
        turn_s: How long a turn is timed; at least five runs.
        progress: Called after each turn with turns done, all turns, and the rival's name.
        monitor: Tells whether the cores are quiet; if missing, all physical cores are watched, and as
            much time is spent waiting as timing, at most.

    Returns:
        Timings in the order of ``rivals``.
    """
    times: dict[str, list[list[float]]] = {name: [] for name in rivals}
    names = list(rivals)
    monitor = monitor or CoreMonitor(physical_cores(), patience_s=cycles * len(names) * turn_s)
    for cycle in range(cycles):
        start = cycle % len(names)
        for at, name in enumerate(names[start:] + names[:start]):
            times[name].append(_quiet_turn(rivals[name], turn_s, monitor))
            if progress:
                progress(cycle * len(names) + at + 1, cycles * len(names), name)
    return [_timing(name, turns) for name, turns in times.items()]


def plain_baselines(source: str | Path | bytes, feed: Feed, prefix: str = "onnxruntime") -> dict[str, Maker]:
    """Plain sessions as a user would make them: one thread, all cores, and nothing set."""
    cores = len(physical_cores())
    return {
        f"{prefix}, 1 thread": plain_baseline(source, feed, 1),
        f"{prefix}, {cores} threads": plain_baseline(source, feed, cores),
        f"{prefix}, default": plain_baseline(source, feed, None),
    }


def plain_baseline(source: str | Path | bytes, feed: Feed, threads: int | None, provider: str = CPU_PROVIDER) -> Maker:
    """A plain session with so many threads, or onnxruntime's own choice; on another provider if one is named."""
    providers = list(dict.fromkeys([provider, CPU_PROVIDER]))

    def make() -> tuple[Run, Callable[[], None]]:
        options = ort.SessionOptions()
        if threads is not None:
            options.intra_op_num_threads = threads
        session = ort.InferenceSession(source, options, providers=providers)
        return lambda: session.run(None, feed), lambda: None

    return make


def hybrid_candidate(graph: Graph, plan: Plan, feed: Feed) -> Maker:
    """A HybridSession with a given plan."""

    def make() -> tuple[Run, Callable[[], None]]:
        session = HybridSession(graph, plan=plan, strict=True)
        return lambda: session.run(None, feed), session.close

    return make


def memory_held_mb(make: Maker, monitor: MemoryMonitor) -> float | None:
    """The most accelerator memory that this process holds while a rival is made and run; None where not known."""
    run, close = make()
    try:
        with monitor.sampled():
            run()
        return monitor.peak_mb()
    finally:
        close()


def read_feed(path: Path, graph: Graph) -> dict[str, np.ndarray[Any, Any]]:
    """Inputs from an ``.npz`` file with an array for each.

    Raises:
        OptionError: The file cannot be read, lacks an input, or holds one of another type or shape.
    """
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            feed = dict(arrays)
    except (OSError, ValueError, EOFError, KeyError, TypeError, BadZipFile) as error:
        raise OptionError(f"{path}: not an .npz file of arrays: {error}") from error
    missing = [info.name for info in graph.inputs if info.name not in feed]
    if missing:
        raise OptionError(f"{path}: no array for input {missing[0]!r}", hint=f"it holds {', '.join(feed) or 'none'}")
    feed = {info.name: feed[info.name] for info in graph.inputs}
    try:
        check_feed(graph.inputs, feed)
    except InvalidArgument as error:
        raise OptionError(f"{path}: {error}") from error
    return feed


def largest_difference(ours: Sequence[Any], theirs: Sequence[Any]) -> float:
    """The largest absolute difference between two lists of outputs; infinite where shapes or NaNs differ."""
    largest = 0.0
    for a, b in zip(ours, theirs, strict=True):
        left, right = np.asarray(a), np.asarray(b)
        if left.shape != right.shape:
            return float("inf")
        if left.dtype.kind not in "fiub":
            largest = max(largest, 0.0 if np.array_equal(left, right) else float("inf"))
            continue
        left, right = left.astype(np.float64), right.astype(np.float64)
        if not np.array_equal(np.isnan(left), np.isnan(right)):
            return float("inf")
        same = (left == right) | np.isnan(left)  # equal infinities have no difference
        largest = max(largest, float(np.abs(left[~same] - right[~same]).max(initial=0.0)))
    return largest


def _quiet_turn(make: Maker, turn_s: float, monitor: InterferenceMonitor) -> list[float]:
    """A turn between two quiet moments; where none is to be had any more, a turn as it comes."""
    run, close = make()
    try:
        run()
        for _ in range(_TRIES):  # looked at last thing before, and first thing after: making a session takes a while
            quiet = monitor.wait()
            times = _times_ms(run, turn_s)
            if not quiet or not monitor.has_interference():
                break
        return times
    finally:
        close()
        del run, close
        gc.collect()


def _times_ms(run: Run, turn_s: float) -> list[float]:
    end = time.perf_counter() + _WARM_UP_S
    while time.perf_counter() < end:
        run()
    times: list[float] = []
    end = time.perf_counter() + turn_s
    while len(times) < _LEAST_RUNS or time.perf_counter() < end:
        before = time.perf_counter()
        run()
        times.append((time.perf_counter() - before) * 1e3)
    return times


def _timing(name: str, turns: list[list[float]]) -> Timing:
    times = [ms for turn in turns for ms in turn]
    low, median, high = statistics.quantiles(times, n=4)
    return Timing(name, median, low, high, len(times), tuple(statistics.median(turn) for turn in turns))
