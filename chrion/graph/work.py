"""The work of an ONNX node: arithmetic by kind, memory traffic and copies, from types, attributes and shapes.

The counts do not depend on a machine. :mod:`chrion.profiler.datasheet` turns them into times.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import onnx

from chrion.graph.kernel_work import Convolution, Pool, expansion_steps, is_blocked, pool_work
from chrion.graph.model import ELEMENT_BYTES, TensorInfo

#: Names of element types as hardware descriptions write them; all others are computed as float32.
_ELEMENTS = {
    "tensor(double)": "float64",
    "tensor(float16)": "float16",
    "tensor(bfloat16)": "bfloat16",
    "tensor(int8)": "int8",
    "tensor(uint8)": "int8",
}
#: Operations for each element of the first output. Functions are counted as the polynomials or rational functions that
#: vectorised libraries evaluate, with a multiply-add as two operations and a division or square root as twenty.
_OPERATIONS = {
    "Erf": 44, "Exp": 24, "Gelu": 50, "FastGelu": 40, "QuickGelu": 40, "BiasGelu": 51, "Elu": 26, "Celu": 26,
    "Selu": 27, "Log": 26, "Mish": 60, "Pow": 50, "Sigmoid": 30, "Softplus": 50, "Tanh": 31, "Sin": 30, "Cos": 30,
    "Softmax": 31, "LogSoftmax": 40, "Div": 20, "Mod": 22, "Reciprocal": 20, "Sqrt": 20, "HardSwish": 4,
    "HardSigmoid": 3, "Clip": 2, "BatchNormalization": 2, "InstanceNormalization": 8, "GroupNormalization": 8,
    "LRN": 60, "LayerNormalization": 50, "SimplifiedLayerNormalization": 30, "RMSNormalization": 30,
    "SkipLayerNormalization": 51, "SkipSimplifiedLayerNormalization": 31, "QuantizeLinear": 6, "DequantizeLinear": 2,
    "DynamicQuantizeLinear": 8,
}  # fmt: skip
#: Gates of a recurrent operator, and evaluations of activation functions for each element of its state.
_GATES = {"LSTM": (4, 5), "GRU": (3, 3), "RNN": (1, 1)}
#: Positions of the two factors among the inputs.
_FACTORS = {"QLinearConv": (0, 3), "QLinearMatMul": (0, 3)}
_CONVOLUTIONS = {"Conv", "FusedConv", "ConvInteger", "QLinearConv", "NhwcConv", "NhwcFusedConv"}
_MATRIX_PRODUCTS = {"MatMul", "FusedMatMul", "MatMulInteger", "QLinearMatMul", "DynamicQuantizeMatMul"}
_POOLS = {"MaxPool", "AveragePool", "LpPool", "QLinearAveragePool", "GlobalAveragePool", "GlobalMaxPool"}
#: Operators that read all elements of their input for fewer elements of output.
_REDUCTIONS = {"ArgMax", "ArgMin", "TopK", "CumSum"}
#: Operators that copy parts of their first input, and therefore read as much as they write.
_SELECTIONS = {"Gather", "GatherElements", "GatherND", "Slice", "Split", "Expand", "Tile", "Pad", "Resize"}
#: Operators that copy their first input and then replace single elements or slices of it.
_SCATTERS = {"ScatterElements", "ScatterND", "Scatter"}
#: Operators that copy all of their inputs, perhaps in another order.
_COPIES = {"Concat", "Transpose", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Cast"}
#: Operators that read nothing but shapes.
_SHAPES = {"Shape", "Size", "ConstantOfShape", "Range", "Constant"}


class Setup(Enum):
    """What a CPU kernel prepares before its arithmetic."""

    NONE = "none"
    #: Loops over dimensions, such as those that a reduction keeps.
    LOOPS = "loops"
    #: Buffers, and the division of a recurrent operator among threads.
    RECURRENT = "recurrent"


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product, or a convolution as one."""

    flops: float
    #: Rows of the factor that is not a weight: the work that shares one reading of the weights. Zero if no weight is
    #: used twice, as in a depthwise convolution.
    rows: float


