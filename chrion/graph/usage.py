"""The probabilities with which a request uses parts of a model, such as experts that a router selects.

A model states them in its metadata, under :data:`USAGE_KEY`, as a JSON object from patterns of node names to
probabilities::

    {"*block0/expert0/*": 0.41, "*block0/expert1/*": 0.25}

``*`` stands for any text, ``?`` for any character. A node that no pattern matches is always used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import translate

from chrion.errors import ModelError

#: The key of the model's metadata.
USAGE_KEY = "chrion-usage"


def read_usage(metadata: Mapping[str, str]) -> dict[str, float]:
    """Return the probability of each pattern that a model's metadata states; empty if it states none.

    Raises:
        ModelError: The entry is not a JSON object from patterns to numbers above 0 and at most 1.
    """
    try:
        stated = json.loads(metadata.get(USAGE_KEY, "{}"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"metadata {USAGE_KEY}: not JSON: {error}") from error
    if not isinstance(stated, dict):
        raise ModelError(f"metadata {USAGE_KEY}: expected an object, found {type(stated).__name__}")
    for pattern, share in stated.items():
        if type(share) not in {int, float} or not 0 < share <= 1:
            raise ModelError(f"metadata {USAGE_KEY}: {pattern!r}: expected a number above 0 and at most 1: {share!r}")
    return {pattern: float(share) for pattern, share in stated.items()}


def usage_of(operators: Iterable[Sequence[str]], patterns: Mapping[str, float]) -> tuple[float, ...]:
    """Return the probability of each operator: that of the first pattern that matches one of its nodes, or 1.

    Args:
        operators: The names of each operator's nodes.
        patterns: The probabilities by pattern; without any, the result is empty.
    """
    compiled = [(re.compile(translate(pattern)), share) for pattern, share in patterns.items()]
    if not compiled:
        return ()
    return tuple(
        next((share for form, share in compiled if any(form.match(name) for name in names)), 1.0) for names in operators
    )
