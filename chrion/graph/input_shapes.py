"""Shapes of a model's inputs: those that it declares, and those that the caller gives for free dimensions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import index
from typing import SupportsIndex

import onnx

from chrion.common.suggestions import did_you_mean
from chrion.common.units import format_shape
from chrion.common.wrong_values import wrong_value
from chrion.errors import ShapeError


def fix_shapes(proto: onnx.ModelProto, given: Mapping[str, tuple[int, ...]]) -> None:
    """Write shapes into the inputs of a model, in place; a named dimension is fixed in all inputs at once.

    Args:
        proto: The model.
        given: A shape by the name of an input, or one size by the name of a free dimension.

    Raises:
        ShapeError: The model has no such input or dimension, or the shape contradicts the declared one.
    """
    weights = {t.name for t in proto.graph.initializer}
    inputs = {i.name: i for i in proto.graph.input if i.name not in weights}
    sizes: dict[str, int] = {}
    for name, shape in given.items():
        if name in inputs:
            _fix_input(inputs[name], shape, sizes)
        elif len(shape) == 1 and name in free_dimensions(inputs.values()):
            sizes[name] = shape[0]
        elif name in free_dimensions(inputs.values()):
            raise ShapeError(f"shape: {name!r} is a dimension: expected one size, found {format_shape(shape)}")
        else:
            known = ", ".join(f"{i.name} ({format_shape(declared_shape(i) or ())})" for i in inputs.values())
            hint = did_you_mean(name, [*inputs, *free_dimensions(inputs.values())], f"its inputs are {known or 'none'}")
            raise ShapeError(f"shape: the model has no input or free dimension {name!r}", hint=hint)
    for value in inputs.values():
        for dim in _dims(value):
            if dim.dim_param in sizes:
                dim.dim_value = sizes[dim.dim_param]


def free_negative_sizes(proto: onnx.ModelProto) -> None:
    """Make dimensions free, in place, whose size is negative: ML.NET writes -1, as onnxruntime reads it."""
    for value in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info):
        for dim in _dims(value):
            if dim.dim_value < 0:
                dim.ClearField("dim_value")


def as_shape(name: str, given: object) -> tuple[int, ...]:
    """Return a given shape, or one size, as a tuple.

    Raises:
        ShapeError: It is neither a whole number nor a sequence of them.
    """
    try:
        return (index(given),) if isinstance(given, SupportsIndex) else tuple(map(index, given))  # type: ignore[call-overload]
    except TypeError:
        raise wrong_value(f"shape: {name!r}", "a size or a sequence of sizes", given, failure=ShapeError) from None


def free_dimensions(values: Iterable[onnx.ValueInfoProto]) -> set[str]:
    """Return the names of the dimensions that a model leaves free."""
    return {dim.dim_param for value in values for dim in _dims(value) if dim.dim_param}


def declared_shape(value: onnx.ValueInfoProto) -> tuple[int | str | None, ...] | None:
    """Return the shape that a model declares for a value, or None if it declares no shape."""
    if not value.type.tensor_type.HasField("shape"):
        return None
    return tuple(d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in _dims(value))


def _fix_input(value: onnx.ValueInfoProto, shape: tuple[int, ...], sizes: dict[str, int]) -> None:
    """Write a shape into an input, and the sizes of its named dimensions into ``sizes``."""
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        for size in shape:
            tensor.shape.dim.add().dim_value = size
        return
    dims = _dims(value)
    declared = declared_shape(value) or ()
    fits = len(dims) == len(shape) and all(
        not isinstance(d, int) or d == s for d, s in zip(declared, shape, strict=True)
    )
    if not fits:
        raise ShapeError(
            f"shape: {value.name!r} cannot be {format_shape(shape)}: the model declares {format_shape(declared)}"
        )
    for dim, size in zip(dims, shape, strict=True):
        if dim.dim_param:
            sizes.setdefault(dim.dim_param, size)
        dim.dim_value = size


def _dims(value: onnx.ValueInfoProto) -> list[onnx.TensorShapeProto.Dimension]:
    return list(value.type.tensor_type.shape.dim)