@dataclass(frozen=True, slots=True)
class NodeWork:
    """The work of one node, or of several that run one after another."""

    #: The element type of the arithmetic: ``float32``, ``int8``, ...
    element: str = "float32"
    products: tuple[Product, ...] = ()
    #: Operations outside products.
    operations: float = 0.0
    #: Bytes read and written. A value that does not fit a cache and is read in every step counts once a step.
    traffic: float = 0.0
    #: Bytes of all values that are touched.
    footprint: float = 0.0
    #: Contiguous pieces, each of which is copied by a call or computed by a loop of its own.
    pieces: float = 0.0
    #: Elements that are copied one by one in one loop.
    singles: float = 0.0
    #: Steps of a CPU kernel that uses vectors of 16 bytes or single elements, in place of ``operations``.
    short_vectors: float = 0.0
    #: Calls of a function for one element each, by CPU kernels that evaluate functions so.
    calls: float = 0.0
    #: Bytes of values that a CPU kernel brings into another layout before and after its arithmetic.
    relaid: float = 0.0
    #: CPU kernels that run one after another, each with the overhead of a node.
    kernels: int = 1
    setup: Setup = Setup.NONE
    #: Values that a kernel joins into one.
    joined: int = 0
    #: Steps that depend on each other; more than 1 for recurrent operators.
    steps: int = 1
    outputs: int = 1

    @property
    def flops(self) -> float:
        """All arithmetic."""
        return sum(product.flops for product in self.products) + self.operations


def node_work(node: onnx.NodeProto, values: Mapping[str, TensorInfo]) -> NodeWork:
    """Return the work of a node; values of unknown shape count as empty.

    Convolutions, matrix products and recurrent cells are counted from their shapes; normalisations, activation
    functions and pools by element; other arithmetic as one operation for each element of the first output.
    """
    inputs = [_Value.of(values.get(name)) for name in node.input]
    outputs = [_Value.of(values.get(name)) for name in node.output if name]
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    kind = node.op_type
    shape = (tuple(inputs), tuple(outputs), attributes)
    if kind in _GATES and len(inputs) > 2 and len(inputs[0].shape) == 3 and len(inputs[1].shape) == 3:
        return _recurrent(kind, *shape)
    if kind in _CONVOLUTIONS | _MATRIX_PRODUCTS | {"ConvTranspose", "Gemm", "Einsum"} and len(inputs) > 1:
        return _product(kind, *shape)
    if kind.startswith("TreeEnsemble"):
        return replace(_other(kind, *shape), calls=_comparisons(inputs, attributes))
    return _other(kind, *shape)


def node_flops(node: onnx.NodeProto, values: Mapping[str, TensorInfo]) -> float:
    """Return the operations of a node's products, or without products one for each element of its first output.

    Profiles are fitted and compared by this count. It depends on no approximation of functions, so that stored profiles
    stay valid.
    """
    products = node_work(node, values).products
    first = next((name for name in node.output if name), "")
    return sum(product.flops for product in products) or float(_Value.of(values.get(first)).elements)


@dataclass(frozen=True, slots=True)
class _Value:
    """A tensor's shape, elements and bytes; a tensor of unknown shape is empty."""

    shape: tuple[int, ...]
    elements: int
    bytes: int
    element: str

    @classmethod
    def of(cls, info: TensorInfo | None) -> _Value:
        known = info is not None and info.shape is not None and all(isinstance(d, int) for d in info.shape)
        if info is None or info.shape is None or not known:
            return cls((), 0, 0, "float32")
        shape = info.fixed_dimensions
        elements = math.prod(shape)
        return cls(shape, elements, elements * ELEMENT_BYTES.get(info.type, 0), _ELEMENTS.get(info.type, "float32"))


Values = tuple[_Value, ...]
Attributes = Mapping[str, Any]


def _total(values: Sequence[_Value]) -> float:
    return float(sum(value.bytes for value in values))


def _recurrent(kind: str, inputs: Values, outputs: Values, attributes: Attributes) -> NodeWork:
    """Return the work of a recurrent operator: X [steps, batch, in], W [directions, gates * hidden, in].

    onnxruntime's kernel of RNN is older than those of LSTM and GRU: it has no packed weights, so that every product
    transposes its weights first, and calls the activation function for every element.
    """
    gates, functions = _GATES[kind]
    x, w, r = inputs[:3]
    steps, batch = (x.shape[1], x.shape[0]) if attributes.get("layout") else (x.shape[0], x.shape[1])
    directions, rows, _ = w.shape
    hidden = rows // gates
    bytes_moved = _total(inputs) + _total(outputs)
    state = directions * hidden * steps * batch
    plain = kind == "RNN"
    return NodeWork(
        element=x.element,
        products=(
            Product(2.0 * w.elements * steps * batch, steps * batch),
            Product(2.0 * r.elements * steps * batch, batch),
        ),
        operations=_OPERATIONS["Tanh"] * functions * state,
        traffic=bytes_moved + (steps - 1) * r.bytes,
        footprint=bytes_moved,
        calls=state if plain else 0.0,
        relaid=float(w.bytes + steps * r.bytes) if plain else 0.0,
        setup=Setup.NONE if plain else Setup.RECURRENT,
        steps=steps,
        outputs=len(outputs),
    )


