"""Atomic writes and size-limited reads of files, and the folders of cached and bundled files."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import platformdirs

from chrion.common.imports import import_late
from chrion.errors import InputError, OptionError

Kind = TypeVar("Kind")

#: The size limit of JSON and TOML files. It also stops a read from an endless device such as ``/dev/zero``.
_MAX_BYTES = 1 << 28
#: Folders of the cache that were refused with a warning.
_refused: set[Path] = set()

log = logging.getLogger(__name__)


def write_atomically(path: Path, content: str | bytes, *, private: bool = False) -> None:
    """Write a temporary file beside ``path`` and rename it, so that a reader never sees an incomplete file.

    Args:
        path: The file.
        content: The content; text is written as UTF-8.
        private: Let only the owner read the file.

    Raises:
        OptionError: ``path`` has no file name, or its folder does not exist or cannot be written.
    """
    data = content.encode() if isinstance(content, str) else content
    with open_atomically(path, private=private) as file:
        file.write(data)


@contextlib.contextmanager
def open_atomically(path: Path, *, private: bool = False) -> Iterator[BinaryIO]:
    """Open a temporary file beside ``path``, and rename it when the context ends without an error.

    Args:
        path: The file.
        private: Let only the owner read the file.

    Raises:
        OptionError: ``path`` has no file name, or its folder does not exist or cannot be written.
    """
    if not path.name:
        raise OptionError(f"{path}: cannot be written: not a file name")
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    try:
        descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666)
        with os.fdopen(descriptor, "wb") as file:
            yield file
        scratch.replace(path)
    except OSError as error:
        raise OptionError(f"{path}: cannot be written: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):  # after a rename there is nothing to remove
            scratch.unlink()


def read_bytes(path: Path, max_bytes: int = _MAX_BYTES) -> bytes:
    """Return the content of a file of at most ``max_bytes``.

    The limit also applies to files whose reported size is wrong, such as devices.

    Raises:
        OSError: The file cannot be read or is larger.
    """
    with path.open("rb") as file:
        known = os.fstat(file.fileno()).st_size
        content = file.read(max_bytes + 1) if known <= max_bytes else b""
    if max(known, len(content)) > max_bytes:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return content


def parse_json(content: bytes, constant: Callable[[str], Any] | None = None) -> Any:
    """Return the data of a JSON document.

    Args:
        content: The document.
        constant: Returns the value of a constant that JSON does not have, such as ``NaN``; by default a float.

    Raises:
        ValueError: The content is not JSON, is nested too deeply, or has texts that no UTF-8 can represent.
    """
    try:
        data = json.loads(content, parse_constant=constant)
        # The ways to write half a surrogate pair; to search one byte is ten times as fast as two.
        if (b"\\" in content and b"\\u" in content) or b"\xed" in content or b"\0" in content:
            json.dumps(data, ensure_ascii=False, default=lambda _: None).encode()
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    except UnicodeDecodeError as error:
        raise ValueError("not text in UTF-8") from error
    except UnicodeEncodeError as error:
        raise ValueError("a text has half a surrogate pair") from error
    return data


def read_toml(path: Path) -> dict[str, Any]:
    """Return the data of a TOML file.

    Raises:
        OSError: The file cannot be read.
        ValueError: The content is not TOML in UTF-8, or is nested too deeply.
    """
    import tomllib  # noqa: PLC0415 - most programs read no TOML

    try:
        return tomllib.loads(read_bytes(path).decode())
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def read_cached(path: Path) -> dict[str, Any] | None:
    """Return what :func:`write_cached` stored, or None if the file is missing, cannot be read, or is not trusted."""
    if not is_trusted(path.parent):
        return None
    try:
        content = parse_json(read_bytes(path))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def write_cached(path: Path, content: Mapping[str, Any]) -> None:
    """Store an object in the cache, readable by its owner only; do nothing if it cannot be written or trusted."""
    try:
        if is_trusted(path.parent):
            _make_private(path.parent)
            write_atomically(path, json.dumps(content), private=True)
    except (OSError, OptionError):
        return


def read_fields(content: Any, kind: type[Kind]) -> Kind:
    """Return the dataclass whose fields are in the data of a JSON document; other keys are ignored.

    Raises:
        ValueError: A field is missing, or a value has another type.
    """
    msgspec = import_late("msgspec")
    try:
        fields: Kind = msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        raise ValueError(str(error).replace("`", "")) from error
    return fields


def read_json(path: Path, schema: str, failure: type[InputError]) -> dict[str, Any]:
    """Read a JSON object whose ``schema`` key names its schema.

    Args:
        path: The file.
        schema: The required schema, ``chrion.plan/1`` for example.
        failure: The type of exception to raise.

    Raises:
        failure: The file cannot be read, is not a JSON object, or has another schema.
    """
    try:
        content = parse_json(read_bytes(path))
    except OSError as error:
        raise failure(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        problem = (
            f"expected a file of schema {schema}, found a model" if path.suffix == ".onnx" else f"not JSON: {error}"
        )
        raise failure(f"{path}: {problem}") from error
    if not isinstance(content, dict) or content.get("schema") != schema:
        given = content.get("schema") if isinstance(content, dict) else None
        shown = repr(given) if given is not None else "no schema"
        raise failure(f"{path}: expected a file of schema {schema}, found {shown}", hint=_schema_hint(given, schema))
    return content


def _schema_hint(given: object, schema: str) -> str:
    """Return the hint for a file of another schema, ``chrion.plan/2`` for example."""
    kind, _, version = schema.rpartition("/")
    other_kind, _, number = str(given).rpartition("/")
    if other_kind == kind and number.isdecimal() and int(number) > int(version):
        return "it is from a newer version of Chrion: upgrade Chrion, or create the file again with this version"
    return "create the file again"


def cache_folder() -> Path:
    """Return the folder of cached measurements and decisions, private to the user; create it if possible."""
    folder = Path(os.environ.get("CHRION_CACHE") or platformdirs.user_cache_dir("chrion"))
    with contextlib.suppress(OSError):  # then nothing is cached
        _make_private(folder)
    return folder


def is_trusted(folder: Path) -> bool:
    """Return whether only the user or the system can write to a folder of the cache and those above it in the cache.

    Another user who owned one, or could write to it, could choose the plans that this user's sessions run. The first
    such folder is named in a warning, as ssh does with keys, and the cache is not used.
    """
    if not hasattr(os, "geteuid"):  # Windows: the user's cache folder has the user's rights
        return True
    root = cache_folder()
    for part in (root, *(parent for parent in (*reversed(folder.parents), folder) if root in parent.parents)):
        try:
            status = part.stat()
        except OSError:  # missing, or not to be read: so is what it contains
            continue
        own = status.st_uid in {os.geteuid(), 0}
        if own and not status.st_mode & 0o022:
            continue
        if part not in _refused:
            _refused.add(part)
            problem = "it can be written by other users" if own else "it belongs to another user"
            log.warning("the cache is not used: %s: %s (expected: chmod 700, or another CHRION_CACHE)", part, problem)
        return False
    return True


def _make_private(folder: Path) -> None:
    """Create a folder and its missing parents for their owner only.

    ``mkdir`` with ``parents=True`` would apply the mode only to the folder itself.
    """
    for path in (*reversed(folder.parents), folder):
        path.mkdir(mode=0o700, exist_ok=True)


def bundled_folder(kind: str) -> Path:
    """Return the folder of files that are part of Chrion: ``models``, ``profiles`` or ``scenarios``."""
    package = Path(__file__).parents[1]
    inside = package / "_data" / kind
    return inside if inside.is_dir() else package.parent / kind
