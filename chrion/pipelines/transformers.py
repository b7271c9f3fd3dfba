"""Converters of transformers: KBinsDiscretizer, SplineTransformer, Normalizer, QuantileTransformer and k-means.

The values of skl2onnx's converter for KBinsDiscretizer differ next to edges, which it rounds to the nearest float32,
and it refuses the default encoding. It has none for SplineTransformer. Its Normalizer divides by the largest value
where scikit-learn divides by the largest absolute one. Its QuantileTransformer takes a time that doubles with every
step of its binary search: with 1000 quantiles, it does not end. Its k-means has labels beside the distances to centres,
which are the features of the step after it.

A spline is converted through its values: between two knots, and beyond the outer ones, each output is a polynomial,
which as many values as it has coefficients determine. So knots, extrapolation and dropped outputs are those of the
fitted transformer.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
from onnx import TensorProto

from chrion.errors import OptionError
from chrion.pipelines.converter_nodes import NodeWriter, not_below

Array = np.ndarray[Any, Any]
#: The most thresholds that each value is compared with one by one.
_MOST_COMPARED = 64


def convert_bins(scope: Any, operator: Any, container: Any) -> None:
    """Convert a KBinsDiscretizer."""
    model, write = operator.raw_operator, NodeWriter(scope, container)
    output = operator.outputs[0].full_name
    bins = _passed(write, write.floats(operator.inputs[0]), [edges[1:-1] for edges in model.bin_edges_])
    if model.encode == "ordinal":
        write.add("Cast", [bins], output, to=TensorProto.FLOAT)
        return
    counts = np.asarray(model.n_bins_, np.int64)
    own = write.add("Gather", [bins, np.repeat(np.arange(len(counts)), counts)], axis=1)
    equal = write.add("Equal", [own, np.concatenate([np.arange(count) for count in counts.tolist()])[None]])
    write.add("Cast", [equal], output, to=TensorProto.FLOAT)


def convert_distances(scope: Any, operator: Any, container: Any) -> None:
    """Convert k-means before another step: the distances to its centres."""
    centres, write = operator.raw_operator.cluster_centers_, NodeWriter(scope, container)
    rows = write.add("Unsqueeze", [write.floats(operator.inputs[0]), np.array([1])])
    apart = write.add("Sub", [rows, centres.astype(np.float32)])
    write.add("ReduceL2", [apart, np.array([2])], operator.outputs[0].full_name, keepdims=0)


def convert_norms(scope: Any, operator: Any, container: Any) -> None:
    """Convert a Normalizer."""
    model, write = operator.raw_operator, NodeWriter(scope, container)
    x, axes = write.floats(operator.inputs[0]), np.array([1])
    if model.norm == "max":
        size = write.add("ReduceMax", [write.add("Abs", [x]), axes])
    else:
        size = write.add("ReduceL1" if model.norm == "l1" else "ReduceL2", [x, axes])
    zero = write.add("Equal", [size, np.zeros(1, np.float32)])
    write.add("Div", [x, write.add("Where", [zero, np.ones(1, np.float32), size])], operator.outputs[0].full_name)


def convert_splines(scope: Any, operator: Any, container: Any) -> None:
    """Convert a SplineTransformer."""
    model, write = operator.raw_operator, NodeWriter(scope, container)
    degree, features = model.degree, len(model.bsplines_)
    knots = np.array([spline.t[degree : len(spline.t) - degree] for spline in model.bsplines_])
    x = write.floats(operator.inputs[0])
    inside = _wrapped(write, x, knots[:, 0], knots[:, -1]) if model.extrapolation == "periodic" else x
    centres, halves, table = _pieces(model, knots)
    first = np.arange(features) * table.shape[1]
    piece = write.add("Add", [_passed(write, inside, list(knots)), first[None]])
    shifted = write.add("Sub", [inside, write.add("Gather", [_flat(centres), piece])])
    local = write.add("Mul", [shifted, write.add("Gather", [_flat(1 / halves), piece])])
    powers = write.add(
        "Pow", [write.add("Unsqueeze", [local, np.array([2, 3])]), np.arange(table.shape[2], dtype=np.float32)]
    )
    coefficients = write.add("Gather", [table.reshape(-1, *table.shape[2:]).astype(np.float32), piece])
    values = write.add("MatMul", [powers, coefficients])
    if getattr(model, "handle_missing", "error") == "zeros":
        missing = write.add("Unsqueeze", [write.add("IsNaN", [x]), np.array([2, 3])])
        values = write.add("Where", [missing, np.zeros(1, np.float32), values])
    write.add("Reshape", [values, np.array([-1, features * table.shape[3]])], operator.outputs[0].full_name)


def convert_quantiles(scope: Any, operator: Any, container: Any) -> None:
    """Convert a QuantileTransformer to the uniform distribution.

    Between different quantiles it is linear. At equal ones it jumps, and has the mean of both sides.
    """
    model, write = operator.raw_operator, NodeWriter(scope, container)
    if model.output_distribution != "uniform":
        raise OptionError(
            f"QuantileTransformer: output_distribution={model.output_distribution!r} has no operators in ONNX",
            hint="fit it with output_distribution='uniform'",
        )
    x, features = write.floats(operator.inputs[0]), model.quantiles_.shape[1]
    lines = [_quantile_lines(quantiles, model.references_) for quantiles in model.quantiles_.T.astype(np.float64)]
    table = np.zeros((4, features, max(len(own[0]) for own in lines)))
    for at, own in enumerate(lines):
        table[:, at, : len(own[0])] = own
    first = np.arange(features) * table.shape[2]
    piece = write.add("Add", [_passed(write, x, [own[0][1:] for own in lines]), first[None]])
    start, value, slope, exact = (write.add("Gather", [_flat(values), piece]) for values in table)
    line = write.add("Add", [value, write.add("Mul", [slope, write.add("Sub", [x, start])])])
    write.add("Where", [write.add("Equal", [x, start]), exact, line], operator.outputs[0].full_name)


def _quantile_lines(quantiles: Array, references: Array) -> tuple[Array, ...]:
    """Return the lines below the first quantile and from each different one on.

    Quantiles that differ in the last bits of float64 are different, as they are in scikit-learn.

    Returns:
        The least float32 of each line, the value there of the line, its slope, and the value that it has instead.
    """
    starts, first = np.unique(quantiles, return_index=True)
    last = np.append(first[1:], len(quantiles)) - 1
    exact = (references[first] + references[last]) / 2
    exact[-1], exact[0] = 1, 0  # in this order, for a constant feature
    slopes = (np.append(references[first[1:]], 1) - references[last]) / np.diff(starts, append=np.inf)
    least = not_below(starts).astype(np.float64)
    values = references[last] + slopes * (least - starts)
    exact = np.where(least == starts, exact, values)
    return np.append(least[:1], least), np.append(0, values), np.append(0, slopes), np.append(0, exact)


def _passed(write: NodeWriter, x: str, thresholds: list[Array]) -> str:
    """Return how many thresholds of its feature each value has reached, [rows, features]."""
    if max(map(len, thresholds)) > _MOST_COMPARED:
        return _searched(write, x, thresholds)
    padded = np.full((len(thresholds), max(1, *map(len, thresholds))), np.nan, np.float32)
    for row, own in zip(padded, thresholds, strict=True):
        row[: len(own)] = not_below(own)
    reached = write.add("GreaterOrEqual", [write.add("Unsqueeze", [x, np.array([2])]), padded[None]])
    numbers = write.add("Cast", [reached], to=TensorProto.INT64)
    return write.add("ReduceSum", [numbers, np.array([2])], keepdims=0)


def _searched(write: NodeWriter, x: str, thresholds: list[Array]) -> str:
    """Return the same as :func:`_passed` by binary search, for many thresholds in ascending order."""
    steps = max(map(len, thresholds)).bit_length()
    table = np.full((len(thresholds), 1 << steps), np.nan, np.float32)  # a value reaches the one at its count
    for row, own in zip(table, thresholds, strict=True):
        row[1 : 1 + len(own)] = not_below(own)
    first = np.arange(len(thresholds))[None] << steps
    flat, at = _flat(table), write.add("Add", [first, np.zeros(1, np.int64)])
    for step in (1 << bit for bit in reversed(range(steps))):
        after = write.add("Add", [at, np.array([step])])
        reached = write.add("GreaterOrEqual", [x, write.add("Gather", [flat, after])])
        at = write.add("Where", [reached, after, at])
    return write.add("Sub", [at, first])


def _wrapped(write: NodeWriter, x: str, low: Array, high: Array) -> str:
    """Return the values moved by whole periods into the first one; a feature without a period is 0."""
    period = (high - low)[None]
    step = np.where(period > 0, period, 1).astype(np.float32)
    start = low[None].astype(np.float32)
    periods = write.add("Floor", [write.add("Div", [write.add("Sub", [x, start]), step])])
    moved = write.add("Sub", [x, write.add("Mul", [periods, step])])
    return write.add("Mul", [moved, (period > 0).astype(np.float32)])


def _pieces(model: Any, knots: Array) -> tuple[Array, Array, Array]:
    """Return the polynomials of each feature below, between and above its knots.

    A polynomial has the argument ``(x - centre) / half``.

    Returns:
        Centres and halves, [features, pieces], and coefficients, [features, pieces, powers, outputs].
    """
    span = knots[:, -1] - knots[:, 0]
    half = np.where(span > 0, span, 2.0) / 2
    edges = np.concatenate([(knots[:, 0] - 2 * half)[:, None], knots, (knots[:, -1] + 2 * half)[:, None]], axis=1)
    # As the model has them: otherwise the difference from a large centre would have its rounding.
    centres, halves = (own.astype(np.float32).astype(np.float64) for own in (_middles(edges), np.diff(edges) / 2))
    count = max(1, model.degree) + 1
    points = np.cos(np.pi * (np.arange(count) + 0.5) / count)
    inverse = np.linalg.inv(np.vander(points, increasing=True))
    bare = copy.copy(model)  # arrays have no names of features
    vars(bare).pop("feature_names_in_", None)

    def values(at: int) -> Array:
        if model.extrapolation == "error" and at in {0, centres.shape[1] - 1}:
            return np.full((count, model.n_features_out_), np.nan)
        found = bare.transform(centres[:, at] + points[:, None] * halves[:, at])
        return np.asarray(found.toarray() if hasattr(found, "toarray") else found)

    each = [values(at).reshape(count, len(knots), -1) for at in range(centres.shape[1])]
    if model.extrapolation == "periodic":  # values are inside, or rounded to the end of the first period
        each[0], each[-1] = each[1], each[-2]
        centres[:, [0, -1]], halves[:, [0, -1]] = centres[:, [1, -2]], halves[:, [1, -2]]
    table = np.einsum("pq,iqfo->fipo", inverse, np.stack(each))
    return centres, np.where(halves > 0, halves, 1.0), table


def _middles(edges: Array) -> Array:
    return (edges[:, 1:] + edges[:, :-1]) / 2


def _flat(values: Array) -> Array:
    return values.ravel().astype(np.float32)
