"""The manager of keys and values: one buffer for each request, reserved for all tokens that the request may have.

A slot is the memory of the keys and values of one token in all layers (Orca, section 3.3). A request reserves as many
slots as it may have tokens, so that it never waits for memory once it has begun. Its buffer is one mapping of memory of
exactly that size, which goes back to the system with the request: no space is lost between requests, and the only
loss is the rest of the last page. Pages that no token has reached take no memory.
"""

from __future__ import annotations

import mmap
import threading
from typing import Any

import numpy as np

from chrion.errors import OptionError
from chrion.graph.decoder import DecoderSignature

Array = np.ndarray[Any, Any]


class RequestCache:
    """The keys and values of one request.

    Args:
        signature: The decoder's inputs and outputs.
        capacity: The most tokens of the request.
        by_token: Arrange a cache as [tokens, heads, width], in which tokens can be appended and the filled part is
            contiguous; otherwise as [heads, tokens, width].
    """

    def __init__(self, signature: DecoderSignature, capacity: int, *, by_token: bool) -> None:
        self.capacity = capacity
        #: The caches in the order of the signature: keys and values, layer by layer.
        self.arrays: list[Array] = []
        item = signature.cache_type.itemsize
        memory = mmap.mmap(-1, max(signature.slot_bytes * capacity, 1))
        offset = 0
        for heads, width in signature.cache_shapes:
            count = capacity * heads * width
            flat = np.frombuffer(memory, signature.cache_type, count, offset)
            self.arrays.append(flat.reshape((capacity, heads, width) if by_token else (heads, capacity, width)))
            offset += count * item


class CacheManager:
    """The budget of slots, and the caches of the requests that have begun. Thread-safe.

    Args:
        signature: The decoder's inputs and outputs.
        n_slots: The most slots that are reserved at a time.
        by_token: As in :class:`RequestCache`.
    """

    def __init__(self, signature: DecoderSignature, n_slots: int, *, by_token: bool) -> None:
        self._signature, self._by_token = signature, by_token
        self.n_slots = n_slots
        self._caches: dict[int, RequestCache] = {}
        self._reserved = 0
        self._lock = threading.Lock()

    @property
    def reserved(self) -> int:
        """The slots that are reserved."""
        return self._reserved

    def get(self, request: int, capacity: int) -> RequestCache:
        """Return the cache of a request, and reserve it at the first call.

        Raises:
            OptionError: Fewer slots are left.
        """
        with self._lock:
            if request not in self._caches:
                if self._reserved + capacity > self.n_slots:
                    left = self.n_slots - self._reserved
                    raise OptionError(f"request {request}: needs {capacity} slots, {left} of {self.n_slots} are left")
                self._caches[request] = RequestCache(self._signature, capacity, by_token=self._by_token)
                self._reserved += capacity
            return self._caches[request]

    def release(self, request: int) -> None:
        """Release the cache of a request, if it has one."""
        with self._lock:
            cache = self._caches.pop(request, None)
            self._reserved -= cache.capacity if cache is not None else 0


def slots_of_bytes(signature: DecoderSignature, budget: int) -> int:
    """Return how many slots a budget of bytes holds.

    Raises:
        OptionError: It holds none.
    """
    slots = budget // signature.slot_bytes
    if slots < 1:
        raise OptionError(f"kv_bytes: {budget} bytes hold no token, which needs {signature.slot_bytes} bytes")
    return slots
