"""The axis of tokens: which operators treat every token by itself, and where the tokens are in their outputs.

A value is token-wise along an axis if its slice ``t`` there depends on token ``t`` only. A node keeps that property if
it computes its output for every token alike and by itself. Token-wise nodes give the same results for the concatenated
tokens of several requests as for each request. A node of an unknown type is taken to mix tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import onnx

from chrion.graph.observation import Observation, Size
from chrion.graph.rewrite import STANDARD, int_attribute, ints_attribute

#: Operators that compute each element from the elements at the same place.
ELEMENTWISE = frozenset(
    """
    Abs Acos Add And Asin Atan BiasGelu Cast CastLike Ceil Celu Clip Cos Div Elu Equal Erf Exp FastGelu Floor  Gelu
    Greater GreaterOrEqual HardSigmoid HardSwish Identity IsInf IsNaN LeakyRelu Less LessOrEqual Log Max  Mean Min
    Mish Mod Mul Neg Not Or PRelu Pow QuickGelu Reciprocal Relu Round Selu Sigmoid Sign Silu Sin  Softplus Softsign
    Sqrt Sub Sum Swish Tan Tanh ThresholdedRelu Where Xor
    """.split()  # noqa: SIM905 - a line for each otherwise
)
_NORMALISATIONS = frozenset({"LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"})
_SKIPPED = frozenset({"SkipLayerNormalization", "SkipSimplifiedLayerNormalization"})
_REDUCTIONS = frozenset(
    f"Reduce{name}" for name in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")
)
_LAYOUT = frozenset({"Flatten", "Reshape", "Squeeze", "Unsqueeze"})
_TOKENS = Size(1, 0, 0)


def token_axes(node: onnx.NodeProto, axes: Mapping[str, int], seen: Observation) -> tuple[int, ...] | None:
    """Return the token axis of every output of a node, or None if the node may mix tokens.

    Args:
        node: The node.
        axes: The token axes of its token-wise inputs; all other inputs are the same for all requests.
        seen: The shapes of the values.
    """
    axis = _axis(node, axes, seen)
    outputs = [name for name in node.output if name]
    if axis is None or any(not _fits(seen.shapes.get(name, ()), axis) for name in outputs):
        return None
    return (axis,) * len(node.output)


def tokens_axis(shape: Sequence[Size | None]) -> int | None:
    """Return the only axis whose length is the number of new tokens, if all other axes are fixed."""
    found = [at for at, size in enumerate(shape) if size == _TOKENS]
    others = [size for size in shape if size != _TOKENS]
    return found[0] if len(found) == 1 and all(size is not None and size.constant for size in others) else None


def leading(shape: Sequence[Size | None], axis: int) -> bool:
    """Return whether slices along an axis are contiguous, because all axes before it have length one."""
    return all(size == Size(0, 0, 1) for size in shape[:axis])


def _fits(shape: Sequence[Size | None], axis: int) -> bool:
    return tokens_axis(shape) == axis


def _axis(node: onnx.NodeProto, axes: Mapping[str, int], seen: Observation) -> int | None:
    kind, standard = node.op_type, node.domain in STANDARD
    if kind in ELEMENTWISE:
        return _elementwise(node, axes, seen)
    if kind in _NORMALISATIONS | _SKIPPED:
        axis = axes.get(node.input[0], -1)
        last = len(seen.shapes.get(node.input[0], ())) - 1
        first = int_attribute(node, "axis", -1) % (last + 1) if kind in _NORMALISATIONS else last
        alike = all(axes[name] == axis for name in node.input if name in axes)
        return axis if 0 <= axis < first and alike else None
    if kind in _REDUCTIONS and standard:
        return _reduction(node, axes, seen)
    rules: dict[str, Callable[[onnx.NodeProto, Mapping[str, int], Observation], int | None]] = {
        "Concat": _along_another_axis,
        "DequantizeLinear": _elementwise,
        "Expand": _expand,
        "FusedMatMul": _plain_product,
        "Gather": _gather,
        "Gemm": _gemm,
        "LogSoftmax": _along_another_axis,
        "MatMul": _product,
        "MatMulNBits": _first_input,
        "QuantizeLinear": _elementwise,
        "RotaryEmbedding": _rotary,
        "Slice": _slice,
        "Softmax": _along_another_axis,
        "Split": _along_another_axis,
        "Transpose": _transpose,
    }
    if kind in _LAYOUT and standard:
        return _layout(node, axes, seen)
    return rules[kind](node, axes, seen) if kind in rules else None


def _elementwise(node: onnx.NodeProto, axes: Mapping[str, int], seen: Observation) -> int | None:
    """Return the common axis of inputs that are broadcast; inputs without tokens must not vary along it."""
    rank = max((len(seen.shapes.get(name, ())) for name in node.input if name), default=0)
    found = {rank - len(seen.shapes[name]) + axis for name, axis in axes.items()}
    if len(found) != 1:
        return None
    axis = found.pop()
    for name in node.input:
        shape = seen.shapes.get(name, ())
        at = axis - (rank - len(shape))
        if name and name not in axes and at >= 0 and shape[at] != Size(0, 0, 1):
            return None
    return axis


def _first_input(node: onnx.NodeProto, axes: Mapping[str, int], seen: Observation) -> int | None:
    """Return the axis of the first input, which must not be the last axis."""
    axis = axes.get(node.input[0])
    return axis if axis is not None and axis < len(seen.shapes[node.input[0]]) - 1 else None


def _rotary(node: onnx.NodeProto, axes: Mapping[str, int], seen: Observation) -> int | None:
    """Return the axis of rotary positions; without a position for each token they count rows."""
    inputs = [*node.input, *[""] * 4]
    if node.domain in STANDARD:
        placed = inputs[3] in axes or (inputs[1] in axes and inputs[2] in axes)
    else:
        placed = inputs[1] in axes
    return _first_input(node, axes, seen) if placed else None


def _plain_product(node: onnx.NodeProto, axes: Mapping[str, int], seen: Observation) -> int | None:
    turned = any(int_attribute(node, name, 0) for name in ("transA", "transBatchA", "transBatchB"))
    return None if turned or node.input[1] in axes else _first_input(node, axes, seen)


def _product(node: onnx.NodeProto, axes: Mapping[str, int], seen: Observation) -> int | None:
    """Return the axis of a matrix product: rows of the left, columns of the right, or an axis of the batch."""
    left, right = (len(seen.shapes.get(name, ())) for name in node.input)
    rank = max(left, right)
    if min(left, right) < 2:
        return None
    found = [rank - len(seen.shapes[name]) + axis for name, axis in axes.items()]
    if len(axes) == 1:
        rows = node.input[0] in axes and found[0] == rank - 2
        columns = node.input[1] in axes and found[0] == rank - 1
        if rows or columns:
            return found[0]
    batch = len(set(found)) == 1 and found[0] < rank - 2
    return _elementwise(node, axes, seen) if batch else None


def _gemm(node: onnx.NodeProto, axes: Mapping[str, int], seen: Observation) -> int | None:
    if list(axes) != [node.input[0]] or int_attribute(node, "transA", 0) or axes[node.input[0]] != 0:
        return None
    bias = seen.shapes.get(node.input[2], ()) if len(node.input) > 2 and node.input[2] else ()
    return 0 if len(bias) < 2 or bias[0] == Size(0, 0, 1) else None


def _gather(node: onnx.NodeProto, axes: Mapping[str, int], seen: Observation) -> int | None:
    data, indices = node.input
    rank = len(seen.shapes.get(data, ()))
    at = int_attribute(node, "axis", 0) % max(rank, 1)
    if data in axes and indices not in axes and at != axes[data]:
        return axes[data] if axes[data] < at else axes[data] - 1 + len(seen.shapes.get(indices, ()))
    return at + axes[indices] if indices in axes and data not in axes else None


def _transpose(node: onnx.NodeProto, axes: Mapping[str, int], seen: Observation) -> int | None:
    rank = len(seen.shapes[node.input[0]])
    return list(ints_attribute(node, "perm", range(rank)[::-1])).index(axes[node.input[0]])


def _layout(node: onnx.NodeProto, axes: Mapping[str, int], seen: Observation) -> int | None:
    """Return the axis after a change of shape: that of equal length with equally many elements before it."""
    source = node.input[0]
    if source not in axes:
        return None
    axis = tokens_axis(seen.shapes[node.output[0]])
    if axis is None:
        return None
    before = [
        math.prod(size.fixed for size in shape[:at] if size is not None)
        for shape, at in ((seen.shapes[source], axes[source]), (seen.shapes[node.output[0]], axis))
    ]
    return axis if before[0] == before[1] else None


def _expand(node: onnx.NodeProto, axes: Mapping[str, int], seen: Observation) -> int | None:
    source, rank = node.input[0], len(seen.shapes[node.output[0]])
    return rank - len(seen.shapes[source]) + axes[source] if source in axes else None


def _along_another_axis(node: onnx.NodeProto, axes: Mapping[str, int], seen: Observation) -> int | None:
    """Return the axis of an operator along one axis, which must be another one."""
    parts = [name for name in node.input if name] if node.op_type == "Concat" else [node.input[0]]
    found = {axes.get(name) for name in parts}
    axis = found.pop()
    default = {"Split": 0}.get(node.op_type, -1)
    along = int_attribute(node, "axis", default) % len(seen.shapes[parts[0]])
    return axis if not found and axis is not None and along != axis else None


def _slice(node: onnx.NodeProto, axes: Mapping[str, int], seen: Observation) -> int | None:
    source = node.input[0]
    rank = len(seen.shapes[source])
    along = seen.constants.get(node.input[3]) if len(node.input) > 3 else None
    if source not in axes or along is None:
        return None
    return None if axes[source] in {int(at) % rank for at in along} else axes[source]


def _reduction(node: onnx.NodeProto, axes: Mapping[str, int], seen: Observation) -> int | None:
    source = node.input[0]
    rank = len(seen.shapes[source])
    given = ints_attribute(node, "axes", ())
    if len(node.input) > 1 and node.input[1]:
        found = seen.constants.get(node.input[1])
        given = () if found is None else tuple(int(at) for at in found)
    along = {at % rank for at in given}
    if source not in axes or not along or axes[source] in along:
        return None
    kept = int_attribute(node, "keepdims", 1)
    return axes[source] if kept else axes[source] - sum(at < axes[source] for at in along)
