"""Arithmetic operators of ONNX as functions of arrays, in NumPy or in JAX (WindTunnel, section 5.2.1).

The operators are those that converters make of linear models, support vector machines, projections, naive Bayes,
distances to centres, factorisation machines, and matrix factorisation. Weights that ``ai.onnx.ml`` has as attributes
are further inputs. What says how an operator works, as the shape of a Reshape, must be constant.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from chrion.graph.rewrite import STANDARD
from chrion.pipelines import support_vectors

Array = np.ndarray[Any, Any]
CLASSICAL = "ai.onnx.ml"
#: The attributes that are weights, by operator.
WEIGHTS: Mapping[str, Sequence[str]] = {
    "Imputer": ("imputed_value_floats",),
    "LinearClassifier": ("coefficients", "intercepts"),
    "LinearRegressor": ("coefficients", "intercepts"),
    "SVMClassifier": ("support_vectors", "coefficients", "rho"),
    "SVMRegressor": ("support_vectors", "coefficients", "rho"),
    "Scaler": ("offset", "scale"),
}
#: The least root: its slope is infinite at zero.
_LEAST = 1e-30
FLOATS = frozenset({TensorProto.FLOAT, TensorProto.DOUBLE})
#: Operators whose further inputs must be constant.
_STRUCTURAL = frozenset({"ArrayFeatureExtractor", "Reshape", "Slice", "Squeeze", "Unsqueeze"})
#: Operators that NumPy and JAX have a function for.
_SAME = {
    "Abs": "abs", "Add": "add", "Div": "divide", "Exp": "exp", "Identity": "asarray", "Log": "log", "MatMul": "matmul",
    "Mul": "multiply", "Neg": "negative", "Not": "logical_not", "Pow": "power", "Sub": "subtract", "Tanh": "tanh",
}  # fmt: skip


def applied(np_: Any, node: onnx.NodeProto, inputs: Sequence[Any]) -> Any:
    """Return the result of an operator; of a classifier, its scores.

    Args:
        np_: NumPy, if all inputs are arrays of it, or JAX's form of it.
        node: The operator.
        inputs: Its inputs, followed by the weights that are attributes.
    """
    return _FUNCTIONS[node.op_type](np_, attributes(node), *inputs)


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    """Return the attributes of a node by name; texts are str."""
    found = {own.name: helper.get_attribute_value(own) for own in node.attribute}
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in found.items()}


def is_differentiable(node: onnx.NodeProto, fixed: Collection[str], looked_up: Collection[str] = ()) -> bool:
    """Return whether an operator has a function here.

    Args:
        node: The operator.
        fixed: The values that do not depend on the inputs of the model.
        looked_up: Integers whose rows of tables are weights.
    """
    given, kind = attributes(node), node.op_type
    if node.domain not in STANDARD | {CLASSICAL} or kind not in _FUNCTIONS:
        return False
    if kind in _TRANSFORMS:
        return given.get("post_transform", "NONE") in _TRANSFORMS[kind](given) and not given.get("one_class")
    if kind == "Gather":
        return node.input[1] in fixed or (node.input[0] in fixed and node.input[1] in looked_up)
    structural = kind in _STRUCTURAL or kind.startswith("Reduce")
    casts = kind != "Cast" or given["to"] in {*FLOATS, TensorProto.BOOL}
    return casts and not (structural and {*node.input[1:]} - {"", *fixed})


def linear(np_: Any, given: Mapping[str, Any], x: Any, coefficients: Any, intercepts: Any) -> Any:
    """Return the scores of a linear model before its link; two classes with one score have opposite ones."""
    found = x @ coefficients.reshape(intercepts.shape[0], -1).T + intercepts
    return np_.concatenate([-found, found], axis=1) if _has_one_score(given) else found


def _has_one_score(given: Mapping[str, Any]) -> bool:
    """Return whether a linear classifier of two classes has a score for one of them."""
    classes = support_vectors.classes_of(given)
    return classes == 2 > len(given.get("intercepts", range(classes)))


def sigmoid(np_: Any, x: Any) -> Any:
    """Return the logistic function."""
    return 0.5 * (1 + np_.tanh(x / 2))


def _softmax(np_: Any, x: Any, axis: int = 1) -> Any:
    powers = np_.exp(x - x.max(axis=axis, keepdims=True))
    return powers / powers.sum(axis=axis, keepdims=True)


_LINKS: Mapping[str, Callable[[Any, Any], Any]] = {"LOGISTIC": sigmoid, "SOFTMAX": _softmax}


def _linked(scores: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of scores, followed by the link of the classifier."""

    def run(np_: Any, given: Mapping[str, Any], *inputs: Any) -> Any:
        found, link = scores(np_, given, *inputs), _LINKS.get(given.get("post_transform", "NONE"))
        return link(np_, found) if link else found

    return run


