"""A model's operators as a directed acyclic graph of plain indices.

Algorithms work on operators 0..n-1, without ONNX: on their dependencies, the bytes transferred along these, and the
weights that each operator reads. Names are for output only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from chrion.common.imports import import_late
from chrion.errors import ModelError

if TYPE_CHECKING:
    import networkx as nx


@dataclass(frozen=True)
class Dag:
    """An immutable DAG of ``n`` operators; every field has one entry per operator unless stated otherwise."""

    #: Unique operator names.
    names: tuple[str, ...]
    #: Operator types such as ``LSTM``; an operator of three ONNX nodes is written ``NonZero+2``.
    op_types: tuple[str, ...]
    #: Type, attributes, shapes and element types as text; operators of equal cost have equal signatures.
    signatures: tuple[str, ...]
    #: The operators that must finish before the operator starts, without repetition, in the order of its inputs.
    predecessors: tuple[tuple[int, ...], ...]
    #: The operators that wait for the operator, in ascending order.
    successors: tuple[tuple[int, ...], ...]
    #: Bytes received from each predecessor, parallel to ``predecessors`` (C of the paper).
    edge_bytes: tuple[tuple[int, ...], ...]
    #: The values read from each predecessor, parallel to ``predecessors``, as indices into ``value_bytes``.
    edge_values: tuple[tuple[tuple[int, ...], ...], ...]
    #: Bytes of each value that an operator computes; one entry per value.
    value_bytes: tuple[int, ...]
    #: Bytes of the operator's inputs, without weights.
    input_bytes: tuple[int, ...]
    #: Bytes of the operator's outputs.
    output_bytes: tuple[int, ...]
    #: The weights that the operator reads, as indices into ``weight_bytes``; a shared weight has one index.
    weights: tuple[tuple[int, ...], ...]
    #: Bytes of each weight; one entry per weight.
    weight_bytes: tuple[int, ...]
    #: Floating point operations of the operator; zero if unknown.
    flops: tuple[float, ...]
    #: One entry per non-empty input of a request, in the model's order: its bytes, and the operators that read it, in
    #: ascending order.
    request_inputs: tuple[tuple[int, tuple[int, ...]], ...] = ()
    #: One entry per non-empty output of a request: the operator that computes it, and its value as an index into
    #: ``value_bytes``. Outputs that are inputs or weights have no entry.
    request_outputs: tuple[tuple[int, int], ...] = ()
    #: One entry per result that no operator reads and no request gets, but that segments return, such as the final
    #: state of a recurrent operator: the operator, and its value as an index into ``value_bytes``.
    unread_results: tuple[tuple[int, int], ...] = ()
    #: Element type and shape of each value (``float[1x64]``), parallel to ``value_bytes``, and of each request input;
    #: empty if they are unknown.
    value_kinds: tuple[str, ...] = ()
    input_kinds: tuple[str, ...] = ()
    #: The probability that a request uses the operator; empty if all operators are always used.
    usage: tuple[float, ...] = ()

    @classmethod
    def from_edges(cls, n: int, edges: Iterable[tuple[int, int]], edge_bytes: Sequence[int] | None = None) -> Dag:
        """Build a DAG from edges, without a model.

        Args:
            n: Number of operators.
            edges: Pairs (before, after). Predecessors keep the order of their edges. An edge that occurs twice counts
                once, with the sum of its bytes.
            edge_bytes: Bytes of each edge, in the order of ``edges``; all zero if None.

        Raises:
            ModelError: An edge has an index outside 0..n-1 or joins an operator to itself, the edges form a cycle, or
                ``edge_bytes`` has another length than ``edges``.
        """
        pairs = list(edges)
        sizes = [0] * len(pairs) if edge_bytes is None else list(edge_bytes)
        if len(sizes) != len(pairs):
            raise ModelError(f"graph: {len(pairs)} edges but {len(sizes)} edge sizes")
        incoming: list[dict[int, int]] = [{} for _ in range(n)]
        index = list(range(n))  # one object for each number
        for (before, after), size in zip(pairs, sizes, strict=True):
            if not (0 <= before < n and 0 <= after < n) or before == after:
                raise ModelError(f"graph: edge {before} -> {after}: expected two different operators of 0 to {n - 1}")
            incoming[after][index[before]] = incoming[after].get(before, 0) + size
        return cls.from_predecessors(incoming)

    @classmethod
    def from_predecessors(cls, incoming: Sequence[dict[int, int]]) -> Dag:
        """Build a DAG without a model from each operator's predecessors and the bytes received from each.

        Every operator computes one value, of the size of the largest transfer from it.

        Raises:
            ModelError: The edges form a cycle.
        """
        n = len(incoming)
        received = tuple(sum(sizes.values()) for sizes in incoming)
        sent = [0] * n
        for sizes in incoming:
            for before, size in sizes.items():
                sent[before] = max(sent[before], size)
        names = tuple(str(i) for i in range(n))
        alone = [(i,) for i in range(n)]
        dag = cls(
            names=names,
            op_types=("Operator",) * n,
            signatures=names,
            predecessors=tuple(tuple(sizes) for sizes in incoming),
            successors=invert([tuple(sizes) for sizes in incoming]),
            edge_bytes=tuple(tuple(sizes.values()) for sizes in incoming),
            edge_values=tuple(tuple(alone[before] for before in sizes) for sizes in incoming),
            value_bytes=tuple(sent),
            input_bytes=received,
            output_bytes=tuple(sent),
            weights=((),) * n,
            weight_bytes=(),
            flops=(0.0,) * n,
        )
        if len(dag.topological_order) < n:
            raise ModelError("graph: the edges form a cycle")
        return dag

    def __len__(self) -> int:
        return len(self.names)

    def to_networkx(self) -> nx.DiGraph[int]:
        """Return the graph for networkx: nodes with ``name`` and ``op_type``, edges with ``bytes``."""
        graph: nx.DiGraph[int] = import_late("networkx").DiGraph()  # takes a tenth of a second
        for i, (name, op_type) in enumerate(zip(self.names, self.op_types, strict=True)):
            graph.add_node(i, name=name, op_type=op_type)
        for i, before in enumerate(self.predecessors):
            for m, size in zip(before, self.edge_bytes[i], strict=True):
                graph.add_edge(m, i, bytes=size)
        return graph

    @cached_property
    def topological_order(self) -> tuple[int, ...]:
        """The operators, each after all of its predecessors (Kahn's algorithm); incomplete if there is a cycle."""
        missing = [len(before) for before in self.predecessors]
        order = [i for i, count in enumerate(missing) if count == 0]
        for i in order:  # the list grows during the iteration
            for after in self.successors[i]:
                missing[after] -= 1
                if missing[after] == 0:
                    order.append(after)
        return tuple(order)

    @cached_property
    def descendants(self) -> tuple[int, ...]:
        """For each operator, a bit mask in which bit ``j`` is set if there is a path to operator ``j``."""
        masks = [0] * len(self)
        for i in reversed(self.topological_order):
            for after in self.successors[i]:
                masks[i] |= masks[after] | 1 << after
        return tuple(masks)

    @cached_property
    def ancestors(self) -> tuple[int, ...]:
        """For each operator, a bit mask in which bit ``j`` is set if there is a path from operator ``j``."""
        masks = [0] * len(self)
        for i in self.topological_order:
            for before in self.predecessors[i]:
                masks[i] |= masks[before] | 1 << before
        return tuple(masks)

    @cached_property
    def reduced(self) -> tuple[tuple[int, ...], ...]:
        """The successors of each operator in the transitive reduction.

        It leaves out every edge whose ends are also joined by a path of several edges. An operator's successors are
        visited in topological order, and a successor that can be reached from an earlier one is left out. This takes
        O(edges * n / 64) with bit masks.
        """
        position = {v: at for at, v in enumerate(self.topological_order)}
        kept = []
        for successors in self.successors:
            reached = 0
            own = []
            for after in sorted(successors, key=position.__getitem__):
                if not reached >> after & 1:
                    own.append(after)
                    reached |= self.descendants[after]
            kept.append(tuple(sorted(own)))
        return tuple(kept)

    @cached_property
    def received(self) -> tuple[tuple[tuple[int, tuple[int, ...]], ...], ...]:
        """For each operator, its predecessors, each with the values read from it."""
        return tuple(
            tuple(zip(before, values, strict=True))
            for before, values in zip(self.predecessors, self.edge_values, strict=True)
        )

    @cached_property
    def output_values(self) -> tuple[tuple[tuple[int, tuple[int, ...]], ...], ...]:
        """For each operator, those of its values that other operators read or that segments return in any case.

        Each entry is a pair: an index into ``value_bytes``, and the operators that read the value in ascending order.
        """
        readers: list[dict[int, list[int]]] = [{} for _ in range(len(self))]
        for i, value in (*self.request_outputs, *self.unread_results):
            readers[i][value] = []
        for i, before in enumerate(self.predecessors):
            for m, values in zip(before, self.edge_values[i], strict=True):
                for value in values:
                    readers[m].setdefault(value, []).append(i)
        return tuple(tuple((value, tuple(by)) for value, by in sorted(own.items())) for own in readers)

    def value_kind(self, value: int) -> str:
        """Return the type and shape of a value; if they are unknown, a text that is equal for values of equal size."""
        return self.value_kinds[value] if self.value_kinds else str(self.value_bytes[value])

    def input_kind(self, at: int) -> str:
        """Return the type and shape of an input of the request, by its index; see :meth:`value_kind`."""
        return self.input_kinds[at] if self.input_kinds else str(self.request_inputs[at][0])

    def weight_total(self, i: int) -> int:
        """Return the bytes of all weights that operator ``i`` reads."""
        return sum(self.weight_bytes[w] for w in self.weights[i])


def invert(predecessors: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Return the successors of all operators, given their predecessors; each list is in ascending order."""
    successors: list[list[int]] = [[] for _ in predecessors]
    for i, before in enumerate(predecessors):
        for b in before:
            successors[b].append(i)
    return tuple(tuple(after) for after in successors)


def depth_first_order(dag: Dag) -> tuple[int, ...]:
    """Return the depth-first order: after an operator its first child that is ready; if there is none, backtrack."""
    missing = [len(before) for before in dag.predecessors]
    order = []
    stack = [i for i in reversed(range(len(dag))) if not missing[i]]
    while stack:
        i = stack.pop()
        order.append(i)
        for child in reversed(dag.successors[i]):
            missing[child] -= 1
            if not missing[child]:
                stack.append(child)
    return tuple(order)
