"""Measuring one operator: alone, and while other cores are busy with the same.

An operator of a few microseconds is shorter than what calling it costs. So a session is made of many copies of it
side by side, and its time divided; that is also what the operator costs inside a segment. For j busy cores, j threads
pinned to one core each run that session at once, and the median over all of them counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime as ort

from chrion.cores import on_cores
from chrion.errors import ModelError
from chrion.graph.extract import Extractor, SubModel
from chrion.graph.model import ELEMENT_BYTES, Graph, TensorInfo
from chrion.profiler.machine import CPU_PROVIDER, DEVICE_TYPES

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
        provider: Execution provider to run on.

    Raises:
        Exception: Whatever onnxruntime raises where the provider cannot run the operator.
    """

    def __init__(
        self,
        extractor: Extractor,
        operator: int,
        feeds: Mapping[str, np.ndarray[Any, Any]],
        provider: str = CPU_PROVIDER,
    ) -> None:
        self._device = DEVICE_TYPES.get(provider, "cpu")
        single = _Copies(extractor.extract([operator]), extractor.graph.values, feeds, provider, self._device)
        once_ms = single.time(_LEAST_CALLS, 0.0).median_ms
        room = _RESULT_BYTES / max(1, extractor.graph.dag.output_bytes[operator])
        self.copies = int(max(1, min(_CALL_S * 1e3 / max(once_ms, 1e-4), room, _MOST_COPIES)))
        self._copies = single
        if self.copies > 1:
            several = extractor.extract([operator], self.copies)
            self._copies = _Copies(several, extractor.graph.values, feeds, provider, self._device)

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

    def _once(self, cores: Sequence[int]) -> Sample:
        return self._copies.time_on(cores) if cores else self._copies.time(_LEAST_CALLS, _WINDOW_S)


def random_array(info: TensorInfo, seed: int = 0) -> np.ndarray[Any, Any]:
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
        return (0.5 * np.random.default_rng(seed).standard_normal(shape)).astype(name)
    return np.zeros(shape, name)


def made_up_feed(graph: Graph, seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    """Inputs of the right type and shape: normal for floating point types, zero for the others."""
    return {info.name: random_array(info, seed) for info in graph.inputs}


class _Copies:
    """A session over some copies of an operator, with its inputs bound."""

    def __init__(
        self,
        sub: SubModel,
        values: Mapping[str, TensorInfo],
        feeds: Mapping[str, np.ndarray[Any, Any]],
        provider: str,
        device: str,
    ) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 4
        for key, value in sub.options.items():
            options.add_session_config_entry(key, value)
        if provider != CPU_PROVIDER:
            options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        # Equal copies would be merged into one.
        self._session = ort.InferenceSession(
            sub.model.SerializeToString(), options, [provider], disabled_optimizers=["CommonSubexpressionElimination"]
        )
        if provider not in self._session.get_providers():
            raise RuntimeError(f"{provider} is not available")
        self._device = device
        self._outputs = sub.outputs
        self._inputs = {
            name: ort.OrtValue.ortvalue_from_numpy(feeds.get(name, random_array(values[name])), device, 0)
            for name in sub.inputs
        }
        self.time(1, 0.0)

    def binding(self) -> Any:
        binding = self._session.io_binding()
        for name, value in self._inputs.items():
            binding.bind_ortvalue_input(name, value)
        for name in self._outputs:
            binding.bind_output(name, self._device)
        return binding

    def time(self, least: int, window_s: float) -> Sample:
        """Call again and again, for ``window_s`` and at least ``least`` times."""
        return _sample(self._calls(self.binding(), least, window_s))

    def time_on(self, cores: Sequence[int]) -> Sample:
        """Call on several pinned threads at once."""
        times = on_cores(cores, lambda: self._calls(self.binding(), _LEAST_CALLS, _WINDOW_S))
        return _sample([ms for own in times for ms in own])

    def _calls(self, binding: Any, least: int, window_s: float) -> list[float]:
        run, session, clock = self._session.run_with_iobinding, binding, time.perf_counter
        binding.synchronize_inputs()
        times: list[float] = []
        end = clock() + window_s
        while len(times) < least or clock() < end:
            before = clock()
            run(session)
            binding.synchronize_outputs()
            times.append((clock() - before) * 1e3)
        return times


def _sample(times: list[float]) -> Sample:
    median = statistics.median(times)
    low, _, high = statistics.quantiles(times, n=4) if len(times) > 1 else (median, median, median)
    return Sample(median, (high - low) / median if median else 0.0)
