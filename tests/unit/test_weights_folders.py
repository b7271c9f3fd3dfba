"""Weights folders of one process; those of several are in ``tests/process/test_weights_folder.py``."""

from __future__ import annotations

import gc
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from chrion.graph.weights_folder import WeightsFolder
from seams.execution import temporary_files_in

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no locks")


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path) -> Iterator[Path]:
    """Use a folder for temporary files."""
    with temporary_files_in(tmp_path):
        yield tmp_path


def test_a_folder_is_removed_with_its_object(temporary: Path) -> None:
    """All folders of a process are in one."""
    kept, folder = WeightsFolder(), WeightsFolder()
    (folder.path / "weights.bin").touch()
    assert folder.path.parent == kept.path.parent
    assert folder.path.parent.parent == temporary
    path = folder.path
    del folder
    gc.collect()
    assert not path.exists()
    assert kept.path.exists()


def test_only_folders_that_no_process_has_locked_are_removed(temporary: Path) -> None:
    """Folders of living processes, files and links of the same name, and folders without a lock are kept."""
    import fcntl  # noqa: PLC0415 - exists on Unix only

    for name in ("dead", "living", "unlocked", "target"):
        (temporary / f"chrion-weights-{name}" / "inner").mkdir(parents=True)
    for name in ("dead", "living", "target"):
        (temporary / f"chrion-weights-{name}" / "lock").touch()
    (temporary / "chrion-weights-target").rename(temporary / "target")
    (temporary / "chrion-weights-link").symlink_to("target")
    (temporary / "chrion-weights-file").touch()
    before = {path.name for path in temporary.iterdir()}
    with (temporary / "chrion-weights-living" / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = WeightsFolder()
    assert {path.name for path in temporary.iterdir()} == before - {"chrion-weights-dead"} | {folder.path.parent.name}
    assert (temporary / "target" / "inner").exists()


def test_the_folder_of_this_process_is_locked(temporary: Path) -> None:
    """Another process does not remove it."""
    folder = WeightsFolder()
    with temporary_files_in(temporary):
        other = WeightsFolder()
    assert folder.path.exists()
    assert other.path.parent != folder.path.parent


def test_a_parent_folder_that_the_system_has_removed_is_created_again(temporary: Path) -> None:
    """A service removes temporary files that are old."""
    first = WeightsFolder()
    shutil.rmtree(first.path.parent)
    second = WeightsFolder()
    assert second.path.exists()
    assert second.path.parent.parent == temporary
