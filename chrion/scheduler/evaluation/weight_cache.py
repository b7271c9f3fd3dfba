"""Durations of operators: W, and the time to reload weights that have left a core's cache.

W is measured by running one operator repeatedly, with its weights in the core's cache. In a request, a lane runs other
operators in between; if all their weights together exceed the cache, each operator has to load its weights again. So a
lane that stays within a layer is faster than one that changes between layers at every step. The model: the cache of a
lane holds the most recently used weights, beginning with those that the previous request has left.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache

from chrion.common.lane_numbers import is_accelerator_lane
from chrion.graph.dag import Dag
from chrion.profiler.costs import Costs
from chrion.scheduler.schedule import Schedule


def durations_ms(dag: Dag, costs: Costs, schedule: Schedule) -> list[float]:
    """Return the time of each operator on its lane, in ms; on the accelerator, without contention.

    On CPU lanes it is W[i, j] plus the reload of its weights. j is the number of lanes in use: all ``cores`` of the
    schedule, as in the paper, or in a schedule with stages, those used in the operator's stage. An operator on several
    cores takes the time measured for its width. One that not every request uses reloads as often as it is used.
    """
    durations = _measured_ms(costs, schedule)
    if costs.cache_bytes and costs.reload_ms_per_byte:
        for i, size in reloaded_bytes(dag, costs.cache_bytes, schedule).items():
            durations[i] += size * costs.reload_ms_per_byte * (dag.usage[i] if dag.usage else 1.0)
    return durations


def reloaded_bytes(dag: Dag, cache_bytes: int, schedule: Schedule) -> dict[int, float]:
    """Return the bytes of weights that operators on CPU lanes reload in the steady state, beyond those in W.

    An operator on several cores divides its weights among them; the largest reload of its cores counts.

    Args:
        dag: The graph.
        cache_bytes: Size of a core's own cache.
        schedule: Order and lanes.
    """
    by_lane: dict[int, list[int]] = defaultdict(list)
    for i in schedule.order:
        if dag.weights[i] and not is_accelerator_lane(schedule.lanes[i]):
            for lane in schedule.occupied(i):
                by_lane[lane].append(i)
    reloaded: dict[int, float] = {}
    for operators in by_lane.values():
        row = tuple((dag.weights[i], schedule.width(i)) for i in operators)
        for i, size in zip(operators, _reloaded(row, dag.weight_bytes, cache_bytes), strict=True):
            reloaded[i] = max(reloaded.get(i, 0.0), size)
    return reloaded


@lru_cache(maxsize=64)  # a step of a search changes few lanes
def _reloaded(
    row: tuple[tuple[tuple[int, ...], int], ...], weight_bytes: tuple[int, ...], cache_bytes: int
) -> tuple[int, ...]:
    """Return the bytes that each operator of one lane reloads, given the weights and the width of each."""
    cache = _Cache(weight_bytes, cache_bytes)
    for weights, width in row:  # the previous request
        cache.use(weights, width)
    return tuple(cache.use(weights, width) for weights, width in row)


def _measured_ms(costs: Costs, schedule: Schedule) -> list[float]:
    """Return W of each operator on its lane, or the time measured for its width."""
    if not schedule.stages:
        rows = {lane: costs.lane_ms(lane, schedule.cores) for lane in set(schedule.lanes)}
        durations = [rows[lane][i] for i, lane in enumerate(schedule.lanes)]
        busy = [schedule.cores] * len(schedule.widths)
    else:
        used: dict[int, set[int]] = defaultdict(set)
        for i, (lane, stage) in enumerate(zip(schedule.lanes, schedule.stages, strict=True)):
            if not is_accelerator_lane(lane):
                used[stage].update(schedule.occupied(i))
        busy = [len(used[stage]) for stage in schedule.stages]
        durations = [costs.lane_ms(lane, busy[i])[i] for i, lane in enumerate(schedule.lanes)]
    for i, width in enumerate(schedule.widths):
        if width > 1:
            durations[i] = costs.core_ms(i, width, busy[i])
    return durations


class _Cache:
    """The most recently used weights, up to a size.

    If the weights of one operator exceed the size, the cache holds an equal part of each of them.
    """

    def __init__(self, weight_bytes: Sequence[int], size: int) -> None:
        self._weight_bytes = weight_bytes
        self._size = size
        #: Bytes held of each weight, least recently used first.
        self._held: dict[int, int] = {}
        self._total = 0
        self._last: tuple[Sequence[int], int] = ((), 1)

    def use(self, weights: Sequence[int], width: int = 1) -> int:
        """Use one part in ``width`` of an operator's weights, and return the bytes of it that are reloaded.

        Bytes that do not fit into the cache even if the operator runs repeatedly are not counted: W includes them.
        """
        if (weights, width) == self._last:  # the previous operator has used the same weights
            return 0
        self._last = weights, width
        whole = sum(self._weight_bytes[w] for w in weights) // width
        reloaded = 0
        for w in weights:
            size = self._weight_bytes[w] // width
            size = size if whole <= self._size else size * self._size // whole
            before = self._held.pop(w, 0)
            reloaded += max(0, size - before)
            self._held[w] = size
            self._total += size - before
        while self._total > self._size:
            self._total -= self._held.pop(next(iter(self._held)))
        return reloaded
