"""Arrays that are drawn again from a seed, so that a model can be kept without its weights.

A recipe keeps an array's element type, shape, mean, standard deviation and range. Floating-point numbers are drawn from
a normal distribution and clipped to the range, so that a variance stays positive; integers are drawn evenly from the
range, so that an index stays valid.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import Message
from onnx import TensorProto, helper, numpy_helper

#: Arrays that are smaller, or that compress to less, are kept as they are.
KEPT_BYTES = 256
#: The entry of a tensor's external data that holds the recipe.
_KEY = "seeded"
_FLOATS = frozenset({"float16", "float32", "float64", "bfloat16"})
#: 64-bit integers are shapes and indices that belong together.
_INTEGERS = frozenset({"int8", "uint8", "int32"})
_STRIPPED_BY_NAME = ("doc_string", "metadata_props")


@dataclass(frozen=True)
class Recipe:
    """A recipe to draw an array that resembles another."""

    dtype: str
    shape: tuple[int, ...]
    seed: int
    mean: float
    deviation: float
    low: float
    high: float

    @classmethod
    def of(cls, array: np.ndarray[Any, Any], name: str) -> Recipe:
        """Describe an array; the seed is that of its name."""
        wide = array.astype(np.float64)
        figures = [float(f"{f:.6g}") for f in (wide.mean(), wide.std())]
        return cls(
            array.dtype.name, array.shape, zlib.crc32(name.encode()), *figures, float(wide.min()), float(wide.max())
        )

    def draw(self) -> np.ndarray[Any, Any]:
        """Return the array; the same at every call."""
        numbers = np.random.default_rng(self.seed)
        dtype = helper.tensor_dtype_to_np_dtype(TensorProto.BFLOAT16) if self.dtype == "bfloat16" else self.dtype
        if self.dtype in _FLOATS:
            drawn = self.mean + self.deviation * numbers.standard_normal(self.shape)
            return np.asarray(drawn.clip(self.low, self.high).astype(dtype))
        return numbers.integers(int(self.low), int(self.high), self.shape, endpoint=True).astype(dtype)

    def to_json(self) -> dict[str, Any]:
        """Return the fields."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Recipe:
        """Return the recipe of such fields."""
        return cls(**{**content, "shape": tuple(content["shape"])})


def seedable(array: np.ndarray[Any, Any], integers: frozenset[str] = _INTEGERS) -> bool:
    """Return whether an array is large, and may be replaced by one that resembles it."""
    if array.nbytes < KEPT_BYTES or array.dtype.name not in _FLOATS | integers:
        return False
    if array.dtype.name in _FLOATS and not np.isfinite(array.astype(np.float64)).all():
        return False  # a mask
    return len(zlib.compress(array.tobytes())) >= KEPT_BYTES


def strip(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy without large weights, and without the notes that exporters leave at nodes and values.

    The model's own metadata stays, since sessions show it. So do types and shapes of values: they are part of what an
    exporter writes.
    """
    stripped = onnx.ModelProto()
    stripped.CopyFrom(model)
    for message in _messages(stripped):
        if isinstance(message, TensorProto):
            _strip_tensor(message)
        if isinstance(message, onnx.ModelProto):
            continue
        for name in _STRIPPED_BY_NAME:
            if name in message.DESCRIPTOR.fields_by_name:
                message.ClearField(name)
    return stripped


def restore(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of a stripped model with weights."""
    restored = onnx.ModelProto()
    restored.CopyFrom(model)
    for message in _messages(restored):
        if isinstance(message, TensorProto) and (recipe := _recipe(message)):
            message.raw_data = numpy_helper.from_array(recipe.draw()).raw_data
            message.ClearField("external_data")
            message.ClearField("data_location")
    return restored


def _messages(message: Message) -> Iterator[Message]:
    """Yield a message and all messages in it. A tensor's own are not looked into."""
    yield message
    if isinstance(message, TensorProto):
        return
    for _, value in message.ListFields():
        if isinstance(value, Message):
            yield from _messages(value)
        elif not isinstance(value, str | bytes | int | float):
            for item in value:
                if isinstance(item, Message):
                    yield from _messages(item)


def _strip_tensor(tensor: TensorProto) -> None:
    if tensor.data_type == TensorProto.STRING:
        return
    array = numpy_helper.to_array(tensor)
    if not seedable(array):
        return
    recipe = Recipe.of(array, tensor.name or str(array.shape))
    data_type, dims, name = tensor.data_type, list(tensor.dims), tensor.name
    tensor.Clear()
    tensor.data_type, tensor.name, tensor.data_location = data_type, name, TensorProto.EXTERNAL
    tensor.dims.extend(dims)
    tensor.external_data.add(key=_KEY, value=json.dumps(list(recipe.to_json().values())[2:]))


def _recipe(tensor: TensorProto) -> Recipe | None:
    for entry in tensor.external_data:
        if entry.key == _KEY:
            dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.data_type)).name
            return Recipe(dtype, tuple(tensor.dims), *json.loads(entry.value))
    return None
