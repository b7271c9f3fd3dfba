"""Iterations of one token for each request, in one call of a session of the whole model.

The calls of a split decoder, one for each layer and one for each layer and request, take longer than a small model's
arithmetic. Requests that have one new token each need no split: with their caches in a pool
(:mod:`chrion.graph.pooled_cache`) they are a rectangle. Only attention computes its pads, so that they are cheap.

In a rectangle the model sees one length of the past, that of the longest request. A mask that lets a token see only the
last ones, or positions that follow from that length, would be wrong for the others. So a trial compares a short request
beside a long one with the parts, and longer requests are never in one call with shorter ones.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import onnxruntime as ort

from chrion.errors import ModelError
from chrion.generation.cache import CachePool, RequestCache
from chrion.generation.equivalence import Run, find_difference, longest_past
from chrion.generation.iteration import Outcome, Work
from chrion.graph.cache_append import AppendedDecoder
from chrion.graph.decoder import IDS, LOGITS, DecoderSignature
from chrion.graph.ort_sessions import open_session
from chrion.graph.pooled_cache import PAST, START, PooledDecoder, pool_caches

Array = np.ndarray[Any, Any]
log = logging.getLogger(__name__)

#: The most pads of a request, on average: they are copied in every iteration. Beyond, calls by request take less time.
_MOST_PADS = 1024
#: Tokens in the caches of the requests of a trial, beside which there is a longer one.
_SHORT = (5, 0)
#: The shortest past of that one.
_LEAST = 9


@dataclass
class _Bound:
    """A binding of a session, and its arrays: inputs of [requests, 1], shapes of the past, and scores."""

    binding: ort.IOBinding
    ids: Array = field(default_factory=lambda: np.empty((0, 1), np.int64))
    past: Array = field(default_factory=lambda: np.empty((0, 1), np.int64))
    start: Array = field(default_factory=lambda: np.empty((0, 1), np.int64))
    past_shapes: list[Array] = field(default_factory=list)
    #: [requests, 1, vocabulary].
    scores: Array = field(default_factory=lambda: np.empty(0))


class IncrementSession:
    """A session of a pooled decoder. Several threads may run batches at a time.

    Args:
        pooled: The decoder.
        signature: Its inputs and outputs before its caches were moved.
        options: Session options.
        run_options: The options of its runs.

    Raises:
        ModelError: onnxruntime refuses the model.
    """

    def __init__(
        self,
        pooled: PooledDecoder,
        signature: DecoderSignature,
        options: ort.SessionOptions,
        run_options: ort.RunOptions,
    ) -> None:
        self._session = open_session(pooled.model, options, "the decoder with a pool")
        self._pooled, self._signature, self._run_options = pooled, signature, run_options
        logits = next(output for output in self._session.get_outputs() if output.name == LOGITS)
        self._logits_type = np.dtype(np.float16 if logits.type == "tensor(float16)" else np.float32)
        #: The longest past with which requests of other lengths may be in a batch.
        self.longest = _LEAST
        #: Bindings of pools that no thread uses.
        self._free: WeakKeyDictionary[CachePool, deque[_Bound]] = WeakKeyDictionary()

    def serves(self, batch: Sequence[Work]) -> bool:
        """Return whether a batch is made of single tokens after similar numbers of others, in one pool."""
        pool = batch[0].cache.pool
        if pool is None or any(len(work.ids) != 1 or work.cache.pool is not pool for work in batch):
            return False
        pasts = [work.past for work in batch]
        if max(pasts) > self.longest and min(pasts) < max(pasts):
            return False
        return max(pasts) * len(pasts) - sum(pasts) <= _MOST_PADS * len(pasts)

    def run(self, batch: Sequence[Work]) -> list[Outcome]:
        """Run one iteration of a batch that it serves."""
        pool = batch[0].cache.pool
        if pool is None:
            raise ValueError("the caches are in no pool")
        bindings = self._free.setdefault(pool, deque())
        try:
            bound = bindings.pop()
        except IndexError:
            bound = self._bind(pool)
        past = [work.past for work in batch]
        if len(batch) != len(bound.past):
            self._resize(bound, len(batch))
        bound.past[:, 0] = past
        bound.start[:, 0] = [work.cache.start for work in batch]
        for row, work in enumerate(batch):
            bound.ids[row] = work.ids
        most = max(past)
        for shape in bound.past_shapes:
            shape[2] = most
        self._session.run_with_iobinding(bound.binding, self._run_options)
        found = bound.scores[:, 0].astype(np.float32)  # a copy: the next iteration writes to the array
        bindings.append(bound)
        return [found[at] if work.wanted else None for at, work in enumerate(batch)]

    def _bind(self, pool: CachePool) -> _Bound:
        """Return a binding of a pool as input and output."""
        binding = self._session.io_binding()
        for name, written, array in zip(self._pooled.pools, self._pooled.written, pool.arrays, strict=True):
            flat = (array.shape[0] * array.shape[1], array.shape[2])
            binding.bind_input(name, "cpu", 0, array.dtype, flat, array.ctypes.data)
            binding.bind_output(written, "cpu", 0, array.dtype, flat, array.ctypes.data)
        return _Bound(binding)

    def _resize(self, bound: _Bound, count: int) -> None:
        """Bind arrays for a number of requests; the next calls of as many only write to them."""
        bound.ids = np.empty((count, 1), self._signature.type_of(IDS))
        bound.past, bound.start = np.empty((count, 1), np.int64), np.empty((count, 1), np.int64)
        shapes = self._pooled.past_shapes
        bound.past_shapes = [np.array([count, heads, 0, width]) for heads, width in shapes.values()]
        bound.scores = np.empty((count, 1, self._signature.vocabulary), self._logits_type)
        bound.binding.bind_output(LOGITS, "cpu", 0, self._logits_type, bound.scores.shape, bound.scores.ctypes.data)
        arrays = (bound.ids, bound.past, bound.start, *bound.past_shapes)
        for name, array in zip((IDS, PAST, START, *shapes), arrays, strict=True):
            bound.binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)


def open_increments(
    appended: AppendedDecoder,
    signature: DecoderSignature,
    options: ort.SessionOptions,
    run_options: ort.RunOptions,
    run: Run,
) -> IncrementSession | None:
    """Return the session of a decoder for iterations of one token a request, or None if it gives other results.

    Args:
        appended: The decoder with caches that are inputs.
        signature: Its inputs and outputs.
        options: Session options.
        run_options: The options of its runs.
        run: Iterations by the parts of the decoder, for comparison.
    """
    for joined in (True, False):
        pooled = pool_caches(appended, signature, joined=joined)
        if pooled is None:
            return None
        try:
            session = IncrementSession(pooled, signature, options, run_options)
        except ModelError as error:
            different = str(error)
        else:
            different = _difference(signature, session.run, run, _LEAST)
        if not different:
            break
    else:
        log.info("increments run by parts: as a rectangle, %s", different)
        return None
    for length in _lengths(signature):
        if not _difference(signature, session.run, run, length):
            session.longest = length
            break
    return session


def _lengths(signature: DecoderSignature) -> Iterator[int]:
    """Yield pasts of the long request of a trial: the longest one that is possible, then half of it, and so on."""
    length = longest_past(signature)
    while length > _LEAST:
        yield length
        length //= 2


def _difference(signature: DecoderSignature, own: Run, other: Run, length: int) -> str:
    """Return why two ways to run a batch with a long past differ, or nothing if they differ by rounding only."""

    def examples() -> tuple[list[Work], list[Array]]:
        """Return requests of different lengths."""
        pasts = (*_SHORT, length)
        pool = CachePool(signature, sum(pasts) + len(pasts))
        random = np.random.default_rng(0)
        for array in pool.arrays:
            array[...] = random.random(array.shape, np.float32) * 4 - 2
        caches = [RequestCache(signature, past + 1, by_token=True, pool=pool) for past in pasts]
        batch = [
            Work(cache, np.array([at % signature.vocabulary]), past)
            for at, (cache, past) in enumerate(zip(caches, pasts, strict=True))
        ]
        return batch, pool.arrays

    return find_difference(signature, own, other, examples)
