"""Profiles of a real second device, plans from them, and faults of it."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from accelerator_plans import WEBGPU, placed
from chrion import Graph, HybridSession, load, partition, profile
from chrion.devices import Device, usable_provider
from chrion.devices.single_provider import find_cpu_nodes
from chrion.errors import ProviderError
from chrion.graph.ort_sessions import weights_folder_option
from chrion.profiler import Profile
from chrion.zoo.recurrent import RecurrentSpec, build_recurrent
from helpers import FLOAT, assert_same_as_plain, make_model, node, value

X = np.linspace(0.1, 1, 4, dtype=np.float32).reshape(2, 2)


def with_a_determinant() -> onnx.ModelProto:
    """Det has no kernel on WebGPU."""
    nodes = [
        node("Relu", ["x"], ["a"], name="relu"),
        node("Det", ["a"], ["d"], name="determinant"),
        node("Mul", ["a", "d"], ["y"], name="product"),
    ]
    return make_model(nodes, [value("x", FLOAT, [2, 2])], [value("y", FLOAT, [2, 2])])


@pytest.fixture(scope="module")
def graph() -> Graph:
    """A model of which the device lacks one operator."""
    return load(with_a_determinant())


@pytest.fixture(scope="module")
def measured(device: Device, graph: Graph) -> Profile:
    """Its profile."""
    return profile(graph, 1, "auto") if device else profile(graph)


def test_the_device_is_found_by_itself(device: Device) -> None:
    """It is the only accelerator here."""
    assert usable_provider("auto") == usable_provider("webgpu") == device.provider


def test_operators_that_the_device_lacks_stay_on_the_cpu(graph: Graph, measured: Profile) -> None:
    """They have no time there; the others have one, and copies take time both ways."""
    costs = measured.costs(graph.dag)
    assert measured.accelerator == WEBGPU
    there = dict(zip(graph.dag.op_types, costs.accelerator_ms or (), strict=True))
    assert there["Det"] == float("inf")
    assert 0 < there["Relu"] < float("inf")
    for copy in (measured.upload, measured.download):
        assert copy.latency_ms > 0
        assert copy.ms_per_byte > 0


def test_what_is_left_to_the_cpu_is_known_by_name(device: Device, graph: Graph) -> None:
    """In the whole model; a model that does not open leaves nothing."""
    entries = weights_folder_option(graph.weights_folder)
    assert find_cpu_nodes(graph.model, entries, device) == {"determinant"}
    assert find_cpu_nodes(onnx.ModelProto(), entries, device) == set()


def test_plans_of_the_profile_run(graph: Graph, measured: Profile) -> None:
    """All that can be on the device is there, and the outputs are the CPU's."""
    plan = partition(graph, measured, policy="accelerator")
    assert plan.on_accelerator == 2
    with HybridSession(graph, plan=plan, strict=True) as session:
        assert_same_as_plain(session, with_a_determinant(), {"x": X})
        assert session.get_providers() == [WEBGPU, "CPUExecutionProvider"]
    for policy in ("chrion", "chrion-paper"):
        with HybridSession(graph, plan=partition(graph, measured, policy=policy), strict=True) as session:
            assert_same_as_plain(session, with_a_determinant(), {"x": X})


def test_a_session_of_its_own_making(device: Device) -> None:
    """Measured, planned and tried out with WebGPU among the providers."""
    model = build_recurrent(RecurrentSpec(layers=2, batch=1, io=4, seq=2))
    name = model.graph.input[0].name
    shape = [d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim]
    with HybridSession(model, providers=[device.provider, "CPUExecutionProvider"]) as session:
        assert_same_as_plain(session, model, {name: np.ones(shape, np.float32)})


def test_a_kernel_that_is_missing(graph: Graph, caplog: pytest.LogCaptureFixture) -> None:
    """The plan puts Det there: strict, the error names it; otherwise the CPU serves, with a warning."""
    plan = placed(graph, [0, 0, 1])
    with pytest.raises(ProviderError, match="'determinant' on CPUExecutionProvider"):
        HybridSession(graph, plan=plan, strict=True)
    with caplog.at_level(logging.WARNING), HybridSession(graph, plan=plan) as session:
        assert_same_as_plain(session, with_a_determinant(), {"x": X})
        assert "determinant" in session.explain()
    assert "runs on the CPU" in caplog.text


def test_a_plan_wholly_on_the_device_runs_there(device: Device) -> None:
    """In one piece, as a plain session on its provider."""
    nodes = [node("Relu", ["x"], ["a"]), node("Neg", ["a"], ["y"])]
    model = make_model(nodes, [value("x", FLOAT, [2, 2])], [value("y", FLOAT, [2, 2])])
    graph = load(model)
    with HybridSession(graph, plan=placed(graph, [0, 0])) as session:
        assert session.get_providers()[0] == device.provider
        assert_same_as_plain(session, model, {"x": X})


def test_the_command_line_takes_it(tmp_path: Path) -> None:
    """``chrion run`` with the accelerator by its short name: outputs are equal, exit code 0."""
    path = tmp_path / "m.onnx"
    path.write_bytes(with_a_determinant().SerializeToString())
    script = "from chrion.cli import main; main()"
    command = [sys.executable, "-c", script, "run", str(path), "--accelerator", "webgpu", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - our own command
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["equal"]
