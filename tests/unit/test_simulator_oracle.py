"""The cluster compared with an independent model of it, written as SimPy processes."""

import math
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import simpy

from chrion.serving.manager.policies import EVICTION, LOAD_ORDER, ROUTING, route_resident_first
from chrion.serving.manager.policy_settings import ServerPolicies
from chrion.serving.simulator.engine import ClusterEngine, EngineConfig
from chrion.serving.simulator.settings import ServerSpec
from chrion.serving.variants import Variant
from property_tests import repetitions


@dataclass
class Rules:
    """The policies of the independent model, by the names of scenarios."""

    eviction: str = "lru"
    routing: str = "least-loaded"
    load_order: str = "fifo"
    spill: int = 4
    slo_ms: float | None = None


class SwappingServer:
    """A GPU server in which each request and the PCIe link are processes, and memory is a set."""

    def __init__(self, env: simpy.Environment, spec: ServerSpec, variants: Sequence[Variant], rules: Rules) -> None:
        self.env = env
        self.spec, self.variants, self.rules = spec, variants, rules
        self.turn = simpy.Resource(self.env, 1)
        self.slots = simpy.Container(self.env, spec.gpu_slots, init=spec.gpu_slots)
        self.cores = simpy.Container(self.env, spec.cpu_cores, init=spec.cpu_cores)
        self.last_use: dict[int, float] = {}
        self.uses: Counter[int] = Counter()
        self.users: Counter[int] = Counter()
        self.wanted: dict[int, list[Any]] = {}
        self.demand: Counter[int] = Counter()
        self.in_transfer: dict[int, float] = {}
        self.outstanding = 0
        self.queue: list[tuple[int, float]] = []
        self.ends: list[float] = []
        self.started: dict[int, float] = {}
        self.ended: dict[int, float] = {}
        self.loads = 0
        self.something_changed = self.env.event()
        self.env.process(self.link())

    def change(self) -> None:
        """Wake all processes that wait for a change."""
        event, self.something_changed = self.something_changed, self.env.event()
        event.succeed()

    def request(self, number: int, model: int) -> Generator[Any, Any, None]:
        """Wait for the weights, the head of the queue, a slot and cores; then execute."""
        variant, arrival = self.variants[model], self.env.now
        refused = self.is_late(model, arrival)
        self.outstanding += not refused
        if model in self.last_use:
            if refused:
                return
            self.users[model] += 1
        else:
            loaded = self.env.event()
            self.wanted.setdefault(model, [])
            self.demand[model] += 0 if model in self.in_transfer else variant.latency_ms
            if not refused:
                self.wanted[model].append(loaded)
            self.change()
            if refused:
                return
            yield loaded
        self.queue.append((model, arrival))
        with self.turn.request() as turn:
            yield turn
            if variant.gpu_busy_ms:
                yield self.slots.get(1)
            if variant.cores:
                yield self.cores.get(variant.cores)
            self.queue.remove((model, arrival))
            if self.rules.slo_ms is not None and self.env.now + variant.latency_ms > arrival + self.rules.slo_ms:
                self.slots.put(1)
                self.leave(model)
                return
        self.started[number] = self.env.now
        self.uses[model] += 1
        self.ends.append(self.env.now + variant.latency_ms)
        if variant.gpu_busy_ms:
            self.env.process(self.give_back(self.slots, variant.gpu_busy_ms))
        for busy_ms in variant.core_busy_ms:
            self.env.process(self.give_back(self.cores, busy_ms))
        yield self.env.timeout(variant.latency_ms)
        self.ended[number] = self.env.now
        self.ends.remove(self.env.now)
        self.leave(model)

    def leave(self, model: int) -> None:
        """End a request's use of its model."""
        self.outstanding -= 1
        self.last_use[model] = self.env.now
        self.users[model] -= 1
        self.change()

    def is_late(self, model: int, arrival: float) -> bool:
        """Return whether a request of a GPU-only model cannot end in time, by the workload vector of its slots."""
        if self.rules.slo_ms is None:
            return False
        free_at = [*self.ends, *[arrival] * (self.spec.gpu_slots - len(self.ends))]
        for other, came in self.queue:
            first = min(range(len(free_at)), key=free_at.__getitem__)
            end = free_at[first] + self.variants[other].latency_ms
            if end <= came + self.rules.slo_ms:
                free_at[first] = end
        start = min(free_at)
        if model not in self.last_use:
            transfer = next(iter(self.in_transfer.values()), arrival)
            ready = transfer if model in self.in_transfer else transfer + self.load_ms(model)
            start = max(start, ready)
        return start + self.variants[model].latency_ms > arrival + self.rules.slo_ms

    def give_back(self, what: simpy.Container, after_ms: float) -> Generator[Any, Any, None]:
        """Release one unit of a resource after some ms."""
        yield self.env.timeout(after_ms)
        yield what.put(1)

    def load_ms(self, model: int) -> float:
        """Return the time of a load."""
        return self.spec.load_fixed_ms + self.variants[model].load_mb / self.spec.pcie_gb_per_s

    def total(self, models: Sequence[int]) -> float:
        """Return the memory of some models in MB."""
        return sum(self.variants[m].memory_mb for m in models)

    def free_mb(self) -> float:
        """Return the memory that no model has and no load takes."""
        return self.spec.gpu_memory_gb * 1000 - self.total([*self.last_use, *self.in_transfer])

    def eviction_key(self, model: int) -> float:
        """Return the number by which idle models are ordered for eviction."""
        if self.rules.eviction == "lfu":
            return self.uses[model]
        if self.rules.eviction == "cost":
            return -(self.env.now - self.last_use[model]) / self.load_ms(model)
        return self.last_use[model]

    def link(self) -> Generator[Any, Any, None]:
        """Carry one load at a time, in the load order; evict idle models in the order of the policy."""
        budget = self.spec.gpu_memory_gb * 1000
        while True:
            while True:
                while not self.wanted:
                    yield self.something_changed
                by_demand = self.rules.load_order == "demand"
                model = max(self.wanted, key=self.demand.__getitem__) if by_demand else next(iter(self.wanted))
                size = self.variants[model].memory_mb
                held = {m: self.variants[m].memory_mb for m in self.last_use}
                staying = sum(mb for m, mb in held.items() if self.users[m])
                if staying + size <= budget:
                    break
                yield self.something_changed
            idle = sorted((m for m in held if not self.users[m]), key=self.eviction_key)
            first = next(n for n in range(len(idle) + 1) if sum(held.values()) - self.total(idle[:n]) + size <= budget)
            # Of the models that would be evicted, those stay that fit beside the new one, the last in order first.
            staying = sum(held.values()) - self.total(idle[:first])
            for victim in reversed(idle[:first]):
                if staying + held[victim] + size <= budget:
                    staying += held[victim]
                else:
                    del self.last_use[victim]
            self.loads += 1
            self.in_transfer = {model: self.env.now + self.load_ms(model)}
            del self.demand[model]
            yield self.env.timeout(self.load_ms(model))
            self.in_transfer = {}
            self.last_use[model] = self.env.now
            for event in self.wanted.pop(model):
                self.users[model] += 1
                event.succeed()


