"""Output files: they are checked before any work, and an existing file is only replaced if Chrion wrote it.

A file that the same kind of command wrote before is replaced, so that a command can be repeated; any other existing
file is refused without ``--force``.
"""

from __future__ import annotations

import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from chrion.errors import OptionError
from chrion.report import check_picture

#: A mark of Chrion's files stands within so many bytes.
_HEAD_BYTES = 4096

PLAN = b'"schema": "chrion.plan/'
PROFILE = b'"schema": "chrion.profile/'
DECISIONS = b'"schema": "chrion.decisions/'
SWEEP = b'"accelerator_only"'
TIMELINE = b'<meta name="generator" content="chrion">'
TRACE = b'"traceEvents"'
PICTURE = (b"\x89PNG", b"%PDF", b"<svg")


@dataclass(frozen=True, slots=True)
class Output:
    """A file that a command is going to write."""

    path: Path
    replaces: bool

    @property
    def message(self) -> str:
        """What to print once it is written."""
        return f"{'replaced' if self.replaces else 'written'}: {self.path}"


def check_output(option: str, path: Path, *marks: bytes, force: bool = False) -> Output:
    """Raise an error if a file cannot or must not be written.

    Args:
        option: The option that names the file, for the message.
        path: The file.
        marks: Texts, one of which Chrion's own files of this kind hold near their beginning. Such a file is replaced.
            A model, which may be the user's own, has none.
        force: Replace any file.

    Raises:
        OptionError: The path is a folder or a device, its folder does not exist or is not writable, or the file exists
            and is none of Chrion's.
    """
    where = f"{option}: {path}"
    if path.is_dir() or not path.name:
        raise OptionError(f"{where}: cannot be written: it is a folder", hint="name a file in it")
    _check_folder(where, path)
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return Output(path, replaces=False)
    except OSError as error:
        raise OptionError(f"{where}: cannot be written: {error.strerror}") from error
    if not stat.S_ISREG(mode):
        raise OptionError(f"{where}: cannot be written: it is not a regular file")
    if not (force or _is_ours(path, marks)):
        owner = "this command did not write it" if marks else "models are not replaced by default"
        raise OptionError(f"{where}: the file exists, and {owner}", hint="add --force to replace it")
    return Output(path, replaces=True)


def looks_like_model(path: Path) -> bool:
    """Return whether an existing file begins as an ONNX model does, with its IR version."""
    try:
        with path.open("rb") as file:
            return file.read(1) == b"\x08"
    except OSError:
        return False


def check_picture_output(option: str, path: Path, *, force: bool = False) -> Output:
    """Raise an error if a picture cannot or must not be written.

    Raises:
        OptionError: As for :func:`check_output`; or matplotlib is missing, or the suffix is not one of a picture.
    """
    checked = check_output(option, path, *PICTURE, force=force)
    check_picture(option, path)
    return checked


def _check_folder(where: str, path: Path) -> None:
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except (FileNotFoundError, NotADirectoryError) as error:
        if path.parent.is_dir():  # for example /proc
            message = f"{where}: cannot be written: folder {path.parent} accepts no new file"
            raise OptionError(message) from error
        hint = f"create it first: mkdir -p {path.parent}"
        raise OptionError(f"{where}: cannot be written: there is no folder {path.parent}", hint=hint) from error
    except OSError as error:
        raise OptionError(f"{where}: cannot be written: folder {path.parent}: {error.strerror}") from error


def _is_ours(path: Path, marks: tuple[bytes, ...]) -> bool:
    """Return whether a file is empty or holds one of some marks near its beginning."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError:
        return False
    return not head or any(mark in head for mark in marks)
