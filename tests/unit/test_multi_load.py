"""Loads on a virtual clock: against queueing theory, and the figures of a load."""

from __future__ import annotations

import itertools
import math
import statistics
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chrion.errors import OptionError
from chrion.serving.multi.dispatcher import BlockSpan, Dispatcher, ModelRules
from chrion.serving.multi.load import submit_all, summarise
from chrion.serving.multi.policies import POLICIES
from chrion.serving.multi.simulation import LOADS, Arrival, Served, build_arrivals, simulate
from chrion.serving.multi.virtual_lanes import PinnedLanes
from property_tests import examples


def test_arrivals_are_periodic() -> None:
    """A model's tasks arrive at constant intervals within the time, as many as its rate says."""
    arrivals = build_arrivals({"a": 10.0, "b": 3.0}, 2.0, seed=1)
    assert [a.time_ms for a in arrivals] == sorted(a.time_ms for a in arrivals)
    assert Counter(a.model for a in arrivals) == {"a": 20, "b": 6}
    own = [a.time_ms for a in arrivals if a.model == "a"]
    assert [b - a for a, b in itertools.pairwise(own)] == pytest.approx([100.0] * 19)
    assert own[-1] < 2000
    with pytest.raises(OptionError, match="more than"):
        build_arrivals({"a": 1e9}, 2.0)
    with pytest.raises(OptionError, match="did you mean 'bursty'"):
        build_arrivals({"a": 1.0}, 2.0, "burst")


@pytest.mark.parametrize("load", LOADS)
def test_loads_have_their_rates_on_average(load: str) -> None:
    """The number of tasks is that of the rate; random ones have the standard deviation of a Poisson process."""
    counts = Counter(a.model for a in build_arrivals({"a": 100.0, "b": 40.0}, 20.0, load))
    for model, expected in (("a", 2000), ("b", 800)):
        assert abs(counts[model] - expected) <= (4 * math.sqrt(expected) if load == "random" else 4)


def test_random_intervals_are_exponential() -> None:
    """The standard deviation of the intervals is their mean."""
    times = [a.time_ms for a in build_arrivals({"a": 100.0}, 100.0, "random")]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert statistics.stdev(gaps) == pytest.approx(statistics.mean(gaps), rel=0.05)


def test_bursts_come_at_once() -> None:
    """Four tasks of a model have the same time, and bursts have constant intervals."""
    times = Counter(a.time_ms for a in build_arrivals({"a": 40.0}, 1.0, "bursty"))
    assert set(times.values()) == {4}
    assert [b - a for a, b in itertools.pairwise(sorted(times))] == pytest.approx([100.0] * (len(times) - 1))


