"""Measurement of stages on this machine's cores, as IOS does it: two warm-up runs, then six times six runs.

A stage runs as in a plan: the operators of each lane are one session, and each lane is a thread pinned to its core. The
thread of the first lane starts each run and waits for the others.
"""

from __future__ import annotations

import logging
import statistics
import threading
import time
from collections.abc import Sequence
from typing import Any

import onnxruntime as ort

from chrion.common.lane_numbers import is_accelerator_lane
from chrion.devices import CPU_PROVIDER
from chrion.errors import OptionError
from chrion.graph.extract import Extractor, SubModel
from chrion.graph.model import Graph
from chrion.machine.cores import physical_cores, pinned
from chrion.machine.waiting import Counter
from chrion.profiler.synthetic_inputs import synthetic_array
from chrion.scheduler.policies.stages import DeviceLanes

#: Numbers of runs as in IOS; see the module.
_WARM_UPS = 2
_REPEATS = _CALLS = 6
log = logging.getLogger(__name__)

#: The count of a lane that has ended, with or without an error.
_ENDED = 1 << 60


class StageTimer:
    """Measures the latency of stages of one graph, for :func:`chrion.scheduler.policies.ios_search.search_stages`.

    Equal stages are measured once. A stage that fails on synthetic inputs gets the latency that ``device`` predicts.

    Args:
        graph: The graph, with known shapes.
        device: Packs groups of operators into lanes, and predicts latencies.

    Raises:
        OptionError: The lanes are an accelerator's.
    """

    def __init__(self, graph: Graph, device: DeviceLanes) -> None:
        if is_accelerator_lane(device.lanes[0]):
            raise OptionError(
                "--measure-stages: stages can be measured on CPU cores only, the profile has an accelerator",
                hint="add --accelerator none",
            )
        self._graph = graph
        self._device = device
        self._extractor = Extractor(graph)
        self._cores = physical_cores()
        self._sessions: dict[str, ort.InferenceSession] = {}
        self._known: dict[tuple[str, ...], float] = {}

    def __call__(self, groups: Sequence[Sequence[int]]) -> float:
        """Return the latency of a stage in ms: the median of six means, each of six runs."""
        parts = [self._extractor.extract(own) for own in self._device.pack(groups)]
        key = tuple(sorted(part.key for part in parts))
        if key not in self._known:
            try:
                self._known[key] = self._measure(parts)
            except Exception as error:  # noqa: BLE001 - onnxruntime raises many kinds
                log.info("stage of %s not measured: %s", [self._graph.dag.names[g[0]] for g in groups], error)
                self._known[key] = self._device.stage_ms(groups)
        return self._known[key]

    def _measure(self, parts: Sequence[SubModel]) -> float:
        lanes = [self._bind(part) for part in parts]
        start, done = Counter(), [Counter() for _ in parts]
        failures: list[BaseException] = []
        followers = [
            threading.Thread(target=_follow, args=(start, done[at], lanes[at], self._cores[at], failures), daemon=True)
            for at in range(1, len(parts))
        ]
        for thread in followers:
            thread.start()
        try:
            with pinned(self._cores[0]):
                times = _lead(start, done[1:], lanes[0])
        finally:
            start.advance(_ENDED)
            for thread in followers:
                thread.join()
        if failures:
            raise failures[0]
        means = [statistics.mean(times[at : at + _CALLS]) for at in range(_WARM_UPS, len(times), _CALLS)]
        return statistics.median(means)

    def _bind(self, part: SubModel) -> tuple[ort.InferenceSession, Any]:
        """Return a session for one lane's part of a stage, and a binding of its own with synthetic inputs."""
        if part.key not in self._sessions:
            options = ort.SessionOptions()
            options.intra_op_num_threads = 1
            options.log_severity_level = 4
            for name, entry in part.options.items():
                options.add_session_config_entry(name, entry)
            providers = [CPU_PROVIDER]
            self._sessions[part.key] = ort.InferenceSession(part.model.SerializeToString(), options, providers)
        session = self._sessions[part.key]
        binding = session.io_binding()
        names = [i.name for i in session.get_inputs()]
        for name, source in zip(names, part.inputs, strict=True):
            value = self._graph.constant(source)
            array = synthetic_array(self._graph.values[source]) if value is None else value
            binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))
        for output in session.get_outputs():
            binding.bind_output(output.name)
        return session, binding


def _lead(start: Counter, followers: Sequence[Counter], own: tuple[ort.InferenceSession, Any]) -> list[float]:
    """Start each run, run the first lane's part and wait for the other lanes; return the time of each run in ms."""
    session, binding = own
    times = []
    for run in range(1, _WARM_UPS + _REPEATS * _CALLS + 1):
        before = time.perf_counter()
        start.advance(run)
        session.run_with_iobinding(binding)
        for counter in followers:
            counter.wait(run)
        times.append((time.perf_counter() - before) * 1e3)
    return times


def _follow(
    start: Counter, done: Counter, own: tuple[ort.InferenceSession, Any], core: int, failures: list[BaseException]
) -> None:
    """Run another lane's part in each run, until the count of ``start`` is ``_ENDED``."""
    session, binding = own
    try:
        with pinned(core):
            run = 1
            start.wait(run)
            while start.count < _ENDED:
                session.run_with_iobinding(binding)
                done.advance(run)
                run += 1
                start.wait(run)
    except BaseException as error:  # noqa: BLE001 - raised again by the caller
        failures.append(error)
    finally:
        done.advance(_ENDED)
