"""Shrinking compared with an independent model of it, written as SimPy processes from ``docs/simulation.md``."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
import pytest
import simpy

from chrion.serving.manager.policies import EVICTION, LOAD_ORDER, ROUTING
from chrion.serving.manager.ready_queue import BatchLimits
from chrion.serving.simulator.cluster_state import Options, ServerPolicies
from chrion.serving.simulator.engine import ClusterEngine, EngineConfig
from chrion.serving.simulator.settings import ServerSpec
from chrion.serving.variants import Variant
from property_tests import repetitions
from simulator_support import engine_of

Wait = Generator[Any, Any, None]


class ShrinkingServer:
    """A GPU whose idle models change to smaller variants if memory is short."""

    def __init__(self, spec: ServerSpec, levels: Sequence[Sequence[Variant]]) -> None:
        self.env = simpy.Environment()
        self.spec, self.levels = spec, levels
        self.slots, self.cores = spec.gpu_slots, spec.cpu_cores
        #: The variant of each model in memory, in the order in which they came, and since when each is idle.
        self.held: dict[int, int] = {}
        self.idle_since: dict[int, float] = {}
        self.users: Counter[int] = Counter()
        self.awaited: dict[int, list[int]] = {}
        self.waiting_loads: list[int] = []
        #: MB that the load in progress adds; None if the link is free.
        self.coming: float | None = None
        self.queue: list[tuple[int, int]] = []
        self.log: dict[int, tuple[float, float]] = {}
        self.notes: Counter[str] = Counter()

    def run(self, times: Sequence[float], models: Sequence[int]) -> None:
        """Serve all requests."""
        self.env.process(self.arrive(times, models))
        self.env.run()

    def arrive(self, times: Sequence[float], models: Sequence[int]) -> Wait:
        """Receive requests at their times."""
        for number, (time, model) in enumerate(zip(times, models, strict=True)):
            yield self.env.timeout(time - self.env.now)
            if model in self.held:
                self.users[model] += 1
                self.queue.append((number, model))
                self.dispatch()
                continue
            if model not in self.awaited:
                self.awaited[model] = []
                self.waiting_loads.append(model)
            self.awaited[model].append(number)
            self.use_link()

    def dispatch(self) -> None:
        """Start requests in order while their slots and cores are free."""
        while self.queue:
            number, model = self.queue[0]
            variant = self.levels[self.held[model]][model]
            if (variant.gpu_busy_ms > 0) > self.slots or variant.cores > self.cores:
                return
            self.queue.pop(0)
            self.slots -= variant.gpu_busy_ms > 0
            self.cores -= variant.cores
            self.env.process(self.execute(number, model, variant))

    def execute(self, number: int, model: int, variant: Variant) -> Wait:
        """Run a request with the variant that it has started with."""
        begin = self.env.now
        steps = [(variant.gpu_busy_ms, 1, 0)] if variant.gpu_busy_ms else []
        steps += [(core_ms, 0, 1) for core_ms in variant.core_busy_ms]
        for at, slot, core in sorted(steps):
            yield self.env.timeout(max(0.0, begin + at - self.env.now))
            self.slots += slot
            self.cores += core
            if at < variant.latency_ms:
                self.dispatch()
        yield self.env.timeout(max(0.0, begin + variant.latency_ms - self.env.now))
        self.log[number] = (begin, self.env.now)
        self.leave(model)
        self.dispatch()

    def leave(self, model: int) -> None:
        """End one use of a model."""
        self.users[model] -= 1
        if self.users[model]:
            return
        self.idle_since[model] = self.env.now
        if self.waiting_loads:
            self.use_link()
        elif self.coming is None and self.held[model]:
            larger = self.held[model] - 1
            more = self.size(larger, model) - self.size(self.held[model], model)
            if more <= self.free():
                self.users[model] += 1
                self.env.process(self.grow(model, larger, more))

    def size(self, level: int, model: int) -> float:
        """Return the MB of a variant."""
        return self.levels[level][model].memory_mb

    def free(self, held: dict[int, int] | None = None) -> float:
        """Return the MB that are free, now or if the models had other variants."""
        held = self.held if held is None else held
        used = sum(self.size(level, model) for model, level in held.items())
        return self.spec.gpu_memory_gb * 1000 - used - (self.coming or 0.0)

    def make_room(self, model: int) -> int | None:
        """Shrink models in rounds, or evict some; return the variant of the new model that fits then."""
        held, last = dict(self.held), len(self.levels) - 1
        idle = sorted((m for m in held if not self.users[m]), key=self.idle_since.__getitem__)
        for level in range(last + 1):
            changing = [m for m in idle if held[m] == level < last]
            while self.size(level, model) > self.free(held) and changing:
                held[changing.pop(0)] += 1
            if self.size(level, model) <= self.free(held):
                self.commit(held)
                return level
        for victim in idle:
            del held[victim]
            if self.size(last, model) <= self.free(held):
                self.commit(held)
                return last
        return None

    def commit(self, held: dict[int, int]) -> None:
        """Carry out what was chosen."""
        self.notes["shrink"] += sum(level != self.held[model] for model, level in held.items())
        self.notes["evict"] += len(self.held) - len(held)
        self.held = held

    def use_link(self) -> None:
        """Start the first waiting load, if the link is free and there is memory."""
        if self.coming is None and self.waiting_loads:
            model = self.waiting_loads[0]
            level = self.make_room(model)
            if level is not None:
                self.waiting_loads.pop(0)
                self.coming = self.size(level, model)
                self.env.process(self.load(model, level))

    def load_ms(self, level: int, model: int) -> float:
        """Return the time of a load."""
        return self.spec.load_fixed_ms + self.levels[level][model].load_mb / self.spec.pcie_gb_per_s

    def load(self, model: int, level: int) -> Wait:
        """Bring a model into memory."""
        self.notes["load"] += 1
        yield self.env.timeout(self.load_ms(level, model))
        self.coming = None
        self.held[model], self.idle_since[model] = level, self.env.now
        requests = self.awaited.pop(model)
        self.users[model] += len(requests)
        self.queue += [(number, model) for number in requests]
        self.use_link()
        self.dispatch()

    def grow(self, model: int, level: int, more: float) -> Wait:
        """Bring what a larger variant needs into memory; the end is like that of a request."""
        self.notes["load"] += 1
        self.coming = more
        difference = self.load_ms(level, model) - self.load_ms(level + 1, model)
        yield self.env.timeout(self.spec.load_fixed_ms + difference)
        self.coming = None
        self.held[model] = level
        self.leave(model)
        self.use_link()
        self.dispatch()


def random_levels(rng: np.random.Generator, models: int, *, on_cpu: bool) -> list[list[Variant]]:
    """Return three variants of each model: the GPU alone, the GPU and a core, and two cores or a smaller hybrid."""
    levels: list[list[Variant]] = [[], [], []]
    for _ in range(models):
        latency, memory = float(rng.uniform(20, 80)), float(rng.integers(500, 1500))
        middle, small = round(memory * rng.uniform(0.5, 0.9)), 0 if on_cpu else round(memory * rng.uniform(0.2, 0.4))
        levels[0].append(Variant("gpu", memory, latency, latency, (), memory))
        levels[1].append(Variant("hybrid", middle, latency * 0.9, latency * 0.5, (latency * 0.7,), middle))
        slow = latency * 1.4
        busy = (slow, slow * 0.6)
        levels[2].append(Variant("small", small, slow, 0.0 if on_cpu else slow * 0.3, busy, small))
    return levels


@pytest.mark.parametrize("rate_per_s", [4.0, 12.0])
@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize(("memory_gb", "on_cpu"), [(1.6, False), (2.4, False), (2.4, True), (6.0, False)])
def test_same_trace_same_results(rate_per_s: float, slots: int, memory_gb: float, *, on_cpu: bool) -> None:
    """Each request starts and ends as in the independent model, and as many models shrink and leave."""
    requests = repetitions(3000)
    rng = np.random.default_rng(11)
    levels = random_levels(rng, 10, on_cpu=on_cpu)
    spec = ServerSpec(gpu_memory_gb=memory_gb, gpu_slots=slots, cpu_cores=3)
    times, models = np.cumsum(rng.exponential(1000 / rate_per_s, requests)), rng.integers(0, 10, requests)
    server = ShrinkingServer(spec, levels)
    server.run(times.tolist(), models.tolist())

    policies = ServerPolicies(
        rank=EVICTION["lru"],
        order=LOAD_ORDER["fifo"],
        deadlines=False,
        slo_ms=[math.inf] * 10,
        weights=[1.0] * 10,
        pinned=[False] * 10,
    )
    notes: Counter[str] = Counter()
    config = EngineConfig([spec], levels[0], policies, ROUTING["least-loaded"], 1, smaller=levels[1:])
    engine = ClusterEngine(config, lambda _, what, *__: notes.update([what]))
    rows: list[Any] = []
    engine.run([(times, models)], keep=rows.append)
    found = np.concatenate(rows)
    expected = np.array([server.log[int(number)] for number in found[:, 0]])
    assert len(found) == len(server.log) == requests
    assert found[:, 4] == pytest.approx(expected[:, 0], rel=1e-9)
    assert found[:, 5] == pytest.approx(expected[:, 1], rel=1e-9)
    assert [notes[what] for what in ("shrink", "evict", "load")] == [
        server.notes[what] for what in ("shrink", "evict", "load")
    ]
    assert notes["shrink"] > 4
    assert (notes["evict"] > requests / 30) == (memory_gb < 3 and not on_cpu)


@pytest.mark.parametrize("options", [Options(), Options([BatchLimits()] * 4)], ids=["requests", "batches"])
def test_a_model_that_has_grown_back_starts_its_requests(options: Options) -> None:
    """A request waits for a core of the small variant until the large one, which needs none, is back in memory.

    Model 1 makes model 0 shrink at 1000 ms; model 2 makes model 1 shrink at 2000 ms, so that model 0 grows back after
    its request at 3000 ms. Model 3 keeps the only core from 3015 to 5015 ms.
    """
    core = Variant("cpu", 0.0, 2000.0, 0.0, (2000.0,))
    large = [Variant("gpu", mb, 10.0, 10.0, (), mb) for mb in (900.0, 600.0, 100.0)]
    small = [Variant("small", 400.0, 10.0, 5.0, (10.0,), 400.0), Variant("none", 0.0, 10.0, 0.0, (10.0,)), large[2]]
    spec = ServerSpec(gpu_memory_gb=1.0, cpu_cores=1, pcie_gb_per_s=10.0, load_fixed_ms=0.0)
    engine = engine_of([*large, core], spec=spec, smaller=[[*small, core]], options=options)
    rows: list[Any] = []
    times, models = [0.0, 1000.0, 2000.0, 3000.0, 3015.0, 3020.0], [0, 1, 2, 0, 3, 0]
    engine.run([(np.array(times), np.array(models))], keep=rows.append)
    starts = {int(row[0]): float(row[4]) for row in np.concatenate(rows)}
    assert starts == pytest.approx({0: 90.0, 1: 1060.0, 2: 2010.0, 3: 3000.0, 4: 3015.0, 5: 3010.0 + 500 / 10})
