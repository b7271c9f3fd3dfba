"""Tensors in the host's memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime as ort

from chrion.graph.model import TensorInfo, element_code


def allocate(info: TensorInfo, memory: Any = None) -> ort.OrtValue:
    """Host memory for a tensor of known size.

    It is onnxruntime's own: arrays that ``OrtValue.numpy`` gives keep that alive, but not memory of another array.

    Args:
        info: Its type and shape.
        memory: A particular kind of host memory (pinned, for example), as onnxruntime describes it; plain if missing.
    """
    kind = {} if memory is None else {"memory_info": memory}
    return ort.OrtValue.ortvalue_from_shape_and_type(fixed_shape(info), element_code(info.type), **kind)


def zeros(info: TensorInfo) -> ort.OrtValue:
    """Host memory for a tensor of known size, filled with zeros."""
    value = allocate(info)
    array = value.numpy() if info.type != "tensor(bfloat16)" else None  # numpy has no such type
    if array is not None:
        array[...] = 0
    return value


def fixed_shape(info: TensorInfo) -> list[int]:
    """The dimensions that are known."""
    return [d for d in info.shape or () if isinstance(d, int)]


def numpy_dtype(kind: str) -> np.dtype[Any]:
    """Numpy's type for onnxruntime's ``tensor(float)``."""
    name = kind.removeprefix("tensor(").removesuffix(")")
    return np.dtype({"float": "float32", "double": "float64", "string": "object"}.get(name, name))


def on_host(value: ort.OrtValue) -> bool:
    """Whether a value is in the host's memory."""
    return bool(value.device_name() == "cpu")


def to_host(value: ort.OrtValue) -> ort.OrtValue:
    """The value itself if it is in the host's memory, or else a copy there."""
    if on_host(value):
        return value
    copy = ort.OrtValue.ortvalue_from_shape_and_type(list(value.shape()), value.element_type())
    ort.copy_tensors([value], [copy])
    return copy
