"""Operator merge: operators on one input become one operator, whose result is split again (IOS, section 3).

Convolutions of one value with the same stride become one convolution with the kernels of all. MatMul and Gemm nodes of
one value become one with the columns of all. The input is then read once, and one large operator uses a device better
than several small ones.

**Windows.** Along each axis a convolution has a kernel of size k, a dilation d, and padding p before and q after. For
output y it reads inputs ``y * stride - p + j * d`` for j < k. The common window starts at the largest padding
P = max p; each kernel is embedded in the common kernel after ``(P - p) / d`` zeros, and the common size K is the
largest that results. (A kernel in the centre of the common one would be correct only for symmetric padding.) The
padding after the input follows from the size of the output.

Operators are not merged if a convolution has more than one group of channels, if weights are not constant, if kernels
differ in dilation, or if the outputs of convolutions have, or with free dimensions might have, different sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from chrion.graph.model import Graph
from chrion.graph.rewrite import (
    STANDARD,
    RewriteError,
    Rewriter,
    int_attribute,
    ints_attribute,
    text_attribute,
)
from chrion.graph.variants import rewritten

Array = np.ndarray[Any, Any]


def mergeable_groups(graph: Graph, operators: Iterable[int] | None = None) -> list[tuple[int, ...]]:
    """Return the groups of operators that can become one operator.

    Args:
        graph: The graph.
        operators: The operators to consider; all if None.

    Returns:
        Disjoint groups of two or more operators, each in ascending order, sorted by their first operator. Each operator
        is in the first group that it fits.
    """
    by_key: dict[tuple[object, ...], list[list[_Member]]] = {}
    for i in sorted(set(range(len(graph.dag)) if operators is None else operators)):
        member = _member(graph, i)
        if member is None:
            continue
        groups = by_key.setdefault(member.key, [])
        group = next((g for g in groups if member.fits([*g, member])), None)
        if group is None:
            groups.append([member])
        else:
            group.append(member)
    merged = (tuple(m.operator for m in group) for groups in by_key.values() for group in groups)
    return sorted(operators for operators in merged if len(operators) > 1)


def merge_operators(graph: Graph, groups: Sequence[Sequence[int]]) -> Graph:
    """Return the graph with each group of operators merged into one.

    Args:
        graph: The graph.
        groups: Disjoint groups of operators, each a group of :func:`mergeable_groups` or a part of one.

    Returns:
        A graph with the same results except for rounding, or the graph itself if there are no groups. Operators ``a``
        and ``b`` are replaced by ``a+b`` and ``a+b/split``. All other operators, and the outputs of ``a`` and ``b``,
        keep their names.

    Raises:
        RewriteError: The operators of a group cannot be merged, or an operator is in two groups.
    """
    chosen = tuple(sorted(tuple(sorted(group)) for group in groups))
    if not chosen:
        return graph
    return rewritten(graph, ("merged", chosen), lambda: _merged_model(graph, chosen))


def _merged_model(graph: Graph, groups: Sequence[tuple[int, ...]]) -> onnx.ModelProto:
    _check_groups(graph, groups)
    rewriter = Rewriter(graph.model)
    first = {min(graph.nodes[i][0] for i in group): group for group in groups}
    merged = {graph.nodes[i][0] for group in groups for i in group}
    for at, node in enumerate(graph.model.graph.node):
        if at in first:
            _merge(graph, [m for m in (_member(graph, i) for i in first[at]) if m is not None], rewriter)
        elif at not in merged:
            rewriter.nodes.append(node)
    return rewriter.finish()


def _check_groups(graph: Graph, groups: Sequence[tuple[int, ...]]) -> None:
    n = len(graph.dag)
    listed = [i for group in groups for i in group]
    if len(set(listed)) < len(listed) or not all(0 <= i < n for i in listed):
        raise RewriteError(f"merge: groups must be disjoint and hold operators 0 to {n - 1}")
    for group in groups:
        if mergeable_groups(graph, group) != [group]:
            names = ", ".join(repr(graph.dag.names[i]) for i in group)
            raise RewriteError(
                f"merge: operators {names} cannot be merged",
                hint="they must be convolutions or matrix products of one value, with constant weights",
            )


@dataclass(frozen=True, slots=True)
class _Axis:
    """The window of a convolution along one axis of its input."""

    kernel: int
    dilation: int
    #: The padding before and after the input.
    before: int
    after: int

    @property
    def growth(self) -> int:
        """The size of the output minus the size of the input, for a stride of 1."""
        return self.before + self.after - (self.kernel - 1) * self.dilation


@dataclass(frozen=True, slots=True)
class _Member:
    """A node that may be merged with others."""

    operator: int
    node: onnx.NodeProto
    #: The properties that nodes must share to be merged: operator type, input, element type and attributes.
    key: tuple[object, ...]
    #: The windows of a convolution; empty for a matrix product.
    axes: tuple[_Axis, ...] = ()
    #: The spatial size of the output; empty if unknown.
    size: tuple[int, ...] = ()

    def fits(self, members: Sequence[_Member]) -> bool:
        """Return whether members with the same key, of which this is one, can be merged."""
        if not self.axes:
            return True
        if not all(_common_axis(axes) for axes in zip(*(m.axes for m in members), strict=True)):
            return False
        alike = len({tuple(a.growth for a in m.axes) for m in members}) == 1
        return alike or (bool(self.size) and len({m.size for m in members}) == 1)


def _common_axis(axes: Sequence[_Axis]) -> _Axis | None:
    """Return the common window of several kernels along one axis, or None if there is none (see the module)."""
    dilations = {a.dilation for a in axes if a.kernel > 1} or {1}
    before = max(a.before for a in axes)
    dilation = min(dilations)
    if len(dilations) > 1 or any((before - a.before) % dilation for a in axes):
        return None
    kernel = max(a.kernel + (before - a.before) // dilation for a in axes)
    growth = max(a.growth for a in axes)
    return _Axis(kernel, dilation, before, growth + (kernel - 1) * dilation - before)


def _member(graph: Graph, operator: int) -> _Member | None:
    if len(graph.nodes[operator]) > 1:
        return None
    node = graph.model.graph.node[graph.nodes[operator][0]]
    kind = f"{'' if node.domain in STANDARD else node.domain + '.'}{node.op_type}"
    make = _KINDS.get(kind)
    inputs = [*node.input, "", "", ""]
    constant = [name for name in inputs[1:3] if name]
    if make is None or any(inputs[3:]):
        return None
    if inputs[0] in graph.weight_names or not all(name in graph.weight_names for name in constant):
        return None
    return make(graph, operator, node, (kind, inputs[0], graph.values[inputs[1]].type))


def _convolution(graph: Graph, operator: int, node: onnx.NodeProto, key: tuple[object, ...]) -> _Member | None:
    kernel = (graph.values[node.input[1]].shape or ())[2:]
    axes = _axes(node, graph.values[node.input[0]].shape, [k for k in kernel if isinstance(k, int)])
    if not axes or int_attribute(node, "group", 1) != 1:
        return None
    strides = ints_attribute(node, "strides", [1] * len(axes))
    activation = [a.SerializeToString(deterministic=True) for a in node.attribute if a.name.startswith("activation")]
    out = (graph.values[node.output[0]].shape or ())[2:]
    size = tuple(d for d in out if isinstance(d, int))
    return _Member(operator, node, (*key, strides, *sorted(activation)), axes, size if len(size) == len(axes) else ())


def _axes(node: onnx.NodeProto, source: Sequence[int | str | None] | None, kernel: Sequence[int]) -> tuple[_Axis, ...]:
    """Return a convolution's axes with explicit padding; empty if the padding depends on a free dimension."""
    count = len(kernel)
    pads = ints_attribute(node, "pads", [0] * 2 * count)
    strides = ints_attribute(node, "strides", [1] * count)
    dilations = ints_attribute(node, "dilations", [1] * count)
    same = text_attribute(node, "auto_pad", "NOTSET")
    if not same.startswith("SAME"):
        if same == "VALID":
            pads = (0,) * 2 * count
        return tuple(map(_Axis, kernel, dilations, pads[:count], pads[count:]))
    axes = []
    for at, (k, d, stride) in enumerate(zip(kernel, dilations, strides, strict=True)):
        total = _same_padding(source[2 + at] if source else None, k, d, stride)
        if total is None:
            return ()
        less, more = total // 2, total - total // 2
        before, after = (less, more) if same == "SAME_UPPER" else (more, less)
        axes.append(_Axis(k, d, before, after))
    return tuple(axes)


