"""Beam search over partial schedules, for tiny graphs: nearly all schedules of a few operators are considered.

List scheduling commits to one operator and one lane at a time. Beam search (Ow, Morton, 1988) keeps many partial
schedules instead, and extends each of them by every operator that is ready, on every lane. Operators are added in the
order of their starts. Three rules limit the number of partial schedules of each length:

- **Bound.** A partial schedule is dropped if no schedule that begins with it can be faster than a known one: an
  operator is followed by the longest path to an exit, with each operator on the better device, and the lanes share the
  work that is left.
- **Dominance.** Of two partial schedules of the same operators, with the same results that are still read on each lane,
  one is dropped if every lane, result and copy of the other is available no later. CPU lanes are alike, so that
  schedules which differ only in their numbers are the same.
- **Width.** Of the others, those with the least bounds are kept; on a tie, those with the least load. They are extended
  in this order until enough longer ones have been found, so that operators without edges, each of which may be the
  next one, cost no more than a chain. On many lanes, fewer are enough: a machine with many lanes has many
  sub-machines, each with a search of its own.

Without the third rule, the result would be optimal in this model. The model knows handoffs, dispatches, and copies,
which start when the first reader is placed. Only the evaluator knows segments and weight reloads, so it has to judge
the results. No rule depends on time, so equal inputs give equal results.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from chrion.common.lane_numbers import is_accelerator_lane
from chrion.scheduler.policies.list_scheduling import Lanes
from chrion.scheduler.schedule import Schedule

#: Of each length, the most partial schedules that are kept, and the number of them from which no further shorter one is
#: extended; on many lanes, it is smaller in proportion to the square of their number. The most schedules returned.
_KEPT, _MADE, _MADE_BY_LANES, _RETURNED = 400, 1_000, 9_000, 4
#: With more CPU lanes, an operator is tried on those of its predecessors and those that are available first.
_FEW_LANES = 3

#: A bit mask of operators, and those on each lane whose results are still read.
_Operators = tuple[int, tuple[tuple[int, ...], ...]]


class _Partial(NamedTuple):
    """A schedule of some operators; times are in ms."""

    #: A lower bound on the latency of every schedule that begins with this one.
    bound: float
    #: A lower bound from the work that is left, see :meth:`_Beam._load_ms`.
    load: float
    #: The end of the last operator of each lane, by index in the machine's lane numbers.
    available: tuple[float, ...]
    #: The operators so far, and a bit mask of them.
    order: tuple[int, ...]
    done: int
    #: The lane and the end of every operator so far, by operator index; 0 for the others.
    lanes: tuple[int, ...]
    ends: tuple[float, ...]
    #: When values have reached the other memory; the request's inputs have negative numbers.
    arrived: dict[int, float]
    #: When the lanes that copy values to the accelerator and to the host are free.
    upload_free: float
    download_free: float
    #: The start of the last operator.
    start: float


def beam_search(lanes: Lanes, limit_ms: float) -> list[Schedule]:
    """Return schedules that may be faster than ``limit_ms``, the most promising first; none if none is found.

    Args:
        lanes: The lanes to use, at most one of them on the accelerator.
        limit_ms: Latency of a known schedule.
    """
    return _Beam(lanes, limit_ms).run()


class _Beam:
    """The search on one machine."""

    def __init__(self, lanes: Lanes, limit_ms: float) -> None:
        dag, costs = lanes.dag, lanes.costs
        self._dag, self._lanes, self._limit_ms = dag, lanes, limit_ms
        self._index = {lane: at for at, lane in enumerate(lanes.numbers)}
        self._upload_ms = [costs.upload.ms(size) for size in dag.value_bytes]
        self._download_ms = [costs.download.ms(size) for size in dag.value_bytes]
        self._inputs: list[list[tuple[int, float]]] = [[] for _ in range(len(dag))]
        for at, (size, readers) in enumerate(dag.request_inputs):
            for reader in readers:
                self._inputs[reader].append((-1 - at, costs.upload.ms(size)))
        self._returned: list[list[int]] = [[] for _ in range(len(dag))]
        for i, value in dag.request_outputs:
            self._returned[i].append(value)
        n = len(dag)
        self._host_ms = lanes.ms[1] if lanes.cores else (math.inf,) * n
        self._device_ms = lanes.ms[0] if lanes.streams else (math.inf,) * n
        #: The bit of each operator and its time on a core and on the accelerator; those first that gain most from the
        #: accelerator for their time on it.
        by_gain = sorted(range(n), key=lambda i: -self._host_ms[i] / max(self._device_ms[i], 1e-9))
        self._by_gain = [(1 << i, self._host_ms[i], self._device_ms[i]) for i in by_gain]
        #: Bit masks of the predecessors and of the successors of each operator.
        self._before = [sum(1 << m for m in before) for before in dag.predecessors]
        self._after = [sum(1 << after for after in successors) for successors in dag.successors]
        self._tails = self._tails_ms()

    def run(self) -> list[Schedule]:
        """Return the schedules."""
        n, lanes = len(self._dag), self._lanes
        empty = (0.0,) * len(lanes.numbers)
        front = [_Partial(0.0, 0.0, empty, (), 0, (0,) * n, (0.0,) * n, {}, 0.0, 0.0, 0.0)]
        for _ in range(n):
            longer: list[_Partial] = []
            for partial in front:
                longer += self._extend(partial)
                if len(longer) >= max(1, min(_MADE, _MADE_BY_LANES // len(lanes.numbers) ** 2)):
                    break
            front = self._select(longer)
        streams = max(1, lanes.streams)
        return [Schedule(partial.order, partial.lanes, lanes.cores, streams) for partial in front[:_RETURNED]]

    def _extend(self, partial: _Partial) -> Iterator[_Partial]:
        """Yield a partial schedule with one more operator that may still be faster than the limit."""
        for i, before in enumerate(self._dag.predecessors):
            if not partial.done >> i & 1 and not self._before[i] & ~partial.done:
                for lane in self._candidates(partial, before):
                    if self._lanes.ms[lane][i] < math.inf:
                        longer = self._add(partial, i, lane)
                        if longer.bound < self._limit_ms:
                            yield longer

    def _candidates(self, partial: _Partial, before: Sequence[int]) -> list[int]:
        """Return the lanes to try for an operator; of the CPU lanes without operators, which are alike, the first."""
        opened = max(partial.lanes) + 1
        lanes = [lane for lane in self._lanes.numbers if lane <= opened]
        if len(lanes) > _FEW_LANES:
            near = {partial.lanes[m] for m in before}
            first = sorted(lanes, key=lambda lane: partial.available[self._index[lane]])[:2]
            lanes = [lane for lane in lanes if is_accelerator_lane(lane) or lane in near or lane in first]
        return lanes

    def _add(self, partial: _Partial, i: int, lane: int) -> _Partial:
        """Return the partial schedule with operator ``i`` at the end of a lane."""
        costs, dag, ends, at = self._lanes.costs, self._dag, partial.ends, self._index[lane]
        on_device = is_accelerator_lane(lane)
        arrived, copied = dict(partial.arrived), [partial.download_free, partial.upload_free]
        start, dispatch = max(partial.available[at], partial.start), costs.dispatch_ms
        for value, ms in self._inputs[i] if on_device else ():
            if value not in arrived:
                copied[True] += ms
                arrived[value] = copied[True]
            start = max(start, arrived[value])
        copy_ms = self._upload_ms if on_device else self._download_ms
        for m, values in sorted(dag.received[i], key=lambda row: ends[row[0]]):
            other = partial.lanes[m]
            if other == lane:
                dispatch = 0.0
            elif is_accelerator_lane(other) == on_device:
                start = max(start, ends[m] + costs.handoff_ms)
            else:
                for value in values:
                    if value not in arrived:
                        copied[on_device] = max(copied[on_device], ends[m]) + copy_ms[value]
                        arrived[value] = copied[on_device]
                    start = max(start, arrived[value])
        end = start + dispatch + self._lanes.ms[lane][i]
        bound = max(partial.bound, end + self._tails[on_device][i])
        for value in self._returned[i] if on_device else ():
            copied[False] = arrived[value] = max(copied[False], end) + self._download_ms[value]
            bound = max(bound, arrived[value])
        available = (*partial.available[:at], end, *partial.available[at + 1 :])
        done = partial.done | 1 << i
        load = self._load_ms([max(free, start) for free in available], done)
        return _Partial(
            bound=max(bound, load),
            load=load,
            available=available,
            order=(*partial.order, i),
            done=done,
            lanes=(*partial.lanes[:i], lane, *partial.lanes[i + 1 :]),
            ends=(*ends[:i], end, *ends[i + 1 :]),
            arrived=arrived,
            upload_free=copied[True],
            download_free=copied[False],
            start=start,
        )

    def _load_ms(self, free: Sequence[float], done: int) -> float:
        """Return when the lanes have done the work that is left, if it could be divided at will.

        The operators that gain most run on the accelerator, until it ends at the same time as the cores.

        Args:
            free: When each lane is free, in ms.
            done: Bit mask of the operators that have been placed.
        """
        left = [(on_host, on_device) for bit, on_host, on_device in self._by_gain if not done & bit]
        cores = self._lanes.cores
        device = free[0] if self._lanes.streams else math.inf
        if not cores:
            return device + sum([on_device for _, on_device in left])
        host = sum(free[len(free) - cores :]) + sum([on_host for on_host, _ in left])
        for on_host, on_device in left:
            if device + on_device > (host - on_host) / cores:
                if on_device < math.inf and device < host / cores:
                    return device + on_device * (host / cores - device) / (on_device + on_host / cores)
                break
            device, host = device + on_device, host - on_host
        return host / cores

    def _select(self, partials: list[_Partial]) -> list[_Partial]:
        """Return the partial schedules to keep, those with the least bounds first."""
        kept: list[_Partial] = []
        known: dict[_Operators, list[tuple[float, ...]]] = {}
        for partial in sorted(partials, key=lambda p: (p.bound, p.load, p.order, p.lanes)):
            key, times = self._figures(partial)
            others = known.setdefault(key, [])
            if not any(all(a <= b for a, b in zip(other, times, strict=True)) for other in others):
                others.append(times)
                kept.append(partial)
                if len(kept) == _KEPT:
                    break
        return kept

    def _figures(self, partial: _Partial) -> tuple[_Operators, tuple[float, ...]]:
        """Return what two partial schedules must have in common to be compared, and the times by which they are."""
        streams = len(partial.available) - self._lanes.cores
        times = [partial.upload_free, partial.download_free, partial.start, *partial.available[:streams]]
        read: list[list[int]] = [[] for _ in partial.available]
        for i, after in enumerate(self._after):
            if partial.done >> i & 1 and after & ~partial.done:
                read[self._index[partial.lanes[i]]].append(i)
                times.append(partial.ends[i])
                times += [partial.arrived.get(value, math.inf) for value, _ in self._dag.output_values[i]]
        times += [partial.arrived.get(-1 - at, math.inf) for at in range(len(self._dag.request_inputs))]
        cores = sorted(zip(read[streams:], partial.available[streams:], strict=True))
        times += [available for _, available in cores]
        on_lanes = (*read[:streams], *(own for own, _ in cores))
        return (partial.done, tuple(tuple(own) for own in on_lanes)), tuple(times)

    def _tails_ms(self) -> tuple[list[float], list[float]]:
        """Return the least time from the end of each operator to the end of the request, from the host and the device.

        Every operator after it runs on the device that is better for the path, and copies do not wait for each other.
        """
        dag = self._dag
        host = [0.0] * len(dag)
        device = [max((self._download_ms[value] for value in values), default=0.0) for values in self._returned]
        for i in reversed(dag.topological_order):
            on_host, on_device = self._host_ms[i] + host[i], self._device_ms[i] + device[i]
            for m, values in dag.received[i]:
                upload = max((self._upload_ms[value] for value in values), default=0.0)
                download = max((self._download_ms[value] for value in values), default=0.0)
                host[m] = max(host[m], min(on_host, on_device + upload))
                device[m] = max(device[m], min(on_device, on_host + download))
        return host, device
