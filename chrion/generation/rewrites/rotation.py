"""The rotation of queries and keys by the positions of their tokens, whatever operators compute it.

With a rotary embedding (Su et al., *RoFormer*, 2021) each element of a head is multiplied by a cosine, and that of its
partner is added, multiplied by a sine. Exporters write that with ``Split``, ``Slice``, ``Neg``, ``Mul``, ``Concat``
and others, in many ways, or as ``RotaryEmbedding``. Here the elements of a token are followed through such operators as
sums of signed products: of an element of one value before, and of an element of a table. If these are a rotation, the
tables and the order of partners describe it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import helper

from chrion.generation.rewrites.arrangements import fixed_shape
from chrion.generation.rewrites.decoder import IDS
from chrion.generation.rewrites.observation import Observation
from chrion.graph.rewrite import MICROSOFT, STANDARD, int_attribute, ints_attribute, producers

Array = np.ndarray[Any, Any]
#: What is known of a term of a sum: the element before, its sign (0 if there is no such term), the table (-1 for none)
#: and its column.
_ELEMENT, _SIGN, _TABLE, _COLUMN = range(4)
#: The terms of a rotated element.
_TERMS = 2
#: The operators that values are followed through, and the most values that are looked at: a rotation has some twenty.
_FOLLOWED = frozenset(
    {
        "Add",
        "Concat",
        "Identity",
        "Mul",
        "Neg",
        "Reshape",
        "Slice",
        "Split",
        "Squeeze",
        "Sub",
        "Transpose",
        "Unsqueeze",
    }
)
_MOST_VALUES = 200


@dataclass(frozen=True)
class Rotation:
    """A rotation of the first elements of each head, or of none."""

    #: The tables of cosines and of sines, if anything is rotated: they have a row for each token, and a column for each
    #: rotated element or for each pair of partners.
    tables: tuple[str, ...] = ()
    #: The number of rotated elements.
    rotated: int = 0
    #: True if partners are neighbours; otherwise they are half of the rotated elements apart.
    interleaved: bool = False
    #: The columns of each table.
    columns: int = 0


class RotationFinder:
    """Finds rotations in a decoder for requests of one new token each.

    Args:
        nodes: Its nodes, in topological order.
        seen: The sizes and constants of its values.
        positions: The inputs that tables follow from.
    """

    def __init__(self, nodes: Sequence[onnx.NodeProto], seen: Observation, positions: Collection[str]) -> None:
        self._seen = seen
        self._producer = producers(nodes)
        #: The values that follow from the tokens, and those that follow from their positions only.
        self._depending = _following(nodes, {IDS})
        self._tables = _following(nodes, positions) - self._depending
        self._selections: dict[str, onnx.NodeProto] = {}

    def find(self, name: str, heads: int, width: int) -> tuple[str, Rotation]:
        """Return the value before the rotation of some heads of each token, and that rotation.

        They are the value itself and the rotation of no elements, if it is not known to be rotated.
        """
        node = self._producer.get(name)
        if node is not None and node.op_type == "RotaryEmbedding":
            source, rotation = node.input[0], self._read_operator(node, heads, width)
        else:
            sums = _Sums(self._producer, self._depending, self._tables, self._seen, heads * width)
            terms = sums.of(name)
            source, rotation = sums.source, None
            if terms is not None and len(terms) == _TERMS:
                rotation = _read_terms(terms.reshape(_TERMS, 4, heads, width), sums)
        return (name, Rotation()) if rotation is None else (source, rotation)

    def _read_operator(self, node: onnx.NodeProto, heads: int, width: int) -> Rotation | None:
        """Return what onnxruntime's or ONNX's ``RotaryEmbedding`` computes."""
        if node.domain in STANDARD:
            tables = node.input[1:3]
            positions = node.input[3] if len(node.input) > 3 else ""
        elif node.domain == MICROSOFT:
            positions, *tables = node.input[1:]
        else:
            return None
        values = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        rotated = int(values.pop("rotary_embedding_dim", 0)) or width
        interleaved = bool(values.pop("interleaved", 0))
        known: dict[str, set[float]] = {"is_packed_batching": {0}, "num_heads": {0, heads}, "scale": {1.0}}
        if any(value not in known.get(name, ()) for name, value in values.items()):
            return None
        if positions:
            if fixed_shape(self._seen.shapes.get(positions, ())) != [0, 1]:
                return None
            tables = [self._select(table, positions) for table in tables]
        return Rotation(tuple(tables), rotated, interleaved, rotated // 2)

    def take_selections(self, names: Collection[str]) -> list[onnx.NodeProto]:
        """Return the nodes that select some rows of tables of ``RotaryEmbedding``, each of them once."""
        return [self._selections.pop(name) for name in names if name in self._selections]

    def _select(self, table: str, positions: str) -> str:
        """Return the rows of a table at the positions of the tokens."""
        name = f"rotation/{table}/{positions}"
        self._selections[name] = helper.make_node("Gather", [table, positions], [name], name=name)
        return name


class _Sums:
    """Follows values back to one value, as sums of its elements.

    The terms of a value are an array of integers, [terms, 4, ...], with the shape of the value but for the first axis.

    Args:
        producer: The nodes by the values that they compute.
        depending: The values that follow from tokens.
        tables: Those that follow from positions.
        seen: The sizes and constants of the values.
        size: The elements of the value before.
    """

    def __init__(
        self,
        producer: Mapping[str, onnx.NodeProto],
        depending: Collection[str],
        tables: Collection[str],
        seen: Observation,
        size: int,
    ) -> None:
        self._producer, self._depending, self._tables, self._seen = producer, depending, tables, seen
        self._size, self._left = size, _MOST_VALUES
        #: The value before.
        self.source = ""
        #: The tables in the order in which they were found.
        self.tables: list[str] = []

    def of(self, name: str) -> Array | None:
        """Return the terms of a value, or None if they are not those of one value."""
        shape = self._shape(name)
        self._left -= 1
        if shape is None or self._left < 0:
            return None
        node, before = self._producer.get(name), (self.source, [*self.tables])
        if node is not None and node.domain in STANDARD and (terms := self._through(node, name)) is not None:
            return terms if terms.shape[2:] == shape else None
        self.source, self.tables = before
        if np.prod(shape) != self._size or self.source not in {"", name}:
            return None
        self.source = name
        elements = np.arange(self._size).reshape(shape)
        ones = np.ones_like(elements)
        return np.stack([elements, ones, -ones, ones * 0])[None]

    def columns(self, table: str) -> int:
        """Return the columns of a table."""
        return int(np.prod(self._shape(table) or ()))

    def _shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape without the first axis, if that is the batch and the others do not depend on the request."""
        shape = fixed_shape(self._seen.shapes.get(name, ()))
        return tuple(shape[1:]) if shape else None

    def _through(self, node: onnx.NodeProto, name: str) -> Array | None:
        """Return the terms of what a node computes, or None if they do not follow from those of its inputs."""
        data = [read for read in node.input if read in self._depending]
        if (
            node.op_type not in _FOLLOWED
            or not data
            or any((shape := self._shape(read)) is None or np.prod(shape) > self._size for read in data)
        ):
            return None
        if node.op_type == "Mul":
            return self._multiply(node, data)
        if node.op_type in {"Add", "Concat", "Sub"} and len(data) < len(node.input):
            return None
        parts = []
        for read in data:
            terms = self.of(read)
            if terms is None:
                return None
            parts.append(terms)
        return self._combine(node, name, parts)

    def _multiply(self, node: onnx.NodeProto, data: Sequence[str]) -> Array | None:
        """Return the terms of a product with a table."""
        others = [read for read in node.input if read in self._tables]
        columns = self._shape(others[0]) if len(others) == 1 else None
        rank = len(self._seen.shapes.get(data[0], ()))
        if not columns or len(columns) + 1 != rank or np.prod(columns) != columns[-1]:
            return None
        terms = self.of(data[0])
        if terms is None or (terms[:, _TABLE] >= 0).any():
            return None
        shape = np.broadcast_shapes(terms.shape[2:], columns)
        product = np.broadcast_to(terms, (*terms.shape[:2], *shape)).copy()
        if others[0] not in self.tables:
            self.tables.append(others[0])
        product[:, _TABLE] = self.tables.index(others[0])
        product[:, _COLUMN] = np.broadcast_to(np.arange(columns[-1]).reshape(columns), shape)
        return product

    def _combine(self, node: onnx.NodeProto, name: str, parts: Sequence[Array]) -> Array | None:
        """Return the terms of sums, and of elements in another order or with another sign."""
        terms, kind = parts[0], node.op_type
        if kind in {"Add", "Sub"}:
            second = _negative(parts[1]) if kind == "Sub" else parts[1]
            same = terms.shape[2:] == second.shape[2:]
            return np.concatenate([terms, second]) if same and len(terms) + len(second) <= _TERMS else None
        if kind == "Concat":
            axis = self._axis(node, terms)
            most = max(len(part) for part in parts)
            padded = [np.concatenate([part, np.zeros_like(part)])[:most] for part in parts]
            return None if axis is None else np.concatenate(padded, axis=axis)
        return _negative(terms) if kind == "Neg" else self._arrange(node, name, terms)

    def _arrange(self, node: onnx.NodeProto, name: str, terms: Array) -> Array | None:
        """Return the terms of elements in another order."""
        if node.op_type in {"Identity", "Reshape", "Squeeze", "Unsqueeze"}:
            return self._reshape(terms, name)
        if node.op_type == "Transpose":
            perm = ints_attribute(node, "perm", range(terms.ndim - 1)[::-1])
            return terms.transpose(0, 1, *(at + 1 for at in perm[1:])) if perm[0] == 0 else None
        if node.op_type == "Split":
            return self._split(node, name, terms)
        return self._slice(node, terms) if node.op_type == "Slice" else None

    def _reshape(self, terms: Array, name: str) -> Array | None:
        shape = self._shape(name)
        fits = shape is not None and np.prod(shape) == np.prod(terms.shape[2:])
        return terms.reshape(*terms.shape[:2], *shape) if shape is not None and fits else None

    def _axis(self, node: onnx.NodeProto, terms: Array) -> int | None:
        """Return the axis of terms that an attribute names for values, or None if it is the first one of values."""
        rank = terms.ndim - 1
        axis = int_attribute(node, "axis", 0) % rank
        return axis + 1 if axis else None

    def _split(self, node: onnx.NodeProto, name: str, terms: Array) -> Array | None:
        axis = self._axis(node, terms)
        if axis is None:
            return None
        start = 0
        for output in node.output:
            shape = self._shape(output)
            if shape is None:
                return None
            size = shape[axis - 2]
            if output == name:
                return np.take(terms, np.arange(start, start + size), axis=axis)
            start += size
        return None

    def _slice(self, node: onnx.NodeProto, terms: Array) -> Array | None:
        """Return a part of each token, if its bounds are constants."""
        constants = [self._seen.constants.get(read) for read in node.input[1:]]
        if len(constants) < 3 or any(constant is None for constant in constants):  # starts, ends, axes, and maybe steps
            return None
        starts, ends, axes, *steps = (constant.tolist() for constant in constants if constant is not None)
        index = [slice(None)] * terms.ndim
        for start, end, axis, step in zip(starts, ends, axes, *(steps or [[1] * len(axes)]), strict=True):
            at = axis % (terms.ndim - 1)
            if not at or step < 1:
                return None
            index[at + 1] = slice(start, end, step)
        return terms[tuple(index)]


