"""Tests of the transfers between host memory and device memory."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from accelerator_plans import fixed_webgpu_plan
from chrion import HybridSession, load
from chrion.common.lane_numbers import DOWNLOAD_LANE, UPLOAD_LANE
from chrion.devices import Device
from chrion.devices.device import Downloader
from chrion.devices.host import allocate, on_host, to_host
from chrion.graph.model import TensorInfo
from helpers import BOOL, FLOAT, INT64, assert_same_as_plain, branches, make_model, node, run_plain, value
from seams.execution import cut_engine

X = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)
CODES = {n: getattr(TensorProto, n.upper()) for n in ("float", "int32", "uint32", "bool")}


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Return a counter of the copies in each direction."""
    count: Counter[str] = Counter()
    upload, download = Device.upload, Downloader.copy
    monkeypatch.setattr(Device, "upload", lambda self, *a: (count.update(["up"]), upload(self, *a))[1])
    monkeypatch.setattr(Downloader, "copy", lambda self, *a: (count.update(["down"]), download(self, *a))[1])
    return count


def through(name: str) -> onnx.ModelProto:
    """Build a model that converts x to a type, applies two operators, and converts back to floating point."""
    op_type, inputs = {"float": ("Neg", 1), "bool": ("Not", 1)}.get(name, ("Add", 2))
    first = node("Tanh", ["x"], ["a"]) if name == "float" else node("Cast", ["x"], ["a"], to=CODES[name])
    last = node("Exp", ["c"], ["y"]) if name == "float" else node("Cast", ["c"], ["y"], to=FLOAT)
    nodes = [first, node(op_type, ["a"] * inputs, ["b"]), node(op_type, ["b"] * inputs, ["c"]), last]
    return make_model(nodes, [value("x", FLOAT, [2, 4])], [value("y", FLOAT, [2, 4])])


@pytest.mark.parametrize("name", CODES)
def test_every_supported_type_is_copied_in_both_directions(device: Device, name: str, counted: Counter[str]) -> None:
    """Values produced on the CPU are read on the device, and the other way round."""
    kind = f"tensor({name})"
    assert device.supports(kind)
    model = through(name)
    graph = load(model)
    x = {"x": np.abs(X) * 3}
    for lanes in ([1, 0, 1, 0], [0, 1, 0, 1]):
        with HybridSession(graph, plan=fixed_webgpu_plan(graph, lanes), strict=True) as session:
            counted.clear()
            assert_same_as_plain(session, model, x)
            program = cut_engine(session).program
            assert program.copies == counted["up"] + counted["down"] >= 3


@pytest.mark.parametrize("name", ["int64", "double", "int8", "uint8", "int16", "float16"])
def test_unsupported_types_have_no_device_buffers(device: Device, name: str) -> None:
    """Allocating a buffer of a type without device kernels raises TypeError."""
    if name == "float16" and device.supports("tensor(float16)"):
        pytest.skip("the device supports float16")
    assert not device.supports(f"tensor({name})")
    with pytest.raises(TypeError, match=name):
        device.allocate(TensorInfo("x", f"tensor({name})", (2,)))


def test_device_segments_read_unsupported_types_from_host_memory(
    device: Device,  # noqa: ARG001 - skipped without it
    counted: Counter[str],
) -> None:
    """A Gather on the device reads 64-bit indices that the CPU computes in each request."""
    nodes = [node("ArgMax", ["x"], ["i"], axis=1, keepdims=0), node("Gather", ["x", "i"], ["y"], axis=1)]
    model = make_model(nodes, [value("x", FLOAT, [2, 4])], [value("y", FLOAT, [2, 2]), value("i", INT64, [2])])
    graph = load(model)
    with HybridSession(graph, plan=fixed_webgpu_plan(graph, [1, 0]), strict=True) as session:
        for x in (X, -X, X[::-1].copy()):
            counted.clear()
            assert_same_as_plain(session, model, {"x": x})
            assert counted == {"up": 1, "down": 1}  # x to the device, y back


def test_a_value_is_copied_once_in_each_direction(device: Device, counted: Counter[str]) -> None:  # noqa: ARG001
    """Three readers on the device take one upload, and two on the CPU one download; inner values are not copied."""
    nodes = [
        node("Relu", ["x"], ["a"]),  # CPU
        node("Neg", ["a"], ["b"]),
        node("Tanh", ["a"], ["c"]),
        node("Abs", ["a"], ["d"]),
        node("Add", ["b", "c"], ["e"]),
        node("Sub", ["e", "d"], ["f"]),
        node("Exp", ["f"], ["g"]),  # CPU
        node("Mul", ["f", "g"], ["y"]),  # CPU
    ]
    model = make_model(nodes, [value("x", FLOAT, [2, 4])], [value("y", FLOAT, [2, 4])])
    graph = load(model)
    lanes = [0 if name in {"Neg", "Tanh", "Abs", "Add", "Sub"} else 1 for name in graph.dag.op_types]
    with HybridSession(graph, plan=fixed_webgpu_plan(graph, lanes), strict=True) as session:
        for _ in range(2):
            counted.clear()
            assert_same_as_plain(session, model, {"x": X})
            assert counted == {"up": 1, "down": 1}
        lanes_used = set(cut_engine(session).program.lanes)
    assert lanes_used == {0, 1, UPLOAD_LANE, DOWNLOAD_LANE}


