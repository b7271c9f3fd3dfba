"""A model's operators as a directed acyclic graph of plain indices.

Algorithms see operators 0..n-1 and nothing of ONNX: who waits for whom, how many bytes travel, which weights
an operator reads. Names are for people and stand beside the indices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from chrion.errors import ModelError


@dataclass(frozen=True)
class Dag:
    """An immutable DAG of ``n`` operators; every field has one entry an operator unless it says otherwise."""

    #: Unique operator names.
    names: tuple[str, ...]
    #: Operator types, ``LSTM`` or ``Conv``; several ONNX nodes kept together read ``NonZero+2``.
    op_types: tuple[str, ...]
    #: Equal operators have equal signatures: type, attributes, shapes and element types.
    signatures: tuple[str, ...]
    #: Who must finish first, without repeats, in the order of the operator's inputs.
    predecessors: tuple[tuple[int, ...], ...]
    #: Who waits for it, in ascending order.
    successors: tuple[tuple[int, ...], ...]
    #: Bytes that travel from each predecessor, parallel to ``predecessors`` (C of the paper).
    edge_bytes: tuple[tuple[int, ...], ...]
    #: The values that it reads of each predecessor, parallel to ``predecessors``, as indices into ``value_bytes``.
    edge_values: tuple[tuple[tuple[int, ...], ...], ...]
    #: Bytes of each value that operators hand to each other.
    value_bytes: tuple[int, ...]
    #: Bytes of the operator's inputs, weights apart.
    input_bytes: tuple[int, ...]
    #: Bytes of its outputs.
    output_bytes: tuple[int, ...]
    #: The weights it reads, as indices into ``weight_bytes``; a shared weight has one index.
    weights: tuple[tuple[int, ...], ...]
    #: Bytes of each weight.
    weight_bytes: tuple[int, ...]
    #: Floating point operations of each operator, zero where not known.
    flops: tuple[float, ...]
    #: Inputs of a request that are not empty, in the model's order: the bytes of each and the operators that read it,
    #: in ascending order.
    request_inputs: tuple[tuple[int, tuple[int, ...]], ...] = ()
    #: Outputs of a request that are not empty: the operator that makes each and the value, as an index into
    #: ``value_bytes``. None for outputs that are inputs or weights.
    request_outputs: tuple[tuple[int, int], ...] = ()

    @classmethod
    def from_edges(cls, n: int, edges: Iterable[tuple[int, int]], edge_bytes: Sequence[int] | None = None) -> Dag:
        """Make a DAG without a model.

        Args:
            n: Number of operators.
            edges: Pairs (before, after). Predecessors keep the order in which their edges are given; an edge
                given twice counts once, with its bytes added up.
            edge_bytes: Bytes of each edge, in the order of ``edges``; zero where missing.

        Raises:
            ModelError: An edge leaves 0..n-1 or joins an operator to itself, there is a cycle, or ``edge_bytes``
                is not as long as ``edges``.
        """
        pairs = list(edges)
        sizes = [0] * len(pairs) if edge_bytes is None else list(edge_bytes)
        if len(sizes) != len(pairs):
            raise ModelError(f"graph: {len(pairs)} edges but {len(sizes)} edge sizes")
        incoming: list[dict[int, int]] = [{} for _ in range(n)]
        for (before, after), size in zip(pairs, sizes, strict=True):
            if not (0 <= before < n and 0 <= after < n) or before == after:
                raise ModelError(f"graph: edge {before} -> {after} is not between two of the {n} operators")
            incoming[after][before] = incoming[after].get(before, 0) + size
        return cls.from_predecessors(incoming)

    @classmethod
    def from_predecessors(cls, incoming: Sequence[dict[int, int]]) -> Dag:
        """Make a DAG without a model from each operator's predecessors and the bytes each sends.

        An operator makes one value, as large as the most that it sends.

        Raises:
            ModelError: There is a cycle.
        """
        n = len(incoming)
        received = tuple(sum(sizes.values()) for sizes in incoming)
        sent = [0] * n
        for sizes in incoming:
            for before, size in sizes.items():
                sent[before] = max(sent[before], size)
        dag = cls(
            names=tuple(str(i) for i in range(n)),
            op_types=("Operator",) * n,
            signatures=tuple(str(i) for i in range(n)),
            predecessors=tuple(tuple(sizes) for sizes in incoming),
            successors=invert([tuple(sizes) for sizes in incoming]),
            edge_bytes=tuple(tuple(sizes.values()) for sizes in incoming),
            edge_values=tuple(tuple((before,) for before in sizes) for sizes in incoming),
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

    @cached_property
    def topological_order(self) -> tuple[int, ...]:
        """Operators with every predecessor first (Kahn); shorter than ``n`` only while a cycle is being refused."""
        missing = [len(before) for before in self.predecessors]
        order = [i for i, count in enumerate(missing) if count == 0]
        for i in order:  # grows while it is walked
            for after in self.successors[i]:
                missing[after] -= 1
                if missing[after] == 0:
                    order.append(after)
        return tuple(order)

    @cached_property
    def descendants(self) -> tuple[int, ...]:
        """For each operator, a mask with bit ``j`` set where there is a path to operator ``j``."""
        masks = [0] * len(self)
        for i in reversed(self.topological_order):
            for after in self.successors[i]:
                masks[i] |= masks[after] | 1 << after
        return tuple(masks)

    @cached_property
    def ancestors(self) -> tuple[int, ...]:
        """For each operator, a mask with bit ``j`` set where there is a path from operator ``j``."""
        masks = [0] * len(self)
        for i in self.topological_order:
            for before in self.predecessors[i]:
                masks[i] |= masks[before] | 1 << before
        return tuple(masks)

    @cached_property
    def reduced(self) -> tuple[tuple[int, ...], ...]:
        """Successors in the transitive reduction: those that no longer path leads to.

        Successors are looked at along the topological order; one that an earlier one reaches is left out.
        O(edges * n / 64) by bit masks.
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
    def handed_over(self) -> tuple[tuple[tuple[int, tuple[int, ...]], ...], ...]:
        """For each operator, the values that others read of it, or the request takes away.

        Each as (value, its readers in ascending order).
        """
        readers: list[dict[int, list[int]]] = [{} for _ in range(len(self))]
        for i, value in self.request_outputs:
            readers[i][value] = []
        for i, before in enumerate(self.predecessors):
            for m, values in zip(before, self.edge_values[i], strict=True):
                for value in values:
                    readers[m].setdefault(value, []).append(i)
        return tuple(tuple((value, tuple(those)) for value, those in sorted(own.items())) for own in readers)

    @cached_property
    def exits(self) -> tuple[int, ...]:
        """Operators that nobody waits for."""
        return tuple(i for i, after in enumerate(self.successors) if not after)

    def weight_total(self, i: int) -> int:
        """Bytes of all the weights that operator ``i`` reads."""
        return sum(self.weight_bytes[w] for w in self.weights[i])


def invert(predecessors: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Successors from predecessors, each list in ascending order."""
    successors: list[list[int]] = [[] for _ in predecessors]
    for i, before in enumerate(predecessors):
        for b in before:
            successors[b].append(i)
    return tuple(tuple(after) for after in successors)
