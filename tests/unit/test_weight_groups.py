"""Placements of weight groups: the knapsack, and the lanes that follow from it."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from chrion.graph import Dag
from chrion.profiler.costs import uniform_costs
from chrion.scheduler.search.weight_groups import knapsack, offload_lanes


@given(items=st.lists(st.tuples(st.integers(0, 20), st.integers(-5, 20)), max_size=9), capacity=st.integers(0, 100))
def test_the_best_selection_of_every_capacity_is_found(items: list[tuple[int, int]], capacity: int) -> None:
    """For each capacity, the gain equals the best of all subsets, and size and gain are those of the selected items."""
    sizes, gains = [size for size, _ in items], [float(gain) for _, gain in items]
    front = knapsack(sizes, gains)
    for selection in front:
        chosen = [i for i in range(len(items)) if selection.groups >> i & 1]
        assert selection.size == sum(sizes[i] for i in chosen)
        assert selection.gain_ms == sum(gains[i] for i in chosen)
    subsets = [[i for i in range(len(items)) if mask >> i & 1] for mask in range(1 << len(items))]
    best = max(sum(gains[i] for i in chosen) for chosen in subsets if sum(sizes[i] for i in chosen) <= capacity)
    assert max(s.gain_ms for s in front if s.size <= capacity) == best


def test_the_number_of_selections_is_bounded() -> None:
    """With powers of two every subset is on the front; the smallest and the largest remain."""
    front = knapsack([2**i for i in range(12)], [float(2**i) for i in range(12)], kept=50)
    assert len(front) == 50
    assert (front[0].size, front[-1].size) == (0, 4095)


def test_operators_without_weights_follow_their_neighbours() -> None:
    """In a chain of weight, small operator, weight: with both weights placed, the small one is placed as well."""
    dag = Dag.from_edges(3, [(0, 1), (1, 2)], [100, 100])
    dag = replace(dag, weights=((0,), (), (1,)), weight_bytes=(10, 20))
    costs = uniform_costs(dag, accelerator_ms=0.1)
    found = list(offload_lanes(dag, costs, 48, 1000))
    # The third gains no more than the first and is larger, so it is selected only together with it. Each selection is
    # tried with the small operator on the accelerator, and with it where its input is made.
    assert found[:6] == [(1, 0, 1), (1, 1, 1), (0, 0, 1), (0, 0, 1), (0, 0, 0), (0, 0, 0)]
    # In order and from the end, the policies that fill the memory stop before a weight.
    assert found[6:] == [(0, 0, 1), (1, 0, 0)]


def test_a_small_shared_weight_joins_no_groups() -> None:
    """Two operators with large weights of their own and a small one in common are placed independently."""
    dag = replace(Dag.from_edges(2, []), weights=((0, 2), (1, 2)), weight_bytes=(100, 200, 10))
    found = set(offload_lanes(dag, uniform_costs(dag, accelerator_ms=0.1), 48, 1000))
    assert {(1, 1), (0, 1), (0, 0)} <= found


def test_large_graphs_have_fewer_placements() -> None:
    """The number of selections is limited by the operators in all of them, but never below two."""
    dag = replace(Dag.from_edges(8, []), weights=tuple((i,) for i in range(8)), weight_bytes=(10,) * 8)
    costs = uniform_costs(dag, accelerator_ms=0.1)
    limits = ((99, 99), (4, 99), (9, 8))
    counts = [len(list(offload_lanes(dag, costs, *limit))) for limit in limits]
    assert counts == [2 * 9 + 14, 2 * 4 + 8, 2 * 2 + 4]


def test_unsupported_operators_stay_on_the_core() -> None:
    """An operator that the accelerator does not support is never placed there."""
    dag = replace(Dag.from_edges(2, [(0, 1)], [4]), weights=((0,), (1,)), weight_bytes=(10, 20))
    costs = replace(uniform_costs(dag), accelerator_ms=(0.1, float("inf")))
    assert {lanes[1] for lanes in offload_lanes(dag, costs, 48, 1000)} == {1}
