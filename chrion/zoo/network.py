"""Networks under construction: nodes, seeded weights, inputs and outputs, and at last the model."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from chrion.errors import OptionError

_OPSET, _IR_VERSION = 17, 8


def check_sizes(spec: Any) -> None:
    """Make sure that the numbers of a specification are above zero; a seed may be zero.

    Raises:
        OptionError: One is not.
    """
    for name in (f.name for f in fields(spec)):
        number, least = getattr(spec, name), 0 if name == "seed" else 1
        if isinstance(number, float) and number <= 0:
            raise OptionError(f"{name}: {number} is not above 0")
        if isinstance(number, int) and not isinstance(number, bool) and number < least:
            raise OptionError(f"{name}: {number} is below {least}")


class Network:
    """Nodes and weights in the order they are made; equal seeds give equal weights."""

    def __init__(self, seed: int) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: dict[str, onnx.TensorProto] = {}
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
        self.random = np.random.default_rng(seed)
        self._scope: list[str] = []
        self._counts: Counter[str] = Counter()

    @contextlib.contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Names made inside begin with this one."""
        self._scope.append(name)
        yield
        self._scope.pop()

    def unique(self, stem: str) -> str:
        """A name that no other value, weight or node has."""
        name = "/".join([*self._scope, stem])
        self._counts[name] += 1
        count = self._counts[name]
        return name if count == 1 else f"{name}.{count}"

    def input(self, name: str, shape: Sequence[int], element: int = TensorProto.FLOAT) -> str:
        """An input of the model."""
        name = self.unique(name)
        self.inputs.append(helper.make_tensor_value_info(name, element, shape))
        return name

    def output(self, source: str, name: str, shape: Sequence[int | str] | None = None) -> None:
        """Hand out, under a name of its own, floats that a node of one output made and that no other node reads."""
        maker = next(node for node in reversed(self.nodes) if source in node.output)
        maker.output[0] = name
        self.outputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))

    def constant(self, name: str, value: npt.NDArray[np.generic]) -> str:
        """A weight of the model; one that is there already is kept."""
        if name not in self.weights:
            self.weights[name] = numpy_helper.from_array(value, name)
        return name

    def integers(self, *values: int) -> str:
        """A list of integers: a shape, axes or bounds."""
        return self.constant(f"[{','.join(map(str, values))}]", np.array(values, np.int64))

    def number(self, value: float) -> str:
        """One float."""
        return self.constant(f"{value:.9g}", np.array(value, np.float32))

    def normal(self, stem: str, *shape: int, deviation: float) -> str:
        """A weight of normally distributed values."""
        drawn = self.random.standard_normal(shape, dtype=np.float32)
        return self.constant(self.unique(stem), drawn * np.float32(deviation))

    def node(self, op_type: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> None:
        """A node, named after its first output."""
        name = next(filter(None, outputs))
        self.nodes.append(helper.make_node(op_type, inputs, outputs, name=f"{op_type}:{name}", **attributes))

    def op(self, op_type: str, *inputs: str, **attributes: Any) -> str:
        """A node of one output, whose name is returned."""
        output = self.unique(op_type.lower())
        self.node(op_type, inputs, [output], **attributes)
        return output

    def dense(  # noqa: PLR0913 - what a dense layer is made of
        self, source: str, width: int, target: int, stem: str, *, bias: bool = True, gain: float = 1.0
    ) -> str:
        """A product with a matrix of ``width`` rows and ``target`` columns; values grow by about ``gain``."""
        with self.scope(stem):
            made = self.op("MatMul", source, self.normal("W", width, target, deviation=gain * width**-0.5))
            return self.op("Add", made, self.normal("b", target, deviation=0.1)) if bias else made

    def model(self, name: str) -> onnx.ModelProto:
        """The model."""
        graph = helper.make_graph(self.nodes, name, self.inputs, self.outputs, list(self.weights.values()))
        opsets = [helper.make_opsetid("", _OPSET)]
        return helper.make_model(graph, producer_name="chrion", opset_imports=opsets, ir_version=_IR_VERSION)
