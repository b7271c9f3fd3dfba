"""Native operators that native lanes call without onnxruntime."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import FrameType
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from chrion import Graph, HybridSession, load
from chrion.graph.native_operators import with_native_operators
from chrion.graph.recurrent import unroll
from chrion.native import (
    NativeBinding,
    NativeCalls,
    NativeError,
    NativeFrame,
    NativeLanes,
    NativeProgram,
    NativeRunOptions,
    NativeSession,
    available,
    bfloat16_available,
    operators_available,
    register_operators,
)
from chrion.native.bindings import RUN
from chrion.scheduler import fixed_plan
from chrion.zoo import RecurrentSpec, build_recurrent
from helpers import FLOAT, make_model, node, run_plain, value
from recurrent_cells import STATES, Array, Cell, draw_cell, run_model

pytestmark = [
    pytest.mark.skipif(not (available() and operators_available()), reason="native code is not compiled"),
    pytest.mark.timeout(120, method="thread"),
    pytest.mark.usefixtures("uncrowded"),
]


class Bound:
    """A model of native operators in a native session, with a tensor for each input and output.

    Args:
        model: The model.
        feed: The values of its inputs.
        outputs: The shapes of its outputs.
    """

    def __init__(self, model: onnx.ModelProto, feed: Mapping[str, Array], outputs: Mapping[str, Sequence[int]]) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 4
        register_operators(options)
        self.session = NativeSession(model.SerializeToString(), options)
        self.binding = NativeBinding(self.session)
        self.inputs = {name: array.copy() for name, array in feed.items()}
        self.outputs = {name: np.full(shape, np.nan, np.float32) for name, shape in outputs.items()}
        self._values = {name: ort.OrtValue.ortvalue_from_numpy(a) for name, a in (self.inputs | self.outputs).items()}
        for name in self.inputs:
            self.binding.bind_ortvalue_input(name, self._values[name])
        for name in self.outputs:
            self.binding.bind_ortvalue_output(name, self._values[name])

    def run(self, calls: NativeCalls | None = None, options: NativeRunOptions | None = None) -> list[Array]:
        """Return the outputs of one request on a native lane."""
        program = NativeProgram([[(RUN, 0, 0)]])
        lanes = NativeLanes(program, [None])
        try:
            frame = NativeFrame(program, [self.session], [self.binding], {0: calls} if calls else None)
            lanes.run(frame, None, options)
        finally:
            lanes.close()
        return [array.copy() for array in self.outputs.values()]


def bind_cell(cell: Cell, feed: Mapping[str, Array]) -> Bound:
    """Return a recurrent operator whose inputs and outputs are bound."""
    steps, batch = feed["X"].shape[:2]
    states = (cell.directions, batch, cell.hidden)
    shapes = {"Y": (steps, cell.directions, batch, cell.hidden), "Y_h": states, "Y_c": states}
    names = [
        name for name, used in zip(("Y", "Y_h", "Y_c")[: 1 + STATES[cell.kind]], cell.outputs, strict=False) if used
    ]
    return Bound(with_native_operators(cell.model()), feed, {name: shapes[name] for name in names})


@pytest.mark.parametrize("seed", range(60))
def test_calls_compute_what_the_session_computes(seed: int) -> None:
    """For any attributes and shapes, zero steps among them, also after the inputs have changed."""
    random = np.random.default_rng(seed)
    cell = draw_cell(random)
    cell.optional = " ".join(name for name in cell.optional.split() if name != "lens")
    steps, batch = int(random.choice([0, 1, 2, 7, 60])), int(random.choice([1, 2, 5]))
    bound = bind_cell(cell, cell.feed(steps, batch, seed))
    calls = NativeCalls(bound.session, bound.binding, 1)
    for other in (seed, seed + 1):
        for name, array in cell.feed(steps, batch, other).items():
            bound.inputs[name][...] = array
        expected = bound.run()
        for array in bound.outputs.values():
            array.fill(np.nan)
        for found, wanted in zip(bound.run(calls), expected, strict=True):
            np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf, 1e-42])
def test_special_values(special: float) -> None:
    """NaN, infinities and denormals have the same consequences."""
    cell = Cell("LSTM", optional="B h c")
    feed = cell.feed(4, 2)
    feed["X"][1, 0, 2] = feed["h"][0, 1, 3] = special
    bound = bind_cell(cell, feed)
    expected = bound.run()
    for found, wanted in zip(bound.run(NativeCalls(bound.session, bound.binding, 1)), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.skipif(not bfloat16_available(), reason="the processor has no instructions for bfloat16")
def test_products_in_bfloat16() -> None:
    """Two products, the second of which reads what the first one computes."""
    random = np.random.default_rng(0)
    weights = {name: random.standard_normal((8, 8), np.float32) for name in ("v", "w")}
    nodes = [node("MatMul", ["x", "v"], ["y"], "first"), node("MatMul", ["y", "w"], ["z"], "second")]
    model = make_model(nodes, [value("x", FLOAT, [3, 8])], [value(n, FLOAT, [3, 8]) for n in "yz"], weights)
    bound = Bound(
        with_native_operators(model, bfloat16=True), {"x": random.standard_normal((3, 8), np.float32)},
        {"y": (3, 8), "z": (3, 8)},
    )  # fmt: skip
    expected = bound.run()
    for array in bound.outputs.values():
        array.fill(np.nan)
    for found, wanted in zip(bound.run(NativeCalls(bound.session, bound.binding, 2)), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("reason", ["lengths", "number", "no rows"])
def test_operators_that_cannot_be_called(reason: str) -> None:
    """Lengths, which requests may change; another number of operators; and operators that compute nothing."""
    cell = Cell("GRU", optional="B lens" if reason == "lengths" else "B")
    bound = bind_cell(cell, cell.feed(3, 0 if reason == "no rows" else 2))
    with pytest.raises(ValueError, match="cannot be called"):
        NativeCalls(bound.session, bound.binding, 2 if reason == "number" else 1)
    bound.run()


def test_an_interrupt_leaves_operators_that_compute() -> None:
    """Wherever Ctrl-C interrupts the recording, the operators of this thread compute afterwards."""
    cell = Cell("GRU")
    bound, at = bind_cell(cell, cell.feed(3, 2)), 0
    plain = bound.run()

    def trace(frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        nonlocal at
        if frame.f_code is not NativeCalls.__init__.__code__:
            return None
        at -= event == "line"
        if at < 0:
            raise KeyboardInterrupt
        return trace

    for line in range(40):
        at = line
        sys.settrace(trace)
        try:
            NativeCalls(bound.session, bound.binding, 1)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        for array in bound.outputs.values():
            array.fill(np.nan)
        for found, wanted in zip(bound.run(), plain, strict=True):
            np.testing.assert_array_equal(found, wanted)
    assert at > 0  # the last ones were not interrupted


def test_a_run_that_fails_leaves_no_calls() -> None:
    """The error of the run is raised, and operators compute again afterwards."""
    cell = Cell("GRU")
    failing = bind_cell(cell, {"X": np.zeros((3, 2, 4), np.float32)})  # the cell has five inputs
    with pytest.raises(NativeError, match="number of inputs"):
        NativeCalls(failing.session, failing.binding, 1)
    feed = cell.feed(3, 2)
    for found, wanted in zip(bind_cell(cell, feed).run(), run_model(cell.model(), feed), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_a_terminated_request() -> None:
    """It ends with onnxruntime's error before the segment computes; requests with other options are called."""
    cell = Cell("GRU")
    bound = bind_cell(cell, cell.feed(3, 2))
    calls = NativeCalls(bound.session, bound.binding, 1)
    np.testing.assert_array_equal(bound.run(calls, NativeRunOptions())[0], bound.run()[0])
    options = NativeRunOptions()
    options.terminate()
    with pytest.raises(NativeError, match="terminate"):
        bound.run(calls, options)