def _product(kind: str, inputs: Values, outputs: Values, attributes: Attributes) -> NodeWork:
    """Return the work of a matrix product or convolution."""
    first, second = (inputs[at] for at in _FACTORS.get(kind, (0, 1)))
    elements = outputs[0].elements if outputs else 0
    bytes_moved = _total(inputs) + _total(outputs)
    relaid = short_vectors = 0.0
    if kind in _CONVOLUTIONS:
        depthwise = attributes.get("group", 1) > 1 and math.prod(second.shape[1:2]) == 1
        rows: float = 0.0 if depthwise else elements / max(1, math.prod(second.shape[:1]))
        flops = 2.0 * elements * math.prod(second.shape[1:])
        convolution = _convolution(first, second, outputs, attributes)
        if convolution is None or is_blocked(convolution):
            relaid = first.bytes + _total(outputs)
        else:
            short_vectors = expansion_steps(convolution)
    elif kind == "ConvTranspose":
        rows = math.prod(first.shape[:1] + first.shape[2:])
        flops = 2.0 * first.elements * math.prod(second.shape[1:])
    elif kind == "Gemm":
        rows = math.prod((outputs[0].shape if outputs else ())[:1])
        flops = 2.0 * elements * math.prod(first.shape[:1] if attributes.get("transA") else first.shape[-1:])
    elif kind == "Einsum":
        rows = math.prod(first.shape[:-1])
        flops = 2.0 * math.prod(_einsum_sizes(attributes.get("equation", b""), inputs).values())
    else:
        stacked = math.prod(second.shape[:-2]) > 1  # products of their own, which share no weights
        rows = math.prod(first.shape[-2:-1] if stacked else first.shape[:-1])
        flops = 2.0 * elements * math.prod(first.shape[-1:])
    known = bool(first.elements and second.elements)
    products = (Product(flops, rows),) if known else ()
    return NodeWork(
        element=first.element,
        products=products,
        operations=0.0 if known else float(elements),
        traffic=bytes_moved,
        footprint=bytes_moved,
        relaid=relaid,
        short_vectors=short_vectors,
        outputs=len(outputs),
    )


def _convolution(first: _Value, filters: _Value, outputs: Values, attributes: Attributes) -> Convolution | None:
    """Return a convolution; None if its shapes are unknown, or if it is not of float32."""
    known = first.element == "float32" and outputs and len(first.shape) == len(filters.shape) == len(outputs[0].shape)
    if not known or len(first.shape) <= 2:
        return None
    stride = attributes.get("strides") or (1,)
    return Convolution(first.shape, filters.shape, outputs[0].shape, attributes.get("group", 1), stride)


def _einsum_sizes(equation: bytes | str, inputs: Values) -> dict[str, int]:
    """Return the size of each letter of an Einsum equation; letters of unknown inputs are left out."""
    text = equation.decode() if isinstance(equation, bytes) else equation
    terms = text.replace(" ", "").split("->")[0].split(",")
    return {
        letter: size
        for term, value in zip(terms, inputs, strict=False)
        for letter, size in zip(term.replace("...", ""), value.shape[-len(term.replace("...", "")) :], strict=False)
    }


def _comparisons(inputs: Sequence[_Value], attributes: Attributes) -> float:
    """Return about how many nodes of trees all rows visit; a visit takes about as long as a call (6 to 8 ns measured).

    Paths in grown trees are 1.4 times as long as in balanced ones (8.8 for 64 leaves of LightGBM).
    """
    trees = max(1, len(attributes.get("tree_roots", ())) or len(set(attributes.get("nodes_treeids", ()))))
    leaves = len(attributes.get("leaf_targetids", ())) or list(attributes.get("nodes_modes", ())).count(b"LEAF")
    rows = inputs[0].shape[0] if inputs and len(inputs[0].shape) > 1 else 1
    return rows * trees * 1.4 * math.log2(max(1, leaves / trees))


def _other(kind: str, inputs: Values, outputs: Values, attributes: Attributes) -> NodeWork:
    """Return the work of an operator without products."""
    first = inputs[0] if inputs else _Value.of(None)
    result = outputs[0] if outputs else _Value.of(None)
    touched = _total(inputs) + _total(outputs)
    work = NodeWork(first.element, (), float(result.elements), touched, touched, outputs=len(outputs))
    if kind in _SHAPES | _SELECTIONS | _SCATTERS | _COPIES:
        return _moved(kind, replace(work, operations=0.0), inputs, outputs, attributes)
    if kind in {"Sum", "Mean", "Max", "Min"}:  # one addition after another, each of which reads two and writes one
        steps = max(1, len(inputs) - 1)
        count = steps + (kind == "Mean")  # a mean is divided last
        traffic = (3.0 * steps + 2 * (kind == "Mean")) * result.bytes
        return replace(work, traffic=traffic, operations=float(count) * result.elements, kernels=steps)
    if kind in _POOLS and len(first.shape) > 2 and len(first.shape) == len(result.shape):
        return _pool(kind, work, first, outputs, attributes)
    if kind in _REDUCTIONS or kind.startswith("Reduce"):
        setup = Setup.LOOPS if kind.startswith("Reduce") else Setup.NONE
        return replace(work, operations=float(first.elements), setup=setup)
    rows = result.elements / max(1, math.prod(result.shape[-1:])) if kind in {"Softmax", "LogSoftmax"} else 0.0
    return replace(work, operations=work.operations * _OPERATIONS.get(kind, 1), pieces=rows)


