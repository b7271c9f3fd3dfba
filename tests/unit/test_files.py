"""Files that are written atomically, schemas, and folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chrion.common.files import bundled_folder, cache_folder, open_atomically, parse_json, read_json, write_atomically
from chrion.errors import OptionError, PlanError


def test_a_file_is_written_and_replaced(tmp_path: Path) -> None:
    """Text and bytes can be written, and no other file remains in the folder."""
    path = tmp_path / "f"
    write_atomically(path, "one")
    write_atomically(path, b"two")
    assert path.read_bytes() == b"two"
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    """If writing fails, the old content remains and the temporary file is removed."""
    path = tmp_path / "f"
    path.write_text("old")

    def fill_the_disk() -> None:
        with open_atomically(path) as file:
            file.write(b"new")
            raise OSError(28, "No space left on device")

    with pytest.raises(OptionError, match="No space left on device"):
        fill_the_disk()
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


@pytest.mark.parametrize("where", ["missing/f", "file/f", "folder", "long" * 80])
def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path, where: str) -> None:
    """A missing folder, a file in place of a folder, a folder in place of a file, and too long a name are errors."""
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(OptionError, match="cannot be written"):
        write_atomically(tmp_path / where, "x")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]


@pytest.mark.parametrize("path", [".", "/"])
def test_a_folder_without_a_name_is_refused(path: str) -> None:
    """The current folder and the root folder are not files."""
    with pytest.raises(OptionError, match="cannot be written"):
        write_atomically(Path(path), "x")


def test_json_of_another_schema_is_refused(tmp_path: Path) -> None:
    """The error names the schema that was found."""
    path = tmp_path / "f.json"
    path.write_text(json.dumps({"schema": "a/1", "x": 2}))
    assert read_json(path, "a/1", PlanError)["x"] == 2
    with pytest.raises(PlanError, match=r"schema a/2, found 'a/1'"):
        read_json(path, "a/2", PlanError)


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    """The error says that the file is not text, without the words of Python's decoder, or that it is a model."""
    messages = {"f.json": "not JSON: not text in UTF-8$", "f.onnx": "expected a file of schema a/1, found a model$"}
    for name, message in messages.items():
        (tmp_path / name).write_bytes(b"\x08\x83\xff")
        with pytest.raises(PlanError, match=f"{name}: {message}"):
            read_json(tmp_path / name, "a/1", PlanError)


@pytest.mark.parametrize(
    "content",
    [rb'"\ud800"', rb'{"\uDFFF": 1}', rb'["\ude00\ud83d"]', b'"\xed\xa0\x80"', rb'"\udfff"'.decode().encode("utf-16")],
)
def test_half_a_surrogate_pair_is_refused(content: bytes) -> None:
    """Such a text could be neither encoded nor shown; a whole pair is a character."""
    with pytest.raises(ValueError, match="half a surrogate pair"):
        parse_json(content)
    assert parse_json(rb'"\ud83d\ude00 \u00e9"') == "\U0001f600 \u00e9"
    assert parse_json('"\ud558\ub098"'.encode()) == "\ud558\ub098"


def test_the_environment_sets_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is created for its owner only."""
    monkeypatch.setenv("CHRION_CACHE", str(tmp_path / "a" / "b"))
    assert cache_folder() == tmp_path / "a" / "b"
    assert cache_folder().stat().st_mode & 0o777 == 0o700


def test_models_and_profiles_are_bundled() -> None:
    """The thirteen specifications of Table 6 and the paper's profile are part of the package."""
    assert len(list(bundled_folder("models").glob("*.toml"))) >= 13
    assert (bundled_folder("profiles") / "gtx1080ti-paper.json").is_file()
