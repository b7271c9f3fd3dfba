"""Models with the operators, names and shapes that the converter of ML.NET writes.

Every column of the data is an input, also the label, and returns as an output. Rows are a dimension of -1. Trees are a
regressor whatever is learnt; a calibrator and a binarizer follow in a classifier.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper

from helpers import node

ML = "ai.onnx.ml"
CITIES = ["Oslo", "Rome", "Bern"]
#: Inputs with their types; all are one column wide.
INPUTS = {"Label": TensorProto.FLOAT, "Distance": TensorProto.FLOAT, "City": TensorProto.STRING}


def regression(trees: int = 8, seed: int = 0) -> onnx.ModelProto:
    """Build a regression: a one-hot encoder of keys, a scaler, and trees on the concatenated columns."""
    return _model([*_features(), _trees("Score", trees, seed)], {"Score": TensorProto.FLOAT})


def binary() -> onnx.ModelProto:
    """Build a classifier of two classes: the same trees, calibrated by a sigmoid."""
    rest = [
        node("Mul", ["Score", "Slope"], ["MulNodeOutput"]),
        node("Add", ["MulNodeOutput", "Offset"], ["linearOutput"]),
        node("Sigmoid", ["linearOutput"], ["Probability"]),
        node("Binarizer", ["Score"], ["BinarizerOutput"], domain=ML, threshold=0.0),
        node("Cast", ["BinarizerOutput"], ["PredictedLabel"], to=TensorProto.BOOL),
    ]
    outputs = {"PredictedLabel": TensorProto.BOOL, "Score": TensorProto.FLOAT, "Probability": TensorProto.FLOAT}
    return _model([*_features(), _trees("Score", 8, 0), *rest], outputs, {"Slope": [0.4], "Offset": [0.1]})


def one_versus_all(classes: int = 3) -> onnx.ModelProto:
    """Build a classifier of several classes: calibrated trees for each of them."""
    nodes = _features()
    names = [f"score{at}" for at in range(classes)]
    for at, name in enumerate(names):
        nodes += [_trees(f"raw{at}", 4, at), node("Sigmoid", [f"raw{at}"], [name])]
    nodes += [
        node("Concat", names, ["concat"], axis=1),
        node("ReduceSum", ["concat"], ["sum"], axes=[1], keepdims=1),
        node("Div", ["concat", "sum"], ["Score"]),
        node("ArgMax", ["Score"], ["PredictedLabel"], axis=1, keepdims=1),
    ]
    return _model(nodes, {"PredictedLabel": TensorProto.INT64, "Score": TensorProto.FLOAT})


def _features() -> list[onnx.NodeProto]:
    """Return the operators from the columns to ``Features``, a distance and a one for each city."""
    keys = [*range(1, len(CITIES) + 1)]
    return [
        node("LabelEncoder", ["City"], ["Key"], domain=ML, keys_strings=CITIES, values_int64s=keys, default_int64=-1),
        node("Cast", ["Key"], ["City0"], to=TensorProto.UINT32),
        node("Cast", ["City0"], ["Key0"], to=TensorProto.INT64),
        node("OneHotEncoder", ["Key0"], ["encoded"], domain=ML, cats_int64s=keys, zeros=1),
        node("ReduceSum", ["encoded"], ["City1"], axes=[1], keepdims=0),
        node("Imputer", ["City1"], ["City2"], domain=ML, replaced_value_float=np.nan, imputed_value_floats=[0.0]),
        node("Scaler", ["Distance"], ["Distance0"], domain=ML, offset=[0.0], scale=[0.5]),
        node("FeatureVectorizer", ["Distance0", "City2"], ["Features"], domain=ML, inputdimensions=[1, len(CITIES)]),
    ]


def _trees(output: str, trees: int, seed: int) -> onnx.NodeProto:
    """Return trees of three comparisons, with the attributes in ML.NET's order."""
    rng = np.random.default_rng(seed)
    features = [at for _ in range(trees) for at in (0, *rng.integers(1, 1 + len(CITIES), 2).tolist(), 0, 0, 0, 0)]
    values = [at for _ in range(trees) for at in (float(rng.normal()), 0.5, 0.5, 0.0, 0.0, 0.0, 0.0)]
    return node(
        "TreeEnsembleRegressor", ["Features"], [output], domain=ML,
        post_transform="NONE", n_targets=1, base_values=[0.0], aggregate_function="SUM",
        nodes_treeids=np.repeat(np.arange(trees), 7).tolist(), nodes_nodeids=[*range(7)] * trees,
        nodes_featureids=features, nodes_modes=(["BRANCH_LEQ"] * 3 + ["LEAF"] * 4) * trees, nodes_values=values,
        nodes_truenodeids=[1, 3, 5, 0, 0, 0, 0] * trees, nodes_falsenodeids=[2, 4, 6, 0, 0, 0, 0] * trees,
        nodes_missing_value_tracks_true=[0] * 7 * trees,
        target_treeids=np.repeat(np.arange(trees), 4).tolist(), target_nodeids=[3, 4, 5, 6] * trees,
        target_ids=[0] * 4 * trees, target_weights=rng.normal(size=4 * trees).tolist(),
    )  # fmt: skip


def _model(
    nodes: list[onnx.NodeProto], outputs: Mapping[str, int], constants: Mapping[str, Sequence[float]] | None = None
) -> onnx.ModelProto:
    passed = {"Label": TensorProto.FLOAT, **outputs}
    nodes = [*nodes, *(node("Identity", [name], [f"{name}.output"]) for name in passed)]
    inputs = [helper.make_tensor_value_info(name, kind, [-1, 1]) for name, kind in INPUTS.items()]
    widths = {"Score": 3 if any(own.op_type == "ArgMax" for own in nodes) else 1}
    results = [
        helper.make_tensor_value_info(f"{name}.output", kind, [-1, widths.get(name, 1)])
        for name, kind in passed.items()
    ]
    weights = [helper.make_tensor(name, TensorProto.FLOAT, [], own) for name, own in (constants or {}).items()]
    graph = helper.make_graph(nodes, "model", inputs, results, weights)
    opsets = [helper.make_opsetid(ML, 2), helper.make_opsetid("", 11)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=6, producer_name="ML.NET")
