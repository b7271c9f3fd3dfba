"""The house: imports point down, and packages say what they offer."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import chrion

ROOT = Path(chrion.__file__).parent
FLOORS = {
    **dict.fromkeys(
        ["allocator", "errors", "units", "files", "cores", "lane_numbers", "native", "timing", "waiting"], 0
    ),
    **dict.fromkeys(["graph", "zoo"], 1),
    "devices": 2,
    "profiler": 3,
    "scheduler": 4,
    "runtime": 5,
    **dict.fromkeys(["backend", "benchmark", "simulator"], 6),
    "report": 7,
    "cli": 8,
}
MODULES = sorted(p for p in ROOT.rglob("*.py") if "_data" not in p.parts)


def imported(path: Path) -> set[str]:
    """Names of the project's modules that a file imports, wherever in it."""
    found = set()
    for part in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(part, ast.Import):
            found |= {alias.name for alias in part.names}
        elif isinstance(part, ast.ImportFrom):
            assert part.level == 0, f"{path.name} imports relatively"
            found |= {f"{part.module}.{alias.name}" for alias in part.names}
    return {name for name in found if name.split(".")[0] == "chrion"}


def module_name(path: Path) -> str:
    return ".".join(("chrion", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_imports_point_down(path: Path) -> None:
    """A module imports from its own package or from lower floors; all raise the errors."""
    if path == ROOT / "__init__.py":
        return
    own = module_name(path).split(".")[1]
    for name in imported(path):
        parts = name.split(".")
        if len(parts) == 1 or (parts[1] not in FLOORS and own == "cli"):
            continue
        assert parts[1] in FLOORS, f"{name} is on no floor"
        assert parts[1] in {own, "errors"} or FLOORS[parts[1]] < FLOORS[own], f"{own} imports {name}"


def test_the_scheduler_knows_nothing_of_what_runs_its_plans() -> None:
    """No module of the scheduler names onnxruntime, threads or Typer."""
    for path in (ROOT / "scheduler").rglob("*.py"):
        for part in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in part.names] if isinstance(part, ast.Import) else []
            names += [part.module or ""] if isinstance(part, ast.ImportFrom) else []
            assert not {n.split(".")[0] for n in names} & {"onnxruntime", "threading", "typer"}


@pytest.mark.parametrize("path", [p for p in MODULES if p.name == "__init__.py"], ids=module_name)
def test_packages_list_all_they_import_in_order(path: Path) -> None:
    """``__all__`` is sorted and holds every public name of the project that the package's first file binds."""
    package = importlib.import_module(module_name(path))
    bound = set()
    for part in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(part, ast.ImportFrom) and (part.module or "").startswith("chrion"):
            bound |= {alias.asname or alias.name for alias in part.names}
    assert {name for name in package.__all__ if not name.startswith("__")} == bound
    assert list(package.__all__) == sorted(package.__all__)
    assert all(hasattr(package, name) for name in package.__all__)


def test_importing_the_package_imports_no_library() -> None:
    """Commands start at once; names of the package are imported on first use, sub-packages too."""
    code = "import sys, chrion; assert not {'numpy', 'onnx', 'onnxruntime'} & {*sys.modules}; "
    code += "chrion.units.format_ms(1.0); chrion.load; from chrion import *; Plan; assert 'load' in dir(chrion)"
    subprocess.run([sys.executable, "-c", code], check=True)  # noqa: S603 - our own interpreter
    with pytest.raises(AttributeError, match="module 'chrion' has no attribute 'nothing'"):
        _ = chrion.nothing
