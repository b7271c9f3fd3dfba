"""Policies, on plain state."""

import pytest

from chrion.serving.manager.policies import (
    EVICTION,
    LOAD_ORDER,
    ROUTING,
    SPILL,
    ResidentModel,
    SpeedRoute,
    WaitingModel,
    choose_victims,
    is_in_time,
    route_resident_first,
)


def residents() -> list[ResidentModel]:
    """Return four idle models, of which each policy evicts a different one first."""
    return [
        ResidentModel(key=0, bytes=10, load_ms=100.0, uses=9, idle_since_ms=1.0, next_use=5),
        ResidentModel(key=1, bytes=10, load_ms=5.0, uses=5, idle_since_ms=3.0, next_use=6),
        ResidentModel(key=2, bytes=10, load_ms=50.0, uses=2, idle_since_ms=4.0, next_use=7),
        ResidentModel(key=3, bytes=10, load_ms=50.0, uses=3, idle_since_ms=5.0),
    ]


@pytest.mark.parametrize(("policy", "key"), [("lru", 0), ("lfu", 2), ("cost", 1), ("belady", 3)])
def test_the_first_victim(policy: str, key: int) -> None:
    """LRU evicts the longest idle, LFU the least used, cost the cheapest to reload, Belady the one not used again."""
    victims = choose_victims(residents(), 1, EVICTION[policy], 10.0)
    assert victims is not None
    assert [victim.key for victim in victims] == [key]


def test_only_as_many_models_as_necessary_are_evicted() -> None:
    """Models are evicted in the policy's order until enough bytes are free."""
    victims = choose_victims(residents(), 25, EVICTION["lru"], 10.0)
    assert victims is not None
    assert [victim.key for victim in victims] == [0, 1, 2]


def test_pinned_and_busy_models_are_not_evicted() -> None:
    """If the other models do not free enough memory, no model is evicted."""
    held = residents()
    held[0].pinned, held[1].in_use = True, 1
    victims = choose_victims(held, 15, EVICTION["lru"], 10.0)
    assert victims is not None
    assert [victim.key for victim in victims] == [2, 3]
    assert choose_victims(held, 21, EVICTION["lru"], 10.0) is None


def test_weight_protects_under_the_cost_policy() -> None:
    """Of two models with equal idle and load times, the one with the lower weight is evicted first."""
    light = ResidentModel(key=0, bytes=1, load_ms=10.0)
    heavy = ResidentModel(key=1, bytes=1, load_ms=10.0, weight=3.0)
    victims = choose_victims([heavy, light], 1, EVICTION["cost"], 5.0)
    assert victims == [light]


def test_ties_go_to_the_first() -> None:
    """Of equal ranks the model loaded first is evicted, and the server with the lowest index is chosen."""
    held = [ResidentModel(key=key, bytes=1, load_ms=1.0) for key in (4, 2)]
    assert choose_victims(held, 1, EVICTION["lru"], 0.0) == [held[0]]
    assert ROUTING["least-loaded"]([3, 1, 1], [0, 1, 2], [], 0.0) == 1


@pytest.mark.parametrize(("draw", "server"), [(0.0, 1), (0.49, 1), (0.5, 3), (0.999, 3)])
def test_random_routing_uses_the_draw(draw: float, server: int) -> None:
    """Equal parts of [0, 1) select the eligible servers, and no other."""
    assert ROUTING["random"]([0, 0, 0, 0], [1, 3], [], draw) == server


def test_least_loaded_stays_among_the_eligible() -> None:
    """A less loaded server that cannot hold the model is not chosen."""
    assert ROUTING["least-loaded"]([0, 5, 4], [1, 2], [1], 0.0) == 2


@pytest.mark.parametrize(("ahead", "server"), [(0, 2), (SPILL - 1, 2), (SPILL, 0)])
def test_resident_first_until_the_queue_is_long(ahead: int, server: int) -> None:
    """The server with the weights is chosen until it has four requests more than the least loaded one."""
    assert ROUTING["resident-first"]([1, 1, 1 + ahead], [0, 1, 2], [2], 0.0) == server


