"""The operators of classical pipelines beside trees, on random fitted values: their formulas, on two lanes.

These are what ML.NET writes (CategoryMapper, FeatureVectorizer) and what converters of scikit-learn write. The expected
values are NumPy's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

import chrion
from helpers import alternating_lanes, node, value
from property_tests import examples

Array = np.ndarray[Any, Any]
SEEDS = st.integers(0, 2**32)
WORDS = ["", "Oslo", "Rome", "né", "7", "b c"]
ML = {"domain": "ai.onnx.ml"}


def classical(name: str, inputs: list[str], output: str, **attributes: Any) -> onnx.NodeProto:
    """Return a node of ``ai.onnx.ml``."""
    return node(name, inputs, [output], **ML, **attributes)


def on_two_lanes(
    nodes: list[onnx.NodeProto],
    feeds: dict[str, Array],
    outputs: dict[str, int],
    weights: dict[str, Array] | None = None,
) -> list[Array]:
    """Return the outputs of a model whose operators alternate between two lanes."""
    kinds = {"f": TensorProto.FLOAT, "i": TensorProto.INT64, "O": TensorProto.STRING}
    inputs = [value(name, kinds[array.dtype.kind], [*array.shape]) for name, array in feeds.items()]
    declared = [value(name, kind, None) for name, kind in outputs.items()]
    constants = [onnx.numpy_helper.from_array(array, name) for name, array in (weights or {}).items()]
    graph = helper.make_graph(nodes, "pipeline", inputs, declared, constants)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    loaded = chrion.load(helper.make_model(graph, opset_imports=opsets, ir_version=8))
    plan = chrion.scheduler.fixed_plan(loaded, alternating_lanes(loaded))
    with chrion.HybridSession(loaded, plan=plan, strict=True) as session:
        return list(session.run(None, feeds))


def floats(rng: np.random.Generator, *shape: int) -> Array:
    """Return random float32."""
    return rng.standard_normal(shape).astype(np.float32)


@given(seed=SEEDS)
@examples(60)
def test_encoders_and_scalers_have_the_values_of_their_formulas(seed: int) -> None:
    """Unseen texts, missing numbers, constant columns and single rows go through a pipeline as ML.NET writes them."""
    rng = np.random.default_rng(seed)
    rows, known = int(rng.choice([1, 2, 30])), int(rng.integers(1, len(WORDS)))
    words = rng.permutation(WORDS)[:known].tolist()
    feeds = {
        "city": rng.choice(np.array(WORDS, object), (rows, 1)),
        "a": np.where(rng.random((rows, 2)) < 0.3, np.nan, floats(rng, rows, 2)).astype(np.float32),
        "b": floats(rng, rows, 3),
    }
    filled, offset, scale = (floats(rng, size) for size in (2, 3, 3))
    scale[rng.random(3) < 0.3] = 0.0
    norm, threshold = rng.choice(["L1", "L2", "MAX"]), float(rng.choice([-0.5, 0.0, 0.3]))
    nodes = [
        classical(
            "CategoryMapper", ["city"], "code", cats_strings=words, cats_int64s=[*range(known)], default_int64=-1
        ),
        classical("OneHotEncoder", ["code"], "hot", cats_int64s=[*range(known)], zeros=1),
        node("Flatten", ["hot"], ["cities"]),
        classical("Imputer", ["a"], "whole", imputed_value_floats=filled.tolist(), replaced_value_float=float("nan")),
        classical("Scaler", ["b"], "scaled", offset=offset.tolist(), scale=scale.tolist()),
        classical("FeatureVectorizer", ["whole", "scaled"], "joined", inputdimensions=[2, 3]),
        classical("Normalizer", ["joined"], "normal", norm=str(norm)),
        classical("Binarizer", ["scaled"], "binary", threshold=threshold),
        node("Concat", ["cities", "normal", "binary"], ["every"], axis=1),
        classical("ArrayFeatureExtractor", ["every", "picked"], "some"),
        node("Constant", [], ["picked"], value=onnx.numpy_helper.from_array(np.array([known, 0]))),
    ]
    nodes = [nodes[-1], *nodes[:-1]]
    hot = (feeds["city"] == np.array(words, object)[None]).astype(np.float32)
    whole = np.where(np.isnan(feeds["a"]), filled, feeds["a"])
    scaled = (feeds["b"] - offset) * scale
    joined = np.hstack([whole, scaled])
    sizes = {"L1": np.abs(joined).sum(1), "L2": np.sqrt((joined**2).sum(1)), "MAX": joined.max(1)}[str(norm)]
    normal = joined / np.where(sizes == 0, 1, sizes)[:, None]
    every = np.hstack([hot, normal, (scaled > threshold).astype(np.float32)])
    found = on_two_lanes(nodes, feeds, {"every": TensorProto.FLOAT, "some": TensorProto.FLOAT})
    np.testing.assert_allclose(found[0], every, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found[1], every[:, [known, 0]], rtol=1e-4, atol=1e-5)


@given(seed=SEEDS)
@examples(60)
def test_linear_models_and_support_vectors_have_the_values_of_their_formulas(seed: int) -> None:
    """Scores of classes by softmax, labels that are texts, numbers, and a kernel of support vectors."""
    rng = np.random.default_rng(seed)
    rows, width, classes, vectors = int(rng.choice([1, 2, 30])), 4, int(rng.integers(2, 5)), int(rng.integers(1, 9))
    x = floats(rng, rows, width)
    weights, bias = floats(rng, classes, width), floats(rng, classes)
    line, rise = floats(rng, width), floats(rng, 1)
    supports, alpha, rho, gamma = floats(rng, vectors, width), floats(rng, vectors), floats(rng, 1), 0.3
    labels = [f"class {at}" for at in range(classes)]
    nodes = [
        node(
            "LinearClassifier", ["x"], ["label", "scores"], **ML, coefficients=weights.ravel().tolist(),
            intercepts=bias.tolist(), classlabels_strings=labels, multi_class=1, post_transform="SOFTMAX",
        ),
        classical("LinearRegressor", ["x"], "line", coefficients=line.tolist(), intercepts=rise.tolist(), targets=1),
        classical(
            "SVMRegressor", ["x"], "kernel", coefficients=alpha.tolist(), kernel_params=[gamma, 0.0, 3.0],
            kernel_type="RBF", n_supports=vectors, rho=rho.tolist(), support_vectors=supports.ravel().tolist(),
        ),
        node("Concat", ["scores", "line", "kernel"], ["y"], axis=1),
    ]  # fmt: skip
    raw = x @ weights.T + bias
    softmax = np.exp(raw - raw.max(1, keepdims=True))
    softmax /= softmax.sum(1, keepdims=True)
    distance = ((x[:, None] - supports[None]) ** 2).sum(2)
    kernel = np.exp(-gamma * distance) @ alpha + rho
    expected = np.hstack([softmax, (x @ line + rise)[:, None], kernel[:, None]])
    label, found = on_two_lanes(nodes, {"x": x}, {"label": TensorProto.STRING, "y": TensorProto.FLOAT})
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)
    sure = np.sort(raw, 1)[:, -1] - np.sort(raw, 1)[:, -2] > 1e-3
    assert [own for own, certain in zip(label.tolist(), sure, strict=True) if certain] == [
        labels[at] for at in raw.argmax(1)[sure]
    ]


@given(seed=SEEDS)
@examples(60)
def test_factorisations_have_the_values_of_their_formulas(seed: int) -> None:
    """A product of the factors of two texts, which may be unknown; and a machine that adds up all pairs of features."""
    rng = np.random.default_rng(seed)
    rows, known, width, factors = int(rng.choice([1, 2, 30])), int(rng.integers(1, 6)), 4, int(rng.integers(1, 9))
    feeds: dict[str, Array] = {"z": floats(rng, rows, width) * (rng.random((rows, width)) < 0.7)}
    bias, linear, each = floats(rng, 1), floats(rng, width, 1), floats(rng, width, factors)
    weights = {"axis": np.array([1]), "half": np.float32([0.5]), "bias": bias, "linear": linear, "each": each}
    nodes, rating = [], np.ones((rows, factors), np.float32)
    for name in ("user", "item"):
        words, feeds[name] = rng.permutation(WORDS)[:known].tolist(), rng.choice(np.array(WORDS, object), rows)
        numbers = {"keys_strings": words, "values_int64s": [*range(known)], "default_int64": known}
        nodes.append(classical("LabelEncoder", [name], f"row of {name}", **numbers))
        nodes.append(node("Gather", [f"table of {name}", f"row of {name}"], [f"factors of {name}"]))
        weights[f"table of {name}"] = table = floats(rng, known + 1, factors)
        rating *= table[[words.index(word) if word in words else known for word in feeds[name]]]
    nodes += [
        node("Mul", ["factors of user", "factors of item"], ["products"]),
        node("ReduceSum", ["products", "axis"], ["rating"], keepdims=1),
        node("MatMul", ["z", "each"], ["sums"]),
        node("Mul", ["sums", "sums"], ["squared sums"]),
        node("Mul", ["z", "z"], ["squared z"]),
        node("Mul", ["each", "each"], ["squared each"]),
        node("MatMul", ["squared z", "squared each"], ["own"]),
        node("Sub", ["squared sums", "own"], ["twice"]),
        node("ReduceSum", ["twice", "axis"], ["pairs twice"], keepdims=1),
        node("Mul", ["pairs twice", "half"], ["pairs"]),
        node("MatMul", ["z", "linear"], ["line"]),
        node("Sum", ["bias", "line", "pairs"], ["machine"]),
        node("Concat", ["rating", "machine"], ["y"], axis=1),
    ]
    [found] = on_two_lanes(nodes, feeds, {"y": TensorProto.FLOAT}, weights)
    columns = feeds["z"].T
    pairs = sum(each[a] @ each[b] * columns[a] * columns[b] for a in range(width) for b in range(a))
    expected = np.stack([rating.sum(axis=1), bias + linear[:, 0] @ columns + pairs], axis=1)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("seed", range(3))
def test_support_vectors_that_vote_have_the_labels_of_the_largest_margin(seed: int) -> None:
    """Two classes with one boundary: the sign of the kernel's sum decides."""
    rng = np.random.default_rng(seed)
    x, supports, alpha = floats(rng, 20, 3), floats(rng, 4, 3), floats(rng, 4)
    alpha[:2], alpha[2:] = np.abs(alpha[:2]), -np.abs(alpha[2:])
    vote = node(
        "SVMClassifier", ["x"], ["label", "scores"], **ML, classlabels_ints=[0, 1], coefficients=alpha.tolist(),
        kernel_params=[1.0, 0.0, 1.0], kernel_type="LINEAR", rho=[0.1], support_vectors=supports.ravel().tolist(),
        vectors_per_class=[2, 2], post_transform="NONE",
    )  # fmt: skip
    nodes = [node("Identity", ["x0"], ["x"]), vote]
    label, _ = on_two_lanes(nodes, {"x0": x}, {"label": TensorProto.INT64, "scores": TensorProto.FLOAT})
    margin = (x @ supports.T) @ alpha + 0.1
    np.testing.assert_array_equal(label[np.abs(margin) > 1e-4], (margin[np.abs(margin) > 1e-4] < 0).astype(int))
