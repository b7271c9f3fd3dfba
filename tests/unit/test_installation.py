"""Several distributions provide onnxruntime: which are installed is found, and what is damaged can be repaired."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from chrion.common.installation import FLAVOURS, find_fault, find_flavours, repair, require_onnxruntime, warn_of_fault


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the only folder in which modules are looked for, with a module onnxruntime."""
    (tmp_path / "onnxruntime").mkdir()
    (tmp_path / "onnxruntime" / "__init__.py").write_text("")
    monkeypatch.delitem(sys.modules, "onnxruntime")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    find_fault.cache_clear()
    yield tmp_path
    find_fault.cache_clear()


def install(site: Path, *names: str) -> None:
    """Add the information of distributions."""
    for name in names:
        (site / f"{name}.dist-info").mkdir()


def test_flavours_are_found_by_the_information_of_distributions(tmp_path: Path) -> None:
    """Other distributions whose names begin alike are none."""
    install(
        tmp_path, "onnxruntime-1.31.1", "onnxruntime_gpu-1.31.1", "onnxruntime_genai-0.9.0", "onnxruntime_tools-1.7"
    )
    assert find_flavours(tmp_path) == {"onnxruntime": "1.31.1", "onnxruntime-gpu": "1.31.1"}
    assert set(FLAVOURS) > {"onnxruntime-openvino", "onnxruntime-directml", "onnxruntime-webgpu"}


@pytest.mark.parametrize("names", [[], ["onnxruntime_openvino-1.24.1"]])
def test_one_flavour_is_accepted(site: Path, names: list[str]) -> None:
    """So is a module without information about its distribution, such as one that was compiled."""
    install(site, *names)
    require_onnxruntime()
    warn_of_fault()


def test_two_flavours_are_named_in_a_warning(site: Path) -> None:
    """The warning has the command that leaves one of them, and the module is used."""
    install(site, "onnxruntime-1.31.1", "onnxruntime_gpu-1.30.0")
    with pytest.warns(UserWarning, match=r"onnxruntime 1\.31\.1 and onnxruntime-gpu 1\.30\.0 .* keep one") as found:
        warn_of_fault()
    command = "pip uninstall -y onnxruntime onnxruntime-gpu && pip install --force-reinstall --no-deps onnxruntime-gpu"
    assert command in str(found[0].message)
    assert command == repair({"onnxruntime": "1", "onnxruntime-gpu": "1"})
    require_onnxruntime()


@pytest.mark.parametrize("folder", [True, False])
@pytest.mark.parametrize("left", [["onnxruntime-1.31.1"], []])
def test_a_module_that_has_lost_its_files_is_an_import_error(site: Path, left: list[str], *, folder: bool) -> None:
    """Pip leaves a folder, or only the information of one flavour, if another one is removed."""
    (site / "onnxruntime" / "__init__.py").unlink()
    if not folder:
        (site / "onnxruntime").rmdir()
    install(site, *left)
    installed = left or folder
    expected = r"removed its files; repair it with: pip uninstall -y onnxruntime && pip install --force"
    with pytest.raises(ImportError, match=expected if installed else r"not installed \(pip install 'chrion\[cpu\]'"):
        require_onnxruntime()
    if installed:
        with pytest.warns(UserWarning, match=expected):
            warn_of_fault()
