"""Output files: they are checked after the inputs and before any work, and replaced only with ``--force``."""

from __future__ import annotations

import itertools
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from chrion.errors import OptionError
from chrion.report.figures import check_picture


@dataclass(frozen=True, slots=True)
class Output:
    """A file that a command is going to write."""

    path: Path
    replaces: bool

    @property
    def message(self) -> str:
        """What to print once it is written."""
        return f"{'replaced' if self.replaces else 'written'}: {self.path}"


def check_outputs(
    files: Mapping[str, Path | None],
    *,
    pictures: Mapping[str, Path | None] | None = None,
    defaults: Mapping[str, Path] | None = None,
    force: bool = False,
) -> list[Output]:
    """Raise an error if a file cannot or must not be written; return the files that are named.

    Args:
        files: Files by the options that name them; None without the option.
        pictures: The same of pictures.
        defaults: Files to use where an option of ``files`` is not given.
        force: Replace existing files.

    Raises:
        OptionError: A path is a folder or a device, its folder does not exist or is not writable, or the file exists;
            for a picture, also if matplotlib is missing, or the suffix is not one of a picture.
    """
    drawn = {option: path for option, path in (pictures or {}).items() if path}
    named = {option: path for option, path in files.items() if path} | drawn
    checked = []
    for option, path in {**(defaults or {}), **named}.items():
        other = "" if option in named else f", or name another file with {option}"
        where = f"{option}: {path}" if option in named else str(path)
        checked.append(_check_output(where, path, other, force=force))
    for option, path in drawn.items():
        check_picture(option, path)
    return checked


def free_path(path: Path) -> Path:
    """Return a path, or if it exists the first one with a number after its stem that does not."""
    others = (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(2))
    return path if not path.exists() else next(other for other in others if not other.exists())


def _check_output(where: str, path: Path, other: str, *, force: bool) -> Output:
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
    if not force:
        raise OptionError(f"{where}: the file exists", hint=f"add --force to replace it{other}")
    return Output(path, replaces=True)


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
