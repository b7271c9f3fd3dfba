"""Libraries that are not imported, and loggers that are not used, by importing Chrion and loading a model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from chrion.zoo import build

#: Libraries that take long to import and that most programs never need.
HEAVY = ["matplotlib", "msgspec", "networkx", "onnx_ir", "rich", "sympy", "typer"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return the file of a small model."""
    path = tmp_path / "model.onnx"
    path.write_bytes(build("lstm", {"layers": 2, "seq": 3, "batch": 1, "io": 4}).SerializeToString())
    return path


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own."""
    return subprocess.run(  # noqa: S603 - this interpreter
        [sys.executable, "-c", code, *arguments], check=True, capture_output=True, text=True
    )


@pytest.mark.parametrize("statement", ["import chrion", "from chrion import *"])
def test_importing_chrion_imports_no_heavy_library(statement: str) -> None:
    """Neither the package nor all of its public names import a library from the list."""
    code = f"import sys\n{statement}\nprint(*sorted(set({HEAVY}) & sys.modules.keys()))"
    found = run(code)
    assert found.stdout.split() == []


def test_planning_imports_no_onnxruntime() -> None:
    """Every module of the scheduler is imported, and a graph is planned, without onnxruntime, threads or devices."""
    code = """
import importlib, pkgutil, sys
import chrion.scheduler
for module in pkgutil.walk_packages(chrion.scheduler.__path__, "chrion.scheduler."):
    importlib.import_module(module.name)
from chrion.graph.dag import Dag
from chrion.profiler.costs import uniform_costs
from chrion.scheduler import POLICIES
dag = Dag.from_edges(3, [(0, 1), (0, 2)])
costs = uniform_costs(dag, accelerator_ms=1.0, cpu_ms=[1.0, 1.0])
for name in ("chrion-paper", "heft", "nimble", "wavefront"):
    POLICIES[name].make_solver(dag, costs)(0.0)
print(*(name for name in ("onnxruntime", "chrion.devices", "chrion.native") if name in sys.modules))
"""
    assert run(code).stdout.split() == []


def test_loading_a_model_imports_no_heavy_library(model: Path) -> None:
    """If the values of the model may all be cut, loading does not use networkx to find operators."""
    code = f"import sys, chrion\nchrion.load(sys.argv[1])\nprint(*sorted(set({HEAVY}) & sys.modules.keys()))"
    assert run(code, str(model)).stdout.split() == []


def test_loading_a_model_logs_nothing_of_other_libraries(model: Path) -> None:
    """With all loggers at DEBUG, a loaded model adds lines of Chrion's own loggers only."""
    code = "import logging, sys\nlogging.basicConfig(level=logging.DEBUG, format='%(name)s')\n"
    code += "import chrion\nchrion.load(sys.argv[1])"
    loggers = set(run(code, str(model)).stderr.split())
    assert all(name.split(".")[0] == "chrion" for name in loggers), loggers


def test_a_plain_session_imports_no_onnx(model: Path) -> None:
    """A session that runs plain reads no model, so it serves a request without onnx, protobuf and Chrion's rewrites."""
    code = """
import sys
import numpy as np
from chrion import HybridSession
with HybridSession(sys.argv[1], tune="never") as session:
    session.run(None, {one.name: np.zeros(one.shape, "f") for one in session.get_inputs()})
    print(*(name for name in ("onnx", "google.protobuf", "chrion.graph.assemble") if name in sys.modules))
"""
    assert run(code, str(model)).stdout.split() == []
