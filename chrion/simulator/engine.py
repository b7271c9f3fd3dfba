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
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from chrion.manager.policies import Route
from chrion.simulator.metrics import RequestMetrics
from chrion.simulator.server import ClusterState, Event, Server, ServerPolicies
from chrion.simulator.service import service_table
from chrion.simulator.settings import ServerSpec
from chrion.simulator.variants import Jitter, Variant

#: Requests in order of arrival: times in ms, models. Both of shape [n].
Chunk = tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]
#: Events between two flushes of the metrics while the last requests end.
DRAIN = 1 << 16


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
    #: Smaller variants that models change to before they are evicted, by level and model.
    smaller: Sequence[Sequence[Variant]] = ()


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
        self._table = service_table([config.variants, *config.smaller])
        self.metrics = RequestMetrics(
            models,
            servers,
            config.policies.slo_ms,
            from_arrival=config.from_arrival,
            busy_shares=self._table.busy_shares(),
        )
        self._events: list[Event] = []
        self._jitter = Jitter(self._table.variants, jitter)
        self._draws = np.random.default_rng(routing)
        self._number = 0
        #: The time of the last event or arrival in ms.
        self.now = 0.0
        policies = replace(config.policies, next_use=self._next_use) if config.oracle else config.policies
        self.cluster = ClusterState(
            table=self._table,
            policies=policies,
            events=self._events,
            outstanding=[0] * servers,
            homes=[[] for _ in range(models)],
            loads=[0] * models,
            record=self.metrics.record,
            journal=journal,
        )
        links = {(spec.pcie_gb_per_s, spec.load_fixed_ms): spec for spec in config.servers}
        load_ms = {link: self._table.load_ms(spec) for link, spec in links.items()}
        self.servers = [
            Server(i, spec, load_ms[spec.pcie_gb_per_s, spec.load_fixed_ms], self.cluster)
            for i, spec in enumerate(config.servers)
        ]
        self.eligible = eligible_by_model(self._table.variants, config.servers)
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
            keep: Called with the records of requests, shape [n, 8], in the order in which they started or were dropped;
                see :data:`chrion.simulator.metrics.COLUMNS`.

        Returns:
            The metrics of all requests.
        """
        for times, models in chunks:
            factors, draws = self.draw(models)
            self._replay(times.tolist(), models.tolist(), factors, draws.tolist())
            self.flush(keep)
            progress(self._number)
        while self._events:
            self._drain()
            self.flush(keep)
        self.flush(keep, force=True)
        return self.metrics

    def draw(self, models: npt.NDArray[np.int64]) -> tuple[list[Any], npt.NDArray[np.float64]]:
        """Return the random factors of a chunk's requests and the random numbers of its routing."""
        return self._jitter.draw(models), self._draws.random(len(models))

    def _replay(self, times: list[float], models: list[int], factors: list[Any], draws: list[float]) -> None:
        events, pop, route = self._events, heapq.heappop, self.config.route
        outstanding, homes, eligible = self.cluster.outstanding, self.cluster.homes, self.eligible
        offers = [server.offer for server in self.servers]
        number = self._number
        for now, model, factor, draw in zip(times, models, factors, draws, strict=True):
            while events and events[0][0] <= now:
                at, _, action, payload = pop(events)
                action(at, payload)
            self._number = number + 1
            offers[route(outstanding, eligible[model], homes[model], draw)](now, number, model, factor)
            number += 1
        self.now = max([self.now, *times[-1:]])

    def _drain(self) -> None:
        for _ in range(min(DRAIN, len(self._events))):
            at, _, action, payload = heapq.heappop(self._events)
            action(at, payload)
            self.now = max(self.now, at)

    def _next_use(self, model: int) -> float:
        assert self.config.oracle  # noqa: S101 # servers have this method only if there is an oracle
        return self.config.oracle.next_use(model, self._number - 1)

    def flush(self, keep: Callable[[npt.NDArray[np.float64]], None], *, force: bool = False) -> None:
        """Add the records of requests to the metrics if there are many, or all of them, and give them to ``keep``."""
        rows = self.metrics.flush(force=force)
        if rows is not None:
            keep(rows)

    def _preload(self) -> None:
        """Load pinned models on every server that can hold them.

        With ``preload``, then load every model once, on the server with most free memory, and then fill the memory that
        is left on all servers with further copies. All of it in the order of the models, as far as they fit.
        """
        pinned = self.config.policies.pinned
        for model in (model for model in range(len(pinned)) if pinned[model]):
            for server in self.servers:
                server.preload(model)
        if not self.config.preload:
            return
        sizes, free = self._table.bytes, [server.free_bytes for server in self.servers]
        for model, eligible in enumerate(self.eligible):
            if sizes[model] and not self.cluster.homes[model]:
                best = max(eligible, key=free.__getitem__)
                self.servers[best].preload(model, shrink=True)
                free[best] = self.servers[best].free_bytes
        self._fill()

    def _fill(self) -> None:
        """Load further copies of models, in their order, into free memory."""
        smallest = min((size for size in self._table.bytes[: self._table.models] if size), default=0)
        open_ = {i for i, server in enumerate(self.servers) if server.free_bytes >= smallest > 0}
        for model, size in enumerate(self._table.bytes[: self._table.models]):
            if not open_ or not size:
                continue
            eligible = self.eligible[model]
            for i in [i for i in sorted(open_) if i in eligible]:
                self.servers[i].preload(model)
                if self.servers[i].free_bytes < smallest:
                    open_.remove(i)


def eligible_servers(levels: Sequence[Variant], servers: Sequence[ServerSpec]) -> Sequence[int]:
    """Return the indices of the servers that can serve a model, in ascending order.

    Args:
        levels: The model's variants, the smallest one last. A server needs memory for the smallest one, and the cores
            and the GPU slot of all of them.
        servers: The servers.
    """
    size, cores = levels[-1].memory_bytes, max(v.cores for v in levels)
    on_gpu = any(v.gpu_busy_ms for v in levels)
    found = [
        i
        for i, spec in enumerate(servers)
        if size <= spec.budget_bytes and cores <= spec.cpu_cores and (spec.gpu_slots > 0 or not on_gpu)
    ]
    return range(len(servers)) if len(found) == len(servers) else found


def eligible_by_model(variants: Sequence[Sequence[Variant]], servers: Sequence[ServerSpec]) -> list[Sequence[int]]:
    """Return the eligible servers of each model, given the variants by level and model. Copies share one sequence."""
    known: dict[tuple[int, ...], Sequence[int]] = {}
    ladders = list(zip(*variants, strict=True))
    for ladder in ladders:
        key = tuple(map(id, ladder))
        if key not in known:
            known[key] = eligible_servers(ladder, servers)
    return [known[tuple(map(id, ladder))] for ladder in ladders]
