"""Synthetic inputs: arrays of the right type and shape for models without data."""

from __future__ import annotations

from typing import Any

import numpy as np

from chrion.devices.host import numpy_dtype
from chrion.errors import ModelError
from chrion.graph.model import ELEMENT_BYTES, Graph, TensorInfo

Array = np.ndarray[Any, Any]


def synthetic_inputs(graph: Graph, seed: int = 0) -> dict[str, Array]:
    """Return an array for each input, by name; see :func:`synthetic_array`."""
    return {info.name: synthetic_array(info, seed) for info in graph.inputs}


def synthetic_array(info: TensorInfo, seed: int = 0) -> Array:
    """Return values for a tensor.

    They are normally distributed with standard deviation 0.5 for float16, float and double, empty strings for text, and
    zero for all other types.

    Args:
        info: The type and shape; unknown dimensions are 1.
        seed: The seed of the random values.

    Raises:
        ModelError: The value is not a tensor, or its element type is not supported.
    """
    if info.type not in ELEMENT_BYTES and info.type != "tensor(string)":
        raise ModelError(f"input {info.name!r}: cannot create a synthetic {info.type or 'value of unknown type'}")
    shape = tuple(d if isinstance(d, int) else 1 for d in info.shape or ())
    if info.type == "tensor(bfloat16)":
        import ml_dtypes  # noqa: PLC0415 - a dependency of onnx, needed for this type only

        return np.zeros(shape, ml_dtypes.bfloat16)
    dtype = numpy_dtype(info.type)
    if dtype.kind == "O":
        return np.full(shape, "", dtype)
    if dtype.kind == "f":
        return np.asarray(
            0.5 * np.random.default_rng(seed).standard_normal(shape), dtype
        )  # an array, even for a scalar
    return np.zeros(shape, dtype)
