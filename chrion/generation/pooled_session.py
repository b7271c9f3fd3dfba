"""Iterations of several requests in one call of a session of the whole model.

The calls of a split decoder, one for each layer and one for each layer and request, take longer than a small model's
arithmetic. With the caches in a pool (``rewrites.pooled_cache``) a decoder need not be split.

If attention is one native operator, every token is a row, and one call serves any requests. Otherwise one call serves
requests that have one new token each: a rectangle, of which only attention computes the pads, so that they are cheap.

In a rectangle the model sees one length of the past, that of the longest request. A mask that lets a token see only the
last ones, or positions that follow from that length, would be wrong for the others. So a trial compares a short request
beside a long one with the parts, and longer requests are never in one call with shorter ones.
"""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import onnxruntime as ort

from chrion.errors import ChrionError, ModelError
from chrion.generation.cache import CachePool
from chrion.generation.equivalence import Examples, Run, find_difference, longest_past, make_requests, run_examples
from chrion.generation.iteration import Outcome, Work
from chrion.generation.rewrites.decoder import IDS, LOGITS, DecoderSignature
from chrion.generation.rewrites.observation import Decoder
from chrion.generation.rewrites.pooled_cache import PAST, START, WANTED, PooledDecoder, pool_caches
from chrion.generation.split_session import SplitSession
from chrion.graph.ort_sessions import open_session
from chrion.graph.rewrite import RewriteError
from chrion.native import operators_available, register_operators

Array = np.ndarray[Any, Any]
log = logging.getLogger(__name__)

#: The most pads of a request, on average: they are copied in every iteration. Beyond, calls by request take less time.
_MOST_PADS = 1024
#: Tokens in the caches of the requests of a trial, beside which there is a longer one.
_SHORT = (5, 0)
#: The shortest past of that one.
_LEAST = 9
#: The new tokens of these requests, if prompts are served, too.
_NEW = (3, 4, 2)


@dataclass
class _Bound:
    """A binding of a session, and its arrays: inputs of [rows, 1], and scores."""

    binding: ort.IOBinding
    ids: Array = field(default_factory=lambda: np.empty((0, 1), np.int64))
    past: Array = field(default_factory=lambda: np.empty((0, 1), np.int64))
    start: Array = field(default_factory=lambda: np.empty((0, 1), np.int64))
    #: The rows whose scores are computed.
    wanted: Array = field(default_factory=lambda: np.empty(0, np.int64))
    #: The output, [wanted, 1, vocabulary], and the scores of each of these rows; None before the first iteration.
    logits: Array | None = None
    scores: list[Array] | None = None


@dataclass
class _Free:
    """The bindings of a pool that no thread uses, of iterations with prompts and of those without.

    The latter often have the size of the last one of them, so that nothing has to be bound.
    """

    prompts: deque[_Bound] = field(default_factory=deque)
    decoding: deque[_Bound] = field(default_factory=deque)


