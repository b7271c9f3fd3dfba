"""Operators that end the process, or never return, on tensors without elements: a request could end the server."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx

from chrion.graph.external import nodes_of

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
