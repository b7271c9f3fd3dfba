"""The cache is used only if other users cannot write to it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from chrion.common.files import cache_folder, read_cached, write_cached
from chrion.runtime.selection.tuning_lock import tuning_lock

pytestmark = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="the system has no users")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a cache folder that exists, with a folder of one kind."""
    folder = tmp_path / "cache"
    (folder / "decisions").mkdir(parents=True, mode=0o700)
    folder.chmod(0o700)
    monkeypatch.setenv("CHRION_CACHE", str(folder))
    return folder


def test_a_private_cache_is_used(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What is written is read, by the owner only, without a warning."""
    entry = cache / "decisions" / "a.json"
    write_cached(entry, {"a": 1})
    assert read_cached(entry) == {"a": 1}
    assert stat.S_IMODE(entry.stat().st_mode) == 0o600
    with tuning_lock():
        assert stat.S_IMODE((cache / "tuning.lock").stat().st_mode) == 0o600
    assert not caplog.records


@pytest.mark.parametrize("part", ["", "decisions"])
@pytest.mark.parametrize("mode", [0o777, 0o720, 0o702])
def test_a_folder_that_others_can_write_to_is_not_used(
    cache: Path, part: str, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is read, written or locked there, and one warning names the folder."""
    entry = cache / "decisions" / "a.json"
    write_cached(entry, {"a": 1})
    (cache / part).chmod(mode)
    assert read_cached(entry) is None
    write_cached(cache / "decisions" / "b.json", {})
    assert [path.name for path in (cache / "decisions").iterdir()] == ["a.json"]
    with tuning_lock():
        assert (cache / "tuning.lock").exists() == bool(part)
    (record,) = caplog.records
    assert f"{cache / part}: it can be written by other users" in record.getMessage()


@pytest.mark.skipif(os.name == "nt" or os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_not_used(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its owner could have put a decision there."""
    entry = cache / "decisions" / "a.json"
    write_cached(entry, {"a": 1})
    os.chown(cache, 65534, 65534)
    assert read_cached(entry) is None
    (record,) = caplog.records
    assert f"{cache}: it belongs to another user" in record.getMessage()
    assert cache_folder() == cache
