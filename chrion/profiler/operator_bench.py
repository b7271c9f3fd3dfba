"""Measurement of one operator: alone, and while other cores run the same operator.

The overhead of a call exceeds the time of an operator of a few microseconds. Therefore a session holds many independent
copies of the operator, and the time of a call is divided by their number. The result is also the operator's cost inside
a segment. For j busy cores, j threads, each pinned to a core, run the session at the same time. For a width of w cores,
one thread runs a session that has w - 1 threads of its own.

Other processes may use the cores meanwhile, for a while or all the time. Therefore several operators, each for all
numbers of busy cores, are timed in rounds of short windows. An operator's time is the least lower quartile of its
windows, since interference only adds time. Waiting for the end of interference would take longer, and may fail.
"""

from __future__ import annotations

import csv
import functools
import logging
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnxruntime as ort

from chrion.common.timing import time_calls_until
from chrion.devices import CPU_PROVIDER, Device
from chrion.devices.intra_op import set_threads
from chrion.devices.single_provider import open_on_one_provider
from chrion.errors import ModelError
from chrion.graph.extract import Extractor, SubModel
from chrion.graph.model import Graph, TensorInfo
from chrion.graph.native_operators import has_native_operators, with_native_operators
from chrion.graph.ort_sessions import first_line
from chrion.graph.work import node_work
from chrion.machine.cores import physical_cores, private_cache_bytes, run_on_cores
from chrion.native import register_operators
from chrion.profiler.precision import Precision, relative_error
from chrion.profiler.synthetic_inputs import synthetic_array
from chrion.profiler.widths import MIN_WIDE_MS

log = logging.getLogger(__name__)

#: The intended time of a call, long enough that the overhead of Python is small.
_CALL_S = 0.4e-3
#: The duration of a window, shorter than the time slices of other processes, and the minimum number of its calls.
_WINDOW_S = 0.002
_MIN_CALLS = 3
#: The number of rounds; the number after which operators are left out that took longer than ``_LONG_S`` in total, so
#: that slow operators do not take most of the time of a profile.
_ROUNDS, _MIN_ROUNDS, _LONG_S = 4, 2, 0.15
#: The number of calls whose shortest time gives the number of copies, so that interference, which makes calls longer,
#: does not leave few copies with the overhead of a call each; and the maximum number of copies, since opening their
#: session takes time as well.
_FIRST_CALLS = 5
_MAX_COPIES = 64
#: The limit on the size of the outputs of all copies together: beyond it they would only measure main memory.
_RESULT_BYTES = 32e6
#: Operators with larger weights have one session of several cores at a time, since each holds packed weights of its
#: own.
_LARGE_WEIGHT_BYTES = 64e6
#: The option with which onnxruntime writes the memory of nodes to a file, and the column of scratch memory.
_FILE, _SCRATCH = "session.collect_node_memory_stats_to_file", "total_temp_allocations"


@dataclass(frozen=True, slots=True)
class OperatorSample:
    """The measured time of one operator."""

    time_ms: float
    #: The interquartile range divided by the median.
    spread: float


