"""The expected start of a request, compared with recursions of queueing theory."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from chrion.serving.manager.queue_estimate import Release, expected_start
from chrion.serving.simulator.settings import ServerSpec
from chrion.serving.variants import Variant
from simulator_support import engine_of


def test_a_request_beside_another_does_not_wait_for_it() -> None:
    """With two slots that become free at 100 ms and one request ahead, the next starts at 100 ms as well."""
    ahead = [((1, 0, 100.0, (), (1, 0)), math.inf)]
    running = [Release(100.0, 1, 0), Release(100.0, 1, 0)]
    assert expected_start(96.0, (0, 0), running, ahead, (1, 0)) == 100.0
    assert expected_start(96.0, (0, 0), running, ahead * 2, (1, 0)) == 200.0


def test_a_request_that_will_be_dropped_takes_nothing() -> None:
    """A request ahead whose turn comes too late does not delay the next."""
    ahead = [((1, 0, 100.0, (), (1, 0)), 199.0)]
    assert expected_start(0.0, (0, 0), [Release(100.0, 1, 0)], ahead, (1, 0)) == 100.0


def test_the_head_blocks_those_behind() -> None:
    """A request that needs a free core waits for the head, which needs a slot."""
    ahead = [((1, 0, 5.0, (), (1, 0)), math.inf)]
    assert expected_start(0.0, (0, 1), [Release(7.0, 1, 0)], ahead, (0, 1)) == 7.0


def test_overdue_releases_are_expected_now() -> None:
    """A running request that is late is expected to end now."""
    assert expected_start(9.0, (0, 0), [Release(7.0, 1, 0)], [], (1, 0)) == 9.0


def drops_by_recursion(times: Sequence[float], latencies: Sequence[float], slots: int, slo_ms: float) -> list[int]:
    """Return the requests that a first-come-first-served queue of ``slots`` servers cannot end in time.

    The workloads of the servers at each arrival follow Kiefer and Wolfowitz (1955); refused requests add none.
    """
    free_at, dropped = [0.0] * slots, []
    for number, (time, latency) in enumerate(zip(times, latencies, strict=True)):
        first = min(range(slots), key=free_at.__getitem__)
        start = max(time, free_at[first])
        if start + latency - time > slo_ms:
            dropped.append(number)
        else:
            free_at[first] = start + latency
    return dropped


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_exactly_the_late_requests_are_dropped(slots: int) -> None:
    """Deadline admission drops the requests that the recursion finds late, and no other."""
    rng = np.random.default_rng(slots)
    latencies = [20.0, 45.0, 100.0]
    models = rng.integers(0, 3, 3000)
    times = np.cumsum(rng.integers(0, round(110 / slots), 3000)).astype(float)
    variants = [Variant("gpu", 10.0, latency, latency) for latency in latencies]
    rows: list[Any] = []
    spec = ServerSpec(gpu_slots=slots)
    engine = engine_of(variants, spec=spec, admission="deadline", slo_ms=150.0, preload=True)
    engine.run([(times, models)], keep=rows.append)
    dropped = sorted(int(row[0]) for row in np.concatenate(rows) if np.isnan(row[4]))
    expected = drops_by_recursion(times.tolist(), [latencies[m] for m in models], slots, 150.0)
    assert dropped == expected
    assert 50 < len(dropped) < 2000
