"""Lanes whose threads share cores on a virtual clock: against small steps of time, and queueing theory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chrion.serving.multi.dispatcher import Dispatcher, ModelRules, Run
from chrion.serving.multi.simulation import Arrival, simulate
from chrion.serving.multi.virtual_lanes import SharedCores
from property_tests import examples

#: Two priority classes of two lanes.
NICENESS = {0: 0, 1: 0, 2: 5, 3: 5}


def ends(cores: int, niceness: Mapping[int, int], tasks: Sequence[tuple[int, float]]) -> dict[int, float]:
    """Return when the block of each lane ends; a block is a lane and the time at which it begins, and takes 10 ms."""
    lanes = SharedCores(cores, niceness, {"m": ((10.0,), (10.0,))})
    found = {}
    for lane, start_ms in tasks:
        while lanes.end_ms <= start_ms:
            span = lanes.end()
            found[span.lane] = span.end_ms
        lanes.begin(Run(lane, lane, "m", 0), start_ms, 0)
    while lanes.end_ms < np.inf:
        span = lanes.end()
        found[span.lane] = span.end_ms
    return found


def test_shares_are_those_of_weights() -> None:
    """On one core, a thread whose niceness is 5 higher has 1 / (1 + 1.25^5) of it while both want it."""
    share = 1 / (1 + 1.25**5)
    first = 10 / (1 - share)
    assert ends(1, NICENESS, [(0, 0.0), (2, 0.0)]) == pytest.approx({0: first, 2: first + 10 - share * first})


def test_a_thread_has_one_core_at_most() -> None:
    """Beside one nice thread on two cores both run at full speed; two nice ones share what is left."""
    assert ends(2, NICENESS, [(0, 0.0), (2, 0.0)]) == {0: 10.0, 2: 10.0}
    found = ends(2, NICENESS, [(0, 0.0), (2, 0.0), (3, 0.0)])
    assert found == pytest.approx({0: 10.0, 2: 15.0, 3: 15.0})


def test_lanes_of_accelerators_take_no_part() -> None:
    """A lane without a niceness runs at full speed and takes nothing from the others."""
    assert ends(1, {0: 0}, [(0, 0.0), (1, 0.0)]) == {0: 10.0, 1: 10.0}


def test_blocks_take_longer_while_all_cores_are_busy() -> None:
    """The time of a block changes when another one begins or ends."""
    lanes = SharedCores(2, NICENESS, {"m": ((10.0,), (20.0,))})
    lanes.begin(Run(0, 0, "m", 0), 0.0, 1)
    lanes.begin(Run(1, 1, "m", 0), 5.0, 2)
    assert [lanes.end().end_ms for _ in range(2)] == [15.0, 20.0]


@given(
    st.integers(1, 3),
    st.dictionaries(st.integers(0, 5), st.tuples(st.sampled_from([0, 5, 10, 19]), st.integers(0, 30)), min_size=1),
)
@examples(30)
def test_ends_are_those_of_small_steps(cores: int, lanes: dict[int, tuple[int, int]]) -> None:
    """Shares that are found by bisection, in steps of 0.01 ms, give the same ends."""
    niceness = {lane: level for lane, (level, _) in lanes.items()}
    starts = {lane: float(start) for lane, (_, start) in lanes.items()}
    found = ends(cores, niceness, sorted(starts.items(), key=lambda own: own[1]))
    left, step, now, expected = dict.fromkeys(lanes, 10.0), 0.01, 0.0, {}
    while left:
        weights = {lane: 1.25 ** -niceness[lane] for lane in left if starts[lane] <= now + 1e-9}
        low, high = 0.0, 1.25**19
        for _ in range(60):
            level = (low + high) / 2
            used = sum(min(1.0, level * own) for own in weights.values())
            low, high = (level, high) if used < min(cores, len(weights)) else (low, level)
        for lane, own in weights.items():
            left[lane] -= step * min(1.0, high * own)
            if left[lane] <= 1e-9:
                del left[lane]
                expected[lane] = now + step
        now += step
    assert found == pytest.approx(expected, abs=0.05)


def test_the_mean_time_is_that_of_processor_sharing() -> None:
    """Tasks of equal niceness on one core, with random arrivals, take s / (1 - rho) (Kleinrock, 1967)."""
    rho, service_ms, count, lanes = 0.6, 2.0, 20_000, 64
    gaps = np.random.default_rng(0).exponential(service_ms / rho, count)
    arrivals = [Arrival(float(time_ms), "a") for time_ms in np.cumsum(gaps)]
    times = {"a": ((service_ms,), (service_ms,))}
    shared = SharedCores(1, dict.fromkeys(range(lanes), 0), times)
    served, _ = simulate(Dispatcher({"a": ModelRules((service_ms,))}, lanes, "fifo"), arrivals, shared)
    assert len(served) == count
    assert np.mean([task.latency_ms for task in served]) == pytest.approx(service_ms / (1 - rho), rel=0.05)


def test_a_background_model_takes_little_from_the_first() -> None:
    """With niceness 19, a heavy task that is always there lengthens light ones by 1 / 70 on one core."""
    times = {"light": ((5.0,), (5.0,)), "heavy": ((1e4,), (1e4,))}
    rules = {name: ModelRules(own[0]) for name, own in times.items()}
    arrivals = [Arrival(0.0, "heavy"), *(Arrival(10.0 * at, "light") for at in range(1, 50))]
    dispatcher = Dispatcher(rules, 2, "fair", own_lanes={"light": range(1), "heavy": range(1, 2)})
    served, _ = simulate(dispatcher, arrivals, SharedCores(1, {0: 0, 1: 19}, times))
    light = [task.latency_ms for task in served if task.model == "light"]
    assert light == pytest.approx([5 * (1 + 1.25**-19)] * 49)