def test_outputs_and_inputs_may_stay_on_the_device(device: Device, counted: Counter[str]) -> None:
    """An output bound on the device is not copied and can be an input; without a buffer, each run allocates one."""
    graph = load(branches())
    expected = dict(zip(("y", "l"), run_plain(branches(), {"x": X}), strict=True))
    lanes = [0 if name != "right" else 1 for name in graph.dag.names]
    with HybridSession(graph, plan=fixed_webgpu_plan(graph, lanes), strict=True) as session:
        binding = session.io_binding()
        binding.bind_cpu_input("x", X)
        binding.bind_output("y", "webgpu")
        binding.bind_output("l")
        session.run_with_iobinding(binding)
        y, left = binding.get_outputs()
        assert not on_host(y)
        assert on_host(left)
        np.testing.assert_allclose(to_host(y).numpy(), expected["y"], rtol=1e-5)
        np.testing.assert_allclose(left.numpy(), expected["l"], rtol=1e-5)
        session.run_with_iobinding(binding)
        assert binding.get_outputs()[0] is not y
        np.testing.assert_allclose(binding.copy_outputs_to_cpu()[0], expected["y"], rtol=1e-5)
        counted.clear()
        again = session.run(None, {"x": y})  # y has the shape of x
        assert counted["up"] <= 1  # the result of the CPU's operator
        for ours, theirs in zip(again, run_plain(branches(), {"x": expected["y"]}), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
        # A subsequent request with an array in host memory.
        assert_same_as_plain(session, branches(), {"x": X})
        target = device.allocate(graph.values["y"])
        binding.bind_ortvalue_output("y", target)
        session.run_with_iobinding(binding)
        assert binding.get_outputs()[0] is target
        np.testing.assert_allclose(to_host(target).numpy(), expected["y"], rtol=1e-5)


@pytest.mark.parametrize("lanes", [[1, 1, 1, 0], [0, 0, 1, 1]])
def test_any_output_can_be_bound_on_the_device(device: Device, lanes: list[int]) -> None:
    """An output of a CPU lane is copied to the device at the end of the run."""
    graph = load(branches())
    with HybridSession(graph, plan=fixed_webgpu_plan(graph, lanes), strict=True) as session:
        binding = session.io_binding()
        binding.bind_cpu_input("x", X)
        for name in ("y", "l"):
            binding.bind_output(name, "webgpu")
        session.run_with_iobinding(binding)
        assert not any(on_host(v) for v in binding.get_outputs())
        for ours, theirs in zip(binding.copy_outputs_to_cpu(), run_plain(branches(), {"x": X}), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5)
        target = device.allocate(graph.values["l"])
        binding.bind_ortvalue_output("l", target)
        session.run_with_iobinding(binding)
        np.testing.assert_allclose(to_host(target).numpy(), run_plain(branches(), {"x": X})[1], rtol=1e-5)


def test_copies_preserve_values_of_any_shape(device: Device) -> None:
    """An upload and a download return the values of tensors of several shapes."""
    for shape in ((1,), (3, 5), (), (2, 1, 7)):
        info = TensorInfo("x", "tensor(float)", shape)
        buffer = device.to_device(info, np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape))
        device.fence()
        host = allocate(info)
        device.downloader(info.type).copy(buffer, host)
        np.testing.assert_array_equal(host.numpy().ravel(), np.arange(max(1, int(np.prod(shape)))))


def test_memory_that_is_copied_when_bound_is_detected(device: Device) -> None:
    """A CPU session reads updates of bound host memory, but not of device memory, which it copies when it is bound."""
    assert device.reads_updates(allocate)
    assert not device.reads_updates(device.allocate)
    assert not device.has_pinned_memory


def test_booleans_keep_their_values(device: Device) -> None:
    """A mask computed on the device selects values on the CPU, and the other way round."""
    nodes = [node("Greater", ["x", "x2"], ["m"]), node("Where", ["m", "x", "x2"], ["y"])]
    shape = [2, 4]
    model = make_model(
        nodes,
        [value("x", FLOAT, shape), value("x2", FLOAT, shape)],
        [value("y", FLOAT, shape), value("m", BOOL, shape)],
    )
    graph = load(model)
    assert device.supports("tensor(bool)")
    for lanes in ([0, 1], [1, 0]):
        with HybridSession(graph, plan=fixed_webgpu_plan(graph, lanes), strict=True) as session:
            assert_same_as_plain(session, model, {"x": X, "x2": -X})
