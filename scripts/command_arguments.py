"""Types of command-line arguments, whose errors are one line."""

from __future__ import annotations

from argparse import ArgumentTypeError
from pathlib import Path


def positive(text: str) -> int:
    """Return a whole number of at least one.

    Raises:
        ArgumentTypeError: The text is something else.
    """
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"expected a whole number of at least 1, found {text!r}")
    return int(text)


def existing_file(text: str) -> Path:
    """Return the path of a file.

    Raises:
        ArgumentTypeError: There is no such file.
    """
    path = Path(text)
    if not path.is_file():
        raise ArgumentTypeError(f"{text}: no such file")
    return path
