"""Measure the gain of merging sibling operators on one core: time of the merged operator and its Split over theirs.

    python scripts/bench_merge.py

Prints a table and writes no file; takes half a minute. Times are the minimum over many alternating rounds of one
thread's processor time, so that other work on the machine changes them little.
"""

from __future__ import annotations

import argparse
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
from chrion.profiler.synthetic_inputs import synthetic_inputs

_ROUNDS, _RUNS = 40, 5


def build_siblings(op_type: str, shape: Sequence[int], weights: Sequence[Sequence[int]]) -> onnx.ModelProto:
    """Build a model of operators of one type that read one input, with a weight each.

    Args:
        op_type: MatMul or Conv; convolutions are padded so that they keep the input's size.
        shape: Shape of the input.
        weights: Shape of each operator's weight.
    """
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


def create_session(graph: Graph) -> ort.InferenceSession:
    """Return a plain session with one thread."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    for key, value in weights_folder_option(graph.weights_folder).items():
        options.add_session_config_entry(key, value)
    return ort.InferenceSession(graph.model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def measure_ratio(model: onnx.ModelProto) -> float:
    """Return the time of the model with merged siblings over its time without."""
    graph = chrion.load(model)
    merged = merge_operators(graph, mergeable_groups(graph))
    feed = synthetic_inputs(graph)
    sessions = [create_session(graph), create_session(merged)]
    best = [float("inf")] * 2
    for _ in range(_ROUNDS):
        for at, session in enumerate(sessions):
            before = time.thread_time()
            for _ in range(_RUNS):
                session.run(None, feed)
            best[at] = min(best[at], time.thread_time() - before)
    return best[1] / best[0]


def main() -> None:
    """Print the table."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print("| siblings | time merged / time separate |\n| --- | ---: |")
    for rows in (1, 8, 128):
        for width in (64, 256, 768):
            model = build_siblings("MatMul", [rows, width], [[width, width]] * 3)
            print(f"| three MatMuls, {rows} x {width} | {measure_ratio(model):.2f} |", flush=True)
    for channels, size, kernels in ((192, 28, (1, 1, 1)), (64, 14, (1, 1)), (64, 14, (1, 3)), (64, 14, (3, 5))):
        model = build_siblings("Conv", [1, channels, size, size], [[64, channels, k, k] for k in kernels])
        label = f"convolutions {' and '.join(f'{k} x {k}' for k in kernels)}, {channels} channels of {size} x {size}"
        print(f"| {label} | {measure_ratio(model):.2f} |", flush=True)


if __name__ == "__main__":
    main()
