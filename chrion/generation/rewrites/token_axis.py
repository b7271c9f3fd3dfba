"""The axis of tokens: which operators treat every token by itself, and where the tokens are in their outputs.

A value is token-wise along an axis if its slice ``t`` there depends on token ``t`` only. A node keeps that property if
it computes its output for every token alike and by itself. Token-wise nodes give the same results for the concatenated
tokens of several requests as for each request. A node of an unknown type is taken to mix tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import onnx

from chrion.generation.rewrites.observation import Observation, Size
from chrion.graph.rewrite import STANDARD, int_attribute, ints_attribute

#: Operators that compute each element from the elements at the same place.
ELEMENTWISE = frozenset(
    """
    Abs Acos Add And Asin Atan BiasGelu Cast CastLike Ceil Celu Clip Cos Div Elu Equal Erf Exp FastGelu Floor  Gelu
    Greater GreaterOrEqual HardSigmoid HardSwish Identity IsInf IsNaN LeakyRelu Less LessOrEqual Log Max  Mean Min
    Mish Mod Mul Neg Not Or PRelu Pow QLinearAdd QLinearLeakyRelu QLinearMul QLinearSigmoid QuickGelu Reciprocal
    Relu Round Selu Sigmoid Sign Silu Sin Softplus Softsign Sqrt Sub Sum Swish Tan Tanh ThresholdedRelu Where Xor
    """.split()  # noqa: SIM905 - a line for each otherwise
)
_NORMALISATIONS = frozenset({"LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"})
_SKIPPED = frozenset({"SkipLayerNormalization", "SkipSimplifiedLayerNormalization"})
#: Operators that compute one element from several ones.
REDUCTIONS = frozenset(
    f"Reduce{name}" for name in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")
)
_LAYOUT = frozenset({"Flatten", "Reshape", "Squeeze", "Unsqueeze"})
_TOKENS = Size(1, 0, 0)
#: The least end of a slice that no number of tokens reaches.
NO_END = (1 << 31) - 1


def token_axes(node: onnx.NodeProto, axes: Mapping[str, int], seen: Observation) -> tuple[int, ...] | None:
    """Return the token axis of every output of a node, or None if the node may mix tokens.

    Args:
        node: The node.
        axes: The token axes of its token-wise inputs; all other inputs are the same for all requests, except for
            shapes of the outputs.
        seen: The shapes of the values.
    """
    axis = _axis(node, axes, seen)
    outputs = [name for name in node.output if name]
    if axis is None or any(not _fits(seen.shapes.get(name, ()), axis) for name in outputs):
        return None
    return (axis,) * len(node.output)


def tokens_axis(shape: Sequence[Size | None]) -> int | None:
    """Return the only axis whose length is the number of new tokens, if all other axes are fixed."""
    along = [at for at, size in enumerate(shape) if size == _TOKENS]
    others = [size for size in shape if size != _TOKENS]
    return along[0] if len(along) == 1 and all(size is not None and size.constant for size in others) else None


def leading(shape: Sequence[Size | None], axis: int) -> bool:
    """Return whether slices along an axis are contiguous, because all axes before it have length one."""
    return all(size == Size(0, 0, 1) for size in shape[:axis])


def _fits(shape: Sequence[Size | None], axis: int) -> bool:
    return tokens_axis(shape) == axis


def _axis(node: onnx.NodeProto, axes: Mapping[str, int], seen: Observation) -> int | None:
    kind, standard = node.op_type, node.domain in STANDARD
    if not axes:
        return _filled(node, seen)
    if kind in ELEMENTWISE:
        return _elementwise(node, axes, seen)
    if kind in _NORMALISATIONS | _SKIPPED:
        return _normalisation(node, axes, seen)
    if kind in REDUCTIONS and standard:
        return _reduction(node, axes, seen)
    if kind in _LAYOUT and standard:
        return _layout(node, axes, seen)
    rule = _RULES.get(kind)
    return None if rule is None else rule(node, axes, seen)


def _filled(node: onnx.NodeProto, seen: Observation) -> int | None:
    """Return the axis of a value whose rows are the same for all tokens, as many as there are tokens."""
    axis = tokens_axis(seen.shapes.get(node.output[0], ()))
    if axis is None or node.op_type not in {"ConstantOfShape", "Expand"}:
        return None
    source = seen.shapes.get(node.input[0], ()) if node.op_type == "Expand" else ()
    at = axis - len(seen.shapes[node.output[0]]) + len(source)
    return axis if at < 0 or source[at] == Size(0, 0, 1) else None


def _normalisation(node: onnx.NodeProto, axes: Mapping[str, int], seen: Observation) -> int | None:
    """Return the axis of an operator that normalises the last axes."""
    axis = axes.get(node.input[0], -1)
    last = len(seen.shapes.get(node.input[0], ())) - 1
    first = int_attribute(node, "axis", -1) % (last + 1) if node.op_type in _NORMALISATIONS else last
    alike = all(axes[name] == axis for name in node.input if name in axes)
    return axis if 0 <= axis < first and alike else None


def _elementwise(node: onnx.NodeProto, axes: Mapping[str, int], seen: Observation) -> int | None:
    """Return the common axis of inputs that are broadcast; inputs without tokens must not vary along it."""
    rank = max((len(seen.shapes.get(name, ())) for name in node.input if name), default=0)
    common = {rank - len(seen.shapes[name]) + axis for name, axis in axes.items()}
    if len(common) != 1:
        return None
    axis = common.pop()
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


def _only_first_input(node: onnx.NodeProto, axes: Mapping[str, int], seen: Observation) -> int | None:
    """Return the axis of the first input, if no other one has tokens."""
    return _first_input(node, axes, seen) if _only(node, axes, 0) else None


def _only(node: onnx.NodeProto, axes: Mapping[str, int], at: int) -> bool:
    """Return whether one input has tokens, and no other one."""
    return [name in axes for name in node.input] == [number == at for number in range(len(node.input))]


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
    factors = (node.input[0], node.input[3 if node.op_type == "QLinearMatMul" else 1])
    left, right = (len(seen.shapes.get(name, ())) for name in factors)
    rank = max(left, right)
    if min(left, right) < 2 or not axes.keys() <= {*factors}:
        return None
    aligned = [rank - len(seen.shapes[name]) + axis for name, axis in axes.items()]
    if len(axes) == 1:
        rows = factors[0] in axes and aligned[0] == rank - 2
        columns = factors[1] in axes and aligned[0] == rank - 1
        if rows or columns:
            return aligned[0]
    batch = len(set(aligned)) == 1 and aligned[0] < rank - 2
    return _elementwise(node, axes, seen) if batch else None


def _gemm(node: onnx.NodeProto, axes: Mapping[str, int], seen: Observation) -> int | None:
    bias_at = 6 if node.op_type == "QGemm" else 2
    if not _only(node, axes, 0) or int_attribute(node, "transA", 0) or axes[node.input[0]] != 0:
        return None
    bias = seen.shapes.get(node.input[bias_at], ()) if len(node.input) > bias_at and node.input[bias_at] else ()
    return 0 if len(bias) < 2 or bias[0] == Size(0, 0, 1) else None


def _experts(node: onnx.NodeProto, axes: Mapping[str, int], seen: Observation) -> int | None:
    """Return the axis of a mixture of experts: every token has a row of the router's scores."""
    tokens, router = node.input[:2]
    own = [name in axes for name in node.input] == [at < 2 for at in range(len(node.input))]
    return _first_input(node, axes, seen) if own and axes[router] == 0 and tokens != router else None


