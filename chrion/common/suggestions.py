"""Hints for names that are not known."""

from __future__ import annotations

import re
from collections.abc import Iterable

#: The least similarity of a suggestion, 1 being equality: below it, names share letters and no meaning (a choice).
_SIMILAR = 0.7
#: The most names that a hint lists; of more it has the most similar ones (a choice).
_LISTED = 12


def did_you_mean(given: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return the hint for an unknown name.

    Args:
        given: The unknown name.
        known: The known names.
        otherwise: The hint if none of them is similar or has it as one of its words; by default it lists them, or of
            many the most similar ones.
    """
    import difflib  # noqa: PLC0415 - only errors need it

    known = list(known)
    names = {_bare(name): name for name in known}
    bare = _bare(given)
    near = difflib.get_close_matches(bare, names, 1, _SIMILAR)
    near += sorted((name for name in names if bare and re.search(rf"(^|_){re.escape(bare)}(_|$)", name)), key=len)
    if near or otherwise:
        return f"did you mean {names[near[0]]!r}?" if near else otherwise
    if len(known) <= _LISTED:
        return f"known: {', '.join(known)}"
    closest = difflib.get_close_matches(bare, names, _LISTED, 0.0)
    return f"{len(known)} are known, such as {', '.join(names[name] for name in closest)}"


def _bare(name: str) -> str:
    """Return a name in lower case with one separator of words, and without the dashes before an option."""
    return re.sub(r"[-.]", "_", name.lower().lstrip("-"))
