"""Stages measured on this machine's cores, as IOS measures them: two runs to warm up, then six times six.

A stage runs as it would in a plan: the operators of each lane as one session, each lane a thread pinned to its core,
all begun at once by the first, which also waits for the others.
"""

from __future__ import annotations

import logging
import statistics
import threading
import time
from collections.abc import Sequence
from typing import Any

import onnxruntime as ort

from chrion.cores import physical_cores, pinned
from chrion.devices import CPU_PROVIDER
from chrion.errors import OptionError
from chrion.graph.extract import Extractor, SubModel
from chrion.graph.model import Graph
from chrion.lane_numbers import is_accelerator_lane
from chrion.profiler.measure import synthetic_array
from chrion.scheduler.policies.stages import Device
from chrion.waiting import Counter

_WARM_UPS = 2
_REPEATS = _CALLS = 6
log = logging.getLogger(__name__)

#: The count of a lane that has ended, well or not.
_ENDED = 1 << 60


class StageBench:
    """Measures stages of one graph; a stage cost for :func:`chrion.scheduler.policies.ios.ios`.

    Stages that compute the same are measured once. One that does not run by itself, on values that are made up, costs
    what the device predicts.

    Args:
        graph: The graph, with all its shapes known.
        device: How groups are packed into lanes.

    Raises:
        OptionError: The lanes are an accelerator's.
    """

    def __init__(self, graph: Graph, device: Device) -> None:
        if is_accelerator_lane(device.lanes[0]):
            raise OptionError("stages: they can be measured on CPU cores only", hint="plan for --accelerator none")
        self._graph = graph
        self._device = device
        self._extractor = Extractor(graph)
        self._cores = physical_cores()
        self._sessions: dict[str, ort.InferenceSession] = {}
        self._known: dict[tuple[str, ...], float] = {}

    def __call__(self, groups: Sequence[Sequence[int]]) -> float:
        """Latency of a stage in ms: the median of six means."""
        parts = [self._extractor.extract(own) for own in self._device.pack(groups)]
        key = tuple(sorted(part.key for part in parts))
        if key not in self._known:
            try:
                self._known[key] = self._measured(parts)
            except Exception as error:  # noqa: BLE001 - onnxruntime's are of many kinds
                log.info("stage of %s not measured: %s", [self._graph.dag.names[g[0]] for g in groups], error)
                self._known[key] = self._device.stage_ms(groups)
        return self._known[key]

    def _measured(self, parts: Sequence[SubModel]) -> float:
        rounds = [self._binding(part) for part in parts]
        go, done = Counter(), [Counter() for _ in parts]
        failures: list[BaseException] = []
        others = [
            threading.Thread(target=_follow, args=(go, done[at], rounds[at], self._cores[at], failures), daemon=True)
            for at in range(1, len(parts))
        ]
        for thread in others:
            thread.start()
        try:
            with pinned(self._cores[0]):
                times = _lead(go, done[1:], rounds[0])
        finally:
            go.advance(_ENDED)
            for thread in others:
                thread.join()
        if failures:
            raise failures[0]
        means = [statistics.mean(times[at : at + _CALLS]) for at in range(_WARM_UPS, len(times), _CALLS)]
        return statistics.median(means)

    def _binding(self, part: SubModel) -> tuple[ort.InferenceSession, Any]:
        """A session for a lane's part of a stage, and a binding with values of the right shapes of its own."""
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


def _lead(go: Counter, others: Sequence[Counter], own: tuple[ort.InferenceSession, Any]) -> list[float]:
    """Begin every round, run the first lane's part, and wait for the others; the time of each round in ms."""
    session, binding = own
    times = []
    for turn in range(1, _WARM_UPS + _REPEATS * _CALLS + 1):
        before = time.perf_counter()
        go.advance(turn)
        session.run_with_iobinding(binding)
        for counter in others:
            counter.wait(turn)
        times.append((time.perf_counter() - before) * 1e3)
    return times


def _follow(
    go: Counter, done: Counter, own: tuple[ort.InferenceSession, Any], core: int, failures: list[BaseException]
) -> None:
    """Run another lane's part in every round."""
    session, binding = own
    try:
        with pinned(core):
            turn = 1
            go.wait(turn)
            while go.count < _ENDED:
                session.run_with_iobinding(binding)
                done.advance(turn)
                turn += 1
                go.wait(turn)
    except BaseException as error:  # noqa: BLE001 - raised again by the caller
        failures.append(error)
    finally:
        done.advance(_ENDED)
