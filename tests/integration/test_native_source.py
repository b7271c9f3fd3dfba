"""The library of native lanes is used only if it was compiled from the source beside it."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import zlib
from pathlib import Path

import pytest

from chrion.native import bindings

SOURCE = Path(bindings.__file__).with_name("lanes.c")
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
        ("const char *chrion_source(void) { return ID; }", [f'-DID="{zlib.crc32(SOURCE.read_bytes()):08x}"'], True),
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
    assert bindings._fits(compiled(tmp_path, code, *flags)) is expected


def test_the_library_in_use_fits() -> None:
    """The one that was compiled at installation says from which source."""
    if not bindings.available():
        pytest.skip("native lanes are not compiled")
    assert bindings._fits(bindings._loaded())


def test_a_missing_source_is_not_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package may be installed without its source."""
    if not bindings.available():
        pytest.skip("native lanes are not compiled")
    library = bindings._loaded()
    monkeypatch.setattr(bindings, "_PATH", tmp_path / "liblanes.so")
    assert bindings._fits(library)
