"""Chrion as an ONNX backend."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.backend.base import Backend, BackendRep

import chrion.backend
from chrion import load
from chrion.backend import HybridBackend
from chrion.errors import OptionError
from helpers import FLOAT, assert_equal, branches, make_model, node, run_plain, value
from random_plans import RandomCutBackend, random_plan

X = np.linspace(-2, 2, 8, dtype=np.float32).reshape(2, 4)


def test_the_module_is_an_onnx_backend() -> None:
    """Both classes of the backend are subclasses of ONNX's class, and the module has its functions."""
    assert issubclass(HybridBackend, Backend)
    assert issubclass(RandomCutBackend, HybridBackend)
    assert chrion.backend.is_compatible(branches())
    for name in ("prepare", "run_model", "run_node", "supports_device"):
        assert getattr(chrion.backend, name).__self__ is HybridBackend


@pytest.mark.parametrize(("device", "supported"), [("CPU", True), ("CPU:0", True), ("CPU:1", False), ("FPGA", False)])
def test_supported_devices(device: str, *, supported: bool) -> None:
    """The CPU is supported, and unknown devices are not."""
    assert chrion.backend.supports_device(device) is supported
    assert chrion.backend.is_compatible(branches(), device) is supported


def test_an_unknown_device_is_refused() -> None:
    """The error lists the supported devices in one line."""
    with pytest.raises(OptionError, match=r"device: expected CPU, CUDA or CUDA:n, found 'FPGA'"):
        chrion.backend.prepare(branches(), "FPGA")


@pytest.mark.parametrize("inputs", [[X], (X,), X, {"x": X}])
def test_inputs_are_given_in_order_by_name_or_alone(inputs: Any) -> None:
    """Outputs are in the model's order, and can be read by name."""
    model = branches()
    prepared = RandomCutBackend.prepare(model)
    assert isinstance(prepared, BackendRep)
    found = prepared.run(inputs)
    assert_equal(list(found), run_plain(model, {"x": X}))
    assert_equal([found["l"], found["y"]], run_plain(model, {"x": X}, ["l", "y"]))
    assert prepared.session.plan is not None
    prepared.session.close()


def test_surplus_inputs_are_refused() -> None:
    """The error names the inputs of the model."""
    with pytest.raises(ValueError, match=r"the model has 1 inputs \(x\), got 2"):
        RandomCutBackend.run_model(branches(), [X, X])


@pytest.mark.parametrize("kind", ["proto", "bytes", "path"])
def test_models_are_prepared_from_protos_bytes_and_files(tmp_path: Path, kind: str) -> None:
    """Options of HybridSession are passed on, and others are ignored."""
    model, path = branches(), tmp_path / "m.onnx"
    onnx.save(model, path)
    source: Any = {"proto": model, "bytes": model.SerializeToString(), "path": str(path)}[kind]
    assert_equal(list(chrion.backend.run_model(source, [X], cores=1, rtol=1e-3)), run_plain(model, {"x": X}))


def test_models_with_free_dimensions_are_cut_for_each_shape() -> None:
    """The plan is made for the shapes of the request."""
    model = make_model(
        [node("Relu", ["x"], ["a"]), node("Neg", ["x"], ["b"]), node("Add", ["a", "b"], ["y"])],
        [value("x", FLOAT, ["n", 4])],
        [value("y", FLOAT, ["n", 4])],
    )
    for optimise in (True, False):
        maker: Any = type("Maker", (RandomCutBackend,), {"optimise": optimise})
        prepared = maker.prepare(model)
        for x in (X, X[:1], np.repeat(X, 3, axis=0)):
            assert_equal(list(prepared.run([x])), run_plain(model, {"x": x}))
            assert len(prepared.session.plan.segments) == 3
        prepared.session.close()


def test_one_operator_runs_alone() -> None:
    """The operator may be of ONNX's other domains, and have omitted or repeated inputs and an opset of its own."""
    run = partial(chrion.backend.run_node, cores=1)
    clip = node("Clip", ["x", "", "most"], ["y"])
    (found,) = run(clip, [X, np.array(1.0, np.float32)])
    np.testing.assert_array_equal(found, np.minimum(X, 1))
    (found,) = run(node("Add", ["x", "x"], ["y"]), {"x": X})
    np.testing.assert_array_equal(found, X + X)
    (found,) = run(node("Softmax", ["x"], ["y"], axis=1), [X], opset_version=13)
    np.testing.assert_allclose(found, np.exp(X) / np.exp(X).sum(1, keepdims=True), rtol=1e-5)
    scaler = node("Scaler", ["x"], ["y"], domain="ai.onnx.ml", offset=[1.0], scale=[2.0])
    (found,) = run(scaler, [X])
    np.testing.assert_array_equal(found, (X - 1) * 2)


def test_equal_seeds_give_equal_plans() -> None:
    """Other seeds give other plans, and every operator is a segment."""
    graph = load(branches())
    plans = [random_plan(graph, Random(seed)) for seed in (1, 1, *range(2, 9))]
    assert plans[0] == plans[1]
    assert len({plan.schedule for plan in plans}) > 2
    assert all(sorted(plan.segments) == [(i,) for i in range(len(graph.dag))] for plan in plans)
