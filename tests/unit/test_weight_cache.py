"""How long operators run: weights that their lane's cache has lost are fetched again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chrion.graph import Dag
from chrion.profiler import uniform_costs
from chrion.scheduler import Schedule, evaluate
from chrion.scheduler.evaluation.weight_cache import durations_ms, reloaded_bytes

A, B = (0,), (1,)


def reading(weights: Sequence[Sequence[int]], sizes: Sequence[int]) -> Dag:
    """Independent operators that read some weights of these sizes."""
    dag = Dag.from_edges(len(weights), [])
    return replace(dag, weights=tuple(tuple(w) for w in weights), weight_bytes=tuple(sizes))


def on_one_lane(n: int) -> Schedule:
    return Schedule(tuple(range(n)), (1,) * n, 1)


@pytest.mark.parametrize(
    ("weights", "cache", "fetched"),
    [
        ([A, A, B, B], 1000, [600, 0, 600, 0]),  # a lane that keeps to a layer
        ([A, B, A, B], 1000, [600, 600, 600, 600]),  # one that changes between two
        ([A, B, A, B], 1200, [0, 0, 0, 0]),  # both fit
        ([A, A, A], 1000, [0, 0, 0]),  # the request before has left it there
        ([A, (0, 1), B], 1200, [0, 0, 0]),
        ([(), A, ()], 1000, [0, 0, 0]),
    ],
)
def test_weights_are_fetched_when_others_have_taken_their_place(
    weights: list[tuple[int, ...]], cache: int, fetched: list[float]
) -> None:
    """Two weights of 600 bytes each."""
    found = reloaded_bytes(reading(weights, [600, 600]), cache, on_one_lane(len(weights)))
    assert [found.get(i, 0) for i in range(len(weights))] == fetched


def test_what_never_fits_is_part_of_w() -> None:
    """An operator with more weights than the cache holds fetches the rest in a loop of its own, too."""
    alone = reloaded_bytes(reading([A], [5000]), 1000, on_one_lane(1))
    beside = reloaded_bytes(reading([A, B], [5000, 300]), 1000, on_one_lane(2))
    assert alone == {0: 0}
    assert beside == {0: 1000, 1: 300}


def test_lanes_have_caches_of_their_own_and_the_accelerator_has_none() -> None:
    """Two layers on two lanes stay where they are."""
    dag = reading([A, B, A, B], [600, 600])
    assert set(reloaded_bytes(dag, 1000, Schedule((0, 1, 2, 3), (1, 2, 1, 2), 2)).values()) == {0}
    assert reloaded_bytes(dag, 1000, Schedule((0, 1, 2, 3), (0, 0, 0, 0), 0)) == {}


def lost_bytes(weights: list[list[int]], sizes: list[int], cache: int) -> list[int]:
    """By stack distances, in the third of three requests: a weight is there if it fits in with all used since."""
    uses, lost = weights * 3, []
    for at in range(2 * len(weights), len(uses)):
        lost.append(0)
        for w in uses[at]:
            last = max(before for before in range(at) if w in uses[before])
            since = set(uses[last][uses[last].index(w) + 1 :]).union(*uses[last + 1 : at])
            lost[-1] += sizes[w] if sizes[w] + sum(sizes[v] for v in since) > cache else 0
    return lost


@given(
    sizes=st.lists(st.integers(1, 9), min_size=5, max_size=5),
    weights=st.lists(st.lists(st.integers(0, 4), max_size=3, unique=True), min_size=1, max_size=9),
    spare=st.integers(0, 20),
)
def test_a_weight_is_lost_when_too_much_else_was_used(sizes: list[int], weights: list[list[int]], spare: int) -> None:
    """As many bytes are fetched as stack distances tell."""
    cache = spare + max(sum(sizes[w] for w in read) for read in weights)
    found = reloaded_bytes(reading(weights, sizes), cache, on_one_lane(len(weights)))
    assert [found.get(i, 0) for i in range(len(weights))] == lost_bytes(weights, sizes, cache)


def test_fetching_takes_time_on_the_timeline() -> None:
    """A layer at a time takes less than step by step in turn; nothing changes where fetching costs nothing."""
    dag = reading([A, B, A, B], [600, 600])
    costs = uniform_costs(dag, cpu_ms=[1.0], reload_ms_per_byte=0.01, cache_bytes=1000)
    by_layer, in_turn = Schedule((0, 2, 1, 3), (1,) * 4, 1), on_one_lane(4)
    assert durations_ms(dag, costs, by_layer) == [7.0, 7.0, 1.0, 1.0]
    assert evaluate(dag, costs, by_layer).latency_ms == 16.0
    assert evaluate(dag, costs, in_turn).latency_ms == 28.0
    assert evaluate(dag, replace(costs, reload_ms_per_byte=0.0), in_turn).latency_ms == 4.0
