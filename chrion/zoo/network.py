"""A builder of models: nodes, seeded weights, inputs and outputs."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from chrion.common.wrong_values import wrong_value
from chrion.errors import OptionError
from chrion.zoo.weights_file import LARGE_BYTES, WeightsFile

#: Values of a large weight that are generated at a time: 4 MB.
_BLOCK_VALUES = 1 << 20
_OPSET, _IR_VERSION = 17, 8
#: The producer in the metadata of all models here, whose weights are random.
PRODUCER = "chrion"


@dataclass(frozen=True, slots=True)
class Spec:
    """Parameters of a network; all numbers are above zero, but a seed may be zero.

    Raises:
        OptionError: A number is too small.
    """

    #: That of the random weights, and of a random wiring.
    seed: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        for name in (f.name for f in fields(self)):
            number, minimum = getattr(self, name), 0 if name == "seed" else 1
            if isinstance(number, float) and number <= 0:
                raise wrong_value(name, "above 0", number)
            if isinstance(number, int) and not isinstance(number, bool) and number < minimum:
                raise wrong_value(name, f"{minimum} or more", number)


def check_heads(hidden: int, heads: int) -> None:
    """Check that the number of heads divides the width.

    Raises:
        OptionError: The number of heads does not divide the width.
    """
    if hidden % heads:
        raise OptionError(f"heads: {heads} does not divide the width of {hidden}")


class Network:
    """A model under construction. Equal seeds give equal weights, in the model or in a file beside it.

    Args:
        seed: The seed of the weights.
        store: The file of large weights; None to keep all weights in the model.
    """

    def __init__(self, seed: int, store: WeightsFile | None = None) -> None:
        self._store = store
        self.nodes: list[onnx.NodeProto] = []
        self.weights: dict[str, onnx.TensorProto] = {}
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
        self.random = np.random.default_rng(seed)
        self._scope: list[str] = []
        self._counts: Counter[str] = Counter()

    @contextlib.contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Prefix all names that are created in this context."""
        self._scope.append(name)
        yield
        self._scope.pop()

    def unique(self, stem: str) -> str:
        """Return an unused name for a value, weight or node."""
        name = "/".join([*self._scope, stem])
        self._counts[name] += 1
        count = self._counts[name]
        return name if count == 1 else f"{name}.{count}"

    def input(self, name: str, shape: Sequence[int | str], element: int = TensorProto.FLOAT) -> str:
        """Add an input of the model."""
        name = self.unique(name)
        self.inputs.append(helper.make_tensor_value_info(name, element, shape))
        return name

    def output(self, source: str, name: str, shape: Sequence[int | str] | None = None) -> None:
        """Add an output of the model and rename its value.

        The value must have floats, be the only output of its node, and be read by no other node.
        """
        producer = next(node for node in reversed(self.nodes) if source in node.output)
        producer.output[0] = name
        self.outputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))

    def constant(self, name: str, value: npt.NDArray[np.generic]) -> str:
        """Add a weight, unless the model has one of that name; return the name."""
        if name not in self.weights:
            self.weights[name] = numpy_helper.from_array(value, name)
        return name

    def integers(self, *values: int) -> str:
        """Add a constant list of integers: a shape, axes or bounds."""
        return self.constant(f"[{','.join(map(str, values))}]", np.array(values, np.int64))

    def number(self, value: float) -> str:
        """Add a constant float."""
        return self.constant(f"{value:.9g}", np.array(value, np.float32))

    def normal(self, stem: str, *shape: int, deviation: float) -> str:
        """Add a weight of normally distributed values."""
        name = self.unique(stem)
        if self._store is None or 4 * math.prod(shape) < LARGE_BYTES:
            return self.constant(name, self._drawn(shape, deviation))
        sizes = blocks(math.prod(shape), _BLOCK_VALUES)
        drawn = (self._drawn((size,), deviation) for size in sizes)
        self.weights[name] = self._store.add(name, shape, np.dtype(np.float32), drawn)
        return name

    def _drawn(self, shape: Sequence[int], deviation: float) -> npt.NDArray[np.float32]:
        return self.random.standard_normal(shape, dtype=np.float32) * np.float32(deviation)

    def node(self, op_type: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> None:
        """Add a node, named after its first output."""
        name = next(filter(None, outputs))
        self.nodes.append(helper.make_node(op_type, inputs, outputs, name=f"{op_type}:{name}", **attributes))

    def op(self, op_type: str, *inputs: str, **attributes: Any) -> str:
        """Add a node of one output; return the name of the output."""
        output = self.unique(op_type.lower())
        self.node(op_type, inputs, [output], **attributes)
        return output

    def dense(  # noqa: PLR0913 - all properties of a dense layer
        self, source: str, width: int, target: int, stem: str, *, bias: bool = True, gain: float = 1.0
    ) -> str:
        """Add a product with a matrix of [width, target] that scales values by about ``gain``, and an optional bias."""
        with self.scope(stem):
            product = self.op("MatMul", source, self.normal("W", width, target, deviation=gain * width**-0.5))
            return self.op("Add", product, self.normal("b", target, deviation=0.1)) if bias else product

    def gelu(self, x: str) -> str:
        """Add GELU: ``x / 2 * (1 + erf(x / sqrt(2)))``."""
        inner = self.op("Erf", self.op("Div", x, self.number(2**0.5)))
        return self.op("Mul", self.op("Mul", x, self.op("Add", inner, self.number(1.0))), self.number(0.5))

    def model(self, name: str, metadata: Mapping[str, str] | None = None, *, opset: int = _OPSET) -> onnx.ModelProto:
        """Return the model, with entries of metadata and the given version of ONNX's operators."""
        graph = helper.make_graph(self.nodes, name, self.inputs, self.outputs, list(self.weights.values()))
        others = sorted({node.domain for node in self.nodes if node.domain})
        opsets = [helper.make_opsetid("", opset), *(helper.make_opsetid(domain, 1) for domain in others)]
        ir_version = max(_IR_VERSION, helper.find_min_ir_version_for(opsets, ignore_unknown=True))
        model = helper.make_model(graph, producer_name=PRODUCER, opset_imports=opsets, ir_version=ir_version)
        helper.set_model_props(model, dict(metadata or {}))
        return model


def blocks(total: int, max_size: int) -> Iterator[int]:
    """Yield the sizes of the blocks of ``max_size`` values, the last one smaller, that ``total`` values consist of."""
    for start in range(0, total, max_size):
        yield min(max_size, total - start)
