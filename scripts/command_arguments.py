"""Types of command-line arguments, and errors of one line."""

from __future__ import annotations

import contextlib
import sys
from argparse import ArgumentTypeError
from collections.abc import Iterator
from pathlib import Path

from chrion.errors import ChrionError


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


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """End the process with one line on standard error if Chrion raises an error of its own."""
    try:
        yield
    except ChrionError as error:
        sys.exit(f"error: {error}")
