"""Tensors in host memory."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import onnxruntime as ort

from chrion.graph.model import TensorInfo, element_code


def allocate(info: TensorInfo, memory: Any = None) -> ort.OrtValue:
    """Allocate host memory for a tensor of known size.

    onnxruntime owns the memory. An array from ``OrtValue.numpy`` keeps such memory alive, but not memory that the
    OrtValue shares with another array.

    Args:
        info: The type and shape.
        memory: onnxruntime's description of a particular kind of host memory, pinned for example; pageable if None.
    """
    kind = {} if memory is None else {"memory_info": memory}
    return ort.OrtValue.ortvalue_from_shape_and_type(list(info.fixed_dimensions), element_code(info.type), **kind)


def zeros(info: TensorInfo) -> ort.OrtValue:
    """Allocate host memory for a tensor of known size, filled with zeros unless its type is bfloat16."""
    value = allocate(info)
    array = value.numpy() if info.type != "tensor(bfloat16)" else None  # numpy has no such type
    if array is not None:
        array[...] = 0
    return value


def numpy_dtype(kind: str) -> np.dtype[Any]:
    """Return numpy's type for a tensor type as onnxruntime writes it, ``tensor(float)`` for example."""
    name = kind.removeprefix("tensor(").removesuffix(")")
    return np.dtype({"float": "float32", "double": "float64", "string": "object"}.get(name, name))


def on_host(value: ort.OrtValue) -> bool:
    """Return whether a value is in host memory."""
    return bool(value.device_name() == "cpu")


def to_host(value: ort.OrtValue) -> ort.OrtValue:
    """Return the value itself if it is in host memory, or a copy in host memory."""
    if on_host(value):
        return value
    copy = ort.OrtValue.ortvalue_from_shape_and_type(list(value.shape()), value.element_type())
    ort.copy_tensors([value], [copy])
    return copy


def copied(value: Any) -> Any:
    """Return a copy of a tensor in host memory, which its owner cannot change; texts as an array of objects.

    Sequences and maps are returned as they are.
    """
    if isinstance(value, ort.OrtValue):
        if not value.is_tensor():
            return value
        if value.data_type() != "tensor(string)":
            host = to_host(value)
            if host is not value:
                return host
            copy = ort.OrtValue.ortvalue_from_shape_and_type(list(value.shape()), value.element_type())
            ctypes.memmove(copy.data_ptr(), value.data_ptr(), value.tensor_size_in_bytes())
            return copy
        value = value.numpy()
    array = np.array(value, order="C")
    return array.astype(object) if array.dtype.kind in "US" else array