class OperatorBench:
    """Copies of one operator in a session, to be timed on a provider.

    Args:
        extractor: An extractor of operators from the graph.
        operator: The index of the operator.
        feeds: Arrays for inputs that were captured from a run; all other inputs are synthetic.
        device: The device to run it on; the CPU if None.
        native: The precision of Chrion's kernel of the operator, to measure that; None to measure onnxruntime's.

    Raises:
        RewriteError: There is no such native kernel.
        Exception: The error of onnxruntime if the provider cannot run the operator.
    """

    def __init__(
        self,
        extractor: Extractor,
        operator: int,
        feeds: Mapping[str, np.ndarray[Any, Any]],
        device: Device | None = None,
        *,
        native: Precision | None = None,
    ) -> None:
        device = device or Device(CPU_PROVIDER)
        values = extractor.graph.values
        extract = partial(_extract, extractor, operator, native=native)
        single = _OperatorSession(extract(1), values, feeds, device)
        self.once_ms = once_ms = min(single.time(_FIRST_CALLS, 0.0))
        dag = extractor.graph.dag
        room = _RESULT_BYTES / max(1, dag.output_bytes[operator])
        # Each copy has its own packed weights, and together they should fit the cache. An embedding reads a few rows.
        touched = min(dag.weight_total(operator), _touched_bytes(extractor.graph, operator))
        warm = (private_cache_bytes(physical_cores()[0]) or math.inf) / 2 / max(1.0, touched)
        copies = self.copies = int(max(1, min(_CALL_S * 1e3 / max(once_ms, 1e-4), room, warm, _MAX_COPIES)))
        self._single = self._copies = single
        sub = extract(copies) if copies > 1 else None
        if sub:
            self._copies = _OperatorSession(sub, values, feeds, device)

        # Without a reference to the bench: in a cycle, its sessions would stay until the next collection of garbage.
        def open_wide(cores: tuple[int, ...]) -> _OperatorSession:
            wide = extract(copies, split=len(cores)) if native else sub or extract(1)
            return _OperatorSession(wide, values, feeds, device, cores)

        #: Returns a session that runs every operator on several cores. Each packs the weights again.
        large = dag.weight_total(operator) > _LARGE_WEIGHT_BYTES
        self._wide = functools.lru_cache(maxsize=1 if large else None)(open_wide)

    def time(self, cores: Sequence[int] = ()) -> list[float]:
        """Return the operator's times in ms in one window.

        One thread on each of ``cores`` runs it, or the calling thread if there are none.
        """
        calls = self._copies.time_on(cores) if cores else self._copies.time(_MIN_CALLS, _WINDOW_S)
        return [ms / self.copies for ms in calls]

    def time_briefly(self) -> OperatorSample:
        """Measure the operator's CPU time in the calling thread in one window, which suffices beside other work."""
        calls = self._copies.time(_MIN_CALLS, _WINDOW_S, time.thread_time)
        return _sample([[ms / self.copies for ms in calls]])

    def time_wide(self, cores: Sequence[int]) -> list[float]:
        """Return the operator's times in ms in one window, each run on all of ``cores`` together.

        If another process uses one of the cores, a call may take a hundred times as long, so that one call suffices.
        """
        return [ms / self.copies for ms in self._wide(tuple(cores)).time_on(cores[:1], min_calls=1)]

    def error_against(self, other: OperatorBench) -> float:
        """Return the error of the outputs relative to those of another kernel."""
        return relative_error(self._single.outputs(), other._single.outputs())

    def scratch_bytes(self) -> int:
        """Return the memory beside inputs, outputs and weights that onnxruntime allocates for the operator."""
        return scratch_bytes(self._single.run_once)


def _extract(extractor: Extractor, operator: int, copies: int, *, native: Precision | None, split: int = 1) -> SubModel:
    """Return the sub-model of some copies of an operator, with Chrion's kernel of a precision if that is given."""
    sub = extractor.extract([operator], copies)
    if native is None:
        return sub
    return replace(sub, model=with_native_operators(sub.model, bfloat16=native == "bf16", split=split))


class _OperatorSession:
    """A session of one or more copies of an operator, and the inputs of the session on the device."""

    def __init__(
        self,
        sub: SubModel,
        values: Mapping[str, TensorInfo],
        feeds: Mapping[str, np.ndarray[Any, Any]],
        device: Device,
        cores: Sequence[int] = (),
    ) -> None:
        self._sub = sub
        #: The cores of its threads; the first one is its caller's. Without cores, there is one thread.
        self._cores = cores
        self._device = device
        if any(values[name].type == "tensor(string)" for name in sub.inputs):
            raise ModelError("its inputs are texts")  # onnxruntime binds numbers only
        self._session = self._open(ort.SessionOptions())
        self._inputs = {
            name: device.to_device(values[name], feeds.get(name, synthetic_array(values[name]))) for name in sub.inputs
        }
        self.time(1, 0.0)

    def _open(self, options: ort.SessionOptions) -> ort.InferenceSession:
        set_threads(options, max(1, len(self._cores)), self._cores[1:], in_a_loop=True)
        options.log_severity_level = 4
        if has_native_operators(self._sub.model):
            register_operators(options)
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

    def outputs(self) -> list[np.ndarray[Any, Any]]:
        """Return the outputs of one run."""
        binding = self._bound(self._session)
        self._session.run_with_iobinding(binding)
        outputs: list[np.ndarray[Any, Any]] = binding.copy_outputs_to_cpu()
        return outputs

    def _bound(self, session: ort.InferenceSession) -> Any:
        binding = session.io_binding()
        for name, value in self._inputs.items():
            binding.bind_ortvalue_input(name, value)
        for name in self._sub.outputs:
            binding.bind_output(name, self._device.name)
        return binding

    def time(self, min_calls: int, window_s: float, clock: Callable[[], float] = time.perf_counter) -> list[float]:
        """Call repeatedly for ``window_s``, and at least ``min_calls`` times; return the times in ms by a clock."""
        return self._calls(self._bound(self._session), min_calls, window_s, clock)

    def time_on(self, cores: Sequence[int], min_calls: int = _MIN_CALLS) -> list[float]:
        """Call on several pinned threads at the same time; return the times of all in ms."""
        times = run_on_cores(
            cores, lambda: self._calls(self._bound(self._session), min_calls, _WINDOW_S, time.perf_counter)
        )
        return [ms for own in times for ms in own]

    def _calls(self, binding: Any, min_calls: int, window_s: float, clock: Callable[[], float]) -> list[float]:
        run, fence = self._session.run_with_iobinding, self._device.fence

        def call() -> None:
            run(binding)
            binding.synchronize_outputs()
            fence()

        binding.synchronize_inputs()
        return time_calls_until(call, clock() + window_s, min_calls, clock)