def _svm_transforms(given: Mapping[str, Any]) -> Collection[str]:
    """Return the transforms of a classifier that have a function: without support vectors it is linear."""
    is_linear = not sum(given.get("vectors_per_class", ())) and support_vectors.classes_of(given) > 1
    return {"NONE", *_LINKS} if is_linear else {"NONE"}


#: The transforms of scores that have a function, by the kind of model, as functions of its attributes.
_TRANSFORMS: Mapping[str, Callable[[Mapping[str, Any]], Collection[str]]] = {
    "LinearClassifier": lambda given: {"LOGISTIC"} if _has_one_score(given) else {"NONE", *_LINKS},
    "LinearRegressor": lambda _given: {"NONE"},
    "SVMClassifier": _svm_transforms,
    "SVMRegressor": lambda _given: {"NONE"},
}


def _root(np_: Any, x: Any) -> Any:
    return np_.sqrt(np_.maximum(x, _LEAST))


def _logarithm_of_sum(np_: Any, x: Any, *, axis: Any, keepdims: bool) -> Any:
    most = x.max(axis=axis, keepdims=True)
    found = np_.log(np_.exp(x - most).sum(axis=axis, keepdims=True)) + most
    return found if keepdims else np_.squeeze(found, axis)


_REDUCTIONS: Mapping[str, Callable[..., Any]] = {
    "ReduceL1": lambda np_, x, **axes: np_.abs(x).sum(**axes),
    "ReduceL2": lambda np_, x, **axes: _root(np_, (x * x).sum(**axes)),
    "ReduceLogSumExp": _logarithm_of_sum,
    "ReduceMax": lambda _np, x, **axes: x.max(**axes),
    "ReduceMean": lambda _np, x, **axes: x.mean(**axes),
    "ReduceSum": lambda _np, x, **axes: x.sum(**axes),
    "ReduceSumSquare": lambda _np, x, **axes: (x * x).sum(**axes),
}


