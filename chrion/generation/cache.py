"""The manager of keys and values: rows of a pool for each request, reserved for all tokens that the request may have.

A slot is the memory of the keys and values of one token in all layers (Orca, section 3.3). A request reserves as many
slots as it may have tokens, so that it never waits for memory once it has begun. The pool is one mapping of memory with
a row for each slot and cache. A request has consecutive rows, so that its own keys and values are contiguous. Pages
that no token has reached take no memory, and whole pages of a request go back to the system when it ends.

If the free rows of the pool are not consecutive, a request has a pool of its own.
"""

from __future__ import annotations

import functools
import mmap
import threading
from contextlib import suppress
from typing import Any

import numpy as np

from chrion.errors import OptionError
from chrion.generation.rewrites.decoder import DecoderSignature

Array = np.ndarray[Any, Any]


class CachePool:
    """Memory for the caches of many requests. Not thread-safe.

    Args:
        signature: The decoder's inputs and outputs.
        rows: The tokens that it has space for.

    Raises:
        OSError: The system does not offer as much memory.
        OverflowError: As much memory cannot be addressed.
    """

    def __init__(self, signature: DecoderSignature, rows: int) -> None:
        sizes = [heads * width * signature.cache_type.itemsize for heads, width in signature.cache_shapes]
        #: Bytes of a row, and the first byte of each cache, which begins a page.
        self._sizes, self._offsets = sizes, [0]
        for size in sizes:
            self._offsets.append(self._offsets[-1] + _pages(rows * size) * mmap.PAGESIZE)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # pages of a shared mapping would not be given back
        self._memory = mmap.mmap(-1, max(self._offsets[-1], 1), flags=flags)
        #: The caches in the order of the signature, [rows, heads, width].
        self.arrays: list[Array] = [
            np.frombuffer(self._memory, signature.cache_type, rows * heads * width, offset).reshape(rows, heads, width)
            for (heads, width), offset in zip(signature.cache_shapes, self._offsets[:-1], strict=True)
        ]
        self._free = [(0, rows)]  # first row and number of rows, in this order; neighbours are joined

    def take(self, count: int) -> int | None:
        """Return the first of consecutive free rows, the lowest ones, or None if there are none."""
        for at, (start, length) in enumerate(self._free):
            if length >= count:
                self._free[at : at + 1] = [(start + count, length - count)] if length > count else []
                return start
        return None

    def give(self, start: int, count: int) -> None:
        """Take rows back, and return their whole pages to the system."""
        joined: list[tuple[int, int]] = []
        for first, length in sorted([*self._free, (start, count)]):
            if joined and sum(joined[-1]) == first:
                joined[-1] = (joined[-1][0], joined[-1][1] + length)
            else:
                joined.append((first, length))
        self._free = joined
        for size, offset in zip(self._sizes, self._offsets, strict=False):
            first, last = _pages(offset + start * size), (offset + (start + count) * size) // mmap.PAGESIZE
            if last > first:
                with suppress(OSError):  # it only costs memory
                    self._memory.madvise(mmap.MADV_DONTNEED, first * mmap.PAGESIZE, (last - first) * mmap.PAGESIZE)


class RequestCache:
    """The keys and values of one request.

    Args:
        signature: The decoder's inputs and outputs.
        capacity: The most tokens with keys and values: the prompt and all new tokens but the last one.
        by_token: Arrange a cache as [tokens, heads, width], in which tokens can be appended and the filled part is
            contiguous; otherwise as [heads, tokens, width].
        pool: Where to take the memory, if caches are arranged by token; if it has no such rows, or by default, the
            request has a pool of its own.
    """

    def __init__(
        self, signature: DecoderSignature, capacity: int, *, by_token: bool, pool: CachePool | None = None
    ) -> None:
        self.capacity = capacity
        start = pool.take(capacity) if pool is not None and by_token else None
        if by_token and start is None:
            pool, start = CachePool(signature, capacity), 0
        #: The pool, or None if caches are not arranged by token, and the first row there.
        self.pool, self.start = (None, 0) if start is None else (pool, start)
        #: The filled rows of caches that have fewer than tokens, by their number (``rewrites.long_texts``).
        self.rows: dict[int, int] = {}
        self._own = [] if self.pool is not None else _own_arrays(signature, capacity)

    @functools.cached_property
    def arrays(self) -> list[Array]:
        """The caches in the order of the signature: keys and values, layer by layer."""
        if self.pool is None:
            return self._own
        return [array[self.start : self.start + self.capacity] for array in self.pool.arrays]

    def release(self) -> None:
        """Give rows back to the pool; the cache must not be used any more."""
        if self.pool is not None:
            self.pool.give(self.start, self.capacity)


def _own_arrays(signature: DecoderSignature, capacity: int) -> list[Array]:
    """Return caches [heads, capacity, width] in a mapping of their own."""
    memory = mmap.mmap(-1, max(signature.slot_bytes * capacity, 1))
    arrays, offset = [], 0
    for heads, width in signature.cache_shapes:
        count = capacity * heads * width
        flat = np.frombuffer(memory, signature.cache_type, count, offset)
        arrays.append(flat.reshape(heads, capacity, width))
        offset += count * signature.cache_type.itemsize
    return arrays


class CacheManager:
    """The caches of the requests that have begun. Thread-safe.

    Args:
        signature: The decoder's inputs and outputs.
        n_slots: The most slots that the scheduler reserves at a time.
        by_token: As in :class:`RequestCache`.
    """

    def __init__(self, signature: DecoderSignature, n_slots: int, *, by_token: bool) -> None:
        self._signature, self._by_token = signature, by_token
        self._pool: CachePool | None = None
        rows = n_slots if by_token else 0
        while self._pool is None and rows:
            try:
                self._pool = CachePool(signature, rows)
            except (OSError, OverflowError):  # the system does not offer as much: a smaller pool serves most requests
                rows //= 2
        self._caches: dict[int, RequestCache] = {}
        self._left: list[RequestCache] = []  # whose memory has not been given back
        self._lock = threading.Lock()

    @property
    def reserved(self) -> int:
        """The slots of all caches."""
        with self._lock:
            return sum(cache.capacity for cache in self._caches.values())

    def get(self, request: int, capacity: int) -> RequestCache:
        """Return the cache of a request, whose slots are reserved."""
        with self._lock:
            if request not in self._caches:
                self._give_back()
                self._caches[request] = RequestCache(
                    self._signature, capacity, by_token=self._by_token, pool=self._pool
                )
            return self._caches[request]

    def release(self, request: int) -> None:
        """Release the cache of a request, if it has one; its memory is given back later."""
        with self._lock:
            cache = self._caches.pop(request, None)
            if cache is not None:
                self._left.append(cache)

    def give_back(self) -> None:
        """Give back the memory of the caches that were released, for which a request that ends need not wait."""
        with self._lock:
            self._give_back()

    def _give_back(self) -> None:
        while self._left:
            self._left.pop().release()


def slots_of_bytes(signature: DecoderSignature, budget: int) -> int:
    """Return how many slots a budget of bytes holds.

    Raises:
        OptionError: It holds none.
    """
    slots = budget // signature.slot_bytes
    if slots < 1:
        raise OptionError(f"kv_bytes: {budget} bytes hold no token, which needs {signature.slot_bytes} bytes")
    return slots


def _pages(size: int) -> int:
    """Return the pages that a number of bytes needs."""
    return -(-size // mmap.PAGESIZE)
