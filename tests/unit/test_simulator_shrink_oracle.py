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
from chrion.serving.manager.policy_settings import ServerPolicies
from chrion.serving.simulator.engine import ClusterEngine, EngineConfig
from chrion.serving.simulator.settings import ServerSpec
from chrion.serving.variants import Variant
from property_tests import repetitions

Wait = Generator[Any, Any, None]


class ShrinkingServer:
    """A GPU whose idle models change to smaller variants if memory is short, and to larger ones if it is not."""

    def __init__(self, spec: ServerSpec, levels: Sequence[Sequence[Variant]], *, prefetch: bool) -> None:
        self.prefetch = prefetch
        self.env = simpy.Environment()
        self.spec, self.levels = spec, levels
        self.slots, self.cores = spec.gpu_slots, spec.cpu_cores
        #: The variant of each model in memory, in the order in which they came, and since when each is idle.
        self.held: dict[int, int] = {}
        self.idle_since: dict[int, float] = {}
        self.users: Counter[int] = Counter()
        self.awaited: dict[int, list[int]] = {}
        self.waiting_loads: list[int] = []
        #: Models that have left for another variant, in their order, with this variant.
        self.changing: dict[int, int] = {}
        #: The model and the variant that are being loaded; None if the link is free.
        self.coming: tuple[int, int] | None = None
        #: When memory was short, and the times of each model's requests.
        self.short_at = -math.inf
        self.seen: dict[int, list[float]] = {}
        self.queue: list[tuple[int, int]] = []
        self.log: dict[int, tuple[float, float]] = {}
        self.notes: Counter[str] = Counter()

    def run(self, times: Sequence[float], models: Sequence[int]) -> None:
        """Serve all requests."""
        self.env.process(self.arrive(times, models))
        self.env.process(self.look_for_free_memory(len(times)))
        self.env.run()

    def arrive(self, times: Sequence[float], models: Sequence[int]) -> Wait:
        """Receive requests at their times."""
        for number, (time, model) in enumerate(zip(times, models, strict=True)):
            yield self.env.timeout(time - self.env.now)
            self.seen.setdefault(model, []).append(time)
            if model in self.held:
                self.users[model] += 1
                self.queue.append((number, model))
                self.dispatch()
                continue
            if model not in self.awaited:
                self.awaited[model] = []
                if self.coming is None or self.coming[0] != model:
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
        self.use_link()

    def size(self, level: int, model: int) -> float:
        """Return the MB of a variant."""
        return self.levels[level][model].memory_mb

    def free(self, held: dict[int, int] | None = None) -> float:
        """Return the MB that are free, now or if the models had other variants."""
        taken = [*(self.held if held is None else held).items(), *self.changing.items()]
        taken += [] if self.coming is None else [self.coming]
        return self.spec.gpu_memory_gb * 1000 - sum(self.size(level, model) for model, level in taken)

    def make_room(self, model: int) -> int | None:
        """Shrink models in rounds, or evict some; return the variant of the new model that fits then."""
        if self.size(0, model) > self.free():
            self.short_at = self.env.now
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
        self.notes["evict"] += len(self.held) - len(held)
        for model in sorted(held, key=self.idle_since.__getitem__):
            if held[model] != self.held[model]:
                self.notes["shrink"] += 1
                self.changing[model] = held[model]
        self.held = {model: level for model, level in held.items() if model not in self.changing}

    def use_link(self) -> None:
        """Start the first waiting load, if the link is free and there is memory, or else that of a changed model."""
        if self.coming is not None:
            return
        if self.waiting_loads:
            model = self.waiting_loads[0]
            level = self.changing[model] if model in self.changing else self.make_room(model)
            if level is not None:
                self.start_load(model, level)
                return
        for model, level in self.changing.items():
            self.start_load(model, level)
            return

    def look_for_free_memory(self, requests: int) -> Wait:
        """Every second, let the most popular model grow that can."""
        while len(self.log) < requests:
            yield self.env.timeout(1000.0)
            if self.coming is not None or self.waiting_loads or self.env.now < self.short_at + 10_000.0:
                continue
            now = self.env.now
            popular = {m: sum(math.exp((t - now) * math.log(2) / 60_000.0) for t in ts) for m, ts in self.seen.items()}
            for model in sorted(popular, key=popular.__getitem__, reverse=True):
                if popular[model] < 0.5 or self.users[model] or not (model in self.held or self.prefetch):
                    continue
                present = self.held.get(model, len(self.levels))
                room = self.free() + (self.size(present, model) if model in self.held else 0)
                larger = [level for level in range(present) if self.size(level, model) <= room]
                if larger:
                    if model in self.held:
                        self.notes["grow"] += 1
                        del self.held[model]
                        self.changing[model] = larger[0]
                    self.start_load(model, larger[0])
                    break

    def load_ms(self, level: int, model: int) -> float:
        """Return the time of a load."""
        return self.spec.load_fixed_ms + self.levels[level][model].load_mb / self.spec.pcie_gb_per_s

    def start_load(self, model: int, level: int) -> None:
        """Occupy the link."""
        keeps = self.changing.pop(model, None) is not None
        if model in self.waiting_loads:
            self.waiting_loads.remove(model)
        self.coming = model, level
        self.env.process(self.load(model, level, keeps=keeps))

    def load(self, model: int, level: int, *, keeps: bool) -> Wait:
        """Bring a model into memory; one that has changed its variant stays idle since its last use."""
        self.notes["load"] += 1
        yield self.env.timeout(self.load_ms(level, model))
        self.coming = None
        self.held[model] = level
        if not keeps:
            self.idle_since[model] = self.env.now
        requests = self.awaited.pop(model, [])
        self.users[model] += len(requests)
        self.queue += [(number, model) for number in requests]
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
@pytest.mark.parametrize("prefetch", [False, True])
def test_same_trace_same_results(
    rate_per_s: float, slots: int, memory_gb: float, *, on_cpu: bool, prefetch: bool
) -> None:
    """Each request starts and ends as in the independent model, and as many models shrink, grow and leave."""
    requests = repetitions(3000)
    rng = np.random.default_rng(11)
    levels = random_levels(rng, 10, on_cpu=on_cpu)
    spec = ServerSpec(gpu_memory_gb=memory_gb, gpu_slots=slots, cpu_cores=3)
    turns = np.arange(requests) // 20  # four models at a time, and twelve seconds between one turn and the next
    times = np.cumsum(rng.exponential(1000 / rate_per_s, requests)) + 12_000.0 * turns
    models = (rng.integers(0, 4, requests) + 3 * turns) % 10
    server = ShrinkingServer(spec, levels, prefetch=prefetch)
    server.run(times.tolist(), models.tolist())

    policies = ServerPolicies(
        rank=EVICTION["lru"],
        order=LOAD_ORDER["fifo"],
        deadlines=False,
        slo_ms=[math.inf] * 10,
        weights=[1.0] * 10,
        pinned=[False] * 10,
        prefetch=prefetch,
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
    kinds = ("shrink", "grow", "evict", "load")
    assert [notes[what] for what in kinds] == [server.notes[what] for what in kinds]
    assert notes["shrink"] > 0
    assert notes["shrink"] + notes["grow"] > 3

    assert (notes["evict"] > requests / 30) == (memory_gb < 3 and not on_cpu)
