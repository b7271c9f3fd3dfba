"""Operators that end onnxruntime's process on tensors without elements, so that a request could end the server."""

from __future__ import annotations

from collections.abc import Iterable

import onnx

from chrion.graph.rewrite import bodies_of

#: Operators by which onnxruntime 1.31 aborts, divides by zero or reads foreign memory if a dimension is 0, found with
#: the test cases of ONNX for all operators. ``Attention`` without heads does so, too; but its caches may be empty.
_FATAL = frozenset({"ConvTranspose", "GRU", "LSTM", "STFT"})


def operator_fatal_if_empty(model: onnx.ModelProto) -> str:
    """Return such an operator of a model, or an empty text if it has none."""
    return _first(model.graph.node) or next(filter(None, (_first(f.node) for f in model.functions)), "")


def _first(nodes: Iterable[onnx.NodeProto]) -> str:
    for node in nodes:
        if node.op_type in _FATAL:
            return node.op_type
        for body in bodies_of(node):
            if name := _first(body.node):
                return name
    return ""