def _gather(node: onnx.NodeProto, axes: Mapping[str, int], seen: Observation) -> int | None:
    data, indices = node.input[:2]
    rank = len(seen.shapes.get(data, ()))
    kind = "gather_axis" if node.op_type == "GatherBlockQuantized" else "axis"
    at = int_attribute(node, kind, 0) % max(rank, 1)
    if data in axes and indices not in axes and at != axes[data]:
        return axes[data] if axes[data] < at else axes[data] - 1 + len(seen.shapes.get(indices, ()))
    return at + axes[indices] if indices in axes and data not in axes else None


def _gather_nd(node: onnx.NodeProto, axes: Mapping[str, int], seen: Observation) -> int | None:
    """Return the axis of slices that are selected: tokens select, or each slice has all tokens."""
    data, indices = node.input
    shape = seen.shapes.get(indices, ())
    depth = shape[-1] if shape else None
    if int_attribute(node, "batch_dims", 0) or depth is None or not depth.constant:
        return None
    if _only(node, axes, 1):
        return axes[indices] if axes[indices] < len(shape) - 1 else None
    inside = _only(node, axes, 0) and axes[data] >= depth.fixed
    return len(shape) - 1 + axes[data] - depth.fixed if inside else None


def _gather_elements(node: onnx.NodeProto, axes: Mapping[str, int], seen: Observation) -> int | None:
    """Return the axis of selected elements: those of a table, along the axis of tokens, or those of each token."""
    indices = node.input[1]
    along = int_attribute(node, "axis", 0) % len(seen.shapes[indices])
    if _only(node, axes, 1):
        return along if axes[indices] == along else None
    return _alike_along_another_axis(node, axes, seen)


