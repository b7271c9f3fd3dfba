"""A native library is used only if it was compiled from the sources beside it."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import zlib
from pathlib import Path

import pytest

from chrion.native import available, library
from chrion.native.library import fits, load_library, path_of

FOLDER = Path(library.__file__).parent
IDENTITY = f"{zlib.crc32(b''.join(path.read_bytes() for path in sorted(FOLDER.glob('*.[ch]')))):08x}"
COMPILER = shutil.which("cc")


def compiled(folder: Path, code: str, *flags: str) -> ctypes.CDLL:
    """Compile and load a library."""
    source, library = folder / "code.c", folder / "code.so"
    source.write_text(code)
    assert COMPILER
    subprocess.run([COMPILER, "-shared", "-fPIC", *flags, str(source), "-o", str(library)], check=True)  # noqa: S603
    return ctypes.CDLL(str(library))


@pytest.mark.skipif(not COMPILER, reason="there is no C compiler")
@pytest.mark.parametrize(
    ("code", "flags", "expected"),
    [
        ("const char *chrion_source(void) { return ID; }", [f'-DID="{IDENTITY}"'], True),
        ("const char *chrion_source(void) { return ID; }", ['-DID="00000000"'], False),
        ("const char *chrion_source(void) { return ID; }", ['-DID=""'], True),  # compiled by hand
        ("int chrion_start(void) { return 0; }", [], False),  # of an earlier version
    ],
    ids=["same", "other", "unknown", "earlier"],
)
def test_a_library_of_another_source_is_not_used(
    tmp_path: Path, code: str, flags: list[str], *, expected: bool
) -> None:
    """Its functions may take other arguments, and would crash the process."""
    assert fits(compiled(tmp_path, code, *flags), FOLDER) is expected


@pytest.mark.skipif(not available(), reason="there are no native libraries")
@pytest.mark.parametrize("name", ["lanes", "operators"])
def test_the_libraries_in_use_fit(name: str) -> None:
    """Those that were compiled at installation say from which source."""
    assert load_library(name, "this test") is not None


@pytest.mark.skipif(not available(), reason="there are no native libraries")
def test_a_missing_source_is_not_an_error(tmp_path: Path) -> None:
    """A package may be installed without its source."""
    assert fits(ctypes.CDLL(str(path_of("lanes"))), tmp_path)


@pytest.mark.skipif(not available(), reason="there are no native libraries")
@pytest.mark.parametrize("missing", ["vectors.h", "lanes.c"])
def test_a_library_of_more_sources_is_not_used(tmp_path: Path, missing: str) -> None:
    """Any change of the sources counts."""
    shutil.copytree(FOLDER, tmp_path / "native")
    assert fits(ctypes.CDLL(str(path_of("operators"))), tmp_path / "native")
    (tmp_path / "native" / missing).unlink()
    assert not fits(ctypes.CDLL(str(path_of("operators"))), tmp_path / "native")