def _reduction(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(np_: Any, given: Mapping[str, Any], x: Any, axes: Any = None) -> Any:
        found = given.get("axes", ()) if axes is None else axes.tolist()
        if not len(found) and given.get("noop_with_empty_axes"):
            return x
        return function(np_, x, axis=tuple(found) or None, keepdims=bool(given.get("keepdims", 1)))

    return run


def _norm(np_: Any, given: Mapping[str, Any], x: Any, axis: int = 1) -> Any:
    kind = {"L1": "ReduceL1", "L2": "ReduceL2", "MAX": "ReduceMax"}[given.get("norm", "MAX")]
    total = _REDUCTIONS[kind](np_, x, axis=axis, keepdims=True)
    return x / np_.where(total == 0, 1, total)


def _imputer(np_: Any, given: Mapping[str, Any], x: Any, values: Any) -> Any:
    missing = given.get("replaced_value_float", 0.0)
    return np_.where(np_.isnan(x) if np.isnan(missing) else x == missing, values, x)


def _gemm(_np: Any, given: Mapping[str, Any], a: Any, b: Any, c: Any = 0.0) -> Any:
    a, b = (own.T if given.get(name) else own for own, name in ((a, "transA"), (b, "transB")))
    return given.get("alpha", 1.0) * (a @ b) + given.get("beta", 1.0) * c


def _clip(np_: Any, given: Mapping[str, Any], x: Any, low: Any = None, high: Any = None) -> Any:
    low, high = (given.get(name) if own is None else own for own, name in ((low, "min"), (high, "max")))
    return np_.clip(x, low, high)


def _reshape(np_: Any, _given: Mapping[str, Any], x: Any, shape: Any) -> Any:
    return np_.reshape(x, [x.shape[at] if size == 0 else size for at, size in enumerate(shape.tolist())])


def _slice(_np: Any, given: Mapping[str, Any], x: Any, *ends: Any) -> Any:
    parts = [own.tolist() for own in ends] or [given[name] for name in ("starts", "ends", "axes") if name in given]
    starts, stops = parts[:2]
    axes = parts[2] if len(parts) > 2 else range(len(starts))
    strides = parts[3] if len(parts) > 3 else [1] * len(starts)
    own = {axis % x.ndim: slice(*part) for axis, *part in zip(axes, starts, stops, strides, strict=True)}
    return x[tuple(own.get(axis, slice(None)) for axis in range(x.ndim))]


def _axes(given: Mapping[str, Any], axes: Any) -> Any:
    found = given.get("axes") if axes is None else axes.tolist()
    return None if found is None else tuple(found)


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **{kind: lambda np_, _given, *x, name=name: getattr(np_, name)(*x) for kind, name in _SAME.items()},
    **{kind: _reduction(function) for kind, function in _REDUCTIONS.items()},
    "ArrayFeatureExtractor": lambda np_, _given, x, places: np_.take(x, places.ravel(), axis=-1),
    "Cast": lambda np_, given, x: x != 0 if given["to"] == TensorProto.BOOL else np_.asarray(x, np.float32),
    "Clip": _clip,
    "Concat": lambda np_, given, *x: np_.concatenate(x, axis=given["axis"]),
    "FeatureVectorizer": lambda np_, _given, *x: np_.concatenate(x, axis=1),
    "Flatten": lambda np_, given, x: np_.reshape(x, (int(np.prod(x.shape[: given.get("axis", 1)])), -1)),
    "Gather": lambda np_, given, x, places: np_.take(x, places, axis=given.get("axis", 0)),
    "Gemm": _gemm,
    "Imputer": _imputer,
    "LinearClassifier": _linked(linear),
    "LinearRegressor": linear,
    "LpNormalization": lambda np_, given, x: _norm(np_, {"norm": f"L{given.get('p', 2)}"}, x, given.get("axis", -1)),
    "Max": lambda np_, _given, *x: reduce(np_.maximum, x),
    "Min": lambda np_, _given, *x: reduce(np_.minimum, x),
    "Normalizer": _norm,
    "Reciprocal": lambda _np, _given, x: 1 / x,
    "Relu": lambda np_, _given, x: np_.maximum(x, 0),
    "Reshape": _reshape,
    "SVMClassifier": _linked(support_vectors.classifier),
    "SVMRegressor": support_vectors.regressor,
    "Scaler": lambda _np, _given, x, offset, scale: (x - offset) * scale,
    "Sigmoid": lambda np_, _given, x: sigmoid(np_, x),
    "Slice": _slice,
    "Softmax": lambda np_, given, x: _softmax(np_, x, given.get("axis", -1)),
    "Sum": lambda np_, _given, *x: reduce(np_.add, x),
    "Sqrt": lambda np_, _given, x: _root(np_, x),
    "Squeeze": lambda np_, given, x, axes=None: np_.squeeze(x, _axes(given, axes)),
    "Transpose": lambda np_, given, x: np_.transpose(x, given.get("perm")),
    "Unsqueeze": lambda np_, given, x, axes=None: np_.expand_dims(x, _axes(given, axes)),
}
