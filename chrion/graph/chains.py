"""Chains: recurrent operators that continue each other, as a loop over time that was written step by step."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import onnx

from chrion.graph.assemble import captured_names
from chrion.graph.model import Graph
from chrion.graph.rewrite import STANDARD, int_attribute, text_attribute
from chrion.graph.views import VIEWS, View, known_shape, node_view, whole_view

#: The number of states of each recurrent operator.
STATES = {"LSTM": 2, "GRU": 1, "RNN": 1}
#: The positions of ``sequence_lens`` and of the first initial state among the inputs.
SEQUENCE_LENS, INITIAL = 4, 5
#: The positions of weights among the inputs: W, R, B and P.
WEIGHTS = (1, 2, 3, 7)


@dataclass(frozen=True, slots=True, eq=False)
class Cell:
    """A recurrent operator of one direction and a known number of steps."""

    node: onnx.NodeProto
    #: The shape of Y: steps, one direction, batch, hidden units.
    shape: tuple[int, int, int, int]
    #: The direction; empty for a single step, which has either.
    direction: str
    #: Whatever two operators that continue each other have in common.
    key: tuple[object, ...]

    @property
    def sequence(self) -> str:
        """The name of Y, even if the operator does not return it."""
        return self.node.output[0] or f"{self.node.name}/Y"

    @property
    def state(self) -> View:
        """The final hidden state, as a view of Y."""
        last = 0 if self.direction == "reverse" else self.shape[0] - 1
        whole = whole_view(self.sequence, self.shape)
        part = whole.part(0, last, last + 1, self.shape[0])
        assert part is not None  # noqa: S101 - a range along one axis of a whole value
        return part.without(0)

    @property
    def cell_state(self) -> str:
        """The name of Y_c; empty if the operator has or returns none."""
        return self.node.output[2] if len(self.node.output) > 2 else ""

    def initial(self, state: int) -> str:
        """Return the name of an initial state; empty if it is not given."""
        at = INITIAL + state
        return self.node.input[at] if len(self.node.input) > at else ""


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """At least two recurrent operators, each of which starts from the final states of the one before it."""

    cells: tuple[Cell, ...]
    #: The direction of all of them; empty if they have a single step each.
    direction: str

    @property
    def in_time(self) -> tuple[Cell, ...]:
        """The operators in the order of time."""
        return self.cells[::-1] if self.direction == "reverse" else self.cells


class ValueViews:
    """The values of a graph as views of others.

    The values of a recurrent operator are views of its Y, whose steps are the only parts of it that count as views.

    Attributes:
        cells: The recurrent operators that may belong to a chain, by the name of Y.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self.cells: dict[str, Cell] = {}
        self._views: dict[str, View] = {}
        self._content: dict[str, str] = {}
        for node in graph.model.graph.node:
            if cell := self._cell(node):
                self.cells[cell.sequence] = cell
                self._views |= {cell.sequence: whole_view(cell.sequence, cell.shape)}
                self._views |= {name: cell.state for name in node.output[1:2] if name}
            elif node.op_type in VIEWS and (view := self.of(node.input[0])):
                found = {name: node_view(graph, node, name, view) for name in node.output}
                self._views |= {
                    name: v for name, v in found.items() if v and (v.source not in self.cells or not v.axis)
                }

    def of(self, name: str) -> View | None:
        """Return a value as a view; None if its shape is unknown."""
        if name not in self._views:
            shape = known_shape(self._graph, name)
            return None if shape is None else whole_view(name, shape)
        return self._views[name]

    def weight(self, name: str) -> str:
        """Return what equal weights have in common; the name of any other value."""
        if name in self._graph.weight_names and name not in self._content:
            value = self._graph.constant(name)
            assert value is not None  # noqa: S101 - it is a weight
            digest = hashlib.sha256(value.tobytes()).hexdigest()
            self._content[name] = f"{self._graph.values[name].type}{list(value.shape)} {digest}"
        return self._content.get(name, name)

    def _cell(self, node: onnx.NodeProto) -> Cell | None:
        if node.op_type not in STATES or node.domain not in STANDARD or int_attribute(node, "layout", 0):
            return None
        inputs = [*node.input, *[""] * 8][:8]
        shape, recurrent = known_shape(self._graph, inputs[0]), known_shape(self._graph, inputs[2])
        direction = text_attribute(node, "direction", "forward")
        constant = {at for at in WEIGHTS if not inputs[at] or inputs[at] in self._graph.weight_names}
        if len(constant) < len(WEIGHTS) or inputs[SEQUENCE_LENS] or direction not in {"forward", "reverse"}:
            return None
        if shape is None or recurrent is None or len(shape) != 3 or len(recurrent) != 3:
            return None
        attributes = sorted(a.SerializeToString(deterministic=True) for a in node.attribute if a.name != "direction")
        weights = tuple(self.weight(inputs[at]) for at in WEIGHTS)
        return Cell(
            node,
            (shape[0], 1, shape[1], recurrent[-1]),
            direction if shape[0] > 1 else "",
            (node.op_type, *attributes, *weights, *shape[1:], self._graph.values[inputs[0]].type),
        )


def find_chains(graph: Graph, views: ValueViews) -> list[Chain]:
    """Return the longest chains of a graph, in the order of their first operators.

    Each operator of a chain but the first starts from the states of the one before it, with equal weights and
    attributes, and the cell state of each but the last is only read by the one after it.
    """
    following: dict[str, Cell] = {}
    for cell in views.cells.values():
        before = _cell_before(cell, views)
        if before is not None:
            following.setdefault(before.sequence, cell)
    continued = {id(cell.node) for cell in following.values()}
    read = _read_sources(graph, views, continued)
    following = {name: cell for name, cell in following.items() if views.cells[name].cell_state not in read}
    continued = {id(cell.node) for cell in following.values()}
    return [
        chain
        for first in views.cells.values()
        if id(first.node) not in continued
        for chain in _chains_from(first, following)
        if len(chain.cells) > 1
    ]


def _cell_before(cell: Cell, views: ValueViews) -> Cell | None:
    """Return the recurrent operator that a recurrent operator continues, or None."""
    state = views.of(cell.initial(0))
    before = views.cells.get(state.source) if state else None
    if before is None or state != before.state or before.key != cell.key:
        return None
    if cell.node.op_type == "LSTM":
        passed = views.of(cell.initial(1))
        if not before.cell_state or passed != views.of(before.cell_state):
            return None
    return before


def _read_sources(graph: Graph, views: ValueViews, continued: set[int]) -> set[str]:
    """Return the values of which any part is read, other than as a state by an operator that continues another one."""
    names = {o.name for o in graph.model.graph.output}
    for node in graph.model.graph.node:
        names |= captured_names(node)
        if node.op_type not in VIEWS:
            names.update(node.input[:INITIAL] if id(node) in continued else node.input)
    return {view.source for name in names if (view := views.of(name))}


def _chains_from(first: Cell, following: dict[str, Cell]) -> Iterator[Chain]:
    """Yield the operators that follow the first one as chains, each of one direction."""
    cells, direction = [first], first.direction
    while (cell := following.get(cells[-1].sequence)) is not None:
        if direction and cell.direction and cell.direction != direction:
            yield Chain(tuple(cells), direction)
            cells, direction = [], ""
        cells.append(cell)
        direction = direction or cell.direction
    yield Chain(tuple(cells), direction)
