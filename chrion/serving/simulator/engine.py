"""The event loop: requests in order of arrival, and between them the events that they cause.

Events are kept in a heap as ``(time, sequence, action, payload)``. The sequence number orders events of the same time
by their creation, so that equal seeds give equal runs. An event at the time of an arrival precedes the arrival.
Arrivals never enter the heap: they come in chunks that are already in order, so memory does not grow with their number.
A request costs one event for its end, and one for each earlier time at which a hybrid variant releases its slot or a
core.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count, pairwise
from typing import Any

import numpy as np

from chrion.serving.manager.device_memory import TICK_MS
from chrion.serving.manager.policies import Route
from chrion.serving.manager.policy_settings import ServerPolicies
from chrion.serving.manager.scaling import AutoscalingSpec
from chrion.serving.simulator.availability import Availability
from chrion.serving.simulator.cluster_state import ClusterState, Event
from chrion.serving.simulator.eligibility import eligible_by_model
from chrion.serving.simulator.metrics import RequestMetrics
from chrion.serving.simulator.network_store import NetworkStore
from chrion.serving.simulator.requests import Floats, Indices, Requests
from chrion.serving.simulator.server import Server, SimulatedHost
from chrion.serving.simulator.service import busy_shares, scaled_levels, service_table
from chrion.serving.simulator.settings import DomainSpec, ServerSpec, StoreSpec
from chrion.serving.variants import Jitter, Variant

#: Requests in order of arrival: times in ms and models, both of shape [n], and optionally their details.
Chunk = Requests | tuple[Floats, Indices]
#: Events between two flushes of the metrics while the last requests end: about as many as a chunk of requests has.
_DRAIN = 1 << 16
#: Requests of a chunk that are Python objects at the same time (a choice, not measured).
_PART = 1 << 12


class NextUseOracle:
    """The number of each model's next request, for Belady's policy. It keeps the whole trace in memory."""

    def __init__(self, models: Indices) -> None:
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
    return NextUseOracle(np.concatenate([np.zeros(0, np.int64), *(chunk[1] for chunk in chunks)]))


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
    #: The latency in ms, by model, to which the duration of a request refers; default: of the variants.
    reference_ms: Sequence[float] = ()
    #: None if all servers are always on.
    autoscaling: AutoscalingSpec | None = None
    #: Groups of servers that fail together.
    domains: Sequence[DomainSpec] = ()
    #: The network store that all servers read; None if each has a disk.
    store: StoreSpec | None = None

    @property
    def gpus(self) -> list[ServerSpec]:
        """The server of each GPU."""
        return [spec for spec in self.servers for _ in range(spec.gpus)]


class ClusterEngine:
    """One run of one cluster.

    Args:
        config: The inputs of the run.
        journal: Called for loads and evictions; see :class:`chrion.serving.simulator.cluster_state.ClusterState`.
    """

    def __init__(self, config: EngineConfig, journal: Callable[[float, str, int, int], None] | None = None) -> None:
        models, gpus = len(config.variants), config.gpus
        jitter, routing = np.random.SeedSequence([config.seed, 1]).spawn(2)
        self.config = config
        levels = [config.variants, *config.smaller]
        speeds = list(dict.fromkeys(spec.gpu_speed for spec in gpus))
        tables = [service_table(scaled_levels(levels, speed)) for speed in speeds]
        classes = [speeds.index(spec.gpu_speed) for spec in gpus]
        self.metrics = RequestMetrics(
            models,
            len(gpus) + 1,  # the last one stands for requests that no server receives
            [config.policies.slo_ms[model] for model in range(models)],
            from_arrival=config.from_arrival,
            busy_shares=busy_shares(tables, [*classes, 0]),
        )
        self._events: list[Event] = []
        self._jitter = Jitter(levels, jitter)
        self._draws = np.random.default_rng(routing)
        self._reference_ms = np.array(config.reference_ms or [variant.latency_ms for variant in config.variants])
        self._number = 0
        #: The time of the request that arrives next if an event comes before it.
        self._arriving = 0.0
        #: The time of the last arrival in ms.
        self.arrived_ms = 0.0
        #: The time of the last event or arrival in ms.
        self.now = 0.0
        policies = replace(config.policies, next_use=self._next_use) if config.oracle else config.policies
        sequence = count()
        self.eligible = eligible_by_model(levels, gpus)
        every = {id(servers): [*servers] for servers in self.eligible}
        store = NetworkStore(config.store.gb_per_s, self._events, sequence) if config.store else None
        self.cluster = ClusterState(
            table=tables[0],
            policies=policies,
            objectives=self.metrics.objectives,
            events=self._events,
            outstanding=[0] * len(gpus),
            free=[spec.budget_bytes for spec in gpus],
            homes=[[] if size else every[id(own)] for size, own in zip(tables[0].sizes[0], self.eligible, strict=True)],
            loads=[0] * models,
            record=self.metrics.record,
            journal=journal,
            store=store,
            sequence=sequence,
        )
        states = [self.cluster, *(replace(self.cluster, table=table) for table in tables[1:])]
        self.servers, self.hosts = _build_servers(config.servers, [states[i] for i in classes])
        self.availability: Availability | None = None
        self._route = config.route
        if config.autoscaling or config.domains or any(spec.mtbf_h for spec in config.servers):
            seeds = np.random.SeedSequence([config.seed, 2])
            self.availability = Availability(
                self.hosts, self.cluster, self.eligible, config.route, config.autoscaling, config.domains, seeds
            )
            self.availability.begin()
            self._route = self.availability.route
        #: Whether events of other things than requests and loads may remain at the end.
        ticks = policies.prefetch or bool(config.smaller)
        expires = policies.keep_alive_ms < float("inf")
        self._idles = bool(ticks or store or self.availability or policies.batching or expires)
        if ticks:
            self._use_free_memory(0.0)
        self._preload()

    def run(
        self,
        chunks: Iterable[Chunk],
        progress: Callable[[int], None] = lambda _: None,
        keep: Callable[[Floats], None] | None = None,
    ) -> RequestMetrics:
        """Serve all requests until the last has ended.

        Args:
            chunks: The requests.
            progress: Called after each chunk with the number of requests that have arrived.
            keep: Called with the records of requests and their outcomes, shape [n, 9], in the order in which they
                started or were dropped; see :data:`chrion.serving.simulator.metrics.COLUMNS` and ``OUTCOMES``.

        Returns:
            The metrics of all requests.
        """
        for chunk in chunks:
            requests = Requests(*chunk)
            factors, draws = self._draw(requests)
            for first in range(0, len(draws), _PART):
                part = slice(first, first + _PART)
                arrivals = requests.times_ms[part].tolist(), requests.models[part].tolist()
                own = [level[part].tolist() for level in factors]
                jobs = own[0] if len(own) == 1 else list(zip(*own, strict=True))
                self._replay(*arrivals, jobs, draws[part].tolist())
                self.metrics.pack()
            self._flush(keep)
            progress(self._number)
        self._arriving = math.inf
        if self.availability:
            self.availability.open = False
        while self._events:
            self._drain()
            self._flush(keep)
        self._flush(keep, force=True)
        return self.metrics

    def _draw(self, requests: Requests) -> tuple[list[Floats], Floats]:
        """Return the factors of a chunk's requests by level and the random numbers of its routing.

        Note what the requests require.
        """
        self.arrived_ms = max([self.arrived_ms, *requests.times_ms[-1:].tolist()])
        factors, draws = self._jitter.draw(requests.models), self._draws.random(len(requests.models))
        if requests.details:
            self.metrics.objectives.add(requests.details)
            self.cluster.priorities.frombytes(requests.details.priority.astype(np.int64).tobytes())
            given = requests.details.duration_ms / self._reference_ms[requests.models]
            factors = [np.where(np.isnan(given), level, given) for level in factors]
        return factors, draws

    def _replay(self, times: list[float], models: list[int], factors: list[Any], draws: list[float]) -> None:
        events, pop, route = self._events, heapq.heappop, self._route
        cluster, eligible = self.cluster, self.eligible
        outstanding, homes, free = cluster.outstanding, cluster.homes, cluster.free
        offers = [server.offer for server in self.servers]
        if self.availability:
            offers.append(self.availability.refuse)
        number = self._number
        for now, model, factor, draw in zip(times, models, factors, draws, strict=True):
            if events and events[0][0] <= now:
                self._arriving = now
                while events and events[0][0] <= now:
                    at, _, action, payload = pop(events)
                    action(at, payload)
            self._number = number + 1
            job = number, model, now, factor, False
            offers[route(outstanding, eligible[model], homes[model], draw, free)](now, job)
            number += 1
        self.now = max([self.now, *times[-1:]])

    def _drain(self) -> None:
        for _ in range(min(_DRAIN, len(self._events))):
            if self._idles and not self._is_busy():
                self._events.clear()  # only failures, decisions and ends of keep-alive times remain
                return
            if not self._events:
                return
            at, _, action, payload = heapq.heappop(self._events)
            action(at, payload)
            self.now = max(self.now, at)

    def _is_busy(self) -> bool:
        """Return whether a request waits or runs, or a model is loaded."""
        return any(self.cluster.outstanding) or any(host.loading for host in self.hosts)

    def _next_use(self, model: int) -> float:
        assert self.config.oracle  # noqa: S101 # servers have this method only if there is an oracle
        return self.config.oracle.next_use(model, self._number - 1)

    def _flush(self, keep: Callable[[Floats], None] | None, *, force: bool = False) -> None:
        """Add the records of requests to the metrics if there are many, or all of them, and give them to ``keep``."""
        added = self.metrics.flush(force=force)
        if added is not None and keep:
            keep(np.column_stack(added))

    def _use_free_memory(self, now: float, _: None = None) -> None:
        """Use the free memory of all servers, now and after each interval in which something may have changed."""
        for server in self.servers:
            if server.host.available:
                server.use_free_memory(now)
        intervals = 1
        if all(server.host.loading is None and server.is_calm(now) for server in self.servers):
            # Nothing was loaded, and until the next event or request popularity only decreases.
            until = min(self._arriving, self._events[0][0] if self._events else math.inf)
            if until == math.inf:
                return
            intervals = max(1, math.ceil((until - now) / TICK_MS))
        at = now + intervals * TICK_MS
        heapq.heappush(self._events, (at, next(self.cluster.sequence), self._use_free_memory, None))

    def _preload(self) -> None:
        """Load pinned models on every server that can hold them.

        With ``preload``, then load every model once, on the server with most free memory, and then fill the memory that
        is left on all servers with further copies. All of it in the order of the models, as far as they fit.
        """
        pinned = self.config.policies.pinned
        for model in (model for model in range(len(pinned)) if pinned[model]):
            for server in self.servers:
                if server.host.on:
                    server.preload(model)
        if not self.config.preload:
            return
        sizes, free = self.cluster.table.sizes[0], [server.free_bytes for server in self.servers]
        for model, eligible in enumerate(self.eligible):
            if sizes[model] and eligible and not self.cluster.homes[model]:
                best = max(eligible, key=free.__getitem__)
                self.servers[best].preload(model, shrink=True)
                free[best] = self.servers[best].free_bytes
        self._fill()
        for host in self.hosts:
            if host.on:
                host.memory.fill(range(len(pinned)))

    def _fill(self) -> None:
        """Load further copies of models, in their order, into free memory."""
        sizes = self.cluster.table.sizes[0]
        smallest = min((size for size in sizes if size), default=0)
        open_ = {i for i, server in enumerate(self.servers) if server.free_bytes >= smallest > 0}
        for model, size in enumerate(sizes):
            if not open_ or not size:
                continue
            eligible = self.eligible[model]
            for i in [i for i in sorted(open_) if i in eligible]:
                self.servers[i].preload(model)
                if self.servers[i].free_bytes < smallest:
                    open_.remove(i)


def _build_servers(
    specs: Sequence[ServerSpec], states: Sequence[ClusterState]
) -> tuple[list[Server], list[SimulatedHost]]:
    """Return an entry for each GPU, and one for each server.

    Args:
        specs: The specification of each server.
        states: What GPUs share, with the table of times for the speed of each GPU.
    """
    table = states[0].table
    links = {(spec.pcie_gb_per_s, spec.load_fixed_ms): spec for spec in specs}
    load_times = {link: table.load_ms(spec) for link, spec in links.items()}
    servers: list[Server] = []
    hosts: list[SimulatedHost] = []
    for spec in specs:
        load_ms = load_times[spec.pcie_gb_per_s, spec.load_fixed_ms]
        host = SimulatedHost(len(hosts), spec, states[0])
        for i in range(len(servers), len(servers) + spec.gpus):
            Server(i, host, load_ms, states[i])
        servers += host.devices
        hosts.append(host)
    return servers, hosts
