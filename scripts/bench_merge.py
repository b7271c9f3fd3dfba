"""What merging siblings gains on one core: time of the merged operator and its split over that of the siblings.

``python scripts/bench_merge.py`` prints a table in half a minute. Times are processor time of one thread, the least of
many, in alternating turns; so other work on the machine changes them little.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

import chrion
from chrion import Graph
from chrion.graph.merge import merge_operators, mergeable_groups
from chrion.graph.ort_sessions import weights_folder_option
from chrion.profiler.measure import synthetic_inputs

_TURNS, _RUNS = 40, 5


def siblings(op_type: str, shape: Sequence[int], weights: Sequence[Sequence[int]]) -> onnx.ModelProto:
    """Operators of one type on one input, a weight each; convolutions keep the input's size."""
    random = np.random.default_rng(0)
    nodes, tensors = [], []
    for at, dims in enumerate(weights):
        tensors.append(numpy_helper.from_array(random.standard_normal(dims, dtype=np.float32), f"w{at}"))
        node = helper.make_node(op_type, ["x", f"w{at}"], [f"y{at}"], name=f"o{at}")
        if op_type == "Conv":
            node.attribute.append(helper.make_attribute("pads", [dims[-1] // 2] * 4))
        nodes.append(node)
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)]
    outputs = [helper.make_tensor_value_info(f"y{at}", TensorProto.FLOAT, None) for at in range(len(weights))]
    graph = helper.make_graph(nodes, "siblings", inputs, outputs, tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def session(graph: Graph) -> ort.InferenceSession:
    """A plain session of one thread."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    for key, value in weights_folder_option(graph.weights_folder).items():
        options.add_session_config_entry(key, value)
    return ort.InferenceSession(graph.model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def ratio(model: onnx.ModelProto) -> float:
    """Time merged over time apart."""
    graph = chrion.load(model)
    merged = merge_operators(graph, mergeable_groups(graph))
    feed = synthetic_inputs(graph)
    sessions = [session(graph), session(merged)]
    best = [float("inf")] * 2
    for _ in range(_TURNS):
        for at, rival in enumerate(sessions):
            before = time.thread_time()
            for _ in range(_RUNS):
                rival.run(None, feed)
            best[at] = min(best[at], time.thread_time() - before)
    return best[1] / best[0]


def main() -> None:
    """Print the table."""
    print("| siblings | merged over apart |\n| --- | ---: |")
    for rows in (1, 8, 128):
        for width in (64, 256, 768):
            model = siblings("MatMul", [rows, width], [[width, width]] * 3)
            print(f"| three MatMuls, {rows} x {width} | {ratio(model):.2f} |", flush=True)
    for channels, size, kernels in ((192, 28, (1, 1, 1)), (64, 14, (1, 1)), (64, 14, (1, 3)), (64, 14, (3, 5))):
        model = siblings("Conv", [1, channels, size, size], [[64, channels, k, k] for k in kernels])
        named = " and ".join(f"{k} x {k}" for k in kernels)
        print(f"| convolutions {named}, {channels} channels of {size} x {size} | {ratio(model):.2f} |", flush=True)


if __name__ == "__main__":
    main()
