"""Arithmetic operators as functions of arrays: against onnxruntime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from chrion.graph.rewrite import RewriteError
from chrion.pipelines.tail import Source, find_tail, tail_after
from random_trees import run

X = np.random.default_rng(0).standard_normal((7, 4)).astype(np.float32)
W = np.random.default_rng(1).standard_normal((4, 3)).astype(np.float32)
ROW = np.array([0.5, -2, 1, 3], np.float32)
LABELS = {"classlabels_ints": [3, 5]}
ONE = {"coefficients": ROW.tolist(), "intercepts": [0.3]}
TWO = {"coefficients": [*ROW.tolist(), *(-ROW).tolist()], "intercepts": [0.3, 0.1]}
VECTORS = np.random.default_rng(2).standard_normal(5 * 4).astype(np.float32).tolist()
KERNELS = {"LINEAR": [0.0, 0.0, 0.0], "POLY": [0.3, 1.0, 3.0], "RBF": [0.4, 0.0, 0.0], "SIGMOID": [0.2, -0.5, 0.0]}
MACHINE = {"support_vectors": VECTORS, "kernel_params": [0.4, 0.0, 0.0], "kernel_type": "RBF"}
#: Support vectors of two and of three classes; slopes and offsets of their probabilities.
OF_TWO = {"coefficients": VECTORS[:5], "rho": [0.3], "vectors_per_class": [2, 3], "classlabels_ints": [3, 5]}
OF_THREE = {"coefficients": VECTORS[:10], "rho": [0.3, -0.2, 0.1], "vectors_per_class": [2, 1, 2],
            "classlabels_ints": [3, 5, 8]}  # fmt: skip
PLATT = {"prob_a": [-1.5, -2.0, -0.7], "prob_b": [0.2, 0.0, -0.4]}
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
    *(("SVMRegressor", {"support_vectors": VECTORS, "coefficients": VECTORS[:5], "rho": [0.3], "n_supports": 5,
                        "kernel_type": kind, "kernel_params": given}, []) for kind, given in KERNELS.items()),
    ("SVMRegressor", {"coefficients": ROW.tolist(), "rho": [0.3], "kernel_params": [0.0, 0.0, 0.0]}, []),
    ("SVMClassifier", {**MACHINE, **OF_TWO}, []), ("SVMClassifier", {**MACHINE, **OF_THREE}, []),
    ("SVMClassifier", {**MACHINE, **OF_TWO, **{name: own[:1] for name, own in PLATT.items()}}, []),
    ("SVMClassifier", {**MACHINE, **OF_THREE, **PLATT}, []),
    *(("SVMClassifier", {"coefficients": VECTORS[:8], "rho": [0.3], "kernel_params": [0.0, 0.0, 0.0], **LABELS,
                         "post_transform": link}, []) for link in ("NONE", "LOGISTIC", "SOFTMAX")),
]  # fmt: skip
CLASSICAL = {"ArrayFeatureExtractor", "Imputer", "LinearClassifier", "LinearRegressor", "Normalizer", "Scaler",
             "SVMClassifier", "SVMRegressor"}  # fmt: skip


def model_of(kind: str, given: dict[str, Any], constants: list[Any]) -> onnx.ModelProto:
    """Return a model of one operator after features."""
    names = [f"c{at}" for at in range(len(constants))]
    outputs = ["label", "y"] if kind.endswith("Classifier") else ["y"]
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
    found = tail_after(model, [Source("x")]).values(np, {}, x)["y"]
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("kind", "given", "constants"),
    [
        ("Sin", {}, []),
        ("Cast", {"to": TensorProto.INT64}, []),
        ("LinearClassifier", {**TWO, **LABELS, "post_transform": "PROBIT"}, []),
        ("LinearClassifier", {**ONE, **LABELS, "post_transform": "SOFTMAX"}, []),
        ("SVMClassifier", {**MACHINE, **OF_THREE, **PLATT, "post_transform": "SOFTMAX"}, []),
        (
            "SVMRegressor",
            {"coefficients": ROW.tolist(), "rho": [0.3], "kernel_params": [0.0, 0.0, 0.0], "one_class": 1},
            [],
        ),
    ],
)
def test_other_operators_are_refused_by_name(kind: str, given: dict[str, Any], constants: list[Any]) -> None:
    """The message begins with the operator."""
    model = model_of(kind, given, constants)
    for find in (
        lambda: tail_after(model, [Source("x")]),
        lambda: find_tail(model, lambda _: ("tensor(float)", ["N", 4])),
    ):
        with pytest.raises(RewriteError, match=f"^{kind} '.*is not differentiable"):
            find()


def test_weights_are_told_from_constants_of_operators() -> None:
    """Exponents, bounds and factors stay; matrices, offsets and attributes are weights."""
    cases: list[tuple[str, Any, bool]] = [
        ("Pow", [ROW], False), ("Mul", [np.float32(0.5)], False), ("Clip", [np.float32(0)], False),
        ("Mul", [ROW], True), ("Add", [np.float32(0.5)], True), ("Sub", [np.float32(0.5)], True), ("MatMul", [W], True),
    ]  # fmt: skip
    for kind, constants, expected in cases:
        assert bool(tail_after(model_of(kind, {}, constants), [Source("x")]).weights) == expected, kind
    assert [*tail_after(model_of("LinearRegressor", ONE, []), [Source("x")]).weights] == [
        "y/coefficients",
        "y/intercepts",
    ]


def test_a_weight_that_other_operators_read_stays() -> None:
    """A matrix that the features, a label or a body are made with is fixed; one of the scores alone is trained."""
    body = "f = Mul(x, s) r = Round(f) a = Mul(r, s) b = Add(a, t) p = MatMul(b, w) l = Greater(p, u)"
    head = '<ir_version: 8, opset_import: ["": 18]>'
    model = onnx.parser.parse_model(f"{head} g (float[N, 4] x) => (bool[N, 3] l, float[N, 3] p) {{ {body} }}")
    for name, value in {"s": ROW, "t": ROW, "u": W[0], "w": W}.items():
        model.graph.initializer.append(numpy_helper.from_array(value, name))
    assert [*tail_after(model, [Source("r")]).weights] == ["t", "w"]
    then = helper.make_graph([helper.make_node("Identity", ["t"], ["o"])], "then", [], [
        helper.make_tensor_value_info("o", TensorProto.FLOAT, [4])])  # fmt: skip
    model.graph.node.append(helper.make_node("If", ["c"], ["q"], then_branch=then, else_branch=then))
    assert [*tail_after(model, [Source("r")]).weights] == ["w"]


def test_probabilities_of_many_classes_are_those_of_onnxruntime() -> None:
    """Votes of pairs are coupled to the same number of rounds, also where a class is certain."""
    rng = np.random.default_rng(3)
    for classes, size in ((4, 1.0), (12, 8.0)):
        pairs = classes * (classes - 1) // 2
        given = {"support_vectors": rng.standard_normal(classes * 4).tolist(), "kernel_type": "RBF",
                 "kernel_params": [0.1, 0.0, 0.0], "coefficients": (size * rng.standard_normal((classes - 1) * classes)
                 ).tolist(), "rho": rng.standard_normal(pairs).tolist(), "vectors_per_class": [1] * classes,
                 "classlabels_ints": [*range(classes)], "prob_a": (-size * rng.random(pairs)).tolist(),
                 "prob_b": rng.standard_normal(pairs).tolist()}  # fmt: skip
        x = rng.standard_normal((500, 4)).astype(np.float32)
        model = model_of("SVMClassifier", given, [])
        found = tail_after(model, [Source("x")]).values(np, {}, x)["y"]
        np.testing.assert_allclose(found, run(model, {"x": x})[0], atol=2e-5)
        np.testing.assert_allclose(found.sum(axis=1), 1, atol=1e-5)


def test_integers_that_look_up_weights_are_features() -> None:
    """Two tables and an offset are weights; a table of integers, and a column that is read otherwise, are not."""
    head = '<ir_version: 8, opset_import: ["": 18]>'
    model = onnx.parser.parse_model(
        f"{head} g (int64[N, 1] user, int64[N, 1] item, float[N, 1] age) => (float[N, 1] p) "
        "{ a = Gather(u, user) b = Gather(v, item) c = Mul(a, b) d = ReduceSum(c, axes) e = Squeeze(d, last)"
        " f = Gather(groups, item) h = Cast<to=1>(f) i = Add(e, h) j = Add(i, age) p = Add(j, k) }"
    )
    rng = np.random.default_rng(4)
    u, v = (rng.standard_normal((rows, 3)).astype(np.float32) for rows in (6, 9))
    for name, value in {"u": u, "v": v, "groups": np.arange(9), "axes": np.array([2]), "last": np.array([2]),
                        "k": np.float32([0.5])}.items():  # fmt: skip
        model.graph.initializer.append(numpy_helper.from_array(value, name))
    kinds = {"user": "tensor(int64)", "item": "tensor(int64)", "age": "tensor(float)"}
    tail = find_tail(model, lambda name: (kinds[name], ["N", 1]))
    assert {*tail.weights} == {"u", "v", "k"}
    assert tail.tables == {"u", "v"}
    assert [(own.name, own.looks_up) for own in tail.sources] == [("age", False), ("item", True), ("user", True)]
    feeds = {"user": rng.integers(-6, 6, (20, 1)), "item": rng.integers(0, 9, (20, 1)),
             "age": rng.standard_normal((20, 1)).astype(np.float32)}  # fmt: skip
    x = np.concatenate([feeds["age"], feeds["item"], feeds["user"]], axis=1).astype(np.float32)
    np.testing.assert_allclose(tail.values(np, {}, x)["p"], run(model, feeds)[0], atol=1e-6)
    with pytest.raises(RewriteError, match=r"scores depend on 'age', of type tensor\(float\) and shape \['N', None\]"):
        find_tail(model, lambda name: (kinds.get(name, "tensor(double)"), ["N", None if name == "age" else 1]))


def test_tables_that_features_look_up_are_constants() -> None:
    """A piece that is computed from a number looks up its coefficients: the weights are those after it."""
    head = '<ir_version: 8, opset_import: ["": 18]>'
    model = onnx.parser.parse_model(
        f"{head} g (float[N, 1] x) => (float[N, 1] p) {{ a = GreaterOrEqual(x, knots) b = Cast<to=7>(a) "
        "c = ReduceSum(b, axes) d = Gather(slopes, c) e = Mul(x, d) p = MatMul(e, w) }"
    )
    for name, value in {"knots": np.float32([[-1, 0, 1]]), "axes": np.array([1]), "slopes": np.float32([1, 2, 3, 4]),
                        "w": np.float32([[2]])}.items():  # fmt: skip
        model.graph.initializer.append(numpy_helper.from_array(value, name))
    tail = find_tail(model, lambda _: ("tensor(float)", ["N", 1]))
    assert ({*tail.weights}, tail.looks_up, [own.name for own in tail.sources]) == ({"w"}, False, ["e"])


def test_values_of_other_types_beside_integers_are_converted_before() -> None:
    """With a float64 number beside looked-up rows, the operators begin with the table that has both."""
    head = '<ir_version: 8, opset_import: ["": 18]>'
    model = onnx.parser.parse_model(
        f"{head} g (int64[N] user, double[N, 1] age) => (float[N, 1] p) "
        "{ a = Gather(u, user) b = Cast<to=1>(age) c = Concat<axis=1>(a, b) p = MatMul(c, w) }"
    )
    for name, value in {"u": X, "w": W[:, :1].repeat(2, axis=0)[:5]}.items():
        model.graph.initializer.append(numpy_helper.from_array(value, name))
    kinds = {"user": ("tensor(int64)", ["N"]), "age": ("tensor(double)", ["N", 1]), "c": ("tensor(float)", ["N", 5])}
    tail = find_tail(model, kinds.__getitem__)
    assert ({*tail.weights}, [own.name for own in tail.sources]) == ({"w"}, ["c"])
