"""Hints for names that are not known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(given: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return the hint for an unknown name.

    Args:
        given: The unknown name.
        known: The known names.
        otherwise: The hint if none of them is similar; by default it lists them.
    """
    names = {name.lower(): name for name in known}
    near = difflib.get_close_matches(given.lower(), names, 1)
    return f"did you mean {names[near[0]]!r}?" if near else otherwise or f"known: {', '.join(names.values())}"
