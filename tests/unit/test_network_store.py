"""Loads from a network store: bandwidth that servers share, compared with theory and with a literal loop."""

import math
from heapq import heappop
from itertools import count
from typing import Any

import numpy as np
import pytest

from chrion.errors import ScenarioError
from chrion.serving.simulator.network_store import NetworkStore
from chrion.serving.simulator.run import simulate
from property_tests import repetitions
from simulator_support import scenario_of

#: A model of 1 GB that executes at once and stays nowhere, so that every request reads it.
READ = {"memory_mb": 1000.0, "latency_ms": 1e-6}
NOWHERE = {"host_memory_gb": 0.001, "keep_alive_s": 1e-9, "pcie_gb_per_s": 1e9, "routing": "least-loaded"}


@pytest.mark.parametrize(("most_gb_per_s", "at_once"), [(1.0, 1), (0.25, 4)])
def test_reads_share_the_bandwidth(most_gb_per_s: float, at_once: int) -> None:
    """The mean time is that of M/M/c, whatever the sizes are: processor sharing among as many reads as fill the store.

    The number of jobs of a queue with processor sharing does not depend on the distribution of their sizes (Kelly,
    Reversibility and Stochastic Networks, 1979, section 3.3), so Erlang's C formula applies to equal ones.
    """
    rate_per_s = 0.5
    requests = repetitions(60_000)
    sets = {"servers.count": 40, "disk_gb_per_s": most_gb_per_s, "rate_per_s": rate_per_s, "requests": requests}
    (found,) = simulate(scenario_of(READ, 1, {"store": {"gb_per_s": 1.0}}, **NOWHERE, **sets))
    erlangs, alone_s = rate_per_s / most_gb_per_s, 1 / most_gb_per_s
    busy = erlangs**at_once / math.factorial(at_once) / (1 - erlangs / at_once)
    waits = busy / (busy + sum(erlangs**k / math.factorial(k) for k in range(at_once)))
    expected_s = alone_s + waits * alone_s / (at_once - erlangs)
    assert found.total.loads == found.usage.disk_loads == requests
    assert found.total.response.mean_ms / 1000 == pytest.approx(expected_s, rel=0.04 * math.sqrt(60_000 / requests))


def test_a_second_read_halves_the_rate_of_the_first() -> None:
    """Of two reads of 1 s that begin half a second apart, the first ends after 1.5 s, and so does the second."""
    sets = {"servers.count": 2, "disk_gb_per_s": 5.0, "disk_fixed_ms": 7.0, "kind": "uniform", "rate_per_s": 2.0}
    (found,) = simulate(scenario_of(READ, 1, {"store": {"gb_per_s": 1.0}}, **NOWHERE, **sets, requests=2))
    assert found.total.response.mean_ms == pytest.approx(1507.0)
    assert [server.link_busy * found.duration_ms for server in found.servers] == pytest.approx([1507.0, 1507.0])


def test_a_store_that_is_faster_than_all_servers_is_their_disk() -> None:
    """If the bandwidth never limits a server, all figures are those of disks of the same rate."""
    sets = {"servers.count": 3, "gpu_memory_gb": 3.0, "host_memory_gb": 4.0, "zipf_exponent": 0.7, "disk_gb_per_s": 2.0}
    sets |= {"requests": 2000, "rate_per_s": 8.0, "servers.mtbf_h": 0.003, "servers.mttr_s": 5.0}
    variant = {"memory_mb": 1000.0, "latency_ms": 60.0}
    (disk,), (store,) = (
        simulate(scenario_of(variant, 12, tables, **sets)) for tables in ({}, {"store": {"gb_per_s": 6.0}})
    )
    assert store.total.failed == disk.total.failed > 0
    assert store.usage.disk_loads == disk.usage.disk_loads > 300
    assert store.total.response.mean_ms == pytest.approx(disk.total.response.mean_ms, rel=1e-9)
    assert store.duration_ms == pytest.approx(disk.duration_ms, rel=1e-9)


def level_of(limits: list[float], bandwidth: float) -> float:
    """Return the share that no read exceeds, by bisection."""
    low, high = 0.0, bandwidth
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(min(limit, middle) for limit in limits) < bandwidth else (low, middle)
    return high


@pytest.mark.parametrize("seed", range(20))
def test_reads_that_begin_and_are_cancelled(seed: int) -> None:
    """Ends of random reads are those of a literal loop from event to event."""
    rng = np.random.default_rng(seed)
    begins = np.cumsum(rng.exponential(1.0, 40)).tolist()
    sizes, limits = rng.exponential(2.0, 40).tolist(), rng.choice([0.3, 0.7, 5.0], 40).tolist()
    cancels = {read: begins[read] + float(rng.exponential(1.0)) for read in range(0, 40, 5)}
    inputs = sorted(
        [*((at, "begin", read) for read, at in enumerate(begins)), *((at, "cancel", r) for r, at in cancels.items())]
    )

    events: list[Any] = []
    store, found = NetworkStore(1.0, events, count()), dict[int, float]()
    for at, what, read in [*inputs, (math.inf, "", 0)]:
        while events and events[0][0] <= at:
            time, _, action, payload = heappop(events)
            action(time, payload)
        if what == "begin":
            store.begin(at, read, sizes[read], limits[read], lambda end, read=read: found.__setitem__(read, end))
        elif what:
            store.cancel(at, read)

    expected, left, now = dict[int, float](), dict[int, float](), 0.0
    while inputs or left:
        level = level_of([limits[read] for read in left], 1.0)
        ends = {read: now + left[read] / min(limits[read], level) for read in left}
        first = min(ends, key=ends.__getitem__, default=-1)
        at = min(inputs[0][0] if inputs else math.inf, ends.get(first, math.inf))
        left = {read: mb - (at - now) * min(limits[read], level) for read, mb in left.items()}
        now = at
        if inputs and at == inputs[0][0]:
            _, what, read = inputs.pop(0)
            left.pop(read, None)
            left |= {read: sizes[read]} if what == "begin" else {}
        else:
            del left[first]
            expected[first] = at
    assert sorted(found) == sorted(expected)
    assert list(found.values()) == pytest.approx([expected[read] for read in found], rel=1e-9)


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ({}, "store: has no effect: every host memory holds all weights"),
        ({"host_memory_gb": 1.0, "admission": "deadline"}, "store: not with policies.admission = 'deadline'"),
        ({"host_memory_gb": 1.0, "gb_per_s": 0.0}, "store.gb_per_s: expected a number above 0"),
    ],
)
def test_stores_that_are_refused(sets: dict[str, Any], message: str) -> None:
    """A store that nothing reads, and one whose time admission cannot foresee, are refused."""
    with pytest.raises(ScenarioError, match=message):
        scenario_of(READ, 1, {"store": {"gb_per_s": 1.0}}, **sets)