def test_calls_keep_what_they_use_alive() -> None:
    """They compute after all other references to the session and the binding are gone."""
    cell = Cell("LSTM", optional="B h c")
    feed = cell.feed(5, 1)
    bound = bind_cell(cell, feed)
    expected = bound.run()
    program = NativeProgram([[(RUN, 0, 0)]])
    frame = NativeFrame(program, [bound.session], [bound.binding], {0: NativeCalls(bound.session, bound.binding, 1)})
    del bound.session, bound.binding
    gc.collect()
    lanes = NativeLanes(program, [None])
    lanes.run(frame)
    lanes.close()
    for found, wanted in zip(bound.outputs.values(), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)


def stack(cell: str, layers: int = 4, steps: int = 12) -> Graph:
    """Return a stack of layers in chunks of three steps."""
    model = build_recurrent(RecurrentSpec(cell=cell, layers=layers, batch=2, io=20, seq=steps, chunk=steps))
    return unroll(load(model), 3)


@pytest.mark.parametrize("segments", [1, 2, 4])
@pytest.mark.parametrize("cell", ["LSTM", "GRU", "RNN"])
def test_plans_compute_the_same_with_and_without_calls(cell: str, segments: int) -> None:
    """Segments of one, two and four layers; requests with run options run on lane threads, without calls."""
    graph = stack(cell)
    recurrent = [i for i, kind in enumerate(graph.dag.op_types) if kind == cell]
    at = {i: number for number, i in enumerate(recurrent)}  # layer by layer, four chunks each
    owner = {s: p for p in recurrent for s in graph.dag.successors[p] if graph.dag.op_types[s] == "Squeeze"}
    lanes = []
    for i in range(len(graph.dag)):
        number = at.get(owner.get(i, i), 0)
        lanes.append(1 + (number // 4 // segments + number % 4) % 2)
    plan = replace(fixed_plan(graph, lanes), native=tuple(graph.dag.names[i] for i in recurrent))
    random = np.random.default_rng(0)
    feeds = [{"X": random.standard_normal(graph.inputs[0].shape).astype(np.float32)} for _ in range(4)]
    with HybridSession(graph, plan=plan, strict=True) as session:
        expected = [session.run(None, feed, ort.RunOptions()) for feed in feeds]

        def call(caller: int) -> None:
            for _ in range(5):
                for found, wanted in zip(session.run(None, feeds[caller]), expected[caller], strict=True):
                    np.testing.assert_array_equal(found, wanted)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(call, range(4)))
    plain = run_plain(build_recurrent(RecurrentSpec(cell=cell, layers=4, batch=2, io=20, seq=12, chunk=12)), feeds[0])
    for found, wanted in zip(expected[0], plain, strict=True):
        np.testing.assert_allclose(found, wanted, atol=2e-6)


@pytest.mark.parametrize("axes", [[1], [-3], [0], None])
@pytest.mark.parametrize("others", ["none", "a reader", "an output"])
@pytest.mark.parametrize("opset", [11, 17])
def test_the_axis_of_directions_is_removed_by_the_operator(opset: int, others: str, axes: list[int] | None) -> None:
    """If only one Squeeze of this axis reads Y; the model computes the same in any case."""
    cell = Cell("GRU", outputs=(True, True, False))
    model = cell.model()
    model.opset_import[0].version = opset
    given = {"axes": axes} if axes and opset < 13 else {}
    weights = [onnx.numpy_helper.from_array(np.array(axes), "axes")] if axes and opset >= 13 else []
    model.graph.initializer.extend(weights)
    model.graph.node.append(node("Squeeze", ["Y", *(w.name for w in weights)], ["y"], "squeeze", **given))
    if others == "a reader":
        model.graph.node.append(node("Relu", ["Y"], ["other"], "relu"))
    del model.graph.output[:]
    names = ["y", "Y_h", *{"none": [], "a reader": ["other"], "an output": ["Y"]}[others]]
    model.graph.output.extend(value(name, FLOAT, None) for name in names)
    feed = cell.feed(1, 2)
    native = with_native_operators(model)
    assert any(n.op_type == "Squeeze" for n in native.graph.node) == (others != "none" or axes not in ([1], [-3]))
    for found, wanted in zip(run_model(native, feed), run_plain(model, feed), strict=True):
        assert found.shape == wanted.shape
        np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_native_operators_that_were_there_before_are_kept() -> None:
    """Another rewrite of a model changes neither the model nor the native operators that it has."""
    model = Cell("GRU").model()
    other = onnx.NodeProto()
    other.CopyFrom(model.graph.node[0])
    other.name = "other"
    other.output[:] = ["other Y"]
    native = with_native_operators(model)
    native.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1]), "axes"))
    native.graph.node.extend([node("Squeeze", ["Y", "axes"], ["y"], "squeeze"), other])
    del native.graph.output[:]
    native.graph.output.extend(value(name, FLOAT, None) for name in ("y", "other Y"))
    before = native.SerializeToString(deterministic=True)
    again = with_native_operators(native)
    assert native.SerializeToString(deterministic=True) == before
    assert [n.op_type for n in again.graph.node] == ["Recurrent", "Squeeze", "Recurrent"]
