"""Several decoders: the routing of requests, against queues that are computed one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chrion.serving.simulator.decoder_requests import DecoderWorkload
from chrion.serving.simulator.decoder_scenario import build_decoder_scenario
from chrion.serving.simulator.iterations import DecoderResult, simulate_decoder
from chrion.serving.simulator.scenario import ScenarioSource

SERVICE_MS = 10.0
ONE_TOKEN = {"prompt_least": 1, "prompt_most": 1, "new_least": 1, "new_most": 1}


def run(
    routing: str, count: int = 3, workload: DecoderWorkload | None = None, block: int = 0, **requests: Any
) -> DecoderResult:
    """Simulate replicas without batches, whose iterations take 10 ms."""
    costs = {"fixed_ms": SERVICE_MS, "token_ms": 0, "request_ms": 0, "pair_ms": 0}
    content = {
        "decoder": {"costs": costs, "slots": 200},
        "policies": ["iteration"],
        "batching": {"max_batch": 1, "block": block},
        "replicas": {"count": count, "routing": routing},
        "requests": {"requests": 1500, "rate_per_s": 80.0 * count, **ONE_TOKEN, **requests},
    }
    (result,) = simulate_decoder(build_decoder_scenario(ScenarioSource("test", content, Path())), workload=workload)
    return result


def ends_in_order(arrivals_ms: Any, replicas: Any) -> list[float]:
    """Return when requests end that are served one by one, in the order of arrival, by their replicas."""
    free_ms: dict[int, float] = {}
    ends = []
    for arrival_ms, replica in zip(arrivals_ms.tolist(), replicas.tolist(), strict=True):
        free_ms[replica] = max(arrival_ms, free_ms.get(replica, 0.0)) + SERVICE_MS
        ends.append(free_ms[replica])
    return ends


@pytest.mark.parametrize("routing", ["random", "least-loaded"])
def test_each_replica_is_a_queue(routing: str) -> None:
    """Requests of a replica end as in a queue with constant service times of its own."""
    result = run(routing)
    assert set(result.replicas.tolist()) == {0, 1, 2}
    assert result.ends_ms == pytest.approx(ends_in_order(result.workload.arrivals_ms, result.replicas))
    assert 0.7 < result.utilisation < 0.9


def test_the_least_loaded_replica_gets_a_request() -> None:
    """It has the fewest requests that have not ended, the first of several."""
    result = run("least-loaded")
    ends_ms = np.array([np.inf] * 1500)
    expected: list[int] = []
    for at, arrival_ms in enumerate(result.workload.arrivals_ms):
        outstanding = [
            sum(expected[other] == replica and ends_ms[other] > arrival_ms for other in range(max(0, at - 300), at))
            for replica in range(3)
        ]
        expected.append(outstanding.index(min(outstanding)))
        ends_ms[at] = result.ends_ms[at]
    assert result.replicas.tolist() == expected


def test_random_replicas_are_equally_likely() -> None:
    """Each has a third of the requests."""
    assert np.bincount(run("random").replicas) == pytest.approx([500] * 3, rel=0.15)


def test_a_session_stays_where_it_began() -> None:
    """Each has one replica, which was the least loaded one at its first request; others have none."""
    result = run("session", sessions=12)
    assert result.workload.sessions is not None
    homes = {
        (session, at) for session, at in zip(result.workload.sessions.tolist(), result.replicas.tolist(), strict=True)
    }
    assert len(homes) == 12
    workload = DecoderWorkload(
        np.array([0.0, 1.0, 2.0, 30.0, 31.0]),
        np.ones(5, np.int64),
        np.ones(5, np.int64),
        np.array([4, 5, -1, 5, 4]),
    )
    assert run("session", 2, workload, sessions=9).replicas.tolist() == [0, 1, 0, 1, 0]


def test_a_prefix_draws_requests_until_the_queue_is_long() -> None:
    """A replica with the prefix is preferred while it has fewer than 4 requests more than another one.

    Then the prefix is kept by two replicas, of which the less loaded one is preferred.
    """
    number = 8
    workload = DecoderWorkload(
        np.concatenate([[0.0], np.full(number, 15.0)]),
        np.full(number + 1, 9),
        np.ones(number + 1, np.int64),
        None,
        np.zeros(number + 1, np.int64),
        np.full(number + 1, 8),
    )
    result = run("prefix", 3, workload, block=4, prefixes=1, prefix_tokens=8)
    assert result.replicas.tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 1]
    assert result.reused == 8 * (4 + 3)
