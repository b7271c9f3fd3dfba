"""Durations of operators, with reloads of weights that have left their lane's cache."""

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
    """Return independent operators that read the given weights."""
    dag = Dag.from_edges(len(weights), [])
    return replace(dag, weights=tuple(tuple(w) for w in weights), weight_bytes=tuple(sizes))


def on_one_lane(n: int) -> Schedule:
    """Return a schedule of operators on one core, by index."""
    return Schedule(tuple(range(n)), (1,) * n, 1)


@pytest.mark.parametrize(
    ("weights", "cache", "reloaded"),
    [
        ([A, A, B, B], 1000, [600, 0, 600, 0]),  # a lane that stays within a layer
        ([A, B, A, B], 1000, [600, 600, 600, 600]),  # a lane that alternates between two layers
        ([A, B, A, B], 1200, [0, 0, 0, 0]),  # both fit
        ([A, A, A], 1000, [0, 0, 0]),  # left in the cache by the previous request
        ([A, (0, 1), B], 1200, [0, 0, 0]),
        ([(), A, ()], 1000, [0, 0, 0]),
    ],
)
def test_weights_are_reloaded_after_other_weights_replaced_them(
    weights: list[tuple[int, ...]], cache: int, reloaded: list[float]
) -> None:
    """With two weights of 600 bytes each, a weight is reloaded if the other one has replaced it in the cache."""
    found = reloaded_bytes(reading(weights, [600, 600]), cache, on_one_lane(len(weights)))
    assert [found.get(i, 0) for i in range(len(weights))] == reloaded


def test_reloads_in_a_loop_of_one_operator_are_part_of_w() -> None:
    """At most the size of the cache counts as reloaded for one operator, since its W includes the rest."""
    alone = reloaded_bytes(reading([A], [5000]), 1000, on_one_lane(1))
    beside = reloaded_bytes(reading([A, B], [5000, 300]), 1000, on_one_lane(2))
    assert alone == {0: 0}
    assert beside == {0: 1000, 1: 300}


def test_each_core_has_a_cache_and_the_accelerator_has_none() -> None:
    """The weights of two layers on two cores stay in the caches of both."""
    dag = reading([A, B, A, B], [600, 600])
    assert set(reloaded_bytes(dag, 1000, Schedule((0, 1, 2, 3), (1, 2, 1, 2), 2)).values()) == {0}
    assert reloaded_bytes(dag, 1000, Schedule((0, 1, 2, 3), (0, 0, 0, 0), 0)) == {}


def lost_bytes(weights: list[list[int]], sizes: list[int], cache: int) -> list[int]:
    """Return the bytes lost in the third of three requests, by stack distances.

    A weight is in the cache if it fits together with all weights used since its last use.
    """
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
def test_reloads_are_those_of_stack_distances(sizes: list[int], weights: list[list[int]], spare: int) -> None:
    """For random weights and cache sizes, reloads equal those that follow from stack distances."""
    cache = spare + max(sum(sizes[w] for w in read) for read in weights)
    found = reloaded_bytes(reading(weights, sizes), cache, on_one_lane(len(weights)))
    assert [found.get(i, 0) for i in range(len(weights))] == lost_bytes(weights, sizes, cache)


def test_reloads_take_time_on_the_timeline() -> None:
    """Layer after layer takes less time than step after step; without a reload time, only operators take time."""
    dag = reading([A, B, A, B], [600, 600])
    costs = uniform_costs(dag, cpu_ms=[1.0], reload_ms_per_byte=0.01, cache_bytes=1000)
    by_layer, in_turn = Schedule((0, 2, 1, 3), (1,) * 4, 1), on_one_lane(4)
    assert durations_ms(dag, costs, by_layer) == [7.0, 7.0, 1.0, 1.0]
    assert evaluate(dag, costs, by_layer).latency_ms == 16.0
    assert evaluate(dag, costs, in_turn).latency_ms == 28.0
    assert evaluate(dag, replace(costs, reload_ms_per_byte=0.0), in_turn).latency_ms == 4.0
