"""Nodes that converters of skl2onnx write: constants and values get unique names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import TensorProto, helper

Array = np.ndarray[Any, Any]


class NodeWriter:
    """Writes the nodes of one operator of a model that skl2onnx converts.

    Args:
        scope: The names of the model, an object of skl2onnx.
        container: Its nodes, an object of skl2onnx.
    """

    def __init__(self, scope: Any, container: Any) -> None:
        self._scope, self._container = scope, container

    def add(
        self, kind: str, inputs: Sequence[str | Array], output: str = "", domain: str = "", **attributes: Any
    ) -> str:
        """Add a node with one output, and return the name of the output.

        Args:
            kind: The type of the node.
            inputs: Names of values, or constants.
            output: The name of the output; a new one if empty.
            domain: The domain of the type.
            attributes: The attributes of the node.
        """
        output = output or self._scope.get_unique_variable_name(kind.lower())
        names = [given if isinstance(given, str) else self._constant(given) for given in inputs]
        name = self._scope.get_unique_operator_name(kind)
        self._container.add_node(kind, names, output, op_domain=domain, name=name, **attributes)
        return output

    def floats(self, variable: Any) -> str:
        """Return an input of the operator as float32."""
        name = str(variable.full_name)
        if type(variable.type).__name__ == "FloatTensorType":
            return name
        return self.add("Cast", [name], to=TensorProto.FLOAT)

    def _constant(self, value: Array) -> str:
        name = str(self._scope.get_unique_variable_name("constant"))
        self._container.add_initializer(
            name, helper.np_dtype_to_tensor_dtype(value.dtype), list(value.shape), value.ravel()
        )
        return name


def not_below(values: Array) -> Array:
    """Return the least float32 that is not below each number: float32 values reach either threshold alike."""
    rounded = np.asarray(values, np.float64).astype(np.float32)
    below = rounded.astype(np.float64) < values
    return np.where(below, np.nextafter(rounded, np.float32(np.inf)), rounded)


def not_above(values: Array) -> Array:
    """Return the greatest float32 that is not above each number."""
    return np.asarray(-not_below(-np.asarray(values, np.float64)))
