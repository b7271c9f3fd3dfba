"""The swapping server compared with an independent model of it, written as SimPy processes."""

from collections import Counter
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
import pytest
import simpy
from simulator_support import engine_of

from chrion.simulator.settings import ServerSpec
from chrion.simulator.variants import Variant


class SwappingServer:
    """A GPU server in which each request and the PCIe link are processes, and memory is a set."""

    def __init__(self, spec: ServerSpec, variants: Sequence[Variant]) -> None:
        self.env = simpy.Environment()
        self.spec, self.variants = spec, variants
        self.turn = simpy.Resource(self.env, 1)
        self.slots = simpy.Container(self.env, spec.gpu_slots, init=spec.gpu_slots)
        self.cores = simpy.Container(self.env, spec.cpu_cores, init=spec.cpu_cores)
        self.last_use: dict[int, float] = {}
        self.users: Counter[int] = Counter()
        self.wanted: dict[int, list[Any]] = {}
        self.started: dict[int, float] = {}
        self.ended: dict[int, float] = {}
        self.loads = 0
        self.something_changed = self.env.event()
        self.env.process(self.link())

    def change(self) -> None:
        """Wake all processes that wait for a change."""
        event, self.something_changed = self.something_changed, self.env.event()
        event.succeed()

    def arrivals(self, times: Sequence[float], models: Sequence[int]) -> Generator[Any, Any, None]:
        """Send the requests at their times."""
        for number, (time, model) in enumerate(zip(times, models, strict=True)):
            yield self.env.timeout(time - self.env.now)
            self.env.process(self.request(number, model))

    def request(self, number: int, model: int) -> Generator[Any, Any, None]:
        """Wait for the weights, the head of the queue, a slot and cores; then execute."""
        variant = self.variants[model]
        if model in self.last_use:
            self.users[model] += 1
        else:
            loaded = self.env.event()
            self.wanted.setdefault(model, []).append(loaded)
            self.change()
            yield loaded
        with self.turn.request() as turn:
            yield turn
            if variant.gpu_busy_ms:
                yield self.slots.get(1)
            if variant.cores:
                yield self.cores.get(variant.cores)
        self.started[number] = self.env.now
        if variant.gpu_busy_ms:
            self.env.process(self.give_back(self.slots, variant.gpu_busy_ms))
        for busy_ms in variant.core_busy_ms:
            self.env.process(self.give_back(self.cores, busy_ms))
        yield self.env.timeout(variant.latency_ms)
        self.ended[number] = self.env.now
        self.last_use[model] = self.env.now
        self.users[model] -= 1
        self.change()

    def give_back(self, what: simpy.Container, after_ms: float) -> Generator[Any, Any, None]:
        """Release one unit of a resource after some ms."""
        yield self.env.timeout(after_ms)
        yield what.put(1)

    def total(self, models: Sequence[int]) -> float:
        """Return the memory of some models in MB."""
        return sum(self.variants[m].memory_mb for m in models)

    def link(self) -> Generator[Any, Any, None]:
        """Carry one load at a time, in the order of first requests; evict the least recently used idle models."""
        budget = self.spec.gpu_memory_gb * 1000
        while True:
            while not self.wanted:
                yield self.something_changed
            model = next(iter(self.wanted))
            size = self.variants[model].memory_mb
            while True:
                held = {m: self.variants[m].memory_mb for m in self.last_use}
                staying = sum(mb for m, mb in held.items() if self.users[m])
                if staying + size <= budget:
                    break
                yield self.something_changed
            idle = sorted((m for m in held if not self.users[m]), key=self.last_use.__getitem__)
            first = next(n for n in range(len(idle) + 1) if sum(held.values()) - self.total(idle[:n]) + size <= budget)
            # Of the models that would be evicted, those stay that fit beside the new one, the last used first.
            staying = sum(held.values()) - self.total(idle[:first])
            for victim in reversed(idle[:first]):
                if staying + held[victim] + size <= budget:
                    staying += held[victim]
                else:
                    del self.last_use[victim]
            self.loads += 1
            yield self.env.timeout(self.spec.load_fixed_ms + self.variants[model].load_mb / self.spec.pcie_gb_per_s)
            self.last_use[model] = self.env.now
            for event in self.wanted.pop(model):
                self.users[model] += 1
                event.succeed()


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


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("rate_per_s", [4.0, 14.0])
def test_same_trace_same_results(*, slots: int, hybrid: bool, rate_per_s: float) -> None:
    """Each of 4000 requests has the start and the end of the independent model, and the numbers of loads are equal."""
    rng = np.random.default_rng([slots, hybrid])
    variants = random_variants(rng, 12, hybrid=hybrid)
    spec = ServerSpec(gpu_memory_gb=5.0, gpu_slots=slots, cpu_cores=3)
    times = np.cumsum(rng.exponential(1000 / rate_per_s, 4000))
    models = rng.integers(0, 12, 4000)

    model = SwappingServer(spec, variants)
    model.env.process(model.arrivals(times.tolist(), models.tolist()))
    model.env.run()
    rows: list[Any] = []
    engine = engine_of(variants, spec=spec)
    engine.run([(times, models)], keep=rows.append)

    found = np.concatenate(rows)
    found = found[np.argsort(found[:, 0])]
    assert found[:, 0].tolist() == list(range(4000))
    assert found[:, 4] == pytest.approx([model.started[i] for i in range(4000)], rel=1e-9)
    assert found[:, 5] == pytest.approx([model.ended[i] for i in range(4000)], rel=1e-9)
    assert sum(engine.cluster.loads) == model.loads
    assert model.loads > 400
