"""The pool of keys and values: rows of requests are disjoint, and memory goes back to the system."""

from __future__ import annotations

import mmap

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from chrion.generation.cache import CacheManager, CachePool
from chrion.generation.rewrites.decoder import DecoderSignature

ROWS = 40


def signature(heads: int = 2, width: int = 4) -> DecoderSignature:
    """Return the signature of a decoder of one layer."""
    past, present = (tuple(f"{name}.0.{part}" for part in ("key", "value")) for name in ("past_key_values", "present"))
    return DecoderSignature(("input_ids",), past, present, ((heads, width),) * 2, np.dtype(np.float32), 10, 0)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 15), st.integers(0, 100)), max_size=60))
def test_rows_are_disjoint_and_all_of_them_come_back(steps: list[tuple[bool, int, int]]) -> None:
    """Rows are refused only if no free rows of that number are consecutive, as a list of used rows says."""
    pool = CachePool(signature(), ROWS)
    used = np.zeros(ROWS, bool)
    taken: list[tuple[int, int]] = []
    for give, count, which in steps:
        if give and taken:
            start, length = taken.pop(which % len(taken))
            pool.give(start, length)
            used[start : start + length] = False
            continue
        fitting = [at for at in range(ROWS - count + 1) if not used[at : at + count].any()]
        found = pool.take(count)
        assert found == (fitting[0] if fitting else None)
        if found is not None:
            used[found : found + count] = True
            taken.append((found, count))
    for start, length in taken:
        pool.give(start, length)
    assert pool.take(ROWS) == 0


def test_pages_of_a_request_go_back_to_the_system() -> None:
    """Whole pages of rows that were given back are zero again; those of a neighbour keep their values."""
    rows = 4 * mmap.PAGESIZE // 32  # 32 bytes a row: four pages of keys and of values
    pool = CachePool(signature(), rows)
    assert pool.take(rows // 4) == 0
    start = pool.take(rows // 2)
    assert start == rows // 4
    for array in pool.arrays:
        array[...] = 1.0
    pool.give(start, rows // 2)
    for array in pool.arrays:
        assert not array[start : start + rows // 2].any()
        assert array[:start].all()
        assert array[start + rows // 2 :].all()


def test_a_request_without_consecutive_rows_has_its_own_memory() -> None:
    """Of 12 slots, 4 + 4 are free on both sides of a request: one of 8 tokens fits in the budget all the same."""
    manager = CacheManager(signature(), 12, by_token=True)
    first, middle, last = (manager.get(at, 4) for at in range(3))
    assert all(cache.pool is first.pool for cache in (middle, last))
    manager.release(0)
    manager.release(2)
    wide = manager.get(3, 8)
    assert wide.pool is not middle.pool
    assert [array.shape for array in wide.arrays] == [(8, 2, 4)] * 2
    middle.arrays[0][...] = 1.0
    wide.arrays[0][...] = 2.0
    assert (middle.arrays[0] == 1.0).all()
    manager.release(3)
    manager.release(1)
    assert manager.reserved == 0
    assert manager.get(4, 12).pool is middle.pool


def test_a_pool_that_the_system_refuses_is_smaller() -> None:
    """More bytes than addresses: requests share a pool of fewer rows."""
    manager = CacheManager(signature(), 1 << 60, by_token=True)
    first, second = (manager.get(at, 4) for at in range(2))
    assert first.pool is second.pool
    assert [array.shape for array in first.arrays] == [(4, 2, 4)] * 2


def test_memory_of_a_request_goes_back_after_its_slots() -> None:
    """The slots are free at once; the pages keep their values until they are given back, or another request begins."""
    rows = 4 * mmap.PAGESIZE // 32
    for again in (CacheManager.give_back, lambda manager: manager.get(1, 1)):
        manager = CacheManager(signature(), rows, by_token=True)
        cache = manager.get(0, rows)
        for array in cache.arrays:
            array[...] = 1.0
        manager.release(0)
        assert manager.reserved == 0
        assert all(array.all() for array in cache.arrays)
        again(manager)
        assert not any(array.any() for array in cache.arrays)
