"""Measurement of copies between host and device memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import onnxruntime as ort

from chrion.common.timing import time_calls
from chrion.devices import Device
from chrion.devices.host import allocate
from chrion.graph.model import TensorInfo
from chrion.profiler.costs import FREE, CopyCost

#: Sizes of copies from which the line is fitted: at the smallest the latency decides, at the largest the bandwidth.
_COPY_BYTES = (1 << 12, 1 << 16, 1 << 20, 1 << 23, 1 << 25)


class CopyCosts(NamedTuple):
    """The costs of copies between host and device memory."""

    upload: CopyCost = FREE
    download: CopyCost = FREE
    #: Copies from and to pageable memory; None if the provider has no pinned memory.
    pageable_upload: CopyCost | None = None
    pageable_download: CopyCost | None = None


def measure_copies(device: Device, handoff_ms: float) -> CopyCosts:
    """Measure copies to and from a device: latency and time per byte, fitted over several sizes.

    The latency includes two handoffs: to the lane that copies, and from it to the lane that waits. If the provider
    works in host memory, the cost is one handoff.
    """
    if not device.supports("tensor(float)"):
        return CopyCosts(CopyCost(handoff_ms, 0.0), CopyCost(handoff_ms, 0.0))
    upload, download = _timed_copies(device, handoff_ms, device.host_buffer)
    if not device.has_pinned_memory:
        return CopyCosts(upload, download)
    return CopyCosts(upload, download, *_timed_copies(device, handoff_ms, allocate))


def _timed_copies(
    device: Device, handoff_ms: float, host_memory: Callable[[TensorInfo], ort.OrtValue]
) -> tuple[CopyCost, CopyCost]:
    uploads, downloads = [], []
    downloader = device.downloader("tensor(float)")
    for size in _COPY_BYTES:
        info = TensorInfo("x", "tensor(float)", (size // 4,))
        host, buffer = host_memory(info), device.allocate(info)

        def upload(host: ort.OrtValue = host, buffer: ort.OrtValue = buffer) -> None:
            device.upload(host, buffer)
            device.fence()

        uploads.append(_median_ms(upload))
        downloads.append(_median_ms(partial(downloader.copy, buffer, host)))
    fits = (fit_copy(_COPY_BYTES, times) for times in (uploads, downloads))
    up, down = (replace(fit, latency_ms=fit.latency_ms + 2 * handoff_ms) for fit in fits)
    return up, down


def fit_copy(sizes: Sequence[int], times_ms: Sequence[float]) -> CopyCost:
    """Fit ``latency + bytes / bandwidth`` by least squares of the relative error; neither part is negative.

    Args:
        sizes: The sizes of copies in bytes.
        times_ms: The time of each copy in ms.
    """
    weights = 1 / np.maximum(times_ms, 1e-6)
    columns = np.stack([np.ones(len(sizes)), np.asarray(sizes, float)], axis=1)
    (latency, slope), *_ = np.linalg.lstsq(columns * weights[:, None], np.asarray(times_ms) * weights, rcond=None)
    if latency < 0:
        slope = float(np.mean(np.asarray(times_ms) / np.asarray(sizes)))
    return CopyCost(max(0.0, float(latency)), max(0.0, float(slope)))


def _median_ms(action: Callable[[], object]) -> float:
    return statistics.median(time_calls(action, 15)[3:])
