"""An independent model of servers with all options, written as SimPy processes from ``docs/simulation.md``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import simpy

from chrion.serving.simulator.settings import ServerSpec
from chrion.serving.variants import Variant

Wait = Generator[Any, Any, None]


@dataclass
class Rules:
    """What differs between tests."""

    spill: int = 4
    keep_alive_ms: float | None = None
    max_batch: int = 1
    max_delay_ms: float = 0.0
    #: (server, from, to) of the times at which a server is down.
    down: Sequence[tuple[int, float, float]] = ()


@dataclass(eq=False)
class Request:
    """A request."""

    number: int
    model: int
    arrival: float
    factor: float
    priority: int
    sent: int = 0


@dataclass(eq=False)
class Group:
    """Requests that start together."""

    requests: list[Request]
    ticket: int
    until: float


class Gpu:
    """One GPU: models in memory, models that are awaited, and a queue of groups."""

    def __init__(self, host: Host, index: int) -> None:
        self.host, self.index, self.env, self.rules = host, index, host.env, host.rules
        self.slots = host.spec.gpu_slots
        self.speed = host.spec.gpu_speed
        #: The last use of each model in memory, and of each that was.
        self.held: dict[int, float] = {}
        self.gone: dict[int, float] = {}
        self.users: Counter[int] = Counter()
        self.awaited: dict[int, list[Request]] = {}
        self.coming: int | None = None
        self.queue: list[Group] = []
        self.forming: list[Group] = []
        self.running: list[Request] = []
        #: Requests here, and a number that changes when the server fails.
        self.number = 0
        self.life = 0

    def variant(self, model: int) -> tuple[float, float, tuple[float, ...], float]:
        """Return latency, GPU time, core times and MB of a model here."""
        v = self.host.variants[model]
        gpu_ms = v.gpu_busy_ms / self.speed
        return max(v.latency_ms - v.gpu_busy_ms + gpu_ms, *v.core_busy_ms, 0.0), gpu_ms, v.core_busy_ms, v.memory_mb

    def receive(self, request: Request) -> None:
        """Take a request."""
        self.number += 1
        if request.model in self.held:
            self.users[request.model] += 1
            self.make_ready(request)
            self.host.dispatch()
        else:
            self.awaited.setdefault(request.model, []).append(request)
            self.host.use_link()

    def make_ready(self, request: Request) -> None:
        """Let a request join a group or begin one."""
        for group in self.queue + self.forming:
            first = group.requests[0]
            same = (first.model, first.priority) == (request.model, request.priority)
            if same and len(group.requests) < self.rules.max_batch:
                group.requests.append(request)
                if len(group.requests) == self.rules.max_batch:
                    self.enter(group)
                return
        group = Group([request], next(self.host.tickets), self.env.now + self.rules.max_delay_ms)
        self.forming.append(group)
        if self.rules.max_batch == 1 or not self.rules.max_delay_ms:
            self.enter(group)
        else:
            self.env.process(self.delay())

    def enter(self, group: Group) -> None:
        """Put a group into the queue."""
        if group in self.forming:
            self.forming.remove(group)
            self.queue.append(group)
            self.queue.sort(key=rank)

    def delay(self) -> Wait:
        """Let groups start that have waited for the delay."""
        life = self.life
        yield self.env.timeout(self.rules.max_delay_ms)
        if life == self.life:
            for group in [group for group in self.forming if group.until <= self.env.now]:
                self.enter(group)
            self.host.dispatch()

    def execute(self, group: Group) -> Wait:
        """Run a group; its slot and cores are taken."""
        life, first = self.life, group.requests[0]
        latency, gpu_ms, cores_ms, _ = self.variant(first.model)
        scale = first.factor * (1 + self.host.variants[first.model].batch_cost * (len(group.requests) - 1))
        begin = self.env.now
        self.running += group.requests
        steps = [(gpu_ms, 1, 0)] if gpu_ms else []
        steps += [(core_ms, 0, 1) for core_ms in cores_ms]
        for at, slot, core in sorted(steps):
            yield self.env.timeout(max(0.0, begin + at * scale - self.env.now))
            if life != self.life:
                return
            self.slots += slot
            self.host.cores += core
            if at < latency * (1 - 1e-9):
                self.host.dispatch()
        yield self.env.timeout(max(0.0, begin + latency * scale - self.env.now))
        if life != self.life:
            return
        for request in group.requests:
            self.running.remove(request)
            self.host.cluster.log[request.number] = (self.index, begin, self.env.now)
            self.number -= 1
        self.leave(first.model, len(group.requests))
        self.host.dispatch()

    def leave(self, model: int, users: int) -> None:
        """End the use of a model."""
        self.users[model] -= users
        if not self.users[model]:
            self.held[model] = self.env.now
            self.env.process(self.expire(model, self.env.now))
            self.host.use_link()

    def expire(self, model: int, since: float) -> Wait:
        """Remove a model that stays idle."""
        if self.rules.keep_alive_ms is None:
            return
        life = self.life
        yield self.env.timeout(self.rules.keep_alive_ms)
        if life == self.life and self.held.get(model) == since and not self.users[model]:
            self.gone[model] = self.held.pop(model)

    def free_mb(self) -> float:
        """Return the memory that no model has and no load takes, without errors of rounding."""
        used = [*self.held, *([] if self.coming is None else [self.coming])]
        return round(self.host.spec.gpu_memory_gb * 1000 - sum(self.variant(m)[3] for m in used), 6)

    def room_for(self, model: int) -> bool:
        """Evict idle models, the one idle longest first and none without need; return whether there is room."""
        size = {m: self.variant(m)[3] for m in (*self.held, model)}
        free = self.free_mb()
        idle = sorted((m for m in self.held if not self.users[m]), key=self.held.__getitem__)
        victims: list[int] = []
        while free < size[model]:
            if len(victims) == len(idle):
                return False
            victims.append(idle[len(victims)])
            free += size[victims[-1]]
        for victim in reversed(victims):
            if free - size[victim] >= size[model]:
                free -= size[victim]
            else:
                self.gone[victim] = self.held.pop(victim)
        return True

    def load(self, model: int) -> Wait:
        """Bring a model into memory over the link."""
        life, spec = self.life, self.host.spec
        size = self.host.variants[model].load_mb
        ms = spec.load_fixed_ms + size / spec.pcie_gb_per_s
        if spec.host_memory_gb and model not in self.host.disk_cache:
            ms += spec.disk_fixed_ms + size / spec.disk_gb_per_s
            self.host.cache(model, size)
        self.host.cluster.loads += 1
        yield self.env.timeout(ms)
        if life != self.life:
            return
        self.coming, self.host.link_busy = None, False
        self.held[model] = self.env.now
        requests = self.awaited.pop(model)
        self.users[model] += len(requests)
        for request in requests:
            self.make_ready(request)
        self.host.use_link()
        self.host.dispatch()

    def crash(self) -> list[Request]:
        """Lose everything; return the requests that waited or ran."""
        self.life += 1
        waiting = [r for group in self.queue + self.forming for r in group.requests]
        waiting += [r for requests in self.awaited.values() for r in requests]
        waiting += self.running
        self.gone |= self.held
        for what in (self.held, self.users, self.awaited, self.queue, self.forming, self.running):
            what.clear()
        self.coming, self.number, self.slots = None, 0, self.host.spec.gpu_slots
        return waiting


def rank(group: Group) -> tuple[int, int]:
    """Return what orders the groups of a server."""
    return -group.requests[0].priority, group.ticket


class Host:
    """A server with some GPUs."""

    def __init__(self, cluster: Cluster, spec: ServerSpec, tickets: Iterator[int]) -> None:
        self.cluster, self.spec, self.tickets = cluster, spec, tickets
        self.env, self.rules, self.variants = cluster.env, cluster.rules, cluster.variants
        self.cores = spec.cpu_cores
        self.link_busy = False
        self.up = True
        self.disk_cache: dict[int, float] = {}
        self.gpus = [Gpu(self, len(cluster.gpus) + i) for i in range(spec.gpus)]
        cluster.gpus += self.gpus

    def dispatch(self) -> None:
        """Start all groups that can start."""
        while True:
            short = False
            for gpu in sorted((g for g in self.gpus if g.queue), key=lambda g: rank(g.queue[0])):
                _, gpu_ms, cores_ms, _ = gpu.variant(gpu.queue[0].requests[0].model)
                if (gpu_ms and not gpu.slots) or (cores_ms and short):
                    continue
                if len(cores_ms) > self.cores:
                    short = True
                    continue
                group = gpu.queue.pop(0)
                gpu.slots -= 1 if gpu_ms else 0
                self.cores -= len(cores_ms)
                self.env.process(gpu.execute(group))
                break
            else:
                return

    def use_link(self) -> None:
        """Start the next load, if the link is free."""
        if self.link_busy:
            return
        proposals = []
        for gpu in self.gpus:
            waiting = [(-max(r.priority for r in rs), rs[0].number, m) for m, rs in gpu.awaited.items()]
            if waiting:
                proposals.append((*min(waiting), gpu))
        for _, _, model, gpu in sorted(proposals, key=lambda p: p[:2]):
            if gpu.room_for(model):
                self.link_busy, gpu.coming = True, model
                self.env.process(gpu.load(model))
                return

    def cache(self, model: int, size: float) -> None:
        """Keep a model in host memory; those that no GPU has used for longest leave."""

        def last_use(other: int) -> float:
            uses = [float("inf") if g.users[other] else g.held.get(other, g.gone.get(other, -1.0)) for g in self.gpus]
            return max(uses)

        while self.disk_cache and sum(self.disk_cache.values()) + size > self.spec.host_memory_gb * 1000:
            del self.disk_cache[min(self.disk_cache, key=last_use)]
        self.disk_cache[model] = size

    def fail_and_return(self, begin: float, end: float) -> Wait:
        """Be down for a time."""
        yield self.env.timeout(begin - self.env.now)
        self.up = False
        waiting = [request for gpu in self.gpus for request in gpu.crash()]
        self.cores, self.link_busy = self.spec.cpu_cores, False
        self.disk_cache.clear()
        for request in sorted(waiting, key=lambda r: r.number):
            self.cluster.send(request)
        yield self.env.timeout(end - self.env.now)
        self.up = True


class Cluster:
    """Servers and a router that prefers GPUs with the weights."""

    def __init__(self, specs: Sequence[ServerSpec], variants: Sequence[Variant], rules: Rules) -> None:
        self.env, self.rules, self.variants = simpy.Environment(), rules, variants
        self.gpus: list[Gpu] = []
        tickets = iter(range(10**9))
        self.hosts = [Host(self, spec, tickets) for spec in specs]
        #: GPU, start and end by request.
        self.log: dict[int, tuple[int, float, float]] = {}
        self.failed: set[int] = set()
        self.loads = 0
        self.homes: dict[int, list[int]] = {}

    def send(self, request: Request) -> None:
        """Route a request."""
        request.sent += 1
        open_gpus = [gpu for gpu in self.gpus if gpu.host.up]
        if not open_gpus or request.sent > 3:
            self.failed.add(request.number)
            return
        has = [g for g in self.gpus if request.model in g.held or request.model in g.awaited]
        order = [i for i in self.homes.get(request.model, []) if self.gpus[i] in has]
        order += [g.index for g in has if g.index not in order]
        self.homes[request.model] = order
        homes = [self.gpus[i] for i in order if self.gpus[i].host.up]
        chosen = least = min(open_gpus, key=lambda g: (g.number, 0 if homes else -g.free_mb()))
        if homes:
            home = min(homes, key=lambda g: g.number)
            chosen = home if home.number < least.number + self.rules.spill else least
        chosen.receive(request)
        if chosen.index not in order:
            order.append(chosen.index)

    def arrive(self, requests: Sequence[Request]) -> Wait:
        """Send requests at their times."""
        for request in requests:
            yield self.env.timeout(request.arrival - self.env.now)
            self.send(request)

    def run(self, requests: Sequence[Request]) -> None:
        """Serve all requests."""
        self.env.process(self.arrive(requests))
        for server, begin, end in self.rules.down:
            self.env.process(self.hosts[server].fail_and_return(begin, end))
        self.env.run()