def test_steps_change_the_rate() -> None:
    """Every second quarter has three times as many tasks as the one before."""
    quarters = Counter(int(a.time_ms // 1000) for a in build_arrivals({"a": 100.0}, 4.0, "stepping"))
    assert quarters == {0: 50, 1: 150, 2: 50, 3: 150}


def test_a_short_task_waits_for_one_block() -> None:
    """Beside a task of 100 ms in blocks of 5 ms on one lane, one of 1 ms waits for the block that runs."""
    rules = {"heavy": ModelRules((5.0,) * 20), "light": ModelRules((1.0,), deadline_ms=10)}
    arrivals = [Arrival(0.0, "heavy"), Arrival(12.0, "light")]
    times = {name: (own.block_ms, own.block_ms) for name, own in rules.items()}
    served, spans = simulate(Dispatcher(rules, 1, "edf"), arrivals, PinnedLanes(1, times))
    assert {task.model: task.end_ms for task in served} == {"light": 16.0, "heavy": 101.0}
    assert len(spans) == 21
    served, _ = simulate(Dispatcher(rules, 1, "fifo"), arrivals, PinnedLanes(1, times))
    assert {task.model: task.end_ms for task in served} == {"light": 101.0, "heavy": 100.0}


def test_blocks_take_longer_beside_others() -> None:
    """A block has its time alone if no other lane is busy when it begins, and the other one if all are."""
    rules = {"a": ModelRules((4.0,))}
    lanes = PinnedLanes(2, {"a": ((4.0,), (6.0,))})
    served, _ = simulate(Dispatcher(rules, 2, "fifo"), [Arrival(0.0, "a"), Arrival(0.0, "a")], lanes)
    assert [task.end_ms for task in served] == [4.0, 6.0]


@pytest.mark.parametrize("policy", ["edf", "fair", "fifo", "priority"])
def test_the_mean_wait_is_that_of_random_arrivals(policy: str) -> None:
    """One model with random arrivals and constant service is an M/D/1 queue: the wait is rho s / (2 (1 - rho))."""
    import numpy as np  # noqa: PLC0415 - this test only

    rho, service_ms, count = 0.7, 2.0, 20_000
    gaps = np.random.default_rng(0).exponential(service_ms / rho, count)
    arrivals = [Arrival(float(time_ms), "a") for time_ms in np.cumsum(gaps)]
    rules = {"a": ModelRules((1.0, 1.0), queue=count)}
    lanes = PinnedLanes(1, {"a": ((1.0, 1.0), (1.0, 1.0))})
    served, _ = simulate(Dispatcher(rules, 1, policy), arrivals, lanes)
    waits = [task.latency_ms - service_ms for task in served]
    assert np.mean(waits) == pytest.approx(rho * service_ms / (2 * (1 - rho)), rel=0.1)


@given(
    st.sampled_from(sorted(set(POLICIES) - {"top"})),
    st.integers(1, 3),
    st.booleans(),
    st.lists(st.tuples(st.integers(0, 30), st.sampled_from("ab")), min_size=1, max_size=20),
)
@examples(100)
def test_no_task_is_lost(policy: str, lanes: int, drop: bool, tasks: list[tuple[int, str]]) -> None:  # noqa: FBT001
    """Every task is over once, and lanes run one block at a time."""
    rules = {"a": ModelRules((2.0, 3.0), deadline_ms=9, queue=3), "b": ModelRules((1.0,), queue=2, drop="oldest")}
    arrivals = [Arrival(float(at), model) for at, model in sorted(tasks)]
    times = {name: (own.block_ms, own.block_ms) for name, own in rules.items()}
    dispatcher = Dispatcher(rules, lanes, policy, drop_late=drop)
    served, spans = simulate(dispatcher, arrivals, PinnedLanes(lanes, times))
    assert Counter(task.model for task in served) == Counter(arrival.model for arrival in arrivals)
    for lane in range(lanes):
        own = sorted((span.start_ms, span.end_ms) for span in spans if span.lane == lane)
        assert all(first[1] <= second[0] for first, second in itertools.pairwise(own))


def test_figures_of_a_load() -> None:
    """Misses are drops, failures and late ends; the backlog is what is open at the last arrival."""
    arrivals = [Arrival(0.0, "a"), Arrival(5.0, "a"), *[Arrival(10.0, "a")] * 2]
    served = [
        Served("a", 0.0, 4.0, "done", 4.0),
        Served("a", 5.0, 14.0, "done", 4.0),
        Served("a", 10.0, 10.0, "full", 4.0),
        Served("a", 10.0, 10.0, "failed", 4.0),
    ]
    spans = [BlockSpan(0, "a", 0, 0, 0.0, 4.0), BlockSpan(0, "a", 1, 0, 5.0, 14.0)]
    result = summarise(served, spans, arrivals, 1)
    own = result.models["a"]
    assert (own.tasks, own.missed, own.dropped, own.backlog) == (4, 3, 1, 1)
    assert own.p50_ms == 6.5
    assert result.utilisation == pytest.approx(0.9)
    assert not result.sustained
    assert math.isnan(summarise(served[2:], [], arrivals[2:], 1).models["a"].p50_ms)


def test_a_last_burst_is_no_backlog() -> None:
    """A load of bursts is sustained though the tasks of the last one are open when they arrive."""
    arrivals = build_arrivals({"a": 40.0}, 1.0, "bursty")
    rules = {"a": ModelRules((5.0,))}
    served, spans = simulate(Dispatcher(rules, 1, "fifo"), arrivals, PinnedLanes(1, {"a": ((5.0,), (5.0,))}))
    result = summarise(served, spans, arrivals, 1)
    assert (result.models["a"].backlog, result.sustained) == (4, True)


@pytest.mark.parametrize("load", LOADS)
def test_a_rare_task_comes_within_the_time(load: str) -> None:
    """A rate of less than one task in the time gives one task, which does not make the run longer."""
    arrivals = build_arrivals({"often": 10.0, "rare": 1e-5}, 2.0, load)
    assert [a.model for a in arrivals].count("rare") == 1
    assert max(a.time_ms for a in arrivals) <= 2000


def test_all_results_are_there_when_the_load_is_over() -> None:
    """A future that is done before its callbacks have run is waited for: each task is counted."""

    class SlowCallbacks(Future[None]):
        def add_done_callback(self, fn: Callable[[Future[None]], object]) -> None:
            threading.Timer(0.05, fn, [self]).start()

    def submit(_: str) -> Future[None]:
        done = SlowCallbacks()
        done.set_result(None)
        return done

    served, _ = submit_all(submit, [Arrival(0.0, "m"), Arrival(1.0, "m")], {})
    assert [s.outcome for s in served] == ["done", "done"]
