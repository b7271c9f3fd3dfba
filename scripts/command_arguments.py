"""Types of command-line arguments, and errors of one line."""

from __future__ import annotations

import contextlib
import sys
from argparse import ArgumentParser, ArgumentTypeError
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


def existing_folder(text: str) -> Path:
    """Return the path of a folder.

    Raises:
        ArgumentTypeError: There is no such folder.
    """
    path = Path(text)
    if not path.is_dir():
        raise ArgumentTypeError(f"{text}: no such folder")
    return path


def add_output(parser: ArgumentParser) -> None:
    """Add the option ``--output`` for the folder of results."""
    parser.add_argument("-o", "--output", type=existing_folder, help="folder to write results to, as docs/data")


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """End the process with one line on standard error if Chrion raises an error of its own."""
    try:
        yield
    except ChrionError as error:
        sys.exit(f"error: {error}")
