"""Files written whole or not at all, and the folders that Chrion reads and writes."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from pathlib import Path
from typing import Any

import platformdirs

from chrion.errors import InputError, OptionError


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write ``content`` beside ``path`` and rename it there, so that a reader never sees half a file.

    Raises:
        OptionError: The folder does not exist or cannot be written.
    """
    if not path.name:
        raise OptionError(f"{path}: cannot be written: it is a folder")
    data = content.encode() if isinstance(content, str) else content
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    try:
        with scratch.open("xb") as file:
            file.write(data)
        scratch.replace(path)
    except OSError as error:
        raise OptionError(f"{path}: cannot be written: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):  # mostly: it is not there
            scratch.unlink()


def read_json(path: Path, schema: str, failure: type[InputError]) -> dict[str, Any]:
    """Read a JSON object that says of itself which schema it follows.

    Args:
        path: The file.
        schema: What its ``schema`` key must hold, ``chrion.plan/2`` for example.
        failure: The exception to raise.

    Raises:
        failure: No such file, not JSON, not an object, or of another schema.
    """
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise failure(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise failure(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict) or content.get("schema") != schema:
        found = content.get("schema") if isinstance(content, dict) else type(content).__name__
        raise failure(f"{path}: expected a file of schema {schema}, found {found!r}", hint="write it again")
    return content


def cache_folder() -> Path:
    """Where measurements are kept between runs, private to the user; made if missing."""
    folder = Path(os.environ.get("CHRION_CACHE") or platformdirs.user_cache_dir("chrion"))
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def shipped(kind: str) -> Path:
    """The folder of files that come with Chrion: ``models``, ``profiles`` or ``scenarios``."""
    package = Path(__file__).parent
    inside = package / "_data" / kind
    return inside if inside.is_dir() else package.parent / kind