class Cluster:
    """Servers and a router."""

    def __init__(self, specs: Sequence[ServerSpec], variants: Sequence[Variant], rules: Rules) -> None:
        self.env = simpy.Environment()
        self.rules = rules
        self.servers = [SwappingServer(self.env, spec, variants, rules) for spec in specs]
        #: By model, servers in the order in which they began to hold or to await it.
        self.since: dict[tuple[int, int], int] = {}

    def run(self, times: Sequence[float], models: Sequence[int]) -> tuple[dict[int, float], dict[int, float]]:
        """Serve all requests; return the start and the end of each by its number."""
        self.env.process(self.arrivals(times, models))
        self.env.run()
        started = {n: t for server in self.servers for n, t in server.started.items()}
        return started, {n: t for server in self.servers for n, t in server.ended.items()}

    def arrivals(self, times: Sequence[float], models: Sequence[int]) -> Generator[Any, Any, None]:
        """Send the requests at their times to the servers that the router chooses."""
        for number, (time, model) in enumerate(zip(times, models, strict=True)):
            yield self.env.timeout(time - self.env.now)
            server = self.servers[self.choose(model, number)]
            self.env.process(server.request(number, model))

    def choose(self, model: int, number: int) -> int:
        """Return the server of a request."""
        queues = [server.outstanding for server in self.servers]
        for i, server in enumerate(self.servers):
            if model in server.last_use or model in server.wanted:
                self.since.setdefault((model, i), number)
            else:
                self.since.pop((model, i), None)
        homes = [i for m, i in self.since if m == model]
        unused = [0.0 if homes else round(server.free_mb(), 6) for server in self.servers]
        least = min(range(len(queues)), key=lambda i: (queues[i], -unused[i]))
        if self.rules.routing == "least-loaded" or not homes:
            return least
        home = min(homes, key=lambda i: queues[i])
        return home if queues[home] < queues[least] + self.rules.spill else least


def random_variants(rng: np.random.Generator, number: int, *, hybrid: bool) -> list[Variant]:
    variants = []
    for i in range(number):
        latency, memory = float(rng.uniform(20, 80)), float(rng.integers(300, 1500))
        if hybrid and i % 3:
            cores = tuple(sorted((latency * rng.uniform(0.2, 0.95, i % 3)).tolist(), reverse=True))
            variants.append(Variant("hybrid", memory, latency, latency * float(rng.uniform(0.1, 0.9)), cores, memory))
        else:
            variants.append(Variant("gpu", memory, latency, latency, (), memory))
    return variants