def time_in_rounds(
    benches: Sequence[OperatorBench], sets: Sequence[Sequence[int]], wide: Sequence[Sequence[int]] = ()
) -> list[list[OperatorSample]]:
    """Time several operators alternately, each of them on several sets of cores.

    Args:
        benches: The operators.
        sets: Sets of cores that are busy at the same time; an empty one stands for the calling thread.
        wide: Sets of cores that run one operator together. Short operators are not timed on them.

    Returns:
        A sample for each operator and set, and for each wide set if it was timed on those.
    """
    actions = [[partial(bench.time, cores) for cores in sets] + _wide_actions(bench, wide) for bench in benches]
    windows: list[list[list[list[float]]]] = [[[] for _ in own] for own in actions]
    took_s = [0.0] * len(benches)
    for done in range(_ROUNDS):
        for at, own in enumerate(actions):
            if done >= _MIN_ROUNDS and took_s[at] > _LONG_S:
                continue
            start = time.perf_counter()
            for action, own_windows in zip(own, windows[at], strict=True):
                own_windows.append(action())
            took_s[at] += time.perf_counter() - start
    return [[_sample(own_windows) for own_windows in own] for own in windows]


def _wide_actions(bench: OperatorBench, wide: Sequence[Sequence[int]]) -> list[Callable[[], list[float]]]:
    """Return the measurements on several cores together; none for short operators, or if such a session fails."""
    if bench.once_ms < MIN_WIDE_MS:
        return []
    try:
        for cores in wide:
            bench.time_wide(cores)
    except Exception as error:  # noqa: BLE001 - any error of a session
        log.warning("an operator is not measured on several cores together: %s", first_line(error))
        return []
    return [partial(bench.time_wide, cores) for cores in wide]


def _sample(windows: Sequence[Sequence[float]]) -> OperatorSample:
    """Return the least lower quartile of the windows, and the spread over all of their calls."""
    times = [ms for window in windows for ms in window]
    low, median, high = statistics.quantiles(times, n=4)
    lowest = min(
        statistics.quantiles(window, n=4, method="inclusive")[0] if len(window) > 1 else window[0] for window in windows
    )
    return OperatorSample(lowest, (high - low) / median if median else 0.0)


def _touched_bytes(graph: Graph, i: int) -> float:
    """Return the bytes that an operator reads and writes, without the rows of tables that it does not select."""
    return sum(node_work(graph.model.graph.node[at], graph.values).footprint for at in graph.nodes[i])


def scratch_bytes(run: Callable[[ort.SessionOptions], object]) -> int:
    """Return the largest scratch memory of any node of a session: allocations beside inputs, outputs and weights.

    onnxruntime writes a file with the allocations of each node. Those of inputs, outputs and weights are not read from
    it: it has zeros if buffers are bound or reused. Scratch memory from other allocators, such as that of a library, is
    not included.

    Args:
        run: A function that opens the session with the given options, runs it once, and releases it.

    Returns:
        Bytes; zero if onnxruntime reports none.

    Raises:
        Exception: Any error of ``run``.
    """
    with TemporaryDirectory(prefix="chrion-") as folder:
        path = Path(folder) / "nodes.csv"
        options = ort.SessionOptions()
        options.enable_mem_pattern = False  # preplanned memory is not counted
        options.add_session_config_entry(_FILE, str(path))
        run(options)
        return read_scratch(path.read_text(encoding="utf-8")) if path.is_file() else 0


def read_scratch(text: str) -> int:
    """Return the largest scratch size in onnxruntime's table of nodes, or zero if the table has none."""
    rows = csv.DictReader(line.lstrip("#") for line in text.splitlines() if line.strip())
    sizes = [row.get(_SCRATCH) or "0" for row in rows]
    return max((int(text) for text in sizes if text.isdigit()), default=0)
