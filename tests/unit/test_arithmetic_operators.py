"""Arithmetic operators as functions of arrays: against onnxruntime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from chrion.graph.rewrite import RewriteError
from chrion.pipelines.tail import find_tail, tail_after
from random_trees import run

X = np.random.default_rng(0).standard_normal((7, 4)).astype(np.float32)
W = np.random.default_rng(1).standard_normal((4, 3)).astype(np.float32)
ROW = np.array([0.5, -2, 1, 3], np.float32)
LABELS = {"classlabels_ints": [3, 5]}
ONE = {"coefficients": ROW.tolist(), "intercepts": [0.3]}
TWO = {"coefficients": [*ROW.tolist(), *(-ROW).tolist()], "intercepts": [0.3, 0.1]}
INTS = {name: np.array(value) for name, value in {"axis": [1], "shape": [0, 2, 2], "flat": [-1, 2]}.items()}
CASES: list[tuple[str, dict[str, Any], list[Any]]] = [
    ("Abs", {}, []), ("Neg", {}, []), ("Tanh", {}, []), ("Sigmoid", {}, []), ("Relu", {}, []), ("Exp", {}, []),
    ("Identity", {}, []), ("Softmax", {}, []), ("Softmax", {"axis": 0}, []), ("Cast", {"to": TensorProto.FLOAT}, []),
    ("Add", {}, [ROW]), ("Sub", {}, [ROW]), ("Mul", {}, [ROW]), ("Div", {}, [ROW]), ("Pow", {}, [np.float32(2)]),
    ("Max", {}, [ROW]), ("Min", {}, [ROW, np.float32(0.2)]), ("Clip", {}, [np.float32(-0.3), np.float32(0.4)]),
    ("Sum", {}, [ROW]), ("MatMul", {}, [W]),
    ("Gemm", {"alpha": -2.0, "beta": 0.5, "transB": 1}, [W.T.copy(), W[0]]), ("Gemm", {}, [W]),
    ("Transpose", {}, []), ("Transpose", {"perm": [1, 0]}, []), ("Flatten", {}, []), ("Flatten", {"axis": 0}, []),
    ("Unsqueeze", {}, [INTS["axis"]]), ("Reshape", {}, [INTS["shape"]]), ("Reshape", {}, [INTS["flat"]]),
    ("Gather", {"axis": 1}, [np.array([2, 0])]), ("Concat", {"axis": 1}, [X]),
    ("Slice", {}, [np.array([1]), np.array([2**62]), np.array([-1]), np.array([2])]),
    ("Slice", {}, [np.array([1, 0]), np.array([-1, 2])]),
    *((kind, {"keepdims": keep}, [INTS["axis"]]) for keep in (0, 1) for kind in (
        "ReduceL1", "ReduceL2", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceSum", "ReduceSumSquare")),
    ("ReduceSum", {}, []), ("ReduceSum", {"noop_with_empty_axes": 1}, []),
    ("Scaler", {"offset": ROW.tolist(), "scale": [2.0, 1.0, 0.5, 3.0]}, []),
    ("Scaler", {"offset": [1.0], "scale": [2.0]}, []),
    ("Imputer", {"imputed_value_floats": ROW.tolist(), "replaced_value_float": float("nan")}, []),
    ("Imputer", {"imputed_value_floats": [7.0], "replaced_value_float": 0.0}, []),
    ("LpNormalization", {"axis": 0, "p": 1}, []), ("LpNormalization", {}, []),
    ("Normalizer", {"norm": "L1"}, []), ("Normalizer", {"norm": "L2"}, []),
    ("ArrayFeatureExtractor", {}, [np.array([1, 3])]),
    ("LinearRegressor", {**ONE, "targets": 1}, []), ("LinearRegressor", {**TWO, "targets": 2}, []),
    ("LinearRegressor", {"coefficients": ROW.tolist()}, []),
    *(("LinearClassifier", {**own, **LABELS, "post_transform": link}, [])
      for own, link in ((ONE, "LOGISTIC"), (TWO, "NONE"), (TWO, "LOGISTIC"), (TWO, "SOFTMAX"))),
]  # fmt: skip
CLASSICAL = {"ArrayFeatureExtractor", "Imputer", "LinearClassifier", "LinearRegressor", "Normalizer", "Scaler"}


def model_of(kind: str, given: dict[str, Any], constants: list[Any]) -> onnx.ModelProto:
    """Return a model of one operator after features."""
    names = [f"c{at}" for at in range(len(constants))]
    outputs = ["label", "y"] if kind == "LinearClassifier" else ["y"]
    node = helper.make_node(kind, ["x", *names], outputs, domain="ai.onnx.ml" if kind in CLASSICAL else "", **given)
    weights = [numpy_helper.from_array(np.asarray(own), name) for own, name in zip(constants, names, strict=True)]
    source = helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, 4])
    graph = helper.make_graph(
        [node], "g", [source], [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)], weights
    )
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 18), helper.make_opsetid("ai.onnx.ml", 3)], ir_version=8
    )


@pytest.mark.parametrize(("kind", "given", "constants"), CASES)
def test_operators_are_those_of_onnxruntime(kind: str, given: dict[str, Any], constants: list[Any]) -> None:
    """Results have the same shape and the same numbers."""
    model, x = model_of(kind, given, constants), X.copy()
    x[2, 1], x[3, 2] = (np.nan if np.isnan(given.get("replaced_value_float", 0.0)) else 0), 0
    expected = run(model, {"x": x})[0]
    found = tail_after(model, "x").values(np, {}, x)["y"]
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("kind", "given", "constants"),
    [
        ("Sin", {}, []),
        ("Cast", {"to": TensorProto.INT64}, []),
        ("LinearClassifier", {**TWO, **LABELS, "post_transform": "PROBIT"}, []),
        ("LinearClassifier", {**ONE, **LABELS, "post_transform": "SOFTMAX"}, []),
    ],
)
def test_other_operators_are_refused_by_name(kind: str, given: dict[str, Any], constants: list[Any]) -> None:
    """The message begins with the operator."""
    model = model_of(kind, given, constants)
    for find in (lambda: tail_after(model, "x"), lambda: find_tail(model, lambda _: True)):
        with pytest.raises(RewriteError, match=f"^{kind} '.*is not differentiable"):
            find()


def test_weights_are_told_from_constants_of_operators() -> None:
    """Exponents, bounds and factors stay; matrices, offsets and attributes are weights."""
    cases: list[tuple[str, Any, bool]] = [
        ("Pow", [ROW], False), ("Mul", [np.float32(0.5)], False), ("Clip", [np.float32(0)], False),
        ("Mul", [ROW], True), ("Add", [np.float32(0.5)], True), ("Sub", [np.float32(0.5)], True), ("MatMul", [W], True),
    ]  # fmt: skip
    for kind, constants, expected in cases:
        assert bool(tail_after(model_of(kind, {}, constants), "x").weights) == expected, kind
    assert [*tail_after(model_of("LinearRegressor", ONE, []), "x").weights] == ["y/coefficients", "y/intercepts"]


def test_a_weight_that_other_operators_read_stays() -> None:
    """A matrix that the features, a label or a body are made with is fixed; one of the scores alone is trained."""
    body = "f = Mul(x, s) r = Round(f) a = Mul(r, s) b = Add(a, t) p = MatMul(b, w) l = Greater(p, u)"
    head = '<ir_version: 8, opset_import: ["": 18]>'
    model = onnx.parser.parse_model(f"{head} g (float[N, 4] x) => (bool[N, 3] l, float[N, 3] p) {{ {body} }}")
    for name, value in {"s": ROW, "t": ROW, "u": W[0], "w": W}.items():
        model.graph.initializer.append(numpy_helper.from_array(value, name))
    assert [*tail_after(model, "r").weights] == ["t", "w"]
    then = helper.make_graph([helper.make_node("Identity", ["t"], ["o"])], "then", [], [
        helper.make_tensor_value_info("o", TensorProto.FLOAT, [4])])  # fmt: skip
    model.graph.node.append(helper.make_node("If", ["c"], ["q"], then_branch=then, else_branch=then))
    assert [*tail_after(model, "r").weights] == ["w"]