def _same_padding(size: int | str | None, kernel: int, dilation: int, stride: int) -> int | None:
    """Return the total padding for an output of ``ceil(size / stride)``, or None if that depends on an unknown size."""
    reach = (kernel - 1) * dilation + 1
    if stride == 1:
        return reach - 1
    if not isinstance(size, int):
        return None
    return max(0, (-(-size // stride) - 1) * stride + reach - size)


def _product(graph: Graph, operator: int, node: onnx.NodeProto, key: tuple[object, ...]) -> _Member | None:
    """Return a MatMul as a member if its second factor is a single matrix, or None."""
    return _Member(operator, node, key) if len(graph.values[node.input[1]].shape or ()) == 2 else None


def _gemm(graph: Graph, operator: int, node: onnx.NodeProto, key: tuple[object, ...]) -> _Member | None:
    """Return a Gemm as a member if it adds nothing, one number, or one row; None otherwise."""
    if len(node.input) > 2 and node.input[2]:
        added = [d for d in graph.values[node.input[2]].shape or () if isinstance(d, int)]
        if int(np.prod(added)) != 1 and (added[-1] != _columns(graph, node) or int(np.prod(added)) != added[-1]):
            return None
    factors = {a.name: a.f for a in node.attribute if a.name in {"alpha", "beta"}}
    options = (int_attribute(node, "transA", 0), factors.get("alpha", 1.0), factors.get("beta", 1.0))
    return _Member(operator, node, (*key, *options))


_KINDS: dict[str, Callable[[Graph, int, onnx.NodeProto, tuple[object, ...]], _Member | None]] = {
    "Conv": _convolution,
    "com.microsoft.FusedConv": _convolution,
    "MatMul": _product,
    "Gemm": _gemm,
}


def _columns(graph: Graph, node: onnx.NodeProto) -> int:
    """Return the number of columns of a product, or of output channels of a convolution."""
    shape = graph.values[node.input[1]].shape or ()
    by_row = node.op_type.endswith("Conv") or int_attribute(node, "transB", 0)
    return int(shape[0 if by_row else 1] or 0)


def _merge(graph: Graph, members: Sequence[_Member], rewriter: Rewriter) -> None:
    """Add the nodes that replace a group, and their weights."""
    first = members[0].node
    name = "+".join(m.node.name for m in members)
    convolution = bool(members[0].axes)
    matrices = _kernels(graph, members) if convolution else [_matrix(graph, m.node) for m in members]
    stacked = np.concatenate(matrices, axis=0 if convolution else 1)
    weights = [_as_weight(graph, f"{name}/W", stacked)]
    if any(len(m.node.input) > 2 and m.node.input[2] for m in members):
        weights.append(_as_weight(graph, f"{name}/B", np.concatenate([_bias(graph, m.node, stacked) for m in members])))
    merged = helper.make_node(first.op_type, [first.input[0], *(w.name for w in weights)], [name], name=name)
    merged.domain = first.domain
    replaced = {"pads", "auto_pad", "kernel_shape", "dilations", "transB"}
    merged.attribute.extend(a for a in first.attribute if a.name not in replaced)
    if convolution:
        axes = _window(members)
        merged.attribute.append(helper.make_attribute("kernel_shape", [a.kernel for a in axes]))
        merged.attribute.append(helper.make_attribute("dilations", [a.dilation for a in axes]))
        merged.attribute.append(helper.make_attribute("pads", [*(a.before for a in axes), *(a.after for a in axes)]))
    sizes = [_columns(graph, m.node) for m in members]
    targets = [m.node.output[0] for m in members]
    rewriter.nodes.append(merged)
    rewriter.added |= {weight.name: weight for weight in weights}
    rewriter.split(name, targets, sizes, 1 if convolution else -1, f"{name}/split")


def _window(members: Sequence[_Member]) -> list[_Axis]:
    window = [_common_axis(axes) for axes in zip(*(m.axes for m in members), strict=True)]
    return [axis for axis in window if axis is not None]


def _kernels(graph: Graph, members: Sequence[_Member]) -> list[Array]:
    """Return each member's kernels, embedded in the common window."""
    window = _window(members)
    embedded = []
    for member in members:
        kernel = _value(graph, member.node.input[1])
        margins = []
        for common, own in zip(window, member.axes, strict=True):
            offset = (common.before - own.before) // common.dilation
            margins.append((offset, common.kernel - own.kernel - offset))
        embedded.append(np.pad(kernel, [(0, 0), (0, 0), *margins]))
    return embedded


def _matrix(graph: Graph, node: onnx.NodeProto) -> Array:
    matrix = _value(graph, node.input[1])
    return matrix.T if int_attribute(node, "transB", 0) else matrix


def _bias(graph: Graph, node: onnx.NodeProto, like: Array) -> Array:
    """Return the bias that a node adds to its columns or channels."""
    count = _columns(graph, node)
    if len(node.input) < 3 or not node.input[2]:
        return np.zeros(count, like.dtype)
    return np.broadcast_to(_value(graph, node.input[2]).ravel(), count)


def _value(graph: Graph, name: str) -> Array:
    value = graph.constant(name)
    assert value is not None  # noqa: S101 - members read constants only
    return value


def _as_weight(graph: Graph, name: str, value: Array) -> onnx.TensorProto:
    """Return a value as a weight; a large value is written to a file of its own in the graph's folder."""
    tensor = numpy_helper.from_array(np.ascontiguousarray(value), name)
    graph.folder.store(tensor)
    return tensor
