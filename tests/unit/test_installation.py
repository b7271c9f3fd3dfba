"""Several distributions provide onnxruntime: which are installed is found, and a damaged module is repaired."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from chrion.installation import FLAVOURS, check_onnxruntime, find_flavours, repair
from chrion.lazy_names import import_on_first_use


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of installed packages in which onnxruntime is looked for, with the module only."""
    (tmp_path / "onnxruntime").mkdir()
    (tmp_path / "onnxruntime" / "__init__.py").write_text("")
    monkeypatch.delitem(sys.modules, "onnxruntime")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    check_onnxruntime.cache_clear()
    return tmp_path


def install(site: Path, *names: str) -> None:
    """Add the information of distributions."""
    for name in names:
        (site / f"{name}.dist-info").mkdir()


def test_flavours_are_found_by_the_information_of_distributions(tmp_path: Path) -> None:
    """Other distributions whose names begin alike are none."""
    install(
        tmp_path, "onnxruntime-1.31.1", "onnxruntime_gpu-1.31.1", "onnxruntime_genai-0.9.0", "onnxruntime_tools-1.7.0"
    )
    assert find_flavours(tmp_path) == {"onnxruntime": "1.31.1", "onnxruntime-gpu": "1.31.1"}
    assert set(FLAVOURS) > {"onnxruntime-openvino", "onnxruntime-directml", "onnxruntime-webgpu"}


def test_one_flavour_is_accepted(site: Path) -> None:
    """So is a module without information about its distribution, such as one that was compiled."""
    check_onnxruntime()
    install(site, "onnxruntime_openvino-1.24.1")
    check_onnxruntime.cache_clear()
    check_onnxruntime()


def test_two_flavours_are_named_in_a_warning(site: Path) -> None:
    """The warning has the command that leaves one of them."""
    install(site, "onnxruntime-1.31.1", "onnxruntime_gpu-1.30.0")
    with pytest.warns(UserWarning, match=r"onnxruntime 1\.31\.1 and onnxruntime-gpu 1\.30\.0 .* keep one") as found:
        check_onnxruntime()
    command = "pip uninstall -y onnxruntime onnxruntime-gpu; pip install --force-reinstall --no-deps onnxruntime-gpu"
    assert command in str(found[0].message)
    assert command == repair({"onnxruntime": "1", "onnxruntime-gpu": "1"})


@pytest.mark.parametrize("left", [["onnxruntime-1.31.1"], []])
def test_a_module_that_has_lost_its_files_is_an_import_error(site: Path, left: list[str]) -> None:
    """Pip leaves a folder without the module's own files when one of two flavours is removed."""
    (site / "onnxruntime" / "__init__.py").unlink()
    install(site, *left)
    with pytest.raises(ImportError, match=r"has lost its files.*pip uninstall -y onnxruntime; pip install"):
        check_onnxruntime()


def test_a_missing_onnxruntime_is_explained_where_it_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of a public name says what to install; other missing modules are reported as they are."""
    (tmp_path / "needing.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'onnxruntime'\", name='onnxruntime')"
    )
    (tmp_path / "other.py").write_text("import no_such_module")
    monkeypatch.syspath_prepend(str(tmp_path))
    get = import_on_first_use("chrion", {"Needing": "needing", "Other": "other"})
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'chrion\[cpu\]'"):
        get("Needing")
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        get("Other")
