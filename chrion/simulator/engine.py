"""The event loop: requests in order of arrival, and between them the events that they cause.

Events are kept in a heap as ``(time, sequence, action, payload)``. The sequence number orders events of the same time
by their creation, so that equal seeds give equal runs. An event at the time of an arrival precedes the arrival.
Arrivals never enter the heap: they come in chunks that are already in order, so memory does not grow with their number.
A request costs one event for its end, and one for each earlier time at which a hybrid variant releases its slot or a
core.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from chrion.manager.policies import Route
from chrion.simulator.metrics import RequestMetrics
from chrion.simulator.server import Action, ClusterState, Server, ServerPolicies
from chrion.simulator.settings import ServerSpec
from chrion.simulator.variants import Jitter, Variant

#: Requests in order of arrival: times in ms, models. Both of shape [n].
Chunk = tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]
#: Events between two flushes of the metrics while the last requests end.
_DRAIN = 1 << 16


class NextUseOracle:
    """The number of each model's next request, for Belady's policy. It keeps the whole trace in memory."""

    def __init__(self, models: npt.NDArray[np.int64]) -> None:
        order = np.argsort(models, kind="stable")
        bounds = np.searchsorted(models[order], np.arange(int(models.max(initial=-1)) + 2))
        self._positions = [order[a:b].tolist() for a, b in pairwise(bounds)]

    def next_use(self, model: int, number: int) -> float:
        """Return the number of the first request for ``model`` after request ``number``, or infinity."""
        positions = self._positions[model] if model < len(self._positions) else []
        index = bisect_right(positions, number)
        return float(positions[index]) if index < len(positions) else float("inf")


def read_ahead(chunks: Iterable[Chunk]) -> NextUseOracle:
    """Return an oracle of all requests of a workload."""
    return NextUseOracle(np.concatenate([np.zeros(0, np.int64), *(models for _, models in chunks)]))


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The inputs of a run, apart from its requests."""

    #: One entry for each server.
    servers: Sequence[ServerSpec]
    #: One entry for each model.
    variants: Sequence[Variant]
    policies: ServerPolicies
    route: Route
    seed: int
    #: True to compare the response time with the objective, false to compare the execution time.
    from_arrival: bool = True
    #: True to load models before the first request, in their order and as far as they fit.
    preload: bool = False
    #: The future requests; only Belady's policy uses them.
    oracle: NextUseOracle | None = None


class Engine:
    """One run of one cluster.

    Args:
        config: The inputs of the run.
        journal: Called for loads and evictions; see :class:`chrion.simulator.server.ClusterState`.
    """

    def __init__(self, config: EngineConfig, journal: Callable[[float, str, int, int], None] | None = None) -> None:
        models, servers = len(config.variants), len(config.servers)
        jitter, routing = np.random.SeedSequence([config.seed, 1]).spawn(2)
        self.config = config
        self.metrics = RequestMetrics(models, servers, config.policies.slo_ms, from_arrival=config.from_arrival)
        self._events: list[tuple[float, int, Action, Any]] = []
        self._sequence = count()
        self._jitter = Jitter(tuple(config.variants), jitter)
        self._draws = np.random.default_rng(routing)
        self._number = 0
        self.cluster = ClusterState(
            push=self._push,
            outstanding=[0] * servers,
            homes=[[] for _ in range(models)],
            loads=[0] * models,
            record=self.metrics.record,
            journal=journal,
        )
        policies = replace(config.policies, next_use=self._next_use) if config.oracle else config.policies
        self.servers = [
            Server(i, spec, config.variants, policies, self.cluster) for i, spec in enumerate(config.servers)
        ]
        self._eligible = [eligible_servers(variant, config.servers) for variant in config.variants]
        self._preload()

    def run(
        self,
        chunks: Iterable[Chunk],
        progress: Callable[[int], None] = lambda _: None,
        keep: Callable[[npt.NDArray[np.float64]], None] = lambda _: None,
    ) -> RequestMetrics:
        """Serve all requests until the last has ended.

        Args:
            chunks: The requests.
            progress: Called after each chunk with the number of requests that have arrived.
            keep: Called with the records of requests, shape [n, 7], in the order in which they started or were dropped;
                see :data:`chrion.simulator.metrics.COLUMNS`.

        Returns:
            The metrics of all requests.
        """
        for times, models in chunks:
            factors, draws = self._jitter.draw(models), self._draws.random(len(models))
            self._replay(times.tolist(), models.tolist(), factors.tolist(), draws.tolist())
            self._flush(keep)
            progress(self._number)
        while self._events:
            self._drain()
            self._flush(keep)
        self._flush(keep, force=True)
        return self.metrics

    def _replay(self, times: list[float], models: list[int], factors: list[float], draws: list[float]) -> None:
        events, pop, servers = self._events, heapq.heappop, self.servers
        route, outstanding, eligible, homes = (
            self.config.route,
            self.cluster.outstanding,
            self._eligible,
            self.cluster.homes,
        )
        number = self._number
        for now, model, factor, draw in zip(times, models, factors, draws, strict=True):
            while events and events[0][0] <= now:
                at, _, action, payload = pop(events)
                action(at, payload)
            self._number = number = number + 1
            server = route(outstanding, eligible[model], homes[model], draw)
            servers[server].offer(now, number - 1, model, factor)

    def _drain(self) -> None:
        for _ in range(min(_DRAIN, len(self._events))):
            at, _, action, payload = heapq.heappop(self._events)
            action(at, payload)

    def _push(self, at: float, action: Action, payload: Any) -> None:
        heapq.heappush(self._events, (at, next(self._sequence), action, payload))

    def _next_use(self, model: int) -> float:
        assert self.config.oracle  # noqa: S101 # servers have this method only if there is an oracle
        return self.config.oracle.next_use(model, self._number - 1)

    def _flush(self, keep: Callable[[npt.NDArray[np.float64]], None], *, force: bool = False) -> None:
        rows = self.metrics.flush(force=force)
        if rows is not None:
            keep(rows)

    def _preload(self) -> None:
        """Load pinned models on every server that can hold them; with ``preload``, then others while they fit."""
        pinned = self.config.policies.pinned
        for server in self.servers:
            for model in range(len(pinned)):
                if pinned[model]:
                    server.preload(model)
        if self.config.preload:
            for model, eligible in enumerate(self._eligible):
                max((self.servers[i] for i in eligible), key=lambda server: server.free_bytes).preload(model)


def eligible_servers(variant: Variant, servers: Sequence[ServerSpec]) -> list[int]:
    """Return the indices of the servers with enough memory, cores and slots for a variant, in ascending order."""
    return [
        i
        for i, spec in enumerate(servers)
        if variant.memory_bytes <= spec.budget_bytes
        and variant.cores <= spec.cpu_cores
        and (spec.gpu_slots > 0 or not variant.gpu_busy_ms)
    ]
