"""Measurement of one operator: alone, and while other cores run the same operator.

The overhead of a call exceeds the time of an operator of a few microseconds. Therefore a session holds many independent
copies of the operator, and the time of a call is divided by their number. The result is also the operator's cost inside
a segment. For j busy cores, j threads, each pinned to a core, run the session at the same time; the result is the
median over the calls of all threads.
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
from chrion.graph.extract import Extractor, SubModel
from chrion.graph.model import TensorInfo
from chrion.profiler.node_memory import scratch_bytes
from chrion.profiler.synthetic_inputs import synthetic_array
from chrion.timing import time_calls_until

#: The intended time of a call, long enough that the overhead of Python is small.
_CALL_S = 0.5e-3
#: The duration of a measurement, and the least number of its calls.
_WINDOW_S = 0.015
_LEAST_CALLS = 5
_MOST_COPIES = 64
#: A larger spread than this counts as interference; the measurement is then repeated up to this many times.
_MAX_SPREAD = 0.1
_REPEATS = 1
#: The limit on the size of the outputs of all copies together.
_RESULT_BYTES = 32e6


@dataclass(frozen=True, slots=True)
class Sample:
    """The measured time of one operator."""

    median_ms: float
    #: The interquartile range divided by the median.
    spread: float


class OperatorBench:
    """Copies of one operator in a session, to be timed on a provider.

    Args:
        extractor: An extractor of operators from the graph.
        operator: The index of the operator.
        feeds: Arrays for inputs that were captured from a run; all other inputs are synthetic.
        device: The device to run it on; the CPU if None.

    Raises:
        Exception: The error of onnxruntime if the provider cannot run the operator.
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
        single = _OperatorSession(extractor.extract([operator]), values, feeds, device)
        once_ms = single.time(_LEAST_CALLS, 0.0).median_ms
        dag = extractor.graph.dag
        room = _RESULT_BYTES / max(1, dag.output_bytes[operator])
        # Each copy has its own packed weights, and together they should fit the cache.
        warm = (private_cache_bytes(physical_cores()[0]) or math.inf) / 2 / max(1, dag.weight_total(operator))
        self.copies = int(max(1, min(_CALL_S * 1e3 / max(once_ms, 1e-4), room, warm, _MOST_COPIES)))
        self._single = self._copies = single
        if self.copies > 1:
            self._copies = _OperatorSession(extractor.extract([operator], self.copies), values, feeds, device)

    def time(self, cores: Sequence[int] = ()) -> Sample:
        """Time the operator with one thread on each of ``cores``, or on the calling thread if there are none.

        A measurement with interference is repeated, and the smallest median is returned, since interference only adds
        time.
        """
        calls = self._once(cores)
        for _ in range(_REPEATS):
            if calls.spread <= _MAX_SPREAD:
                break
            calls = min(calls, self._once(cores), key=lambda sample: sample.median_ms)
        return Sample(calls.median_ms / self.copies, calls.spread)

    def scratch_bytes(self) -> int:
        """Return the memory beside inputs, outputs and weights that onnxruntime allocates for the operator."""
        return scratch_bytes(self._single.run_once)

    def _once(self, cores: Sequence[int]) -> Sample:
        return self._copies.time_on(cores) if cores else self._copies.time(_LEAST_CALLS, _WINDOW_S)


class _OperatorSession:
    """A session of one or more copies of an operator, and the inputs of the session on the device."""

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
        # This optimisation would merge the copies into one.
        rest = {"disabled_optimizers": ["CommonSubexpressionElimination"]}
        return open_on_one_provider(self._sub.model.SerializeToString(), options, self._device.provider, {}, **rest)

    def run_once(self, options: ort.SessionOptions) -> None:
        """Open a new session with these options and run it once."""
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
        """Call repeatedly for ``window_s``, and at least ``least`` times."""
        return _sample(self._calls(self._bound(self._session), least, window_s))

    def time_on(self, cores: Sequence[int]) -> Sample:
        """Call on several pinned threads at the same time."""
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
