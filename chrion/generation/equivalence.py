"""Comparison of two ways to run the same requests, which decides what an engine uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from chrion.generation.iteration import Outcome, Work
from chrion.graph.decoder import DecoderSignature, equal_but_for_rounding
from chrion.graph.ort_sessions import first_line

Array = np.ndarray[Any, Any]
Run = Callable[[Sequence[Work]], list[Outcome]]

#: The most tokens of a past, and the most bytes of its keys and values.
_LONGEST, _BYTES = 2047, 1 << 28


def longest_past(signature: DecoderSignature) -> int:
    """Return the tokens of the longest past that is worth a comparison, if the model has positions for them."""
    return min(_LONGEST, _BYTES // signature.slot_bytes, (signature.context or _LONGEST + 1) - 1)


def find_difference(
    signature: DecoderSignature,
    candidate: Run,
    baseline: Run,
    examples: Callable[[], tuple[Sequence[Work], Sequence[Array]]],
) -> str:
    """Return how two ways to run a batch differ, or nothing if they differ by rounding only.

    Args:
        signature: The decoder's inputs and outputs.
        candidate: Runs an iteration.
        baseline: Runs an iteration in the other way.
        examples: Returns requests, equal ones in each call, and the arrays of their caches.
    """
    try:
        found, expected = (_run(way, *examples()) for way in (candidate, baseline))
    except Exception as error:  # noqa: BLE001 - onnxruntime raises many types
        return first_line(error)
    if all(equal_but_for_rounding(signature, *pair) for pair in zip(found, expected, strict=True)):
        return ""
    return "scores or caches differ"


def _run(way: Run, batch: Sequence[Work], caches: Sequence[Array]) -> list[Array]:
    """Return the scores of requests, and the keys and values that they get."""
    outcomes = way(batch)
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return [np.asarray(value, np.float32) for value in (*outcomes, *caches)]
