"""When values reach the other side of a schedule: its copies.

A value is copied once to each side that reads it, whoever reads it there. Each direction has a lane of its own, which
copies one value after another, in the order in which the segments that make them stand in the schedule: a value that is
ready may wait for one that is not, if that one stands before it. That is the order in which a program's copy lanes
work, too.

A request comes from the host's memory and is answered there: inputs that the accelerator reads are copied up before all
else, outputs that it makes are copied down like any value.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from chrion.graph.dag import Dag
from chrion.lane_numbers import is_accelerator_lane
from chrion.profiler.costs import Costs


class Copying:
    """The copies of one schedule, while it is walked through.

    Args:
        dag: The graph.
        costs: The machine's costs.
        lanes: Lane of each operator.
        segments: The schedule's segments, in topological order.
    """

    def __init__(self, dag: Dag, costs: Costs, lanes: Sequence[int], segments: Sequence[Sequence[int]]) -> None:
        self._dag = dag
        self._taken = set(dag.request_outputs)
        self._there = [is_accelerator_lane(lane) for lane in lanes]
        self._cost = {True: costs.upload, False: costs.download}
        self._free = {True: 0.0, False: 0.0}
        #: What is still to be copied up and down: (operator, value).
        self._queues: dict[bool, deque[tuple[int, int]]] = {True: deque(), False: deque()}
        self._seen: dict[int, float] = {}
        #: When the last of the request's inputs that an operator reads is there.
        self._brought: dict[int, float] = {}
        self._arrived: dict[int, float] = {}
        if not any(self._there):
            return
        self._bring()
        for segment in segments:
            for i in segment:
                self._queue(i)

    @property
    def ended_ms(self) -> float:
        """When the last copy so far has ended."""
        return max(self._free.values())

    def brought_ms(self, i: int) -> float:
        """When the accelerator has what its operator ``i`` reads of the request's inputs."""
        return self._brought.get(i, 0.0)

    def end(self, segment: Sequence[int], time_ms: float) -> None:
        """A segment has ended: what it has made may be copied."""
        upload = not self._there[segment[0]]
        queue = self._queues[upload]
        if not queue:
            return
        self._seen.update(dict.fromkeys(segment, time_ms))
        while queue and queue[0][0] in self._seen:
            i, value = queue.popleft()
            begin = max(self._free[upload], self._seen[i])
            self._free[upload] = self._arrived[value] = begin + self._cost[upload].ms(self._dag.value_bytes[value])

    def arrival_ms(self, values: Sequence[int]) -> float | None:
        """When all of some values have reached the other side; None while that is not known."""
        latest = 0.0
        for value in values:
            time = self._arrived.get(value)
            if time is None:
                return None
            latest = max(latest, time)
        return latest

    def _bring(self) -> None:
        """Copy the request's inputs up."""
        for size, readers in self._dag.request_inputs:
            wanting = [reader for reader in readers if self._there[reader]]
            if wanting:
                self._free[True] += self._cost[True].ms(size)
                self._brought.update(dict.fromkeys(wanting, self._free[True]))

    def _queue(self, i: int) -> None:
        there = self._there[i]
        for value, readers in self._dag.handed_over[i]:
            if (there and (i, value) in self._taken) or any(self._there[reader] != there for reader in readers):
                self._queues[not there].append((i, value))
