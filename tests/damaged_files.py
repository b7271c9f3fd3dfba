"""Hypothesis strategies for damaged files: corrupted bytes, and JSON with unexpected content."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

from hypothesis import strategies as st

#: Numbers that are easily overlooked.
_NUMBERS = [0, -1, 1, 2**31, 2**63, 10**19, 10**400, -0.0, 0.5, 1e308, float("inf"), float("nan")]
_ODD = st.one_of(
    st.sampled_from([*_NUMBERS, None, True, "", "\ud800", "x" * 5000, [], {}, [[[]]], {"a": {}}]),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
)


@st.composite
def damaged_bytes(draw: st.DrawFn, whole: bytes) -> bytes:
    """Draw the content of a file with bytes changed, deleted, duplicated, inserted or cut off."""
    content = bytearray(whole)
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, len(content)))
        length = draw(st.integers(1, 40))
        match draw(st.sampled_from(["flip", "lose", "double", "insert", "cut"])):
            case "flip" if at < len(content):
                content[at] ^= 1 << draw(st.integers(0, 7))
            case "lose":
                del content[at : at + length]
            case "double":
                content[at:at] = content[at : at + length]
            case "insert":
                content[at:at] = draw(st.binary(min_size=1, max_size=12))
            case _:
                del content[at:]
    return bytes(content)


@st.composite
def damaged_json(draw: st.DrawFn, whole: Any) -> bytes:
    """Draw well-formed JSON with values replaced, deleted or duplicated."""
    content = json.loads(json.dumps(whole))
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(_paths(content)))
        if not path:
            content = deepcopy(draw(_ODD))
            break
        inner = content
        for key in path[:-1]:
            inner = inner[key]
        match draw(st.sampled_from(["replace", "lose", "double"])):
            case "lose":
                del inner[path[-1]]
            case "double" if isinstance(inner, list):
                inner.append(deepcopy(inner[path[-1]]))
            case _:
                inner[path[-1]] = deepcopy(draw(_ODD))  # the strategy gives the same object each time
    return json.dumps(content).encode()


def _paths(content: Any) -> list[tuple[Any, ...]]:
    """Return the paths to all values in plain data, the empty one first; of a long list, only the first values."""
    found: list[tuple[Any, ...]] = [()]
    if isinstance(content, dict | list):
        pairs = list(content.items() if isinstance(content, dict) else enumerate(content))
        for key, value in pairs[:40]:
            found += [(key, *path) for path in _paths(value)]
    return found
