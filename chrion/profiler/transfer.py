"""What it costs to start work on a lane, to hand work to another, and to copy between memories."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import onnxruntime as ort

from chrion.cores import pinned
from chrion.profiler.costs import CopyCost
from chrion.profiler.machine import CPU_PROVIDER, DEVICE_TYPES
from chrion.profiler.probe import smallest_session
from chrion.waiting import Counter

_ROUNDS = 400
_COPY_BYTES = (1 << 12, 1 << 16, 1 << 20, 1 << 23, 1 << 25)


def measure_handoff_ms(cores: Sequence[int]) -> float:
    """One way from a lane to another that spins for it; zero where there is only one core."""
    if len(cores) < 2:
        return 0.0
    ping, pong = Counter(), Counter()

    def echo() -> None:
        with pinned(cores[1]):
            for turn in range(1, _ROUNDS + 1):
                ping.wait(turn)
                pong.advance(turn)

    thread = threading.Thread(target=echo, daemon=True)
    times = []
    with pinned(cores[0]):
        thread.start()
        for turn in range(1, _ROUNDS + 1):
            before = time.perf_counter()
            ping.advance(turn)
            pong.wait(turn)
            times.append((time.perf_counter() - before) * 1e3 / 2)
    thread.join()
    return statistics.median(times)


def measure_dispatch_ms(cores: Sequence[int]) -> float:
    """Calling a segment through its IOBinding, less the segment's work: an operator on one number.

    Measured as it happens, while another lane waits and takes over: the interpreter lock changes hands then, which
    makes the call dearer than in a loop of its own.
    """
    session = smallest_session(CPU_PROVIDER)
    if len(cores) < 2:
        return _calls_ms(session, _bound(session))
    ping, pong = Counter(), Counter()

    def echo() -> None:
        binding = _bound(session)
        with pinned(cores[1]):
            for turn in range(1, _ROUNDS + 1):
                ping.wait(turn)
                session.run_with_iobinding(binding)
                pong.advance(turn)

    thread = threading.Thread(target=echo, daemon=True)
    binding = _bound(session)
    times = []
    with pinned(cores[0]):
        thread.start()
        for turn in range(1, _ROUNDS + 1):
            before = time.perf_counter()
            session.run_with_iobinding(binding)
            times.append((time.perf_counter() - before) * 1e3)
            ping.advance(turn)
            pong.wait(turn)
    thread.join()
    return statistics.median(times)


def _bound(session: ort.InferenceSession) -> Any:
    """A binding with an array for the smallest session's input and its output."""
    binding = session.io_binding()
    for name, bind in (("x", binding.bind_ortvalue_input), ("y", binding.bind_ortvalue_output)):
        bind(name, ort.OrtValue.ortvalue_from_numpy(np.zeros(1, np.float32)))
    return binding


def _calls_ms(session: ort.InferenceSession, binding: Any) -> float:
    times = []
    for _ in range(_ROUNDS):
        before = time.perf_counter()
        session.run_with_iobinding(binding)
        times.append((time.perf_counter() - before) * 1e3)
    return statistics.median(times)


def measure_copies(provider: str, handoff_ms: float) -> tuple[CopyCost, CopyCost]:
    """Upload to a provider's memory and download from it: latency and time a byte, fitted over sizes.

    The latency includes the handoff to the lane that waits for the copy, which is all that remains where the provider
    works in the CPU's memory.
    """
    device = DEVICE_TYPES.get(provider)
    if device is None:
        return CopyCost(handoff_ms), CopyCost(handoff_ms)
    uploads, downloads = [], []
    for size in _COPY_BYTES:
        array = np.zeros(size // 4, np.float32)
        value = ort.OrtValue.ortvalue_from_numpy(array, device, 0)
        uploads.append(_median_ms(partial(value.update_inplace, array)))
        downloads.append(_median_ms(value.numpy))
    up, down = fit_copy(_COPY_BYTES, uploads), fit_copy(_COPY_BYTES, downloads)
    return replace(up, latency_ms=up.latency_ms + handoff_ms), replace(down, latency_ms=down.latency_ms + handoff_ms)


def fit_copy(sizes: Sequence[int], times_ms: Sequence[float]) -> CopyCost:
    """Least squares of ``latency + bytes / bandwidth``, relative errors weighted alike, neither below zero."""
    weights = 1 / np.maximum(times_ms, 1e-6)
    columns = np.stack([np.ones(len(sizes)), np.asarray(sizes, float)], axis=1)
    (latency, slope), *_ = np.linalg.lstsq(columns * weights[:, None], np.asarray(times_ms) * weights, rcond=None)
    if latency < 0:
        slope = float(np.mean(np.asarray(times_ms) / np.asarray(sizes)))
    return CopyCost(max(0.0, float(latency)), max(0.0, float(slope)))


def _median_ms(action: Callable[[], object]) -> float:
    times = []
    for _ in range(15):
        before = time.perf_counter()
        action()
        times.append((time.perf_counter() - before) * 1e3)
    return statistics.median(times[3:])
