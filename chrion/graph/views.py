"""Views: what chains of Slice, Split, Gather, Squeeze, Unsqueeze, Transpose and Reshape nodes select of a value.

A view is a range of a value along one axis, with its axes in another order. Axes of one element are not followed: a
view has one wherever its shape asks for it. So a step that was sliced, squeezed and unsqueezed again equals one that
was gathered, and steps that follow each other join to a longer range of the same value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import onnx

from chrion.graph.model import Graph
from chrion.graph.rewrite import STANDARD, int_attribute

#: Operators whose results are views of their first input, if their other inputs are constant.
VIEWS = frozenset({"Identity", "Slice", "Split", "Gather", "Squeeze", "Unsqueeze", "Transpose", "Reshape"})


@dataclass(frozen=True, slots=True)
class View:
    """A range of a value along one axis, with the axes of the value in some order."""

    source: str
    #: The axis of the value that each axis of the view is; None for an axis of one element.
    layout: tuple[int | None, ...]
    #: The axis of which the view has a part; None for a view of the whole value.
    axis: int | None = None
    start: int = 0
    stop: int = 0

    def shape(self, source: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the view of a value of a shape."""
        return tuple(1 if e is None else self.stop - self.start if e == self.axis else source[e] for e in self.layout)

    def part(self, at: int, start: int, stop: int, size: int) -> View | None:
        """Return a range of the view along its axis ``at``, which has ``size`` elements; None if that is no view."""
        entry = self.layout[at]
        if (start, stop) == (0, size):
            return self
        if entry is None or start >= stop or self.axis not in {None, entry}:
            return None
        layout = (*self.layout[:at], entry if stop - start > 1 else None, *self.layout[at + 1 :])
        return replace(self, layout=layout, axis=entry, start=self.start + start, stop=self.start + stop)

    def without(self, at: int) -> View:
        """Return the view without one of its axes of one element."""
        return replace(self, layout=(*self.layout[:at], *self.layout[at + 1 :]))

    def reshaped(self, own: Sequence[int], shape: Sequence[int]) -> View | None:
        """Return the view, which has shape ``own``, in another shape; None if more than axes of one element differ."""
        if [size for size in own if size != 1] != [size for size in shape if size != 1]:
            return None
        entries = (e for e, size in zip(self.layout, own, strict=True) if size != 1)
        return replace(self, layout=tuple(None if size == 1 else next(entries) for size in shape))

    def joined(self, following: View, at: int) -> View | None:
        """Return this view and one that follows it, concatenated along axis ``at``; None if that is no view."""
        axis = self.axis
        if axis is None or (following.source, following.axis, following.start) != (self.source, axis, self.stop):
            return None
        layouts = {(*v.layout[:at], axis, *v.layout[at + 1 :]) for v in (self, following)}
        layout = layouts.pop()
        if layouts or layout.count(axis) > 1 or not {self.layout[at], following.layout[at]} <= {None, axis}:
            return None
        return replace(self, layout=layout, stop=following.stop)


def whole_view(source: str, shape: Sequence[int]) -> View:
    """Return the view of a whole value."""
    return View(source, tuple(None if size == 1 else at for at, size in enumerate(shape)))


def known_shape(graph: Graph, name: str) -> tuple[int, ...] | None:
    """Return the shape of a value, if it is known and has elements."""
    shape = graph.values[name].shape if name in graph.values else None
    fixed = tuple(size for size in shape or () if isinstance(size, int) and size > 0)
    return fixed if shape is not None and len(fixed) == len(shape) else None


def node_view(graph: Graph, node: onnx.NodeProto, output: str, view: View) -> View | None:
    """Return the view of a value that a node of :data:`VIEWS` computes.

    Args:
        graph: The graph, from which constants and shapes are read.
        node: The node.
        output: The output of the node that is asked for.
        view: The view that the node's first input is.

    Returns:
        The view of the same value; None if it is no view, or if an input or a shape is unknown.
    """
    shape, result = known_shape(graph, node.input[0]), known_shape(graph, output)
    if node.domain not in STANDARD or shape is None or result is None or len(shape) != len(view.layout):
        return None
    match node.op_type:
        case "Transpose":
            perm = constant_integers(graph, node, "perm", None)
            return replace(view, layout=tuple(view.layout[p] for p in perm or reversed(range(len(shape)))))
        case "Slice":
            return _slice(graph, node, view, shape)
        case "Split":
            return _split(graph, node, output, view, shape)
        case "Gather":
            return _gather(graph, node, view, shape, len(result))
    return view.reshaped(shape, result)


def _slice(graph: Graph, node: onnx.NodeProto, view: View, shape: Sequence[int]) -> View | None:
    starts, ends = constant_integers(graph, node, "starts", 1), constant_integers(graph, node, "ends", 2)
    axes, steps = constant_integers(graph, node, "axes", 3), constant_integers(graph, node, "", 4)
    given = [at for at, name in enumerate(node.input) if name and at > 2]
    if starts is None or ends is None or (axes is None and 3 in given) or (steps is None and 4 in given):
        return None
    if any(step != 1 for step in steps or ()):
        return None
    current: View | None = view
    for axis, start, end in zip(axes or range(len(starts)), starts, ends, strict=False):
        at = axis % len(shape)
        first, last, _ = slice(start, end).indices(shape[at])
        current = current and current.part(at, first, last, shape[at])
    return current


def _split(graph: Graph, node: onnx.NodeProto, output: str, view: View, shape: Sequence[int]) -> View | None:
    at = int_attribute(node, "axis", 0) % len(shape)
    before = 0
    for name in node.output:
        result = known_shape(graph, name)
        if result is None:
            return None
        if name == output:
            return view.part(at, before, before + result[at], shape[at])
        before += result[at]
    return None


def _gather(graph: Graph, node: onnx.NodeProto, view: View, shape: Sequence[int], rank: int) -> View | None:
    indices = constant_integers(graph, node, "", 1)
    at = int_attribute(node, "axis", 0) % len(shape)
    if indices is None or len(indices) != 1 or rank > len(shape) or not -shape[at] <= indices[0] < shape[at]:
        return None
    index = indices[0] % shape[at]
    part = view.part(at, index, index + 1, shape[at])
    return part.without(at) if part and rank < len(shape) else part


def constant_integers(graph: Graph, node: onnx.NodeProto, attribute: str, slot: int | None) -> list[int] | None:
    """Return a list of integers that a node has as an attribute or as a constant input, or None."""
    for given in node.attribute:
        if given.name == attribute:
            return list(given.ints)
    value = graph.constant(node.input[slot]) if slot is not None and len(node.input) > slot else None
    return None if value is None else [int(v) for v in value.ravel()]