def test_resident_first_takes_the_least_loaded_home() -> None:
    """Of several servers with the weights the least loaded one is chosen, unless its queue is as long as permitted."""
    assert ROUTING["resident-first"]([SPILL, SPILL - 1, 0], [0, 1, 2], [0, 1], 0.0) == 1
    assert ROUTING["resident-first"]([SPILL, SPILL, 0], [0, 1, 2], [0, 1], 0.0) == 2


def test_resident_first_without_a_resident_server() -> None:
    """A model that is resident on no server goes to the least loaded server."""
    assert ROUTING["resident-first"]([2, 0, 1], [0, 1, 2], [], 0.0) == 1


@pytest.mark.parametrize(("routing", "with_homes"), [("least-loaded", 1), ("resident-first", 3)])
def test_a_missing_model_goes_where_memory_is_free(routing: str, with_homes: int) -> None:
    """Of the servers with the fewest requests, the one with most free memory is chosen if no server has the weights."""
    free = [9.0, 5.0, 7.0, 7.0, 8.0]
    outstanding = [2, 1, 1, 1, 1]
    assert ROUTING[routing](outstanding, range(4), [], 0.0, free) == 2
    assert ROUTING[routing](outstanding, [0, 1, 3, 4], [], 0.0, free) == 4
    assert ROUTING[routing](outstanding, range(5), [3, 4], 0.0, free) == with_homes
    by_speed = SpeedRoute([6.0, 2.0, 2.0, 4.0, 4.0], None)
    assert by_speed(outstanding, range(1, 5), [], 0.0, free) == 4
    assert by_speed(outstanding, range(1, 5), [1], 0.0, free) == 3


@pytest.mark.parametrize(("order", "key"), [("fifo", 0), ("demand", 1)])
def test_load_order(order: str, key: int) -> None:
    """``fifo`` loads the model of the oldest request, and ``demand`` the model with the most waiting work."""
    waiting = [WaitingModel(0, 1.0, 50.0), WaitingModel(1, 2.0, 120.0), WaitingModel(2, 3.0, 80.0)]
    assert min(waiting, key=LOAD_ORDER[order]).key == key


def test_admission() -> None:
    """A request is admitted if its wait and execution fit its deadline."""
    assert is_in_time(10.0, 100.0, 40.0, 50.0)
    assert not is_in_time(10.1, 100.0, 40.0, 50.0)


def test_no_victim_is_unnecessary() -> None:
    """Models that were chosen before a large one stay if the large one frees enough, the last of them first."""
    held = [ResidentModel(key=i, bytes=size, load_ms=1.0, idle_since_ms=i) for i, size in enumerate([2, 5, 3, 9])]
    assert [v.key for v in choose_victims(held, 14, EVICTION["lru"], 9.0) or ()] == [1, 3]
    assert [v.key for v in choose_victims(held, 11, EVICTION["lru"], 9.0) or ()] == [0, 3]
    assert [v.key for v in choose_victims(held, 9, EVICTION["lru"], 9.0) or ()] == [0, 1, 2]


def test_rounding_does_not_drop_a_request() -> None:
    """A request that ends at its deadline is admitted although the sum of its times exceeds it by rounding."""
    assert 0.1 + 0.2 > 0.3
    assert is_in_time(0.1, 0.3, 0.0, 0.2)
    assert not is_in_time(0.1, 0.3, 0.0, 0.2 + 1e-6)


@pytest.mark.parametrize(("spill", "server"), [(1, 0), (2, 0), (3, 2), (8, 2)])
def test_spill_is_the_length_of_queue_that_is_accepted(spill: int, server: int) -> None:
    """The server with the weights is left if it has at least ``spill`` requests more than the least loaded."""
    assert route_resident_first([1, 1, 3], [0, 1, 2], [2], 0.0, spill=spill) == server