class PooledSession:
    """A session of a pooled decoder. Several threads may run batches at a time.

    Args:
        pooled: The decoder.
        signature: Its inputs and outputs before its caches were moved.
        options: Session options of its own; they get the native operator if the decoder has it.
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
        if pooled.longest:
            register_operators(options)
        self._session = open_session(pooled.model, options, "the decoder with a pool")
        self.decoder, self._signature, self._run_options = pooled, signature, run_options
        logits = next(output for output in self._session.get_outputs() if output.name == LOGITS)
        self._logits_type = np.dtype(np.float16 if logits.type == "tensor(float16)" else np.float32)
        #: The longest past with which requests of other lengths may be in a batch.
        self.longest = _LEAST
        self._free: WeakKeyDictionary[CachePool, _Free] = WeakKeyDictionary()

    def serves(self, batch: Sequence[Work]) -> bool:
        """Return whether one call may serve a batch: its caches are in one pool, and its lengths fit the decoder.

        Without the native operator, these are single tokens after similar numbers of others.
        """
        pool, longest = batch[0].cache.pool, self.decoder.longest
        if pool is None:
            return False
        for work in batch:  # in every iteration: faster than any() and max()
            if work.cache.pool is not pool or (longest and work.past + len(work.ids) > longest):
                return False
        if not self.decoder.prompts and any(len(work.ids) != 1 for work in batch):
            return False
        if longest:
            return True
        pasts = [work.past for work in batch]
        if max(pasts) > self.longest and min(pasts) < max(pasts):
            return False
        return max(pasts) * len(pasts) - sum(pasts) <= _MOST_PADS * len(pasts)

    def serves_all(self, tokens: int) -> bool:
        """Return whether it serves every batch whose caches are in one pool: :meth:`PooledDecoder.serves_all`."""
        return self.decoder.serves_all(tokens)

    def run_by_pool(self, batch: Sequence[Work]) -> list[Outcome]:
        """Run one iteration of requests whose caches are in several pools, with a call for each pool."""
        pools: dict[CachePool | None, list[int]] = {}
        for at, work in enumerate(batch):
            pools.setdefault(work.cache.pool, []).append(at)
        outcomes: list[Outcome] = [None] * len(batch)
        for numbers in pools.values():
            for number, outcome in zip(numbers, self.run([batch[number] for number in numbers]), strict=True):
                outcomes[number] = outcome
        return outcomes

    def run(self, batch: Sequence[Work]) -> list[Outcome]:
        """Run one iteration of a batch that it serves."""
        pool = batch[0].cache.pool
        if pool is None:
            raise ValueError("the caches are in no pool")
        free = self._free.get(pool)
        if free is None:  # setdefault() would make one in every iteration
            free = self._free.setdefault(pool, _Free())
        rows = 0
        for work in batch:
            rows += len(work.ids)
        bindings = free.decoding if rows == len(batch) else free.prompts
        try:
            bound = bindings.pop()
        except IndexError:
            bound = self._bind(pool)
        scores = self._fill(bound, batch, rows)
        self._session.run_with_iobinding(bound.binding, self._run_options)
        outcomes: list[Outcome] = [row.astype(np.float32) for row in scores]  # the next iteration overwrites them
        bindings.append(bound)
        if not self.decoder.prompts:
            return [outcomes[at] if work.wanted else None for at, work in enumerate(batch)]
        if len(outcomes) == len(batch):
            return outcomes
        given = iter(outcomes)
        return [next(given) if work.wanted else None for work in batch]

    def _fill(self, bound: _Bound, batch: Sequence[Work], rows: int) -> list[Array]:
        """Write the inputs of an iteration with a number of tokens, and return where its scores will be."""
        wanted, end = [], 0
        for work in batch:
            end += len(work.ids)
            if work.wanted:
                wanted.append(end - 1)
        scores = self._resize(bound, rows, len(wanted) if self.decoder.prompts else rows)
        if self.decoder.prompts:
            bound.wanted[:] = wanted
        if rows == len(batch):
            ids, past, start = bound.ids, bound.past, bound.start
            for row, work in enumerate(batch):
                ids[row, 0], past[row, 0], start[row, 0] = work.ids[0], work.past, work.cache.start
        else:
            bound.past[:, 0] = np.concatenate([np.arange(work.past, work.past + len(work.ids)) for work in batch])
            bound.start[:, 0] = np.repeat([work.cache.start for work in batch], [len(work.ids) for work in batch])
            bound.ids[:, 0] = np.concatenate([work.ids for work in batch])
        return scores

    def _bind(self, pool: CachePool) -> _Bound:
        """Return a binding of a pool as input and, if there are such outputs, as output."""
        binding = self._session.io_binding()
        for at, array in enumerate(pool.arrays):
            flat = (array.shape[0] * array.shape[1], array.shape[2])
            binding.bind_input(self.decoder.pools[at], "cpu", 0, array.dtype, flat, array.ctypes.data)
            for written in self.decoder.written[at : at + 1]:
                binding.bind_output(written, "cpu", 0, array.dtype, flat, array.ctypes.data)
        return _Bound(binding)

    def _resize(self, bound: _Bound, rows: int, wanted: int) -> list[Array]:
        """Bind arrays for numbers of rows and of scores, and return the scores; calls of as many only write to them."""
        scores = bound.scores
        if scores is not None and len(scores) == wanted and len(bound.ids) == rows:
            return scores
        arrays: dict[str, Array] = {}
        if rows != len(bound.ids):
            bound.ids = np.empty((rows, 1), self._signature.type_of(IDS))
            bound.past, bound.start = np.empty((rows, 1), np.int64), np.empty((rows, 1), np.int64)
            arrays = {IDS: bound.ids, PAST: bound.past, START: bound.start}
        if scores is None or len(scores) != wanted:
            bound.wanted = np.empty(wanted, np.int64)
            bound.logits = logits = np.empty((wanted, 1, self._signature.vocabulary), self._logits_type)
            bound.scores = scores = [*logits[:, 0]]
            bound.binding.bind_output(LOGITS, "cpu", 0, logits.dtype, logits.shape, logits.ctypes.data)
            arrays |= {WANTED: bound.wanted} if self.decoder.prompts else {}
        for name, array in arrays.items():
            bound.binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        return scores


def open_pooled_session(
    decoder: Decoder,
    options: Callable[[], ort.SessionOptions],
    run_options: ort.RunOptions,
    parts: SplitSession,
    most_tokens: int,
) -> PooledSession | None:
    """Return the session of a decoder for iterations of several requests, or None if it gives other results.

    Args:
        decoder: The decoder with caches that are inputs.
        options: Returns session options.
        run_options: The options of its runs.
        parts: The sessions of its parts, for comparison. They are released if the session makes them needless.
        most_tokens: The most tokens of a request; 0 if there is no limit.
    """

    def opened(pooled: PooledDecoder) -> PooledSession:
        return PooledSession(pooled, decoder.signature, options(), run_options)

    native = _open_native(decoder, opened, parts, most_tokens) if operators_available() else None
    return native or _open_rectangle(decoder, opened, parts.run_whole)


def _open_rectangle(
    decoder: Decoder, opened: Callable[[PooledDecoder], PooledSession], run: Run
) -> PooledSession | None:
    """Return the session of a decoder for requests of one new token each, or None if it gives other results."""
    signature = decoder.signature
    for joined in (True, False):
        try:
            session = opened(pool_caches(decoder, joined=joined))
        except RewriteError as refusal:
            log.info("increments run by parts: as a rectangle, %s", refusal)
            return None
        except ModelError as error:
            different = str(error)
        else:
            different = find_difference(signature, session.run, run, _examples(signature, _LEAST))
        if not different:
            break
    else:
        log.info("increments run by parts: as a rectangle, %s", different)
        return None
    for length in _lengths(signature):
        if not find_difference(signature, session.run, run, _examples(signature, length)):
            session.longest = length
            break
    return session


def _open_native(
    decoder: Decoder, opened: Callable[[PooledDecoder], PooledSession], parts: SplitSession, most_tokens: int
) -> PooledSession | None:
    """Return the session of a decoder with the native operator, or None if its attention does something else.

    If it makes the parts needless, they are released before it is opened, so that the weights are in memory once.
    """
    signature = decoder.signature
    try:
        pooled = pool_caches(decoder, native=True)
        new = _NEW if pooled.prompts else (1,) * len(_NEW)
        lengths = (_LEAST, max(longest_past(signature) - max(new), 0))
        trials = [_examples(signature, length, new) for length in lengths]
        expected = [run_examples(parts.run_whole, trial) for trial in trials]
        if pooled.serves_all(most_tokens):
            parts.release()
        session = opened(pooled)
    except ChrionError as error:
        log.info("attention is made of several operators: %s", error)
        return None
    for trial, results in zip(trials, expected, strict=True):
        if different := find_difference(signature, session.run, results, trial):
            log.info("attention is made of several operators: as one, %s", different)
            return None
    return session


def _lengths(signature: DecoderSignature) -> Iterator[int]:
    """Yield pasts of the long request of a trial: the longest one that is possible, then half of it, and so on."""
    length = longest_past(signature)
    while length > _LEAST:
        yield length
        length //= 2


def _examples(signature: DecoderSignature, length: int, new: Sequence[int] = (1, 1, 1)) -> Examples:
    """Return a function that makes requests of different lengths, the last one with a number of past tokens."""
    sizes = list(zip((*_SHORT, length), new, strict=True))
    return functools.partial(make_requests, signature, sizes, by_token=True)
