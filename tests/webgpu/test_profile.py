"""Tests of profiles of a second device, of plans made from them, and of its failures."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from accelerator_plans import WEBGPU, fixed_webgpu_plan
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
    """Build a model with a Det, for which WebGPU has no kernel."""
    nodes = [
        node("Relu", ["x"], ["a"], name="relu"),
        node("Det", ["a"], ["d"], name="determinant"),
        node("Mul", ["a", "d"], ["y"], name="product"),
    ]
    return make_model(nodes, [value("x", FLOAT, [2, 2])], [value("y", FLOAT, [2, 2])])


@pytest.fixture(scope="module")
def graph() -> Graph:
    """Return a graph with one operator that the device does not support."""
    return load(with_a_determinant())


@pytest.fixture(scope="module")
def measured(device: Device, graph: Graph) -> Profile:
    """Return the profile of the graph."""
    return profile(graph, 1, "auto") if device else profile(graph)


def test_auto_selects_the_device(device: Device) -> None:
    """``auto`` selects WebGPU, the only accelerator of the environment."""
    assert usable_provider("auto") == usable_provider("webgpu") == device.provider


def test_unsupported_operators_have_infinite_device_time(graph: Graph, measured: Profile) -> None:
    """Supported operators have a finite time on the device, and copies take time in both directions."""
    costs = measured.costs(graph.dag)
    assert measured.accelerator == WEBGPU
    device_ms = dict(zip(graph.dag.op_types, costs.accelerator_ms or (), strict=True))
    assert device_ms["Det"] == float("inf")
    assert 0 < device_ms["Relu"] < float("inf")
    for copy in (measured.upload, measured.download):
        assert copy.latency_ms > 0
        assert copy.ms_per_byte > 0


def test_nodes_that_onnxruntime_assigns_to_the_cpu_are_found(device: Device, graph: Graph) -> None:
    """The nodes of the whole model are named; an invalid model gives none."""
    entries = weights_folder_option(graph.weights_folder)
    assert find_cpu_nodes(graph.model, entries, device) == {"determinant"}
    assert find_cpu_nodes(onnx.ModelProto(), entries, device) == set()


def test_plans_of_the_profile_run(graph: Graph, measured: Profile) -> None:
    """The accelerator policy places all supported operators on the device, and every plan gives correct outputs."""
    plan = partition(graph, measured, policy="accelerator")
    assert plan.on_accelerator == 2
    with HybridSession(graph, plan=plan, strict=True) as session:
        assert_same_as_plain(session, with_a_determinant(), {"x": X})
        assert session.get_providers() == [WEBGPU, "CPUExecutionProvider"]
    for policy in ("chrion", "chrion-paper"):
        with HybridSession(graph, plan=partition(graph, measured, policy=policy), strict=True) as session:
            assert_same_as_plain(session, with_a_determinant(), {"x": X})


def test_a_session_plans_with_webgpu(device: Device) -> None:
    """A session with WebGPU among its providers profiles, plans, and gives correct outputs."""
    model = build_recurrent(RecurrentSpec(layers=2, batch=1, io=4, seq=2))
    name = model.graph.input[0].name
    shape = [d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim]
    with HybridSession(model, providers=[device.provider, "CPUExecutionProvider"]) as session:
        assert_same_as_plain(session, model, {name: np.ones(shape, np.float32)})


def test_a_plan_with_an_unsupported_operator(graph: Graph, caplog: pytest.LogCaptureFixture) -> None:
    """With ``strict``, the error names the operator; otherwise the model runs on the CPU, with a warning."""
    plan = fixed_webgpu_plan(graph, [0, 0, 1])
    with pytest.raises(ProviderError, match="'determinant' on CPUExecutionProvider"):
        HybridSession(graph, plan=plan, strict=True)
    with caplog.at_level(logging.WARNING), HybridSession(graph, plan=plan) as session:
        assert_same_as_plain(session, with_a_determinant(), {"x": X})
        assert "determinant" in session.explain()
    assert "runs on the CPU" in caplog.text


def test_a_plan_of_the_device_alone_runs_as_a_plain_session(device: Device) -> None:
    """The session uses the device's provider and gives correct outputs."""
    nodes = [node("Relu", ["x"], ["a"]), node("Neg", ["a"], ["y"])]
    model = make_model(nodes, [value("x", FLOAT, [2, 2])], [value("y", FLOAT, [2, 2])])
    graph = load(model)
    with HybridSession(graph, plan=fixed_webgpu_plan(graph, [0, 0])) as session:
        assert session.get_providers()[0] == device.provider
        assert_same_as_plain(session, model, {"x": X})


def test_the_command_line_accepts_webgpu(tmp_path: Path) -> None:
    """``chrion run --accelerator webgpu`` exits with 0 and reports equal outputs."""
    path = tmp_path / "m.onnx"
    path.write_bytes(with_a_determinant().SerializeToString())
    script = "from chrion.cli import main; main()"
    command = [sys.executable, "-c", script, "run", str(path), "--accelerator", "webgpu", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - a command of the project
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["equal"]
