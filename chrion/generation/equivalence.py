"""Comparison of two ways to run the same requests, which decides what an engine uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from chrion.errors import GenerationError
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


def find_difference(signature: DecoderSignature, candidate: Run, baseline: Run, examples: Examples) -> str:
    """Return how two ways to run a batch differ, or nothing if they differ by rounding only.

    Args:
        signature: The decoder's inputs and outputs.
        candidate: Runs an iteration.
        baseline: Runs an iteration in the other way.
        examples: The requests.
    """
    try:
        expected = run_examples(baseline, examples)
    except GenerationError as error:
        return error.message
    return find_difference_from(signature, candidate, expected, examples)


def find_difference_from(
    signature: DecoderSignature, candidate: Run, expected: Sequence[Array], examples: Examples
) -> str:
    """Return how the results of a way to run a batch differ from those of another one, or nothing.

    Args:
        signature: The decoder's inputs and outputs.
        candidate: Runs an iteration.
        expected: The results of the other way.
        examples: The requests.
    """
    try:
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
