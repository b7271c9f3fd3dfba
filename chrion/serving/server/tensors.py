"""Tensors of the Open Inference Protocol: their datatypes, JSON data and binary data.

Binary data is little-endian and row-major. An element of a BYTES tensor is its length in four bytes and its content. In
memory, BYTES tensors are object arrays of str, as onnxruntime takes them, and BF16 tensors are uint16 arrays.

Some operators end the process, or never return, on tensors without elements. A request could end the server with one,
so it is refused.
"""

from __future__ import annotations

import functools
import json
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from chrion.graph.external import nodes_of
from chrion.serving.server.failures import invalid
from chrion.serving.server.number_text import NumberText

Array = npt.NDArray[Any]

#: The numpy type of each datatype.
DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype(np.uint8),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype(np.int8),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
    "BF16": np.dtype("<u2"),
    "BYTES": np.dtype(object),
}
#: The datatypes that ONNX names otherwise, by their names in ONNX.
RENAMED = {"FLOAT16": "FP16", "FLOAT": "FP32", "DOUBLE": "FP64", "BFLOAT16": "BF16", "STRING": "BYTES"}
#: Returns data as JSON without spaces; json.dumps would make an encoder in each call.
compact_json = json.JSONEncoder(separators=(",", ":")).encode
#: Maximum number of dimensions, that of numpy.
_MAX_DIMENSIONS = 64
#: The most inputs of a size that a message names.
_NAMED = 5
#: Elements that are converted in one call, which holds the GIL.
_PIECE = 1 << 12
#: Bytes of an element of BYTES beside its content: objects of 49 and 33 bytes and their pointers in a list and an
#: array (CPython), and a string in onnxruntime's tensor.
_STRING_BYTES = 150
_JSON_TYPES: dict[str, set[type]] = {"BOOL": {bool}, "BYTES": {str}, "FP32": {int, float}, "FP64": {int, float}}
_JSON_TYPES["FP16"] = {int, float}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """An input or output of a model."""

    name: str
    datatype: str
    #: Sizes of the dimensions, -1 for a free one; None if even their number is free.
    shape: tuple[int, ...] | None
    #: Names of the dimensions, empty for one without a name.
    names: tuple[str, ...] = field(default=(), compare=False)
    #: Operators of the model to which an input without elements may be fatal.
    fragile: frozenset[str] = field(default=frozenset(), compare=False)


def element_count(name: str, datatype: str, shape: Sequence[Any]) -> int:
    """Return the number of elements of a tensor.

    Raises:
        RequestFailure: The datatype is unknown, or the shape is not a list of sizes.
    """
    if datatype not in DTYPES:
        raise invalid(f"tensor {name!r}: unknown datatype {datatype!r}: expected one of {', '.join(DTYPES)}")
    if len(shape) > _MAX_DIMENSIONS or not all(type(d) is int and 0 <= d < 2**63 for d in shape):
        raise invalid(f"tensor {name!r}: shape: expected at most {_MAX_DIMENSIONS} whole numbers of at least 0")
    if 0 in shape and math.prod(d for d in shape if d) * DTYPES[datatype].itemsize >= 2**63:  # numpy refuses it
        raise invalid(f"tensor {name!r}: shape: {list(shape)} is too large, although it has no elements")
    return math.prod(shape)