def _alike_along_another_axis(node: onnx.NodeProto, axes: Mapping[str, int], seen: Observation) -> int | None:
    """Return the common axis of all inputs, which must not be that of the operator."""
    axis = axes.get(node.input[0])
    along = int_attribute(node, "axis", 0) % len(seen.shapes[node.input[0]])
    return axis if axis != along and all(axes.get(name) == axis for name in node.input) else None


def _one_hot(node: onnx.NodeProto, axes: Mapping[str, int], seen: Observation) -> int | None:
    if not _only(node, axes, 0):
        return None
    axis = axes[node.input[0]]
    added = int_attribute(node, "axis", -1) % (len(seen.shapes[node.input[0]]) + 1)
    return axis if axis < added else axis + 1


def _tile(node: onnx.NodeProto, axes: Mapping[str, int], seen: Observation) -> int | None:
    """Return the axis of a value that is repeated along other axes."""
    repeats = seen.constants.get(node.input[1])
    axis = axes.get(node.input[0])
    return axis if axis is not None and repeats is not None and repeats[axis] == 1 else None


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
    own = {axes.get(name) for name in parts}
    axis = own.pop()
    default = {"ArgMax": 0, "ArgMin": 0, "Split": 0}.get(node.op_type, -1)
    along = int_attribute(node, "axis", default) % len(seen.shapes[parts[0]])
    return axis if not own and axis is not None and along != axis else None


def _top_k(node: onnx.NodeProto, axes: Mapping[str, int], seen: Observation) -> int | None:
    return _along_another_axis(node, axes, seen) if _only(node, axes, 0) else None


def _arg(node: onnx.NodeProto, axes: Mapping[str, int], seen: Observation) -> int | None:
    """Return the axis of an operator that finds the place of an element along another axis, which it may remove."""
    axis = _along_another_axis(node, axes, seen)
    if axis is None or int_attribute(node, "keepdims", 1):
        return axis
    return axis - (int_attribute(node, "axis", 0) % len(seen.shapes[node.input[0]]) < axis)


def _slice(node: onnx.NodeProto, axes: Mapping[str, int], seen: Observation) -> int | None:
    """Return the axis of a slice along other axes, or one that has all tokens."""
    source = node.input[0]
    rank = len(seen.shapes[source])
    along = seen.constants.get(node.input[3]) if len(node.input) > 3 else None
    if source not in axes or along is None:
        return None
    numbers = [number for number, at in enumerate(along) if int(at) % rank == axes[source]]
    return axes[source] if all(_all_rows(node, number, seen) for number in numbers) else None


def _all_rows(node: onnx.NodeProto, number: int, seen: Observation) -> bool:
    """Return whether a slice begins with the first row and has no last one, along one of its axes."""
    start, end = (seen.constants.get(name) for name in node.input[1:3])
    steps = node.input[4] if len(node.input) > 4 else ""
    step = seen.constants.get(steps)
    if start is None or end is None or (steps and step is None):
        return False
    return start[number] == 0 and end[number] >= NO_END and (step is None or step[number] == 1)


def _reduction(node: onnx.NodeProto, axes: Mapping[str, int], seen: Observation) -> int | None:
    source = node.input[0]
    rank = len(seen.shapes[source])
    given = ints_attribute(node, "axes", ())
    if len(node.input) > 1 and node.input[1]:
        constant = seen.constants.get(node.input[1])
        given = () if constant is None else tuple(int(at) for at in constant)
    along = {at % rank for at in given}
    if source not in axes or not along or axes[source] in along:
        return None
    kept = int_attribute(node, "keepdims", 1)
    return axes[source] if kept else axes[source] - sum(at < axes[source] for at in along)


_RULES: Mapping[str, Callable[[onnx.NodeProto, Mapping[str, int], Observation], int | None]] = {
    "ArgMax": _arg,
    "ArgMin": _arg,
    "Concat": _along_another_axis,
    "DequantizeLinear": _elementwise,
    "Expand": _expand,
    "FusedMatMul": _plain_product,
    "Gather": _gather,
    "GatherBlockQuantized": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "Gemm": _gemm,
    "LogSoftmax": _along_another_axis,
    "MatMul": _product,
    "MatMulBnb4": _only_first_input,
    "MatMulInteger": _product,
    "MatMulIntegerToFloat": _product,
    "MatMulNBits": _only_first_input,
    "MoE": _experts,
    "OneHot": _one_hot,
    "QGemm": _gemm,
    "QLinearMatMul": _product,
    "QMoE": _experts,
    "QuantizeLinear": _elementwise,
    "RotaryEmbedding": _rotary,
    "ScatterElements": _alike_along_another_axis,
    "Slice": _slice,
    "Softmax": _along_another_axis,
    "Split": _along_another_axis,
    "Tile": _tile,
    "TopK": _top_k,
    "Transpose": _transpose,
}
