"""Random tree ensembles, as nodes of each operator that holds them, and onnxruntime's results for them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from chrion.graph.trees import Rule, TreeEnsemble, write_ensemble

#: The versions of ``ai.onnx.ml`` by operator.
VERSIONS = {"TreeEnsembleRegressor": 3, "TreeEnsembleClassifier": 3, "TreeEnsemble": 5}
FEATURES = 5
_TYPES = {
    np.float32: TensorProto.FLOAT,
    np.float64: TensorProto.DOUBLE,
    np.int64: TensorProto.INT64,
    np.int32: TensorProto.INT32,
}


def random_ensemble(
    rng: random.Random, kind: str, *, trees: int, depth: int, targets: int, dtype: Any = np.float32
) -> TreeEnsemble:
    """Return an ensemble of random trees, in which thresholds are often equal to values of :func:`random_rows`."""
    features, rules, thresholds, true, false, missing = ([] for _ in range(6))
    entries: list[tuple[int, int, float]] = []
    members: dict[int, Any] = {}
    leaves = 0
    own_rules = [rule for rule in Rule if rule != Rule.MEMBER or kind == "TreeEnsemble"]
    own_rules = rng.choice([own_rules, [Rule.LEQ], [Rule.LT], [Rule.LEQ, Rule.EQ]])
    with_missing = rng.random() < 0.4
    one_target = rng.random() < 0.5 or kind == "TreeEnsemble"
    positive = rng.random() < 0.5

    def grow(level: int, target: int) -> int:
        nonlocal leaves
        if level == depth or rng.random() < 0.2:
            leaf, leaves = leaves, leaves + 1
            own = [target] if one_target else range(targets)
            entries.extend((leaf, at, rng.random() if positive else rng.uniform(-1, 1)) for at in own)
            return ~leaf
        node = len(features)
        rule = rng.choice(own_rules)
        threshold = rng.choice([rng.uniform(-3, 3), float(rng.randint(-3, 3)), 0.0, -0.0])
        for column, value in zip(
            (features, rules, thresholds, missing),
            (rng.randrange(FEATURES), rule, threshold, with_missing and rng.random() < 0.5),
            strict=True,
        ):
            column.append(value)
        true.append(0)
        false.append(0)
        if rule == Rule.MEMBER:
            members[node] = np.array(rng.sample(range(-3, 4), rng.randint(1, 4)), dtype)
        true[node], false[node] = grow(level + 1, target), grow(level + 1, target)
        return node

    roots = [grow(0, tree % targets) for tree in range(trees)]
    classifier = kind == "TreeEnsembleClassifier"
    sizes = [0] if kind == "TreeEnsemble" else [0, 1] if classifier and targets == 2 else [0, targets]
    transforms = ["NONE", "LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO"]
    labels: Any = [*range(targets)] if rng.random() < 0.5 else [f"class {at}" for at in range(targets)]
    leaf, target, weight = (list(column) for column in zip(*entries, strict=True))
    if classifier and targets == 2 and one_target and rng.random() < 0.5:
        target = [rng.choice([0, 1])] * len(target)  # all weights are for one class
    return TreeEnsemble(
        roots=np.array(roots),
        features=np.array(features, np.int64),
        rules=np.array(rules, np.uint8),
        thresholds=np.array(thresholds, np.float32).astype(dtype),
        true=np.array(true, np.int64),
        false=np.array(false, np.int64),
        missing_true=np.array(missing, bool),
        members=members,
        leaf_count=leaves,
        entry_leaves=np.array(leaf),
        entry_targets=np.array(target),
        entry_weights=np.array(weight, np.float32).astype(dtype),
        targets=targets,
        base=np.array([rng.uniform(-1, 1) for _ in range(rng.choice(sizes))], np.float32).astype(dtype),
        aggregate="SUM" if classifier else rng.choice(["SUM", "AVERAGE", "MIN", "MAX"]),
        transform=rng.choice(transforms),
        labels=tuple(labels) if classifier else None,
        dtype=np.dtype(dtype),
    )


def random_rows(rng: random.Random, rows: int, dtype: Any = np.float32) -> Any:
    """Return rows with values that are equal to thresholds, and with NaN and infinities."""
    values = [
        [
            rng.choice(
                [rng.uniform(-3, 3), float(rng.randint(-3, 3)), rng.choice([0.0, -0.0, np.nan, np.inf, -np.inf])]
            )
            for _ in range(FEATURES)
        ]
        for _ in range(rows)
    ]
    array = np.array(values, np.float32)
    return (
        np.nan_to_num(array, posinf=9, neginf=-9).astype(dtype)
        if np.issubdtype(dtype, np.integer)
        else array.astype(dtype)
    )


def tree_model(ensemble: TreeEnsemble, kind: str, dtype: Any = np.float32, opset: int = 18) -> onnx.ModelProto:
    """Return a model of one node of this type, written by Chrion."""
    classifier = kind == "TreeEnsembleClassifier"
    node = helper.make_node(
        kind, ["x"], ["label", "scores"] if classifier else ["scores"], "trees", domain="ai.onnx.ml"
    )
    return model_of(
        write_ensemble(ensemble, node), dtype, texts=classifier and isinstance(ensemble.labels[0], str), opset=opset
    )


def model_of(node: onnx.NodeProto, dtype: Any = np.float32, *, texts: bool = False, opset: int = 18) -> onnx.ModelProto:
    """Return a model of one node."""
    double = dtype is np.float64 and node.op_type == "TreeEnsemble"
    outputs = [
        helper.make_tensor_value_info(node.output[-1], TensorProto.DOUBLE if double else TensorProto.FLOAT, None)
    ]
    if len(node.output) > 1:
        kind = TensorProto.STRING if texts else TensorProto.INT64
        outputs.insert(0, helper.make_tensor_value_info(node.output[0], kind, None))
    source = helper.make_tensor_value_info("x", _TYPES[dtype], ["rows", FEATURES])
    graph = helper.make_graph([node], "trees", [source], outputs)
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("ai.onnx.ml", VERSIONS[node.op_type])]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def run(model: onnx.ModelProto | bytes, feeds: dict[str, Any]) -> list[Any]:
    """Return onnxruntime's outputs of a model, on one thread."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    content = model if isinstance(model, bytes) else model.SerializeToString()
    return list(ort.InferenceSession(content, options, providers=["CPUExecutionProvider"]).run(None, feeds))
