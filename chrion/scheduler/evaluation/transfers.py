"""Transfers between host and device: when values of a schedule reach the other memory.

A value is copied at most once in each direction, however many operators read it. Each direction has a copy lane of its
own. It copies values in the order of the segments that make them, so a value that is ready waits for earlier values
that are not. The copy lanes of a program work in the same order.

A request starts and ends in host memory: inputs that the accelerator reads are copied to it before all other values,
and outputs that the accelerator makes are copied back like any other value.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from chrion.common.lane_numbers import is_accelerator_lane
from chrion.graph.dag import Dag
from chrion.profiler.costs import Costs


class Transfers:
    """The transfers of one schedule during its evaluation.

    Args:
        dag: The graph.
        costs: The machine's costs.
        lanes: Lane of each operator.
        segments: The schedule's segments, in topological order.
    """

    def __init__(self, dag: Dag, costs: Costs, lanes: Sequence[int], segments: Sequence[Sequence[int]]) -> None:
        self._dag = dag
        self._outputs = set(dag.request_outputs)
        self._sources = {i for i, _ in dag.request_outputs}
        self._on_device = [is_accelerator_lane(lane) for lane in lanes]
        # Both directions are keyed by "upload": True is host to device, False device to host.
        self._cost = {True: costs.upload, False: costs.download}
        #: When the copy lane of each direction is free, in ms.
        self._available = {True: 0.0, False: 0.0}
        #: Pending copies of each direction: (operator, value).
        self._queues: dict[bool, deque[tuple[int, int]]] = {True: deque(), False: deque()}
        #: The end of each operator's segment, in ms.
        self._finished: dict[int, float] = {}
        #: When the last request input of an operator has reached the accelerator.
        self._inputs_ready: dict[int, float] = {}
        #: When each value has reached the other memory.
        self._arrived: dict[int, float] = {}
        if not any(self._on_device):
            return
        self._copy_inputs()
        on_device = self._on_device
        for segment in segments:
            for i in segment:
                own = on_device[i]
                if (own and i in self._sources) or any(on_device[after] != own for after in dag.successors[i]):
                    self._enqueue(i)

    @property
    def finish_ms(self) -> float:
        """The end of the last copy so far, in ms."""
        return max(self._available.values())

    def inputs_ready_ms(self, i: int) -> float:
        """Return when the accelerator has all request inputs that its operator ``i`` reads, in ms."""
        return self._inputs_ready.get(i, 0.0)

    def finish_segment(self, segment: Sequence[int], time_ms: float) -> None:
        """Schedule the copies that can start because a segment has finished."""
        upload = not self._on_device[segment[0]]
        queue = self._queues[upload]
        if not queue:
            return
        self._finished.update(dict.fromkeys(segment, time_ms))
        while queue and queue[0][0] in self._finished:
            i, value = queue.popleft()
            start = max(self._available[upload], self._finished[i])
            end = start + self._cost[upload].ms(self._dag.value_bytes[value])
            self._available[upload] = self._arrived[value] = end

    def arrival_ms(self, values: Sequence[int]) -> float | None:
        """Return when all given values have reached the other memory, in ms; None if that is not known yet."""
        latest = 0.0
        for value in values:
            time = self._arrived.get(value)
            if time is None:
                return None
            latest = max(latest, time)
        return latest

    def _copy_inputs(self) -> None:
        """Schedule the copies of the request's inputs."""
        for size, readers in self._dag.request_inputs:
            on_device = [reader for reader in readers if self._on_device[reader]]
            if on_device:
                self._available[True] += self._cost[True].ms(size)
                self._inputs_ready.update(dict.fromkeys(on_device, self._available[True]))

    def _enqueue(self, i: int) -> None:
        """Queue the values of operator ``i`` that are read in the other memory, or are outputs made on the device."""
        on_device = self._on_device[i]
        for value, readers in self._dag.output_values[i]:
            is_output = on_device and (i, value) in self._outputs
            if is_output or any(self._on_device[reader] != on_device for reader in readers):
                self._queues[not on_device].append((i, value))
