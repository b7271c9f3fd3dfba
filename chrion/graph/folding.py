"""Folding of chains of recurrent operators: the inverse of unrolling.

Exporters write a loop over time as one LSTM, GRU or RNN for each step, or for each chunk of steps, which starts from
the states in which the one before it ended (:mod:`chrion.graph.chains`). One operator over all steps computes the same,
and its kernel processes the sequence at once.

The sequence that the operator reads is the concatenation of the inputs of the steps. If these are the steps of one
value (:mod:`chrion.graph.views`), it is that value; if equal nodes compute them, one such node computes it; otherwise a
Concat does. The concatenation of results of steps is found likewise, and readers of single steps read slices.

Chains of which a step depends on the results of earlier ones, other than by its states, are not folded; nor are chains
that depend on each other.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
from onnx import helper

from chrion.common.imports import import_late
from chrion.graph.assemble import captured_names
from chrion.graph.chains import INITIAL, STATES, Chain, ValueViews, find_chains
from chrion.graph.model import Graph
from chrion.graph.rewrite import STANDARD, Rewriter, int_attribute, nodes_before, producers, standard_opset
from chrion.graph.variants import rewritten
from chrion.graph.views import VIEWS, View, known_shape, whole_view

#: A chain, or a node.
Unit = Chain | int
#: Elementwise operators of one input.
POINTWISE = frozenset(
    {"Identity", "Relu", "Tanh", "Sigmoid", "LeakyRelu", "Elu", "Selu", "Gelu", "Erf", "Neg", "Abs", "Exp", "Cast"}
)
#: Further operators that are applied to all steps at once if they are applied to each.
_SHARED = POINTWISE | {"Add", "Sub", "Mul", "Div", "MatMul", "Concat"}
#: The most nodes between two chains that are applied to all steps at once: the depth of a recursion.
_DEEPEST = 60


def fold(graph: Graph) -> Graph:
    """Return the graph with its chains of recurrent operators folded.

    Args:
        graph: A graph of known shapes.

    Returns:
        A graph with the same results, except for rounding, or the graph itself if no chain can be folded.
    """
    computed = {name for node in graph.model.graph.node for name in node.output}
    if not any(n.op_type in STATES and computed.intersection(n.input[INITIAL:]) for n in graph.model.graph.node):
        return graph
    return rewritten(graph, "folded", lambda: _folded(graph))


def _folded(graph: Graph) -> onnx.ModelProto | None:
    """Return the model with its chains folded, or None if no chain can be folded."""
    views = ValueViews(graph)
    chains = _without_cycles(graph, find_chains(graph, views))
    return _Folder(graph, views).run(chains) if chains else None


def _without_cycles(graph: Graph, chains: Sequence[Chain]) -> list[Chain]:
    """Return the chains that depend neither on themselves, other than by their states, nor on each other."""
    nx = import_late("networkx")  # takes a tenth of a second
    links = _dependencies(graph, chains)
    cyclic = set(nx.nodes_with_selfloops(links))
    cyclic |= {unit for group in nx.strongly_connected_components(links) if len(group) > 1 for unit in group}
    return [chain for chain in chains if chain not in cyclic]


def _in_order(graph: Graph, chains: Sequence[Chain]) -> list[Unit]:
    """Return the chains and the nodes outside of them in topological order."""
    nx = import_late("networkx")  # takes a tenth of a second
    links = _dependencies(graph, chains)
    position = {unit: at for at, unit in enumerate(links)}
    return list(nx.lexicographical_topological_sort(links, key=position.__getitem__))


def _dependencies(graph: Graph, chains: Sequence[Chain]) -> Any:
    """Return which chains and nodes read which; chains that go on from their own states do not read these."""
    nx = import_late("networkx")  # takes a tenth of a second
    nodes = graph.model.graph.node
    chain_of = {id(cell.node): chain for chain in chains for cell in chain.cells}
    continued = {id(cell.node) for chain in chains for cell in chain.cells[1:]}
    units: list[Unit] = [chain_of.get(id(node), at) for at, node in enumerate(nodes)]
    producer = {name: units[at] for at, node in enumerate(nodes) for name in node.output if name}
    links = nx.DiGraph()
    links.add_nodes_from(units)
    for node, unit in zip(nodes, units, strict=True):
        names = node.input[:INITIAL] if id(node) in continued else node.input
        links.add_edges_from((producer[n], unit) for n in {*names, *captured_names(node)} & producer.keys())
    return links


class _Folder(Rewriter):
    """A rewriter that folds the chains of a model.

    Attributes:
        alias: Values of the model that are computed under another name.
        touched: Values of the model that depend on a chain.
    """

    def __init__(self, graph: Graph, views: ValueViews) -> None:
        super().__init__(graph.model)
        self.graph, self.values = graph, views
        self.producer = producers(graph.model.graph.node)
        self.alias: dict[str, str] = {}
        self.touched: set[str] = set()
        #: The shapes of Y and Y_h of each chain.
        self.shapes: dict[str, tuple[int, ...]] = {}
        #: The Y_h of each chain, by its Y and the step that it equals.
        self.final: dict[tuple[str, int], str] = {}
        #: The Y of each chain and the first step in it, by the Y of each of its operators.
        self.places: dict[str, tuple[str, int]] = {}
        self.realised: dict[View, str] = {}
        self.joins: dict[tuple[tuple[View, ...], int], str | None] = {}
        self.numbers = itertools.count()

    def run(self, chains: Sequence[Chain]) -> onnx.ModelProto:
        """Return the folded model."""
        for unit in _in_order(self.graph, chains):
            if isinstance(unit, Chain):
                self._fold(unit)
            else:
                self._keep(self.model.graph.node[unit])
        renamed: dict[str, str] = {}
        for output in self.model.graph.output:
            used = self._use(output.name)
            if used in self.graph.values or used in renamed:
                self._provide(output.name)
            else:
                renamed[used] = output.name
        for node in self.nodes:
            node.input[:] = [renamed.get(name, name) for name in node.input]
            node.output[:] = [renamed.get(name, name) for name in node.output]
        self._prune()
        return self.finish()

    def _prune(self) -> None:
        """Remove nodes and results of chains that nothing reads."""
        results = {o.name for o in self.model.graph.output}
        producer = {name: at for at, node in enumerate(self.nodes) for name in node.output if name}
        reads = [{*node.input, *captured_names(node)} for node in self.nodes]
        needed = sorted(nodes_before(results, producer, reads))
        read = results.union(*(reads[at] for at in needed))
        self.nodes = [self.nodes[at] for at in needed]
        for node in self.nodes:
            if node.output[0] in self.shapes:
                node.output[:] = [name if name in read else "" for name in node.output]

    def _fold(self, chain: Chain) -> None:
        """Add the operator that replaces a chain."""
        cells, direction = chain.in_time, chain.direction or "forward"
        source = self._joined(self._views([cell.node.input[0] for cell in cells]), 0)
        if source is None and not chain.direction:  # steps may be taken from the last one on
            source = self._joined(self._views([cell.node.input[0] for cell in cells[::-1]]), 0)
            if source is not None:
                cells, direction = cells[::-1], "reverse"
        source = source or self._concatenated([cell.node.input[0] for cell in cells], 0)
        first, last = chain.cells[0].node, chain.cells[-1].node
        name = f"{first.name}+{len(cells) - 1}"
        inputs = [source, *first.input[1:INITIAL], *map(self._use, first.input[INITIAL:])]
        outputs = [f"{name}/Y", *(given or f"{name}/{at}" for at, given in enumerate([*last.output, "", ""][1:3]))]
        node = helper.make_node(first.op_type, inputs, outputs[: 1 + STATES[first.op_type]], name, direction=direction)
        node.attribute.extend(attribute for attribute in first.attribute if attribute.name != "direction")
        self.nodes.append(node)
        before = 0
        for cell in cells:
            self.places[cell.sequence] = outputs[0], before
            self.touched.update(cell.node.output)
            before += cell.shape[0]
        self.shapes |= {outputs[0]: (before, *cells[0].shape[1:]), outputs[1]: cells[0].shape[1:]}
        self.final[outputs[0], self._placed(chain.cells[-1].state).start] = outputs[1]

    def _keep(self, node: onnx.NodeProto) -> None:
        """Add a node of the model, unless chains have made it unnecessary."""
        captured = captured_names(node)
        if not self.touched.isdisjoint([*node.input, *captured]):
            self.touched.update(filter(None, node.output))
            if node.op_type in VIEWS and all(self._is_of_chain(name) for name in node.output):
                return
            if node.op_type == "Concat" and node.domain in STANDARD:
                self.alias[node.output[0]] = self._concatenated(node.input, int_attribute(node, "axis", 0), node)
                return
        for name in sorted(captured):
            self._provide(name)
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        copy.input[:] = map(self._use, node.input)
        self.nodes.append(copy)

    def _provide(self, name: str) -> None:
        """Compute a value of the model under its own name."""
        used = self._use(name)
        if used != name:
            self.nodes.append(helper.make_node("Identity", [used], [name], name=f"{name}/folded"))
            self.alias[name] = name

    def _use(self, name: str) -> str:
        """Return the name by which to read a value of the model."""
        if name in self.alias or not self._is_of_chain(name):
            return self.alias.get(name, name)
        view = self._view(name)
        assert view is not None  # noqa: S101 - values of chains have views
        return self._realise(view)

    def _is_of_chain(self, name: str) -> bool:
        """Return whether a value is a part of the results of a chain."""
        view = self.values.of(name) if name else None
        return view is not None and view.source in self.places

    def _view(self, name: str) -> View | None:
        """Return a value of the model as a view of a value of the folded one; None if its shape is unknown."""
        view = self.values.of(name)
        if view and view.source not in self.places and view.source not in self.graph.values:  # a Y that is not returned
            return whole_view(name, known_shape(self.graph, name) or ())
        return view and self._placed(view)

    def _views(self, names: Sequence[str]) -> tuple[View, ...] | None:
        views = [self._view(name) for name in names]
        return None if None in views else tuple(view for view in views if view)

    def _placed(self, view: View) -> View:
        """Return a view of an operator's Y as one of its chain's; other views as they are."""
        if view.source not in self.places:
            return view
        source, before = self.places[view.source]
        steps = self.values.cells[view.source].shape[0]
        start, stop = (0, steps) if view.axis is None else (view.start, view.stop)
        return View(source, view.layout, 0, before + start, before + stop)

    def _concatenated(self, names: Sequence[str], axis: int, node: onnx.NodeProto | None = None) -> str:
        """Return the name of the concatenation of values, by the given node if that is necessary."""
        views = self._views(names)
        target = node.output[0] if node else self._fresh(names[0])
        runs: list[tuple[View | None, str]] = []
        if views:
            axis %= len(views[0].layout)
            if joined := self._joined(views, axis):
                return joined
        for name, view in zip(names, views or [None] * len(names), strict=True):
            merged = runs[-1][0].joined(view, axis) if runs and runs[-1][0] and view else None
            runs[-1:] = [(merged, "")] if merged else [*runs[-1:], (view, name)]
        parts = [self._use(name) if name or view is None else self._realise(view) for view, name in runs]
        self.nodes.append(helper.make_node("Concat", parts, [target], node.name if node else target, axis=axis))
        return target

    def _joined(self, views: tuple[View, ...] | None, axis: int, depth: int = 0) -> str | None:
        """Return the name of the concatenation of views, or None if it is neither a view nor one node's result."""
        if views is None or depth > _DEEPEST:
            return None
        if (views, axis) not in self.joins:
            whole: View | None = views[0]
            for view in views[1:]:
                whole = whole and whole.joined(view, axis)
            self.joins[views, axis] = self._realise(whole) if whole else self._shared(views, axis, depth)
        return self.joins[views, axis]

    def _shared(self, views: Sequence[View], axis: int, depth: int) -> str | None:
        """Return the name of the concatenation of what equal nodes compute, by one such node; None if they differ."""
        layout = views[0].layout
        nodes = [self.producer.get(view.source) for view in views]
        made = [node for node in nodes if node]
        alike = len({view.source for view in views}) == len(made) == len(views) and len({*map(_kind, made)}) == 1
        if not alike or any(view.axis is not None or view.layout != layout for view in views):
            return None
        node = made[0]
        if node.op_type not in _SHARED or node.domain not in STANDARD or len(node.output) != 1:
            return None
        attributes = {a.name: a for a in node.attribute}
        if node.op_type == "Concat":
            along = int_attribute(node, "axis", 0) % len(known_shape(self.graph, node.output[0]) or (1,))
            if along not in layout or layout.index(along) == axis:
                return None
            attributes["axis"] = helper.make_attribute("axis", layout.index(along))
        operands = []
        for at in range(len(node.input)):
            operand = self._operand(made, at, layout, axis, depth)
            if operand is None:
                return None
            operands.append(operand)
        name = self._fresh(f"{node.name}*{len(made)}")
        shared = helper.make_node(node.op_type, operands, [name], name)
        shared.attribute.extend(attributes.values())
        self.nodes.append(shared)
        return name

    def _operand(
        self, nodes: Sequence[onnx.NodeProto], at: int, layout: tuple[int | None, ...], axis: int, depth: int
    ) -> str | None:
        """Return what one node reads as its input ``at`` to compute the results of all, arranged by ``layout``."""
        names, kind = [node.input[at] for node in nodes], nodes[0].op_type
        shapes = [tuple(known_shape(self.graph, n) for n in (node.input[at], node.output[0])) for node in nodes]
        own, result = shapes[0]
        if own is None or result is None:
            return None
        if names[0] in self.graph.weight_names:
            keeps_last = layout[-1:] == (len(result) - 1,) and axis != len(layout) - 1 and len(own) <= len(layout)
            row = all(size == 1 for size in own[:-1]) and (keeps_last or own[-1:] in {(), (1,)})
            fits = keeps_last and at == 1 and len(own) == 2 if kind == "MatMul" else row and len(own) <= len(layout)
            return names[0] if fits and len({*map(self.values.weight, names)}) == 1 else None
        if kind == "MatMul" and at == 1:
            return None
        if kind not in {"MatMul", "Concat"} and any(given != made for given, made in shapes):
            return None
        views = self._views(names)
        if views is None or any(len(view.layout) != len(result) for view in views):
            return None
        arranged = (tuple(None if e is None else view.layout[e] for e in layout) for view in views)
        placed = tuple(replace(view, layout=own) for view, own in zip(views, arranged, strict=True))
        return self._joined(placed, axis, depth + 1)

    def _realise(self, view: View) -> str:
        """Return the name of a view, which nodes compute from its source."""
        if view not in self.realised:
            self.realised[view] = self._arranged(view)
        return self.realised[view]

    def _arranged(self, view: View) -> str:
        source, layout = view.source, view.layout
        shape = self.shapes.get(source) or known_shape(self.graph, source) or ()
        if view.axis is not None and (view.start, view.stop) != (0, shape[view.axis]):
            final = self.final.get((source, view.start)) if view.stop - view.start == 1 else None
            if final:  # no slice of Y, but Y_h, which lacks the first axis
                return self._realise(View(final, tuple(None if e is None else e - 1 for e in layout)))
            ranges = {"starts": [view.start], "ends": [view.stop], "axes": [view.axis]}
            source = self._arrange("Slice", source, 10, ranges)
            shape = tuple(view.stop - view.start if at == view.axis else size for at, size in enumerate(shape))
        places = _places(layout, shape)
        kept = [axis for axis in places if axis is not None]
        if dropped := [axis for axis in range(len(shape)) if axis not in kept]:
            source = self._arrange("Squeeze", source, 13, {"axes": dropped})
        if kept != sorted(kept):
            source = self.add("Transpose", [source], self._fresh(source), perm=[sorted(kept).index(a) for a in kept])
        if added := [at for at, axis in enumerate(places) if axis is None]:
            source = self._arrange("Unsqueeze", source, 13, {"axes": added})
        return source

    def _arrange(self, kind: str, source: str, opset: int, given: Mapping[str, list[int]]) -> str:
        """Add a node with lists of integers, which are attributes before an opset, and return its result."""
        source = self.alias.get(source, source)
        if standard_opset(self.model) < opset:
            return self.add(kind, [source], self._fresh(source), **given)
        constants = [np.array(value, np.int64) for value in given.values()]
        return self.add(kind, [source, *constants], self._fresh(source))

    def _fresh(self, base: str) -> str:
        """Return a new name for a value."""
        names = (f"{base}/{number}" for number in self.numbers)
        return next(name for name in names if name not in self.graph.values)


def _kind(node: onnx.NodeProto) -> tuple[object, ...]:
    """Return what equal nodes have in common, apart from their values."""
    attributes = sorted(a.SerializeToString(deterministic=True) for a in node.attribute)
    return (node.domain, node.op_type, len(node.input), *attributes)


def _places(layout: Sequence[int | None], shape: Sequence[int]) -> list[int | None]:
    """Return a layout in which axes of one element are also those of a shape, as far as they keep their order."""
    unused = [axis for axis in range(len(shape)) if axis not in layout]
    places, before = list[int | None](), -1
    for at, entry in enumerate(layout):
        following = next((e for e in layout[at:] if e is not None), len(shape))
        axis = next((u for u in unused if before < u < following), None) if entry is None else entry
        places.append(axis)
        if axis is not None:
            unused = [u for u in unused if u != axis]
            before = axis
    return places
