"""Comparison of two ways to run the same requests, which decides what an engine uses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from chrion.errors import GenerationError
from chrion.generation.cache import CachePool, RequestCache
from chrion.generation.iteration import Outcome, Work
from chrion.generation.rewrites.decoder import DecoderSignature, equal_but_for_rounding
from chrion.graph.ort_sessions import first_line

Array = np.ndarray[Any, Any]
Run = Callable[[Sequence[Work]], list[Outcome]]
#: Returns requests, equal ones in each call, and the arrays of their caches.
Examples = Callable[[], tuple[Sequence[Work], Sequence[Array]]]

#: The most tokens of a past, and the most bytes of its keys and values.
_LONGEST, _BYTES = 2047, 1 << 28


def longest_past(signature: DecoderSignature) -> int:
    """Return the tokens of the longest past that is worth a comparison, if the model has positions for them."""
    return min(_LONGEST, _BYTES // signature.slot_bytes, (signature.context or _LONGEST + 1) - 1)


def make_requests(
    signature: DecoderSignature, sizes: Iterable[tuple[int, int]], *, by_token: bool
) -> tuple[list[Work], list[Array]]:
    """Return requests, equal ones in each call, and the arrays of their caches, which are random.

    Args:
        signature: The decoder's inputs and outputs.
        sizes: The past and new tokens of each request.
        by_token: As in :class:`RequestCache`; such caches are in one pool.
    """
    sizes, random = [*sizes], np.random.default_rng(0)
    pool = CachePool(signature, sum(map(sum, sizes))) if by_token else None
    batch = []
    for at, (past, new) in enumerate(sizes):
        cache = RequestCache(signature, past + new, by_token=by_token, pool=pool)
        for array in cache.arrays:
            array[...] = random.random(array.shape, np.float32) * 4 - 2
        batch.append(Work(cache, np.arange(at, at + new) % signature.vocabulary, past))
    return batch, [array for work in batch for array in work.cache.arrays]


def find_difference(
    signature: DecoderSignature, candidate: Run, baseline: Run | Sequence[Array], examples: Examples
) -> str:
    """Return how two ways to run a batch differ, or nothing if they differ by rounding only.

    Args:
        signature: The decoder's inputs and outputs.
        candidate: Runs an iteration.
        baseline: Runs an iteration in the other way, or the results of that.
        examples: Returns the requests.
    """
    try:
        expected = run_examples(baseline, examples) if callable(baseline) else baseline
        results = run_examples(candidate, examples)
    except GenerationError as error:
        return error.message
    if all(equal_but_for_rounding(signature, *pair) for pair in zip(results, expected, strict=True)):
        return ""
    return "scores or caches differ"


def run_examples(run: Run, examples: Examples) -> list[Array]:
    """Return the scores of requests, and the keys and values that they get.

    Raises:
        GenerationError: The iteration fails, or the iteration of a request.
    """
    try:
        batch, caches = examples()
        outcomes = run(batch)
    except Exception as error:  # onnxruntime raises many types
        raise GenerationError(first_line(error)) from error
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return [np.asarray(value, np.float32) for value in (*outcomes, *caches)]
