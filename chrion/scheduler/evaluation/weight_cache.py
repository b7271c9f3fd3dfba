"""How long each operator of a schedule runs: W, and the time to fetch weights that its lane's cache has lost.

W is measured by running one operator again and again, with its weights in the cache of the core. In a request a lane
runs other operators in between, and where all their weights do not fit into the cache together, each has to be fetched
again. So a lane that keeps to a layer is faster than one that changes between layers step by step. Each lane's cache is
taken to hold the weights that were used last, beginning with what the request before has left there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache

from chrion.graph.dag import Dag
from chrion.lane_numbers import is_accelerator_lane
from chrion.profiler.costs import Costs
from chrion.scheduler.schedule import Schedule


def durations_ms(dag: Dag, costs: Costs, schedule: Schedule) -> list[float]:
    """How long each operator runs on its lane, by itself if that is one of the accelerator's.

    On CPU lanes that is W[i, j], with j the lanes that are in use: all ``cores`` of the schedule as in the paper, or
    with stages, those of the operator's stage; and what it takes to fetch its weights.
    """
    durations = _undisturbed_ms(costs, schedule)
    if costs.cache_bytes and costs.reload_ms_per_byte:
        for i, fetched in fetched_bytes(dag, costs.cache_bytes, schedule).items():
            durations[i] += fetched * costs.reload_ms_per_byte
    return durations


def fetched_bytes(dag: Dag, cache_bytes: int, schedule: Schedule) -> dict[int, float]:
    """Bytes of weights that operators on CPU lanes fetch in each request of many, beyond what W includes.

    Args:
        dag: The graph.
        cache_bytes: What a core's own cache holds.
        schedule: Order and lanes.
    """
    shares: dict[int, list[int]] = defaultdict(list)
    for i in schedule.order:
        if dag.weights[i] and not is_accelerator_lane(schedule.lanes[i]):
            shares[schedule.lanes[i]].append(i)
    fetched: dict[int, float] = {}
    for operators in shares.values():
        row = _fetched(tuple(dag.weights[i] for i in operators), dag.weight_bytes, cache_bytes)
        fetched |= zip(operators, row, strict=True)
    return fetched


@lru_cache(maxsize=64)  # a step of a search leaves most lanes as they are
def _fetched(row: tuple[tuple[int, ...], ...], weight_bytes: tuple[int, ...], cache_bytes: int) -> tuple[int, ...]:
    """What one lane's operators fetch, given the weights of each."""
    cache = _Cache(weight_bytes, cache_bytes)
    for weights in row:  # the request before
        cache.use(weights)
    return tuple(cache.use(weights) for weights in row)


def _undisturbed_ms(costs: Costs, schedule: Schedule) -> list[float]:
    if not schedule.stages:
        rows = {lane: costs.lane_ms(lane, schedule.cores) for lane in set(schedule.lanes)}
        return [rows[lane][i] for i, lane in enumerate(schedule.lanes)]
    used: dict[int, set[int]] = defaultdict(set)
    for lane, stage in zip(schedule.lanes, schedule.stages, strict=True):
        if not is_accelerator_lane(lane):
            used[stage].add(lane)
    pairs = zip(schedule.lanes, schedule.stages, strict=True)
    return [costs.lane_ms(lane, len(used[stage]))[i] for i, (lane, stage) in enumerate(pairs)]


class _Cache:
    """The weights used last, up to a size. Of an operator whose weights exceed it, it holds a part of each."""

    def __init__(self, weight_bytes: Sequence[int], size: int) -> None:
        self._weight_bytes = weight_bytes
        self._size = size
        #: Bytes of each weight, the one used last at the end.
        self._held: dict[int, int] = {}
        self._total = 0
        self._last: Sequence[int] = ()

    def use(self, weights: Sequence[int]) -> int:
        """Bytes that an operator has to fetch, of those that it would find in a loop of its own."""
        if weights == self._last:  # the operator before has left them all
            return 0
        self._last = weights
        whole = sum(self._weight_bytes[w] for w in weights)
        fetched = 0
        for w in weights:
            size = self._weight_bytes[w]
            size = size if whole <= self._size else size * self._size // whole
            before = self._held.pop(w, 0)
            fetched += max(0, size - before)
            self._held[w] = size
            self._total += size - before
        while self._total > self._size:
            self._total -= self._held.pop(next(iter(self._held)))
        return fetched
