"""What is copied between the memories, how often, and what stays where it is."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from accelerator_plans import engine_of, placed
from chrion import HybridSession, load
from chrion.devices import Device
from chrion.devices.device import Download
from chrion.devices.host import allocate, on_host, to_host
from chrion.graph.model import TensorInfo
from chrion.lane_numbers import DOWNLOAD_LANE, UPLOAD_LANE
from helpers import BOOL, FLOAT, INT64, assert_same_as_plain, branches, make_model, node, run_plain, value

X = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)
CODES = {n: getattr(TensorProto, n.upper()) for n in ("float", "int32", "uint32", "bool")}


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often something has been copied each way."""
    count: Counter[str] = Counter()
    upload, download = Device.upload, Download.copy
    monkeypatch.setattr(Device, "upload", lambda self, *a: (count.update(["up"]), upload(self, *a))[1])
    monkeypatch.setattr(Download, "copy", lambda self, *a: (count.update(["down"]), download(self, *a))[1])
    return count


def through(name: str) -> onnx.ModelProto:
    """X to a type, through two operators on it, and back to floating point."""
    op_type, inputs = {"float": ("Neg", 1), "bool": ("Not", 1)}.get(name, ("Add", 2))
    first = node("Tanh", ["x"], ["a"]) if name == "float" else node("Cast", ["x"], ["a"], to=CODES[name])
    last = node("Exp", ["c"], ["y"]) if name == "float" else node("Cast", ["c"], ["y"], to=FLOAT)
    nodes = [first, node(op_type, ["a"] * inputs, ["b"]), node(op_type, ["b"] * inputs, ["c"]), last]
    return make_model(nodes, [value("x", FLOAT, [2, 4])], [value("y", FLOAT, [2, 4])])


@pytest.mark.parametrize("name", CODES)
def test_every_type_that_the_device_holds_crosses_both_ways(device: Device, name: str, counted: Counter[str]) -> None:
    """Made on the CPU and read on the device, and the other way round."""
    kind = f"tensor({name})"
    assert device.supports(kind)
    model = through(name)
    graph = load(model)
    x = {"x": np.abs(X) * 3}
    for lanes in ([1, 0, 1, 0], [0, 1, 0, 1]):
        with HybridSession(graph, plan=placed(graph, lanes), strict=True) as session:
            counted.clear()
            assert_same_as_plain(session, model, x)
            program = engine_of(session).program
            assert program.copies == counted["up"] + counted["down"] >= 3


@pytest.mark.parametrize("name", ["int64", "double", "int8", "uint8", "int16", "float16"])
def test_what_the_device_does_not_hold_stays_with_the_host(device: Device, name: str) -> None:
    """Types without a kernel there (16 bit floats without the hardware) are no buffers; asking for one is an error."""
    if name == "float16" and device.supports("tensor(float16)"):
        pytest.skip("this device has 16 bit floats")
    assert not device.supports(f"tensor({name})")
    with pytest.raises(TypeError, match=name):
        device.allocate(TensorInfo("x", f"tensor({name})", (2,)))


def test_values_that_the_device_does_not_hold_are_fetched_by_its_sessions(
    device: Device,  # noqa: ARG001 - skipped without it
    counted: Counter[str],
) -> None:
    """Indices of 64 bits, made on the CPU anew in each request, steer a Gather on the device."""
    nodes = [node("ArgMax", ["x"], ["i"], axis=1, keepdims=0), node("Gather", ["x", "i"], ["y"], axis=1)]
    model = make_model(nodes, [value("x", FLOAT, [2, 4])], [value("y", FLOAT, [2, 2]), value("i", INT64, [2])])
    graph = load(model)
    with HybridSession(graph, plan=placed(graph, [1, 0]), strict=True) as session:
        for x in (X, -X, X[::-1].copy()):
            counted.clear()
            assert_same_as_plain(session, model, {"x": x})
            assert counted == {"up": 1, "down": 1}  # x there, y back


def test_a_value_is_copied_once_to_each_side(device: Device, counted: Counter[str]) -> None:  # noqa: ARG001
    """Three readers in two segments there, two here: one upload, one download; inner values do not move."""
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
    with HybridSession(graph, plan=placed(graph, lanes), strict=True) as session:
        for _ in range(2):
            counted.clear()
            assert_same_as_plain(session, model, {"x": X})
            assert counted == {"up": 1, "down": 1}
        lanes_used = set(engine_of(session).program.lanes)
    assert lanes_used == {0, 1, UPLOAD_LANE, DOWNLOAD_LANE}


def test_outputs_and_inputs_may_stay_on_the_device(device: Device, counted: Counter[str]) -> None:
    """Bound there, an output is not copied, and feeds the next request as it is; a fresh one is made in each run."""
    graph = load(branches())
    expected = dict(zip(("y", "l"), run_plain(branches(), {"x": X}), strict=True))
    lanes = [0 if name != "right" else 1 for name in graph.dag.names]
    with HybridSession(graph, plan=placed(graph, lanes), strict=True) as session:
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
        again = session.run(None, {"x": y})  # it has x's shape
        assert counted["up"] <= 1  # what the CPU makes of it
        for ours, theirs in zip(again, run_plain(branches(), {"x": expected["y"]}), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
        # After that, an array of the host's again.
        assert_same_as_plain(session, branches(), {"x": X})
        target = device.allocate(graph.values["y"])
        binding.bind_ortvalue_output("y", target)
        session.run_with_iobinding(binding)
        assert binding.get_outputs()[0] is target
        np.testing.assert_allclose(to_host(target).numpy(), expected["y"], rtol=1e-5)


@pytest.mark.parametrize("lanes", [[1, 1, 1, 0], [0, 0, 1, 1]])
def test_an_output_of_either_side_can_be_had_on_the_device(device: Device, lanes: list[int]) -> None:
    """Made on the CPU it is brought there when the run has ended."""
    graph = load(branches())
    with HybridSession(graph, plan=placed(graph, lanes), strict=True) as session:
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


def test_buffers_copy_what_they_hold(device: Device) -> None:
    """Up and down again, whatever the shape; the fence waits for what came before it."""
    for shape in ((1,), (3, 5), (), (2, 1, 7)):
        info = TensorInfo("x", "tensor(float)", shape)
        there = device.to_device(info, np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape))
        device.fence()
        host = allocate(info)
        device.download(info.type).copy(there, host)
        np.testing.assert_array_equal(host.numpy().ravel(), np.arange(max(1, int(np.prod(shape)))))


def test_host_memory_that_is_copied_when_it_is_bound_is_noticed(device: Device) -> None:
    """Plain host memory follows; memory of a device does not, since a session on the CPU takes a copy of it."""
    assert device.reads_updates(allocate)
    assert not device.reads_updates(device.allocate)
    assert not device.has_pinned_memory


def test_booleans_keep_their_values(device: Device) -> None:
    """A mask made on the device decides on the CPU."""
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
        with HybridSession(graph, plan=placed(graph, lanes), strict=True) as session:
            assert_same_as_plain(session, model, {"x": X, "x2": -X})
