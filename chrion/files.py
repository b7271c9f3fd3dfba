"""Files written whole or not at all, and the folders that Chrion reads and writes."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import platformdirs

from chrion.errors import InputError, OptionError

#: No JSON file is larger; a device that never ends is not read for ever.
_MOST_BYTES = 1 << 28


def write_atomically(path: Path, content: str | bytes, *, private: bool = False) -> None:
    """Write ``content`` beside ``path`` and rename it there, so that a reader never sees half a file.

    Args:
        path: The file.
        content: Text is written as UTF-8.
        private: Nobody but its owner may read it.

    Raises:
        OptionError: The folder does not exist or cannot be written.
    """
    if not path.name:
        raise OptionError(f"{path}: cannot be written: it is a folder")
    data = content.encode() if isinstance(content, str) else content
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    try:
        descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        scratch.replace(path)
    except OSError as error:
        raise OptionError(f"{path}: cannot be written: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):  # mostly: it is not there
            scratch.unlink()


def read_bytes(path: Path, most_bytes: int = _MOST_BYTES) -> bytes:
    """The content of a file that is not too large, whatever its size is said to be.

    Raises:
        OSError: It cannot be read, or there is more in it.
    """
    with path.open("rb") as file:
        known = os.fstat(file.fileno()).st_size
        content = file.read(most_bytes + 1) if known <= most_bytes else b""
    if max(known, len(content)) > most_bytes:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return content


def parse_json(content: bytes) -> Any:
    """Data from JSON.

    Raises:
        ValueError: It is none, or nested too deep.
    """
    try:
        return json.loads(content)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def read_toml(path: Path) -> dict[str, Any]:
    """Data from a TOML file.

    Raises:
        OSError: It cannot be read.
        ValueError: It is not TOML in UTF-8, or nested too deep.
    """
    try:
        return tomllib.loads(read_bytes(path).decode())
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def read_cached(path: Path) -> dict[str, Any] | None:
    """Return what :func:`write_cached` stored, or None if the file is missing or cannot be read."""
    try:
        content = parse_json(read_bytes(path))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def write_cached(path: Path, content: Mapping[str, Any]) -> None:
    """Keep something in the cache, for its owner's eyes; a cache that cannot be written is left alone."""
    try:
        _make_private(path.parent)
        write_atomically(path, json.dumps(content), private=True)
    except (OSError, OptionError):
        return


def read_json(path: Path, schema: str, failure: type[InputError]) -> dict[str, Any]:
    """Read a JSON object that says of itself which schema it follows.

    Args:
        path: The file.
        schema: What its ``schema`` key must hold, ``chrion.plan/1`` for example.
        failure: The exception to raise.

    Raises:
        failure: No such file, not JSON, not an object, or of another schema.
    """
    try:
        content = parse_json(read_bytes(path))
    except OSError as error:
        raise failure(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise failure(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict) or content.get("schema") != schema:
        found = content.get("schema") if isinstance(content, dict) else type(content).__name__
        raise failure(f"{path}: expected a file of schema {schema}, found {found!r}", hint=_schema_hint(found, schema))
    return content


def _schema_hint(found: object, schema: str) -> str:
    """What to do about a file of another schema, ``chrion.plan/2`` for example."""
    kind, _, version = schema.rpartition("/")
    theirs, _, number = str(found).rpartition("/")
    if theirs == kind and number.isdecimal() and int(number) > int(version):
        return "a newer Chrion has written it: upgrade Chrion, or write it again with this one"
    return "write it again"


def cache_folder() -> Path:
    """Where measurements are kept between runs, private to the user; made if missing and possible."""
    folder = Path(os.environ.get("CHRION_CACHE") or platformdirs.user_cache_dir("chrion"))
    with contextlib.suppress(OSError):  # nothing is kept, then
        _make_private(folder)
    return folder


def _make_private(folder: Path) -> None:
    """Make a folder and those it stands in, for their owner alone; ``mkdir`` would do that for the last one only."""
    for made in (*reversed(folder.parents), folder):
        made.mkdir(mode=0o700, exist_ok=True)


def bundled_folder(kind: str) -> Path:
    """The folder of files that come with Chrion: ``models``, ``profiles`` or ``scenarios``."""
    package = Path(__file__).parent
    inside = package / "_data" / kind
    return inside if inside.is_dir() else package.parent / kind
