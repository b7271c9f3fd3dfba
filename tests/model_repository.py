"""Model repositories for tests of the server."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

#: Element types of ONNX by the protocol's datatypes.
ELEMENTS = {
    "BOOL": TensorProto.BOOL,
    "UINT8": TensorProto.UINT8,
    "UINT16": TensorProto.UINT16,
    "UINT32": TensorProto.UINT32,
    "UINT64": TensorProto.UINT64,
    "INT8": TensorProto.INT8,
    "INT16": TensorProto.INT16,
    "INT32": TensorProto.INT32,
    "INT64": TensorProto.INT64,
    "FP16": TensorProto.FLOAT16,
    "FP32": TensorProto.FLOAT,
    "FP64": TensorProto.DOUBLE,
    "BF16": TensorProto.BFLOAT16,
    "BYTES": TensorProto.STRING,
}


def identity(datatype: str) -> onnx.ModelProto:
    """Build ``y = x`` for one datatype and any shape with two dimensions."""
    kind = ELEMENTS[datatype]
    infos = [helper.make_tensor_value_info(name, kind, ["n", "m"]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "identity", infos[:1], infos[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def product(side: int = 4, seed: int = 0, *, layers: int = 1) -> onnx.ModelProto:
    """Build ``y = x w ... w`` with rows of ``side`` numbers."""
    weight = np.random.default_rng(seed).standard_normal((side, side), np.float32) / side
    names = ["x", *(f"h{i}" for i in range(layers - 1)), "y"]
    nodes = [helper.make_node("MatMul", [names[i], "w"], [names[i + 1]]) for i in range(layers)]
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", side]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "product", infos[:1], infos[1:], [numpy_helper.from_array(weight, "w")])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def columns() -> onnx.ModelProto:
    """Build a pipeline as converters make it: one input a column, texts and numbers, to a label and probabilities.

    Flights from Oslo are late; others are in time up to a distance of 1, and above it late with a probability of 0.75.
    """
    leaves = {2: (0.0, 1.0), 3: (1.0, 0.0), 4: (0.25, 0.75)}
    trees = helper.make_node(
        "TreeEnsembleClassifier", ["features"], ["label", "probabilities"], domain="ai.onnx.ml",
        nodes_treeids=[0] * 5, nodes_nodeids=[*range(5)], nodes_featureids=[0, 2, 0, 0, 0],
        nodes_modes=["BRANCH_LEQ"] * 2 + ["LEAF"] * 3, nodes_values=[0.5, 1.0, 0.0, 0.0, 0.0],
        nodes_truenodeids=[1, 3, 0, 0, 0], nodes_falsenodeids=[2, 4, 0, 0, 0],
        class_treeids=[0] * 6, class_nodeids=[leaf for leaf in leaves for _ in range(2)], class_ids=[0, 1] * 3,
        class_weights=[weight for own in leaves.values() for weight in own],
        classlabels_strings=["in time", "late"], post_transform="NONE",
    )  # fmt: skip
    nodes = [
        helper.make_node(
            "OneHotEncoder", ["city"], ["hot"], domain="ai.onnx.ml", cats_strings=["Oslo", "Rome"], zeros=1
        ),
        helper.make_node("Reshape", ["hot", "flat"], ["cities"]),
        helper.make_node("Concat", ["cities", "distance"], ["features"], axis=1),
        trees,
    ]
    kinds = {"city": TensorProto.STRING, "distance": TensorProto.FLOAT, "label": TensorProto.STRING}
    infos = {
        name: helper.make_tensor_value_info(name, kind, ["rows", 1][: 1 + (name != "label")])
        for name, kind in kinds.items()
    }
    outputs = [infos["label"], helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, ["rows", 2])]
    flat = numpy_helper.from_array(np.array([-1, 2]), "flat")
    graph = helper.make_graph(nodes, "columns", [infos["city"], infos["distance"]], outputs, [flat])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def counting() -> onnx.ModelProto:
    """Build ``y = x`` by counting to x one by one, which ends when the test wants if x is large."""
    one = numpy_helper.from_array(np.ones(1, np.float32), "one")
    flags = [helper.make_tensor_value_info(name, TensorProto.BOOL, []) for name in ("condition", "go_on")]
    counts = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n"]) for name in ("count", "next", "x", "y")]
    body = helper.make_graph(
        [helper.make_node("Identity", ["condition"], ["go_on"]), helper.make_node("Add", ["count", "one"], ["next"])],
        "body",
        [helper.make_tensor_value_info("i", TensorProto.INT64, []), flags[0], counts[0]],
        [flags[1], counts[1]],
    )
    nodes = [
        helper.make_node("ReduceMax", ["x"], ["most"], keepdims=0),
        helper.make_node("Cast", ["most"], ["rounds"], to=TensorProto.INT64),
        helper.make_node("Sub", ["x", "x"], ["zero"]),
        helper.make_node("Loop", ["rounds", "", "zero"], ["y"], body=body),
    ]
    graph = helper.make_graph(nodes, "counting", [counts[2]], [counts[3]], [one])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def put(root: Path, name: str, model: onnx.ModelProto | bytes, version: int = 1, toml: str = "") -> Path:
    """Put a model into a repository; return its file."""
    file = root / name / str(version) / "model.onnx"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(model if isinstance(model, bytes) else model.SerializeToString())
    if toml:
        (root / name / "model.toml").write_text(toml, encoding="utf-8")
    return file


def put_all(root: Path) -> Path:
    """Put a model of each datatype, two versions of a product, and a bad model into a repository; return it."""
    for datatype in ELEMENTS:
        put(root, f"identity-{datatype}", identity(datatype))
    put(root, "product", product(seed=1))
    put(root, "product", product(seed=2), version=2)
    put(root, "bad", b"not a model")
    return root
