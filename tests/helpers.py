"""Small models, plans that force a placement, and comparisons with plain onnxruntime."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from chrion import Graph, HybridSession, load
from chrion.profiler import Machine
from chrion.scheduler import fixed_plan
from chrion.zoo import build

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
MACHINE = Machine("a CPU", 2, 1000.0, "a system", "1.0")
Feed = Mapping[str, Any]
value = helper.make_tensor_value_info
node = helper.make_node


def make_model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    weights: Mapping[str, np.ndarray[Any, Any]] | None = None,
    *,
    opset: int = 17,
    **rest: Any,
) -> onnx.ModelProto:
    """Build a model of opset 17 by default; ``rest`` is passed to ``onnx.helper.make_model``."""
    initializers = [onnx.numpy_helper.from_array(array, name) for name, array in (weights or {}).items()]
    graph = helper.make_graph(list(nodes), "tiny", list(inputs), list(outputs), initializers)
    domains = [helper.make_opsetid(d, 1) for d in {f.domain for f in rest.get("functions", ())}]
    opsets = [helper.make_opsetid("", opset), *domains]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9, **rest)


def branches(*, size: int = 4) -> onnx.ModelProto:
    """Build two branches that join: ``y = relu(x) @ w + (-x) @ w`` with a shared weight; ``l`` is the left product."""
    w = np.linspace(-1, 1, size * size, dtype=np.float32).reshape(size, size)
    nodes = [
        node("Relu", ["x"], ["a"], name="left"),
        node("MatMul", ["a", "w"], ["l"], name="left_product"),
        node("Neg", ["x"], ["b"], name="right"),
        node("MatMul", ["b", "w"], ["r"], name="right_product"),
        node("Add", ["l", "r"], ["y"], name="sum"),
    ]
    shape = [2, size]
    return make_model(nodes, [value("x", FLOAT, shape)], [value("y", FLOAT, shape), value("l", FLOAT, shape)], {"w": w})


def free_branches(*, size: int = 4) -> onnx.ModelProto:
    """Build the model of :func:`branches` with a symbolic first dimension ``batch``."""
    model = branches(size=size)
    for info in (*model.graph.input, *model.graph.output):
        info.type.tensor_type.shape.dim[0].dim_param = "batch"
    return model


def conditional() -> onnx.ModelProto:
    """Build ``y = -relu(x)`` or ``|relu(x)|`` by an If whose branches read a value of the graph around them."""
    result = value("b", FLOAT, [2])
    arms = {
        f"{name}_branch": helper.make_graph([node(op, ["r"], ["b"])], name, [], [result])
        for name, op in (("then", "Neg"), ("else", "Abs"))
    }
    nodes = [node("Relu", ["x"], ["r"]), node("If", ["flag"], ["y"], name="if", **arms)]
    return make_model(nodes, [value("x", FLOAT, [2]), value("flag", BOOL, [])], [value("y", FLOAT, [2])])


def alternating_lanes(graph: Graph) -> list[int]:
    """Assign lanes 1 and 2 alternately along a topological order."""
    lanes = [0] * len(graph.dag)
    for at, i in enumerate(graph.dag.topological_order):
        lanes[i] = 1 + at % 2
    return lanes


def cut_session(model: onnx.ModelProto | Graph | str, **shapes: tuple[int, ...]) -> HybridSession:
    """Return a session whose operators alternate between two lanes."""
    graph = model if isinstance(model, Graph) else load(model, shapes)
    return HybridSession(graph, plan=fixed_plan(graph, alternating_lanes(graph)))


def run_plain(model: onnx.ModelProto | str, feed: Feed, names: Sequence[str] | None = None) -> list[Any]:
    """Run a model with plain onnxruntime on one thread and return its outputs."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    source = model if isinstance(model, str) else model.SerializeToString()
    session = ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    return list(session.run(names, feed))


def assert_equal(ours: Sequence[Any], theirs: Sequence[Any]) -> None:
    """Assert equal types and shapes, and equal values within float tolerance."""
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        if isinstance(b, list):
            assert_equal(a, b)
            continue
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        if np.array_equal(a, b):
            continue  # quickly, in most cases
        if b.dtype.kind == "f":
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
        else:
            np.testing.assert_array_equal(a, b)


def assert_same_as_plain(session: HybridSession, model: onnx.ModelProto | str, feed: Feed) -> None:
    """Assert that a session returns the outputs of plain onnxruntime."""
    assert_equal(session.run(None, feed), run_plain(model, feed))


@dataclass
class FakeClock:
    """A clock that tests advance."""

    now_s: float = 0.0

    def __call__(self) -> float:
        """Return the time in seconds."""
        return self.now_s


class FakeInterferenceMonitor:
    """A monitor of cores with interference at the given checks only, counted from 0."""

    def __init__(self, interference_at: Sequence[int] = ()) -> None:
        self.checks = 0
        self._interference_at = interference_at

    def wait(self) -> bool:
        """Return immediately."""
        return True

    def has_interference(self) -> bool:
        """Return whether this check is one of those with interference."""
        self.checks += 1
        return self.checks - 1 in self._interference_at


@functools.cache
def smallest_graph() -> Graph:
    """Return a graph of one LSTM cell, for tests that need any graph."""
    return load(build("lstm", {"layers": 1, "seq": 1, "batch": 1, "io": 2}))


def tasks() -> list[int]:
    """Return the numbers of all threads of this process."""
    folder = Path("/proc/self/task")
    return [int(path.name) for path in folder.iterdir()] if folder.is_dir() else []


def lanes(except_of: Iterable[int] = ()) -> dict[int, str]:
    """Return the lane threads that are alive, native or of Python, but for some: their names by number."""
    found = {thread.native_id or 0: thread.name for thread in threading.enumerate()}
    for task in {*tasks()} - {*except_of}:
        with contextlib.suppress(OSError):  # the thread has just ended
            found.setdefault(task, Path(f"/proc/self/task/{task}/comm").read_text().strip())
    return {n: name for n, name in found.items() if name.startswith("chrion-lane-") and n not in except_of}


def lane_threads() -> list[str]:
    """Return the names of the lane threads that are alive."""
    return list(lanes().values())


def remaining_lane_threads() -> list[str]:
    """Wait up to ten seconds for lane threads to end, and return the names of those that remain."""
    end = time.monotonic() + 10
    while (found := lane_threads()) and time.monotonic() < end:
        time.sleep(0.01)
    return found
