"""Structure of the package: imports point down, and packages list their public names."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import chrion

ROOT = Path(chrion.__file__).parent
Layers = tuple[tuple[str, ...], ...]

#: Packages and modules from the lowest layer up. A module imports from its own package and from lower layers.
PACKAGES: Layers = (
    ("errors",),
    ("allocator", "cgroups", "files", "lane_numbers", "lazy_names", "native", "timing", "units", "waiting"),
    ("cores", "hardware", "ray_cluster"),
    ("core_leases", "cpu_use"),
    ("graph",),
    ("zoo",),
    ("devices",),
    ("profiler",),
    ("scheduler",),
    ("runtime",),
    ("manager",),
    ("generation",),
    ("backend", "benchmark", "simulator"),
    ("report", "server"),
    ("replay",),
    ("cli",),
    ("__main__",),
)
#: The same inside two packages; modules that are not listed belong to the highest layer.
INSIDE: dict[str, Layers] = {
    "scheduler": (
        ("schedule",),
        ("plan",),
        ("evaluation",),
        ("policies",),  # published policies and their helpers
        ("search",),
        ("policies.chrion",),
        ("policies.registry",),
        ("explain", "fixed_placement", "planner"),
    ),
    "runtime": (("live_comparison", "options", "process_hooks", "requests"), ("execution",), ("selection",)),
}
MODULES = sorted(p for p in ROOT.rglob("*.py") if "_data" not in p.parts)


def imported(path: Path) -> set[str]:
    """Return the names that a file imports from the project, at any level of its code."""
    found = set()
    for part in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(part, ast.Import):
            found |= {alias.name for alias in part.names}
        elif isinstance(part, ast.ImportFrom):
            assert part.level == 0, f"{path.name} imports relatively"
            found |= {f"{part.module}.{alias.name}" for alias in part.names}
    return {name for name in found if name.split(".")[0] == "chrion"}


def module_name(path: Path) -> str:
    """Return the dotted name of a file."""
    return ".".join(("chrion", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


def layer_of(name: str, layers: Layers) -> tuple[int, str]:
    """Return the layer of a module and its entry, the most specific one; without an entry, the layer above all."""
    entries = [(layer, entry) for layer, own in enumerate(layers) for entry in own]
    matching = [(layer, entry) for layer, entry in entries if f"{name}.".startswith(f"{entry}.")]
    return max(matching, key=lambda found: len(found[1]), default=(len(layers), ""))


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_imports_point_down(path: Path) -> None:
    """A module imports from its own package and from lower layers."""
    if path == ROOT / "__init__.py":
        return
    own = module_name(path).removeprefix("chrion.")
    layer, entry = layer_of(own, PACKAGES)
    assert entry, f"{own} is in no layer"
    for name in imported(path):
        if name in {"chrion", "chrion.__version__"}:
            continue
        target_layer, target = layer_of(name.removeprefix("chrion."), PACKAGES)
        assert target, f"{name} is in no layer"
        assert target == entry or target_layer < layer, f"{own} imports {name}"


@pytest.mark.parametrize("package", INSIDE)
def test_imports_inside_a_package_point_down(package: str) -> None:
    """The scheduler's policies do not import the searches above them, and execution does not import selection."""
    checked = 0
    for path in MODULES:
        own = module_name(path).removeprefix(f"chrion.{package}.")
        if own == module_name(path):  # of another package, or the package's own __init__
            continue
        layer, entry = layer_of(own, INSIDE[package])
        for name in imported(path):
            inner = name.removeprefix(f"chrion.{package}.")
            if inner == name:
                continue
            target_layer, target = layer_of(inner, INSIDE[package])
            assert target == entry or target_layer < layer, f"{own} imports {name}"
            checked += 1
    assert checked > 0


def test_the_scheduler_is_independent_of_the_runtime() -> None:
    """No module of the scheduler imports onnxruntime, threading or Typer."""
    for path in (ROOT / "scheduler").rglob("*.py"):
        for part in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in part.names] if isinstance(part, ast.Import) else []
            names += [part.module or ""] if isinstance(part, ast.ImportFrom) else []
            assert not {n.split(".")[0] for n in names} & {"onnxruntime", "threading", "typer"}


def test_the_policies_of_the_manager_are_pure() -> None:
    """Decisions that the simulator and a server share import nothing of the project, no threads and no sockets."""
    path = ROOT / "manager" / "policies.py"
    assert imported(path) == set()
    assert "threading" not in path.read_text(encoding="utf-8")
    assert "socket" not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", [p for p in MODULES if p.name == "__init__.py"], ids=module_name)
def test_packages_list_all_they_import_in_order(path: Path) -> None:
    """``__all__`` is sorted and contains every name of the project that ``__init__.py`` imports."""
    package = importlib.import_module(module_name(path))
    bound = set()
    for part in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(part, ast.ImportFrom) and (part.module or "").startswith("chrion"):
            bound |= {alias.asname or alias.name for alias in part.names} - {"import_on_first_use"}
    assert {name for name in package.__all__ if not name.startswith("__")} == bound
    assert list(package.__all__) == sorted(package.__all__)
    assert all(hasattr(package, name) for name in package.__all__)


def test_importing_the_package_imports_no_library() -> None:
    """Names of the package and its sub-packages are imported on first use, so that commands start at once."""
    code = "import sys, chrion; assert not {'numpy', 'onnx', 'onnxruntime'} & {*sys.modules}; "
    code += "chrion.units.format_ms(1.0); chrion.load; from chrion import *; Plan; assert 'load' in dir(chrion)"
    subprocess.run([sys.executable, "-c", code], check=True)  # noqa: S603 - our own interpreter
    with pytest.raises(AttributeError, match="module 'chrion' has no attribute 'nothing'"):
        _ = chrion.nothing
