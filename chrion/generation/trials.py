"""Trials, in which a decoder's engine compares two ways to run the same requests before it uses the faster one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from chrion.generation.iteration import Outcome, Work
from chrion.graph.decoder import DecoderSignature
from chrion.graph.ort_sessions import first_line

Array = np.ndarray[Any, Any]
Run = Callable[[Sequence[Work]], list[Outcome]]

#: The greatest difference of scores, relative to the largest one: rounding, which differences of meaning far exceed.
_ROUNDING = {"float16": 2e-2, "float32": 1e-3}


def find_difference(
    signature: DecoderSignature, ways: tuple[Run, Run], examples: Callable[[], tuple[Sequence[Work], Sequence[Array]]]
) -> str:
    """Return why two ways to run a batch differ, or nothing if they differ by rounding only.

    Args:
        signature: The decoder's inputs and outputs.
        ways: What runs an iteration.
        examples: Makes equal requests for each of them, and returns these with the arrays of their caches.
    """
    try:
        found, expected = (_run(way, *examples()) for way in ways)
    except Exception as error:  # noqa: BLE001 - onnxruntime raises many types
        return first_line(error)
    for value, wanted in zip(found, expected, strict=True):
        limit = _ROUNDING[signature.cache_type.name] * float(np.abs(wanted).max())
        if not np.abs(value - wanted).max() <= limit:  # NaN is a difference
            return "requests have other scores"
    return ""


def _run(way: Run, batch: Sequence[Work], caches: Sequence[Array]) -> list[Array]:
    """Return the scores of requests, and the keys and values that they get."""
    outcomes = way(batch)
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return [np.asarray(value, np.float32) for value in (*outcomes, *caches)]
