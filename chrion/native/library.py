"""The native libraries that were compiled when Chrion was installed."""

from __future__ import annotations

import ctypes
import logging
import zlib
from pathlib import Path

log = logging.getLogger(__name__)
_FOLDER = Path(__file__).parent


def path_of(name: str) -> Path:
    """Return the path of a library."""
    return _FOLDER / f"lib{name}.so"


def load_library(name: str, purpose: str) -> ctypes.CDLL | None:
    """Load a library, or return None if it is not there or of another version.

    Args:
        name: Its name.
        purpose: What it is for, for a message.
    """
    path = path_of(name)
    try:
        library = ctypes.CDLL(str(path))
    except OSError:
        return None
    if fits(library, _FOLDER):
        return library
    log.warning("%s: %s is of another version and not used; install Chrion again", purpose, path.name)
    return None


def fits(library: ctypes.CDLL, folder: Path) -> bool:
    """Return whether a library was compiled from the present sources in a folder, as far as it says so.

    In an editable installation, the sources may change without the library.
    """
    sources = sorted(folder.glob("*.[ch]"))
    try:
        library.chrion_source.restype = ctypes.c_char_p
        compiled_from: bytes = library.chrion_source()
        content = b"".join(source.read_bytes() for source in sources)
    except AttributeError:  # before it said so
        return False
    except OSError:
        return True
    return not sources or not compiled_from or compiled_from == f"{zlib.crc32(content):08x}".encode()
