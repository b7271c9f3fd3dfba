"""Measuring one operator: alone, and while other cores are busy with the same.

An operator of a few microseconds is shorter than what calling it costs. So a session is made of many copies of it
side by side, and its time divided; that is also what the operator costs inside a segment. For j busy cores, j threads
pinned to one core each run that session at once, and the median over all of them counts.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime as ort

from chrion.cores import physical_cores, private_cache_bytes, run_on_cores
from chrion.devices import CPU_PROVIDER, Device
from chrion.devices.single_provider import open_on_one_provider
from chrion.errors import ModelError
from chrion.graph.extract import Extractor, SubModel
from chrion.graph.model import ELEMENT_BYTES, Graph, TensorInfo
from chrion.profiler.node_memory import scratch_bytes
from chrion.timing import time_calls_until

#: A measurement's calls are made about this long, so that the interpreter's part in them is small.
_CALL_S = 0.5e-3
#: How long each measurement lasts, and how many calls it makes at least.
_WINDOW_S = 0.015
_LEAST_CALLS = 5
_MOST_COPIES = 64
#: A spread above this tells that something else was running; then so many more tries.
_DISTURBED = 0.1
_REPEATS = 1
#: All copies' results together stay below this.
_RESULT_BYTES = 32e6


@dataclass(frozen=True, slots=True)
class Sample:
    """Time of one operator."""

    median_ms: float
    #: Interquartile range over the median.
    spread: float


class OperatorBench:
    """Copies of one operator, ready to be timed on a provider.

    Args:
        extractor: Cuts operators out of the graph.
        operator: Which one.
        feeds: Arrays for those of its inputs that have been captured from a run; the rest is made up.
        device: Where to run it; the CPU if missing.

    Raises:
        Exception: Whatever onnxruntime raises where the provider cannot run the operator.
    """

    def __init__(
        self,
        extractor: Extractor,
        operator: int,
        feeds: Mapping[str, np.ndarray[Any, Any]],
        device: Device | None = None,
    ) -> None:
        device = device or Device(CPU_PROVIDER)
        values = extractor.graph.values
        single = _Copies(extractor.extract([operator]), values, feeds, device)
        once_ms = single.time(_LEAST_CALLS, 0.0).median_ms
        dag = extractor.graph.dag
        room = _RESULT_BYTES / max(1, dag.output_bytes[operator])
        # Each copy packs weights of its own, and they should stay in the cache.
        warm = (private_cache_bytes(physical_cores()[0]) or math.inf) / 2 / max(1, dag.weight_total(operator))
        self.copies = int(max(1, min(_CALL_S * 1e3 / max(once_ms, 1e-4), room, warm, _MOST_COPIES)))
        self._single = self._copies = single
        if self.copies > 1:
            self._copies = _Copies(extractor.extract([operator], self.copies), values, feeds, device)

    def time(self, cores: Sequence[int] = ()) -> Sample:
        """Time the operator with one thread on each of ``cores``; without any, on the calling thread as it is.

        A measurement that others have disturbed is repeated; the one with the least median of those counts, since
        disturbance only ever adds.
        """
        calls = self._once(cores)
        for _ in range(_REPEATS):
            if calls.spread <= _DISTURBED:
                break
            calls = min(calls, self._once(cores), key=lambda sample: sample.median_ms)
        return Sample(calls.median_ms / self.copies, calls.spread)

    def scratch_bytes(self) -> int:
        """Memory that the operator takes beside inputs, outputs and weights, as far as onnxruntime counts it."""
        return scratch_bytes(self._single.run_once)

    def _once(self, cores: Sequence[int]) -> Sample:
        return self._copies.time_on(cores) if cores else self._copies.time(_LEAST_CALLS, _WINDOW_S)


def synthetic_array(info: TensorInfo, seed: int = 0) -> np.ndarray[Any, Any]:
    """Values for a tensor of known shape: normal for floating point types, zero for the others.

    Raises:
        ModelError: It is not a tensor, or numpy has no such type.
    """
    if info.type not in ELEMENT_BYTES and info.type != "tensor(string)":
        raise ModelError(f"input {info.name!r}: no {info.type or 'value of unknown type'} can be made up")
    shape = tuple(d if isinstance(d, int) else 1 for d in info.shape or ())
    names = {"float": "float32", "double": "float64"}
    name = info.type.removeprefix("tensor(").removesuffix(")")
    name = names.get(name, name)
    if name == "string":
        return np.full(shape, "", dtype=object)
    if name == "bfloat16":
        import ml_dtypes  # noqa: PLC0415 - comes with onnx; numpy needs it for this one type

        return np.zeros(shape, ml_dtypes.bfloat16)
    if name.startswith("float"):
        return np.asarray(0.5 * np.random.default_rng(seed).standard_normal(shape), name)  # a scalar is an array too
    return np.zeros(shape, name)


def synthetic_inputs(graph: Graph, seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    """Inputs of the right type and shape: normal for floating point types, zero for the others."""
    return {info.name: synthetic_array(info, seed) for info in graph.inputs}


class _Copies:
    """A session over some copies of an operator, with its inputs bound."""

    def __init__(
        self,
        sub: SubModel,
        values: Mapping[str, TensorInfo],
        feeds: Mapping[str, np.ndarray[Any, Any]],
        device: Device,
    ) -> None:
        self._sub = sub
        self._device = device
        self._session = self._open(ort.SessionOptions())
        self._inputs = {
            name: device.to_device(values[name], feeds.get(name, synthetic_array(values[name]))) for name in sub.inputs
        }
        self.time(1, 0.0)

    def _open(self, options: ort.SessionOptions) -> ort.InferenceSession:
        options.intra_op_num_threads = 1
        options.log_severity_level = 4
        for key, value in self._sub.options.items():
            options.add_session_config_entry(key, value)
        # Equal copies would be merged into one.
        rest = {"disabled_optimizers": ["CommonSubexpressionElimination"]}
        return open_on_one_provider(self._sub.model.SerializeToString(), options, self._device.provider, {}, **rest)

    def run_once(self, options: ort.SessionOptions) -> None:
        """Run once in a session of these options."""
        with self._device.exclusive():
            session = self._open(options)
            session.run_with_iobinding(self._bound(session))

    def _bound(self, session: ort.InferenceSession) -> Any:
        binding = session.io_binding()
        for name, value in self._inputs.items():
            binding.bind_ortvalue_input(name, value)
        for name in self._sub.outputs:
            binding.bind_output(name, self._device.name)
        return binding

    def time(self, least: int, window_s: float) -> Sample:
        """Call again and again, for ``window_s`` and at least ``least`` times."""
        return _sample(self._calls(self._bound(self._session), least, window_s))

    def time_on(self, cores: Sequence[int]) -> Sample:
        """Call on several pinned threads at once."""
        times = run_on_cores(cores, lambda: self._calls(self._bound(self._session), _LEAST_CALLS, _WINDOW_S))
        return _sample([ms for own in times for ms in own])

    def _calls(self, binding: Any, least: int, window_s: float) -> list[float]:
        run, fence = self._session.run_with_iobinding, self._device.fence

        def call() -> None:
            run(binding)
            binding.synchronize_outputs()
            fence()

        binding.synchronize_inputs()
        return time_calls_until(call, time.perf_counter() + window_s, least)


def _sample(times: list[float]) -> Sample:
    median = statistics.median(times)
    low, _, high = statistics.quantiles(times, n=4) if len(times) > 1 else (median, median, median)
    return Sample(median, (high - low) / median if median else 0.0)
