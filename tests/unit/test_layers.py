"""Structure of the package: imports point down, and packages list their public names."""

from __future__ import annotations

import ast
import functools
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import networkx as nx
import pytest

import chrion
from layers import INSIDE, LAYERS, Layers

ROOT = Path(chrion.__file__).parent
MODULES = sorted(p for p in ROOT.rglob("*.py") if "_data" not in p.parts)


def statements(part: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements of a file at any level of its code."""
    for inner in ast.iter_child_nodes(part):
        if isinstance(inner, ast.stmt | ast.excepthandler | ast.match_case):
            yield inner
            yield from statements(inner)


@functools.cache
def imported(path: Path) -> set[str]:
    """Return the names that a file imports."""
    found = set()
    for part in statements(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(part, ast.Import):
            found |= {alias.name for alias in part.names}
        elif isinstance(part, ast.ImportFrom):
            assert part.level == 0, f"{path.name} imports relatively"
            found |= {f"{part.module}.{alias.name}" for alias in part.names}
    return found


def libraries(path: Path) -> set[str]:
    """Return the top-level packages that a file imports."""
    return {name.split(".")[0] for name in imported(path)}


def module_name(path: Path) -> str:
    """Return the dotted name of a file."""
    return ".".join(("chrion", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


def layer_of(name: str, layers: Layers) -> tuple[int, str]:
    """Return the layer of a module and its entry, the most specific one; without an entry, the layer above all."""
    entries = [(layer, entry) for layer, own in enumerate(layers) for entry in own]
    matching = [(layer, entry) for layer, entry in entries if f"{name}.".startswith(f"{entry}.")]
    return max(matching, key=lambda found: len(found[1]), default=(len(layers), ""))


def upward_imports(package: str, layers: Layers) -> list[str]:
    """Return the imports among the modules of a package that do not point down, and the modules without a layer."""
    found = []
    for path in MODULES:
        own = module_name(path).removeprefix(f"{package}.")
        if own in {module_name(path), "__version__"}:  # of another package, or the package's own __init__
            continue
        layer, entry = layer_of(own, layers)
        if package == "chrion" and not entry:
            found.append(f"{own} is in no layer")
        for name in imported(path):
            inner = name.removeprefix(f"{package}.")
            if inner in {name, "__version__"}:
                continue
            target_layer, target = layer_of(inner, layers)
            if target != entry and target_layer >= layer:
                found.append(f"{own} imports {name}")
    return found


def test_imports_point_down() -> None:
    """A module imports from its own package, and from packages listed before it."""
    assert not upward_imports("chrion", tuple((entry,) for layer in LAYERS for entry in layer))


@pytest.mark.parametrize("package", INSIDE)
def test_imports_inside_a_package_point_down(package: str) -> None:
    """The scheduler's policies do not import the searches above them, and execution does not import selection."""
    assert not upward_imports(f"chrion.{package}", INSIDE[package])


def test_no_imports_form_a_cycle() -> None:
    """No two modules import each other, directly or through others, not even for their types."""
    known = {module_name(path): path for path in MODULES}
    graph = nx.DiGraph()
    for name, path in known.items():
        for found in imported(path):
            graph.add_edge(name, found if found in known else found.rpartition(".")[0])
    cycles = [sorted(part) for part in nx.strongly_connected_components(graph) if len(part) > 1]
    assert not cycles


def test_nothing_that_serves_requests_imports_the_agents() -> None:
    """No module outside of ``chrion.learning`` imports from it, not even inside of a function."""
    others = (path for path in MODULES if not module_name(path).startswith("chrion.learning"))
    assert not [path for path in others if any(name.startswith("chrion.learning") for name in imported(path))]


def test_violations_are_found() -> None:
    """An import from another package of the same layer and a module that no layer has are violations."""
    found = upward_imports("chrion", (("scheduler", "runtime"),))
    assert "runtime.session imports chrion.scheduler.plan.Plan" in found
    assert "backend is in no layer" in found
    assert not any(violation.startswith("scheduler") and ".scheduler." in violation for violation in found)


def test_the_scheduler_is_independent_of_the_runtime() -> None:
    """No module of the scheduler imports onnxruntime, threading or Typer."""
    for path in (ROOT / "scheduler").rglob("*.py"):
        assert not libraries(path) & {"onnxruntime", "threading", "typer"}, path


def test_the_policies_of_the_manager_are_pure() -> None:
    """Decisions that the simulator and a server share import nothing of the project, no threads and no sockets."""
    assert not libraries(ROOT / "serving" / "manager" / "policies.py") & {"chrion", "threading", "socket"}


def test_packages_list_all_they_import_in_order() -> None:
    """``__all__`` is sorted and contains every name of the project that ``__init__.py`` imports."""
    for path in [p for p in MODULES if p.name == "__init__.py"]:
        name = module_name(path)
        package = importlib.import_module(name)
        bound = set()
        for part in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(part, ast.ImportFrom) and (part.module or "").startswith("chrion"):
                bound |= {alias.asname or alias.name for alias in part.names} - {"import_on_first_use", "warn_of_fault"}
        assert {*package.__all__} == bound, name
        assert list(package.__all__) == sorted(package.__all__), name
        assert all(hasattr(package, name) for name in package.__all__), name


def test_importing_the_package_imports_no_library() -> None:
    """Names of the package and its sub-packages are imported on first use, so that commands start at once."""
    code = "import sys, chrion; from chrion.common import units; units.format_ms(1.0); chrion.ChrionError; "
    code += "assert 'load' in dir(chrion); assert not {'numpy', 'onnx', 'onnxruntime'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True)  # noqa: S603 - our own interpreter
    with pytest.raises(AttributeError, match="module 'chrion' has no attribute 'nothing'"):
        _ = chrion.nothing