def from_raw(
    name: str,
    datatype: str,
    shape: Sequence[int],
    data: bytes | memoryview,
    take: Callable[[int], None] = lambda _: None,
) -> Array:
    """Return a tensor of binary data; the array is a view of the data, except for BYTES.

    Args:
        name: The name of the tensor.
        datatype: Its datatype.
        shape: Its shape.
        data: The data.
        take: Takes the memory of the elements of BYTES, in bytes.

    Raises:
        RequestFailure: The data does not have the size that the shape requires.
    """
    elements = element_count(name, datatype, shape)
    if datatype == "BYTES":
        take(_STRING_BYTES * min(elements, len(data) // 4) + len(data))
        return _strings(name, data, elements).reshape(shape)
    expected = elements * DTYPES[datatype].itemsize
    if len(data) != expected:
        raise invalid(f"tensor {name!r}: expected {expected} bytes for shape {list(shape)}, found {len(data)}")
    array = np.frombuffer(data, DTYPES[datatype]).reshape(shape)
    if datatype == "BOOL" and array.size and array.view(np.uint8).max() > 1:
        raise invalid(f"tensor {name!r}: BOOL elements must be 0 or 1")
    return array


def to_raw(datatype: str, array: Array) -> bytes:
    """Return the binary data of a tensor."""
    if datatype != "BYTES":
        return np.ascontiguousarray(array, DTYPES[datatype]).tobytes()
    parts = []
    for element in array.ravel():
        content = element.encode() if isinstance(element, str) else bytes(element)
        parts += [struct.pack("<I", len(content)), content]
    return b"".join(parts)


def from_json(name: str, datatype: str, shape: Sequence[int], data: Any) -> Array:
    """Return a tensor of JSON data, a list that is flat or nested like the shape, or a :class:`NumberText`.

    Raises:
        RequestFailure: The number of elements differs from the shape's, or an element does not fit the datatype.
    """
    elements = element_count(name, datatype, shape)
    if datatype == "BF16":
        raise invalid(f"tensor {name!r}: BF16 must be sent as binary data")
    if isinstance(data, NumberText):
        count = data.count()
        if elements and count != elements:
            raise invalid(f"tensor {name!r}: expected {elements} elements for shape {list(shape)}, found {count}")
        numbers = data.read(shape, elements, DTYPES[datatype], functools.partial(_array, name, datatype))
        if numbers is not None:
            return numbers.reshape(shape)
        data = data.parse()
    if not isinstance(data, list):
        raise invalid(f"tensor {name!r}: data: expected a list")
    flat = _flatten(name, data, elements)
    if len(flat) != elements:
        raise invalid(f"tensor {name!r}: expected {elements} elements for shape {list(shape)}, found {len(flat)}")
    return _array(name, datatype, flat).reshape(shape)


def json_text(datatype: str, array: Array) -> Iterator[bytes]:
    """Yield the elements of a tensor as JSON, separated by commas, in pieces for which no other thread waits long."""
    flat = array.ravel()
    for at in range(0, flat.size, _PIECE):
        piece = flat[at : at + _PIECE]
        if datatype == "BF16":
            piece = (np.asarray(piece, np.uint32) << 16).view(np.float32)
        yield (b"," if at else b"") + compact_json(piece.tolist())[1:-1].encode()


def from_contents(name: str, datatype: str, shape: Sequence[int], values: Sequence[Any]) -> Array:
    """Return a tensor of the typed contents of a gRPC message.

    Raises:
        RequestFailure: The number of elements differs from the shape's, or an element is out of range.
    """
    elements = element_count(name, datatype, shape)
    if len(values) != elements:
        raise invalid(f"tensor {name!r}: expected {elements} elements for shape {list(shape)}, found {len(values)}")
    if datatype == "BYTES":
        return _decoded(name, list(values)).reshape(shape)
    array = np.empty(elements, DTYPES[datatype])
    for at in range(0, elements, _PIECE):
        array[at : at + _PIECE] = _numbers(name, datatype, list(values[at : at + _PIECE]))
    return array.reshape(shape)


class OutputSizes:
    """The bytes of a model's outputs as far as the shapes of its inputs tell them before it runs.

    Args:
        inputs: The model's inputs.
        outputs: The outputs; a dimension that is no dimension of an input, too, counts as 1.
    """

    def __init__(self, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> None:
        places = {name: (spec.name, axis) for spec in inputs for axis, name in enumerate(spec.names) if name}
        #: For each output the bytes of its fixed dimensions, and the inputs and axes that have the free ones.
        self._outputs = []
        for spec in outputs:
            item = _STRING_BYTES if spec.datatype == "BYTES" else DTYPES[spec.datatype].itemsize
            shape = spec.shape or ()
            free = [places[name] for size, name in zip(shape, spec.names, strict=True) if size < 0 and name in places]
            self._outputs.append((item * math.prod(size for size in shape if size >= 0), free))

    def total(self, feeds: Mapping[str, tuple[str, Array]]) -> int:
        """Return the bytes for a request with these inputs, datatype and array of each, which may not fit the model."""
        total = 0
        for fixed, free in self._outputs:
            size = fixed
            for name, axis in free:
                shape = feeds[name][1].shape if name in feeds else ()
                size *= shape[axis] if axis < len(shape) else 1
            total += size
        return total


def check_input(spec: TensorSpec, datatype: str, shape: Sequence[int]) -> None:
    """Check an input against the model.

    Raises:
        RequestFailure: The datatype or the shape does not fit.
    """
    if datatype != spec.datatype:
        raise invalid(f"input {spec.name!r}: expected datatype {spec.datatype}, found {datatype}")
    expected = spec.shape
    if expected is not None and (
        len(shape) != len(expected) or any(e not in (-1, d) for d, e in zip(shape, expected, strict=True))
    ):
        raise invalid(f"input {spec.name!r}: expected shape {list(expected)}, found {list(shape)}")
    if operator := fatal_operator(shape, spec.fragile):
        reason = f"onnxruntime's {operator} may end the process or never return"
        raise invalid(f"input {spec.name!r}: shape {list(shape)} has no elements, on which {reason}")


def check_request(
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    feeds: Mapping[str, tuple[str, Array]],
    names: Sequence[str],
) -> tuple[TensorSpec, ...]:
    """Check a request against the model, and return the outputs that it asks for.

    Args:
        inputs: Those of the model.
        outputs: Those of the model.
        feeds: Datatype and array of each input of the request.
        names: Names of the outputs that it asks for; empty for all.

    Raises:
        RequestFailure: An input or output is unknown, or an input is missing or does not fit.
    """
    known = {spec.name: spec for spec in inputs}
    for name, (datatype, array) in feeds.items():
        if name not in known:
            raise invalid(f"unknown input {name[:200]!r}: expected {', '.join(known)}")
        check_input(known[name], datatype, array.shape)
    missing = [name for name in known if name not in feeds]
    if missing:
        raise invalid(f"missing input {missing[0]!r}")
    return choose_outputs(outputs, names)


def choose_outputs(outputs: Sequence[TensorSpec], names: Sequence[str]) -> tuple[TensorSpec, ...]:
    """Return the outputs with some names, or all of them without a name.

    Raises:
        RequestFailure: An output is unknown.
    """
    offered = {spec.name: spec for spec in outputs}
    for name in names:
        if name not in offered:
            raise invalid(f"unknown output {name[:200]!r}: expected one of {', '.join(offered)}")
    return tuple(offered[name] for name in dict.fromkeys(names)) if names else tuple(outputs)


def unequal_sizes(inputs: Sequence[TensorSpec], feeds: Mapping[str, tuple[str, Array]]) -> tuple[str, bool]:
    """Return which inputs of a request differ in the size of a dimension that they share, empty if none do.

    A name of a free dimension means one size; a free first dimension without a name may mean one, as that of columns.
    Some models run nevertheless, so that this explains a failure.

    Returns:
        The explanation, and whether the dimension has a name.
    """
    shared: dict[str, dict[int, list[str]]] = {}
    for spec in inputs:
        for axis, size in enumerate(spec.shape or ()):
            if size < 0 and (spec.names[axis] or not axis):
                sizes = shared.setdefault(spec.names[axis], {})
                sizes.setdefault(feeds[spec.name][1].shape[axis], []).append(spec.name)
    for dimension, sizes in sorted(shared.items(), key=lambda entry: not entry[0]):
        if len(sizes) > 1:
            found = (f"{n} in {', '.join(own[:_NAMED])}{', ...' * (len(own) > _NAMED)}" for n, own in sizes.items())
            where = f"dimension {dimension!r}" if dimension else "the first dimension"
            return f"inputs differ in {where}: {'; '.join(found)}", bool(dimension)
    return "", False


def _array(name: str, datatype: str, values: list[Any]) -> Array:
    """Return elements of JSON as a flat array."""
    unexpected = set(map(type, values)) - _JSON_TYPES.get(datatype, {int})
    if unexpected:
        raise invalid(
            f"tensor {name!r}: {datatype} elements cannot be {', '.join(sorted(t.__name__ for t in unexpected))}"
        )
    return _numbers(name, datatype, values)


def _numbers(name: str, datatype: str, values: list[Any]) -> Array:
    try:
        return np.array(values, DTYPES[datatype])
    except (OverflowError, ValueError) as error:
        raise invalid(f"tensor {name!r}: an element is out of the range of {datatype}") from error


def _flatten(name: str, data: list[Any], elements: int) -> list[Any]:
    """Return the elements of nested lists of equal depth, without recursion."""
    for _ in range(_MAX_DIMENSIONS):
        kinds = set(map(type, data))
        if list not in kinds:
            return data
        if len(kinds) > 1:
            raise invalid(f"tensor {name!r}: data: lists and elements at the same depth")
        if len({len(part) for part in data}) > 1:
            raise invalid(f"tensor {name!r}: data: lists of different lengths at the same depth")
        data = [element for part in data for element in part]
        if not data and not elements:
            return data
    raise invalid(f"tensor {name!r}: data: nested more than {_MAX_DIMENSIONS} times")


def _strings(name: str, data: bytes | memoryview, elements: int) -> Array:
    contents, at = [], 0
    for _ in range(min(elements, len(data) // 4 + 1)):  # the shape may have more than there can be
        start = at + 4
        at = start + int.from_bytes(data[at:start], "little")
        contents.append(bytes(data[start:at]))
    if at != len(data) or len(contents) != elements:
        raise invalid(f"tensor {name!r}: expected {elements} BYTES elements, each with its length before it")
    return _decoded(name, contents)


def _decoded(name: str, values: list[bytes]) -> Array:
    array = np.empty(len(values), object)
    try:
        for at in range(0, len(values), _PIECE):
            array[at : at + _PIECE] = [value.decode() for value in values[at : at + _PIECE]]
    except UnicodeDecodeError as error:
        raise invalid(f"tensor {name!r}: BYTES elements must be UTF-8, which is what ONNX strings are") from error
    return array


#: Operators of onnxruntime 1.31 that abort, divide by zero or read foreign memory if a dimension is 0, found with the
#: test cases of ONNX for all operators.
_ANY_DIMENSION = frozenset({"ConvTranspose", "GRU", "LSTM", "STFT"})
#: Those that divide by zero or never return if the second dimension (heads, channels) of a tensor is 0, and the rank
#: from which a tensor has such a dimension.
_SECOND_DIMENSION = {"Attention": 4, "Conv": 3}
#: The domains of ONNX's own operators.
_ONNX = ("", "ai.onnx")


def fragile_operators(models: Iterable[onnx.ModelProto], name: str) -> frozenset[str]:
    """Return the types of such operators in models, to which their input of a name may be fatal.

    Bodies and functions are searched. Operators with a fatal second dimension count if they read the input itself.
    """
    types: set[str] = set()
    for model in models:
        for node in nodes_of(model):
            fatal = node.op_type in _ANY_DIMENSION or (node.op_type in _SECOND_DIMENSION and name in node.input)
            if fatal and node.domain in _ONNX:
                types.add(node.op_type)
    return frozenset(types)


def fatal_operator(shape: Sequence[int], operators: Iterable[str]) -> str:
    """Return one of these operators to which an input of a shape may be fatal, or an empty text."""
    for operator in sorted(operators):
        if operator in _ANY_DIMENSION:
            if 0 in shape:
                return operator
        elif len(shape) >= _SECOND_DIMENSION[operator] and shape[1] == 0:
            return operator
    return ""