def _following(nodes: Sequence[onnx.NodeProto], roots: Collection[str]) -> set[str]:
    """Return all values that follow from some, other than from their shapes."""
    following = {*roots}
    for node in nodes:
        if node.op_type != "Shape" and not following.isdisjoint(node.input):
            following.update(node.output)
    return following


def _negative(terms: Array) -> Array:
    changed = terms.copy()
    changed[:, _SIGN] *= -1
    return changed


def _read_terms(terms: Array, sums: _Sums) -> Rotation | None:
    """Return the rotation that terms are, [2, 4, heads, width], or None."""
    heads, width = terms.shape[2:]
    own = np.arange(heads * width).reshape(heads, width)
    is_own = (terms[:, _SIGN] != 0) & (terms[:, _ELEMENT] == own)
    if not (is_own.sum(axis=0) == 1).all():
        return None
    # One term of each element is its own, the other one that of its partner.
    cosine, sine = (
        np.take_along_axis(terms, chosen.argmax(axis=0)[None, None], axis=0)[0] for chosen in (is_own, ~is_own)
    )
    rotated = int((cosine[_TABLE, 0] >= 0).sum())
    inside = np.broadcast_to(np.arange(width) < rotated, (heads, width))
    if not rotated or rotated % 2 or not (cosine[_SIGN] == 1).all():
        return None
    if not ((cosine[_TABLE] >= 0) == inside).all() or not ((sine[_SIGN] != 0) == inside).all():
        return None
    first, second = np.unique(cosine[_TABLE, :, :rotated]), np.unique(sine[_TABLE, :, :rotated])
    if len(first) != 1 or len(second) != 1 or second[0] < 0:
        return None
    cosines, sines = sums.tables[first[0]], sums.tables[second[0]]
    half = rotated // 2
    for interleaved in (False, True):
        steps = np.arange(rotated)
        pairs = steps // 2 if interleaved else steps % half
        later = steps % 2 == 1 if interleaved else steps >= half
        distance = np.where(later, -1, 1) * (1 if interleaved else half)
        expected = {_ELEMENT: own[:, :rotated] + distance, _SIGN: np.where(later, 1, -1)}
        if any((sine[field, :, :rotated] != value).any() for field, value in expected.items()):
            continue
        for columns in (steps, pairs):
            same = all((part[_COLUMN, :, :rotated] == columns).all() for part in (cosine, sine))
            if same and sums.columns(cosines) == sums.columns(sines) == columns.max() + 1:
                return Rotation((cosines, sines), rotated, interleaved, int(columns.max()) + 1)
    return None
