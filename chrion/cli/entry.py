"""The entry point: it imports little, so that Ctrl-C and a closed pipe are handled from the start."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn, TextIO

from chrion.cli.exit_codes import FAILED, INTERRUPTED
from chrion.common.installation import require_onnxruntime
from chrion.common.version import __version__


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit; see :mod:`chrion.cli.exit_codes`.

    Args:
        arguments: The words after ``chrion``; None for those of ``sys.argv``.
    """
    _replace_closed_streams()
    _format_own_warnings()
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        _complain("interrupted")
        try:
            sys.stdout.flush()
        except OSError:  # its reader has ended, perhaps by the same Ctrl-C
            _discard(sys.stdout)
        code = INTERRUPTED
    except ImportError as error:
        if error.name != "onnxruntime":
            raise
        _complain(f"error: {error}")
        code = FAILED
    except BrokenPipeError:  # the reader of stdout, `head` for example, has closed it
        _discard(sys.stdout)
        code = FAILED
    except OSError as error:
        if not _stdout_fails():
            raise
        _complain(f"error: standard output: {error.strerror}")
        _discard(sys.stdout)
        code = FAILED
    try:
        sys.stderr.flush()
    except OSError:  # the disk of the log is full, or its reader has ended, which does not change the result
        _discard(sys.stderr)
    sys.exit(code)


def _replace_closed_streams() -> None:
    """Send what the caller wants to discard, by closing a standard stream, to the null device.

    Otherwise the next file that is opened would get the number of the closed stream.
    """
    for name in ("stdin", "stdout", "stderr"):  # in the order of their numbers
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w", encoding="utf-8"))  # noqa: SIM115, PTH123 - for the process


def _run(arguments: Sequence[str] | None) -> int:
    if (sys.argv[1:] if arguments is None else list(arguments)) in (["--version"], ["-V"]):
        # Needs no library; with other arguments, Typer prints it.
        print(f"chrion {__version__}")  # noqa: T201 - this is what stdout is for
        return 0
    with _notice("chrion: loading ..."):
        require_onnxruntime()
        from chrion.cli.app import run  # noqa: PLC0415 - takes a second, during which Ctrl-C has to be handled
    return run(arguments)


def _format_own_warnings() -> None:
    """Print warnings of Chrion, which imports raise before its log has a handler, as commands print theirs."""
    usual, own = warnings.formatwarning, str(Path(__file__).parents[1])

    def formatted(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        if category is RuntimeWarning and filename.startswith(own):
            return f"chrion: warning: {message}\n"
        return usual(message, category, filename, lineno, line)

    warnings.formatwarning = formatted


@contextlib.contextmanager
def _notice(text: str) -> Iterator[None]:
    """Show a text on stderr, if that is a terminal, until the block ends."""
    shown = sys.stderr is not None and sys.stderr.isatty() and "_CHRION_COMPLETE" not in os.environ
    if shown:
        sys.stderr.write(text)
        sys.stderr.flush()
    try:
        yield
    finally:
        if shown:
            sys.stderr.write("\r" + " " * len(text) + "\r")
            sys.stderr.flush()


def _complain(message: str) -> None:
    with contextlib.suppress(OSError):
        sys.stderr.write(f"chrion: {message}\n")


def _stdout_fails() -> bool:
    """Return whether nothing more can be written to stdout."""
    try:
        sys.stdout.flush()
        os.write(sys.stdout.fileno(), b"\n")
    except OSError:
        return True
    return False


def _discard(stream: TextIO) -> None:
    """Send what is left in the buffer of a stream to the null device: the interpreter flushes it at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
