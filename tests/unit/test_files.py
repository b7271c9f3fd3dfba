"""Files written whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chrion.errors import OptionError, PlanError
from chrion.files import bundled_folder, cache_folder, read_json, write_atomically


def test_a_file_is_written_and_replaced(tmp_path: Path) -> None:
    """Text and bytes; nothing else is left in the folder."""
    path = tmp_path / "f"
    write_atomically(path, "one")
    write_atomically(path, b"two")
    assert path.read_bytes() == b"two"
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where renaming fails, the old content stands and the scratch file is gone."""
    path = tmp_path / "f"
    path.write_text("old")

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(OptionError, match="Permission denied"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


@pytest.mark.parametrize("where", ["missing/f", "file/f", "folder", "long" * 80])
def test_where_nothing_can_be_written(tmp_path: Path, where: str) -> None:
    """A missing folder, a file in a folder's place, a folder in the file's place, a name too long."""
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(OptionError, match="cannot be written"):
        write_atomically(tmp_path / where, "x")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]


@pytest.mark.parametrize("path", [".", "/"])
def test_a_folder_without_a_name_is_refused(path: str) -> None:
    """The current folder and the root are no files."""
    with pytest.raises(OptionError, match="cannot be written"):
        write_atomically(Path(path), "x")


def test_json_says_its_schema(tmp_path: Path) -> None:
    """A file of another schema is refused with what was found."""
    path = tmp_path / "f.json"
    path.write_text(json.dumps({"schema": "a/1", "x": 2}))
    assert read_json(path, "a/1", PlanError)["x"] == 2
    with pytest.raises(PlanError, match=r"schema a/2, found 'a/1'"):
        read_json(path, "a/2", PlanError)


def test_the_cache_is_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made if missing, for its owner alone."""
    monkeypatch.setenv("CHRION_CACHE", str(tmp_path / "a" / "b"))
    assert cache_folder() == tmp_path / "a" / "b"
    assert cache_folder().stat().st_mode & 0o777 == 0o700


def test_models_and_profiles_are_shipped() -> None:
    """Table 6's thirteen specifications and the paper's profile."""
    assert len(list(bundled_folder("models").glob("*.toml"))) >= 13
    assert (bundled_folder("profiles") / "gtx1080ti-paper.json").is_file()