def compare(
    specs: Sequence[ServerSpec], variants: Sequence[Variant], rules: Rules, rate_per_s: float
) -> tuple[float, float]:
    """Check that all requests start and end at the times of the independent model; return shares of loads and drops."""
    requests = repetitions(4000)
    rng = np.random.default_rng(len(variants))
    times = np.cumsum(rng.exponential(1000 / rate_per_s, requests))
    models = rng.integers(0, len(variants), requests)
    cluster = Cluster(specs, variants, rules)
    started, ended = cluster.run(times.tolist(), models.tolist())

    policies = ServerPolicies(
        rank=EVICTION[rules.eviction],
        order=LOAD_ORDER[rules.load_order],
        deadlines=rules.slo_ms is not None,
        slo_ms=[rules.slo_ms or math.inf] * len(variants),
        weights=[1.0] * len(variants),
        pinned=[False] * len(variants),
    )
    route = ROUTING[rules.routing]
    if rules.routing == "resident-first":
        route = partial(route_resident_first, spill=rules.spill)
    engine = ClusterEngine(EngineConfig(specs, variants, policies, route, 1))
    rows: list[Any] = []
    engine.run([(times, models)], keep=rows.append)
    found = np.concatenate(rows)
    served = found[~np.isnan(found[:, 4])]
    assert sorted(found[:, 0].tolist()) == list(range(requests))
    assert set(served[:, 0].astype(int).tolist()) == set(started)
    assert served[:, 4] == pytest.approx([started[int(n)] for n in served[:, 0]], rel=1e-9)
    assert served[:, 5] == pytest.approx([ended[int(n)] for n in served[:, 0]], rel=1e-9)
    assert sum(engine.cluster.loads) == sum(server.loads for server in cluster.servers)
    return sum(engine.cluster.loads) / requests, 1 - len(started) / requests


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("rate_per_s", [4.0, 14.0])
def test_same_trace_same_results(*, slots: int, hybrid: bool, rate_per_s: float) -> None:
    """Each request has the start and the end of the independent model, and the numbers of loads are equal."""
    variants = random_variants(np.random.default_rng([slots, hybrid]), 12, hybrid=hybrid)
    spec = ServerSpec(gpu_memory_gb=5.0, gpu_slots=slots, cpu_cores=3)
    loads, _ = compare([spec], variants, Rules(), rate_per_s)
    assert loads > 0.1


@pytest.mark.parametrize("eviction", ["lfu", "cost"])
@pytest.mark.parametrize("load_order", ["fifo", "demand"])
@pytest.mark.parametrize("rate_per_s", [4.0, 14.0])
def test_eviction_and_load_order(eviction: str, load_order: str, rate_per_s: float) -> None:
    """Frequency and cost of eviction, and loads by demand, agree with the independent model request by request."""
    variants = random_variants(np.random.default_rng(5), 12, hybrid=True)
    rules = Rules(eviction=eviction, load_order=load_order)
    loads, _ = compare([ServerSpec(gpu_memory_gb=5.0, cpu_cores=3)], variants, rules, rate_per_s)
    assert loads > 0.1


@pytest.mark.parametrize(("routing", "spill"), [("least-loaded", 4), ("resident-first", 1), ("resident-first", 4)])
@pytest.mark.parametrize("rate_per_s", [15.0, 60.0])
def test_routing(routing: str, spill: int, rate_per_s: float) -> None:
    """Three servers receive the same requests as in the independent model."""
    variants = random_variants(np.random.default_rng(6), 14, hybrid=True)
    specs = [ServerSpec(gpu_memory_gb=memory, cpu_cores=3) for memory in (3.0, 4.0, 5.0)]
    loads, _ = compare(specs, variants, Rules(routing=routing, spill=spill), rate_per_s)
    assert loads > 0.02


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("load_order", ["fifo", "demand"])
@pytest.mark.parametrize("rate_per_s", [5.0, 25.0])
def test_deadlines(slots: int, load_order: str, rate_per_s: float) -> None:
    """The same requests are dropped as in the independent model, on arrival and before their start."""
    variants = random_variants(np.random.default_rng(7), 12, hybrid=False)
    spec = ServerSpec(gpu_memory_gb=5.0, gpu_slots=slots)
    rules = Rules(load_order=load_order, slo_ms=250.0)
    loads, dropped = compare([spec], variants, rules, rate_per_s)
    assert loads > 0.1
    assert dropped > 0.01
