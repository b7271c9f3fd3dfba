"""The policy ``shrink``, on plain state and in the simulator."""

from typing import Any

import numpy as np
import pytest

from chrion.serving.manager.policies import ResidentModel, rank_lru
from chrion.serving.manager.shrinking import Memory, Room, make_room
from chrion.serving.simulator.settings import ServerSpec
from chrion.serving.variants import Variant
from simulator_support import engine_of

#: Bytes by level and model: three models of three variants.
SIZES = [[40, 40, 60], [30, 20, 50], [10, 10, 15]]


def held(*levels: int, **changes: Any) -> list[ResidentModel]:
    """Return models in memory at the given levels, of which the first was used least recently."""
    return [
        ResidentModel(key=i, bytes=SIZES[level][i], load_ms=1.0, idle_since_ms=float(i), level=level, **changes)
        for i, level in enumerate(levels)
    ]


def decided(room: Room | None) -> tuple[int, dict[int, int], list[int]]:
    """Return the level of the new model, the new levels of others by key, and the keys of evicted models."""
    assert room is not None
    return room.level, {resident.key: level for resident, level in room.shrunk}, [r.key for r in room.evicted]


@pytest.mark.parametrize(
    ("free", "expected"),
    [
        (60, (0, {}, [])),
        (50, (0, {0: 1}, [])),
        (30, (0, {0: 1, 1: 1}, [])),
        (20, (1, {0: 1, 1: 1}, [])),
        (0, (1, {0: 2, 1: 1}, [])),
        (-30, (2, {0: 2, 1: 2}, [])),
        (-46, (2, {1: 2}, [0])),
        (-60, (2, {}, [0, 1])),
    ],
)
def test_models_give_up_one_variant_each_before_any_gives_up_two(
    free: int, expected: tuple[int, dict[int, int], list[int]]
) -> None:
    """The less memory there is, the smaller the variants of all become; models are evicted last."""
    found = make_room(Memory(held(0, 0), free, SIZES), 2, rank_lru, 9.0)
    if free == -60:
        assert found is None or decided(found) == expected
    else:
        assert decided(found) == expected


def test_models_in_use_and_pinned_models_keep_their_variant() -> None:
    """If no other model can give up memory, there is no room."""
    for changes in ({"in_use": 1}, {"pinned": True}):
        assert make_room(Memory(held(0, 0, **changes), 5, SIZES), 2, rank_lru, 9.0) is None


def test_no_eviction_if_it_is_not_permitted() -> None:
    """Without permission to evict, the smallest variants of all have to fit."""
    memory = Memory(held(0, 0), -46, SIZES)
    assert make_room(memory, 2, rank_lru, 9.0, evict=False) is None


def levels(*sizes_mb: float) -> list[list[Variant]]:
    """Return three levels of two equal models: larger variants are faster."""
    return [[Variant(f"v{i}", size, 10.0 + i, 10.0 + i, load_mb=size)] * 2 for i, size in enumerate(sizes_mb)]


def test_two_models_shrink_and_stay() -> None:
    """Two models that fit only in smaller variants are loaded once in each that they have, and are never evicted."""
    first, *smaller = levels(900, 500, 100)
    rows: list[Any] = []
    engine = engine_of(first, spec=ServerSpec(gpu_memory_gb=1.0), smaller=smaller)
    engine.run([(np.arange(10) * 1000.0, np.arange(10) % 2)], keep=rows.append)
    found = np.concatenate(rows)
    assert engine.cluster.loads == [2, 1]
    assert engine.servers[0].evictions == 0
    # Model 0 runs alone in its first variant, then both run in their second one.
    assert (found[:, 5] - found[:, 4]).tolist() == pytest.approx([10.0] + [11.0] * 9)
    assert found[:, 7].tolist() == [0] + [3, 2] * 4 + [3]


def test_a_model_grows_into_free_memory() -> None:
    """A model that was loaded in a smaller variant has the larger one after ten seconds in which memory was enough."""
    sizes = [[800.0, 900.0, 300.0], [500.0, 890.0, 290.0]]
    first, second = ([Variant("v", mb, 10.0, 10.0, load_mb=mb) for mb in row] for row in sizes)
    # 0 and 2 share the memory after 0 has shrunk; 1 evicts both; 2 evicts 1, and later grows beside nothing.
    engine = engine_of(first, spec=ServerSpec(gpu_memory_gb=0.9), smaller=[second])
    journal: list[tuple[float, str, int, int]] = []
    engine.cluster.journal = lambda *note: journal.append(note)
    engine.run([(np.array([0.0, 1000.0, 2000.0, 3000.0, 14_000.0]), np.array([0, 2, 1, 2, 2]))])
    assert [(at // 1000, what, kind) for at, what, _, kind in journal if what != "loaded"] == [
        (0, "load", 0),
        (1, "shrink", 3),
        (1, "load", 2),
        (1, "load", 3),
        (2, "evict", 3),
        (2, "evict", 2),
        (2, "load", 4),
        (3, "evict", 4),
        (3, "load", 5),
        (13, "grow", 2),
        (13, "load", 2),
    ]
    used = engine.servers[0].budget_bytes - engine.servers[0].free_bytes
    assert used == sum(resident.bytes for resident in engine.servers[0].residents.values())


def test_a_variant_without_gpu_memory_is_never_evicted() -> None:
    """With the CPU alone as the last variant, models are loaded once in each variant, however short memory is."""
    first = [Variant("gpu", 900.0, 10.0, 10.0, load_mb=900.0)] * 3
    last = [Variant("cpu", 0.0, 30.0, 0.0, (30.0,))] * 3
    engine = engine_of(first, spec=ServerSpec(gpu_memory_gb=1.0), smaller=[last])
    engine.run([(np.arange(30) * 1000.0, np.arange(30) % 3)])
    assert engine.servers[0].evictions == 0
    assert max(engine.cluster.loads) <= 2


def test_a_model_without_gpu_memory_is_never_loaded() -> None:
    """It has nothing to give up for another model, and so keeps its variant."""
    first, last = (
        [Variant("v", mb, 10.0, 10.0, load_mb=mb) for mb in row] for row in ((0.0, 900.0, 900.0), (0, 500, 500))
    )
    engine = engine_of(first, spec=ServerSpec(gpu_memory_gb=1.0), smaller=[last])
    engine.run([(np.arange(9) * 1000.0, np.arange(9) % 3)])
    assert engine.cluster.loads[0] == 0
    assert engine.cluster.loads[1:] == [2, 1]
