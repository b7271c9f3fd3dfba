"""What it costs to start work on a lane, to hand work to another, and to copy between memories."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Sequence

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper

from chrion.cores import pinned
from chrion.profiler.costs import CopyCost
from chrion.profiler.machine import DEVICE_TYPES
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


def measure_dispatch_ms() -> float:
    """Calling a segment through its IOBinding, less the segment's work: an operator on one number."""
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "dispatch", value[:1], value[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    for name, bind in (("x", binding.bind_ortvalue_input), ("y", binding.bind_ortvalue_output)):
        bind(name, ort.OrtValue.ortvalue_from_numpy(np.zeros(1, np.float32)))
    times = []
    for _ in range(_ROUNDS):
        before = time.perf_counter()
        session.run_with_iobinding(binding)
        times.append((time.perf_counter() - before) * 1e3)
    return statistics.median(times)


def measure_copies(provider: str) -> tuple[CopyCost, CopyCost]:
    """Upload to a provider's memory and download from it: latency and time a byte, fitted over sizes.

    Free where the provider works in the CPU's memory.
    """
    device = DEVICE_TYPES.get(provider)
    if device is None:
        return CopyCost(), CopyCost()
    uploads, downloads = [], []
    for size in _COPY_BYTES:
        array = np.zeros(size // 4, np.float32)
        value = ort.OrtValue.ortvalue_from_numpy(array, device, 0)
        uploads.append(_median_ms(lambda v=value, a=array: v.update_inplace(a)))  # type: ignore[misc]
        downloads.append(_median_ms(value.numpy))
    return fit_copy(_COPY_BYTES, uploads), fit_copy(_COPY_BYTES, downloads)


def fit_copy(sizes: Sequence[int], times_ms: Sequence[float]) -> CopyCost:
    """Least squares of ``latency + bytes / bandwidth``, relative errors weighted alike, neither below zero."""
    weights = 1 / np.maximum(times_ms, 1e-6)
    columns = np.stack([np.ones(len(sizes)), np.asarray(sizes, float)], axis=1)
    (latency, slope), *_ = np.linalg.lstsq(columns * weights[:, None], np.asarray(times_ms) * weights, rcond=None)
    if latency < 0:
        slope = float(np.mean(np.asarray(times_ms) / np.asarray(sizes)))
    return CopyCost(max(0.0, float(latency)), max(0.0, float(slope)))


def _median_ms(action: object) -> float:
    times = []
    for _ in range(15):
        before = time.perf_counter()
        action()  # type: ignore[operator]
        times.append((time.perf_counter() - before) * 1e3)
    return statistics.median(times[3:])