def _moved(kind: str, work: NodeWork, inputs: Values, outputs: Values, attributes: Attributes) -> NodeWork:
    """Return the work of an operator that moves values and computes none, given its traffic."""
    if kind in _SHAPES:
        return replace(work, traffic=_total(outputs))
    if kind in _SCATTERS:
        return replace(work, pieces=float(sum(value.elements for value in inputs[1:2])), setup=Setup.LOOPS)
    if kind in _SELECTIONS:
        # The positions that are read come in the inputs after the first one.
        touched = 2 * _total(outputs) + _total(inputs[1:])
        pieces, single = _selected_pieces(kind, inputs, outputs, attributes)
        work = replace(work, traffic=touched, footprint=touched)
    else:
        pieces, single = _rearranged_pieces(kind, inputs, outputs, attributes)
        work = replace(work, joined=len(inputs) - 1 if kind == "Concat" else 0)
    return replace(work, singles=pieces) if single else replace(work, pieces=pieces)


def _pool(kind: str, work: NodeWork, first: _Value, outputs: Values, attributes: Attributes) -> NodeWork:
    """Return the work of a pooling operator, given its traffic."""
    spatial = first.shape[2:]
    given = Pool(
        input=first.shape,
        output=outputs[0].shape,
        window=spatial if kind.startswith("Global") else attributes.get("kernel_shape", spatial),
        stride=attributes.get("strides") or (1,) * len(spatial),
        average="Average" in kind,
        float32=first.element == "float32",
        outputs=len(outputs),
    )
    operations, short_vectors, pieces, blocked = pool_work(given)
    work = replace(work, operations=operations, short_vectors=short_vectors, pieces=pieces)
    # Bringing one layout into the other is a kernel before and one after.
    return replace(work, relaid=work.traffic, kernels=3) if blocked else work


def _selected_pieces(kind: str, inputs: Values, outputs: Values, attributes: Attributes) -> tuple[float, bool]:
    """Return the number of contiguous pieces that a selection copies, and whether they are elements in one loop."""
    first = inputs[0] if inputs else _Value.of(None)
    elements = sum(value.elements for value in outputs)
    if not elements or not first.shape:
        return 0.0, False
    axis = attributes.get("axis", 0) % len(first.shape)
    if kind == "Gather":  # checks each position and copies each piece with a call, also if it is one element
        return elements / max(1, math.prod(first.shape[axis + 1 :])), False
    if kind == "Split":
        piece = elements / len(outputs) / math.prod(first.shape[:axis])
    elif kind in {"Slice", "Pad"} and len(first.shape) == len(outputs[0].shape):
        # Trailing dimensions that are kept whole make one piece with the last one that is cut.
        piece = 1.0
        for whole, part in zip(reversed(first.shape), reversed(outputs[0].shape), strict=True):
            piece *= min(whole, part)
            if whole != part:
                break
    else:
        piece = outputs[0].shape[-1] if outputs[0].shape else 1
    return elements / max(1.0, piece), piece <= 1


def _rearranged_pieces(kind: str, inputs: Values, outputs: Values, attributes: Attributes) -> tuple[float, bool]:
    """Return the number of contiguous pieces that are copied, and whether they are elements in one loop."""
    result = outputs[0] if outputs else _Value.of(None)
    if not result.elements:
        return 0.0, False
    if kind == "Concat":
        outer = math.prod(result.shape[: attributes.get("axis", 0) % max(1, len(result.shape))])
        pieces = float(outer * len(inputs))
    elif kind == "Transpose" and inputs[0].shape:
        rank = len(inputs[0].shape)
        order = [axis for axis in attributes.get("perm", range(rank)[::-1]) if inputs[0].shape[axis] != 1]
        kept = [axis for axis in range(rank) if inputs[0].shape[axis] != 1]
        same = 0
        while same < len(order) and order[-1 - same] == kept[-1 - same]:
            same += 1
        pieces = float(math.prod(inputs[0].shape[axis] for axis in order[: len(order) - same]))
    else:
        pieces = 1.0
    return pieces, pieces >= result.elements
