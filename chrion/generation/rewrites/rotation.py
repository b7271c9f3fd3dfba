"""The rotation of queries and keys by the positions of their tokens, whatever operators compute it.

With a rotary embedding (Su et al., *RoFormer*, 2021) each element of a head is multiplied by a cosine, and that of its
partner is added, multiplied by a sine. Exporters write that with ``Split``, ``Slice``, ``Neg``, ``Mul``, ``Concat``
and others, in many ways, or as ``RotaryEmbedding``. Here the nodes between a value and queries or keys are run with
random integers, and the result is compared with that of every kind of rotation. Sums and products of small integers are
exact in float32, so that another function is not taken for a rotation.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from chrion.generation.rewrites.arrangements import fixed_shape
from chrion.generation.rewrites.decoder import IDS
from chrion.generation.rewrites.observation import Observation
from chrion.graph.ort_sessions import analysis_options, open_session
from chrion.graph.rewrite import MICROSOFT, STANDARD, nodes_before, producers

Array = np.ndarray[Any, Any]
#: Operators that only change the shape.
_RESHAPING = frozenset({"Identity", "Reshape", "Squeeze", "Unsqueeze"})
#: The operators of a rotation, of which there are some twenty, and the most that are looked at.
_FOLLOWED = _RESHAPING | {"Add", "Concat", "Mul", "Neg", "Slice", "Split", "Sub", "Transpose"}
_MOST_NODES = 200
#: The tokens and the limit of the integers of a run.
_TOKENS, _LIMIT = 2, 1000


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
        opset: The version of ONNX's operators.
    """

    def __init__(
        self, nodes: Sequence[onnx.NodeProto], seen: Observation, positions: Collection[str], opset: int
    ) -> None:
        self._nodes, self._seen, self._opset = nodes, seen, opset
        self._producer = producers(nodes)
        #: The values that follow from tokens, and those that follow from their positions only.
        self._depending = _following(nodes, {IDS})
        self._tables = _following(nodes, positions) - self._depending
        #: The values that nodes read, without shapes.
        self._reads = [node.input[:1] if node.op_type in _RESHAPING else node.input for node in nodes]
        #: The operators of rotations by the values that they compute.
        self._followed = {
            name: at
            for at, node in enumerate(nodes)
            if node.op_type in _FOLLOWED and node.domain in STANDARD
            for name in self._depending.intersection(node.output)
        }
        self._selections: dict[str, onnx.NodeProto] = {}

    def find(self, name: str, heads: int, width: int) -> tuple[str, Rotation]:
        """Return the value before the rotation of some heads of each token, and that rotation.

        They are the value itself and the rotation of no elements, if it is not known to be rotated.
        """
        node = self._producer.get(name)
        if node is not None and node.op_type == "RotaryEmbedding":
            source, rotation = node.input[0], self._read_operator(node, heads, width)
            return (name, Rotation()) if rotation is None else (source, rotation)
        for source, tables, nodes in self._ways(name, heads * width):
            if (rotation := self._compare(source, tables, nodes, name, (heads, width))) is not None:
                return source, rotation
        return name, Rotation()

    def _ways(self, name: str, size: int) -> Iterator[tuple[str, list[str], list[onnx.NodeProto]]]:
        """Yield earlier values of a size, the earliest first, two tables, and the nodes from these three to a value."""
        reads = self._reads
        cone = nodes_before([name], self._followed, reads)
        if len(cone) > _MOST_NODES:
            return
        for source in dict.fromkeys(read for at in sorted(cone) for read in reads[at] if self._size(read) == size):
            inner = {one: at for one, at in self._followed.items() if at in cone and one != source}
            way = sorted(nodes_before([name], inner, reads))
            computed = {one for at in way for one in self._nodes[at].output}
            given = {read for at in way for read in reads[at] if read} - computed
            tables = sorted(given & self._tables)
            others = given - {source, *tables}
            if len(tables) == 2 and source in given and all(map(self._is_integer, others)):
                yield source, tables, [self._nodes[at] for at in way]

    def _size(self, name: str) -> int:
        """Return the elements of a token in a value that follows from tokens; 0 if that is not known."""
        shape = fixed_shape(self._seen.shapes.get(name, ())) if name in self._depending else []
        return int(np.prod(shape[1:])) if shape else 0

    def _is_integer(self, name: str) -> bool:
        return name in self._seen.constants and self._seen.constants[name].dtype.kind == "i"

    def _compare(
        self, source: str, tables: Sequence[str], nodes: Sequence[onnx.NodeProto], name: str, size: tuple[int, int]
    ) -> Rotation | None:
        """Return the rotation that nodes compute of some heads of a width, or None."""
        draw, feed = np.random.default_rng(0), dict[str, Array]()
        for given in (source, *tables):
            shape = fixed_shape(self._seen.shapes.get(given, ()))
            feed[given] = draw.integers(1, _LIMIT, (_TOKENS, *shape[1:])).astype(np.float32)
        x, *columns = (array.reshape(_TOKENS, -1) for array in feed.values())
        count = columns[0].shape[1]
        if columns[1].shape[1] != count:
            return None
        try:
            result = self._run(nodes, feed, name).reshape(_TOKENS, *size)
        except Exception:  # noqa: BLE001 - nodes that cannot run with several tokens; onnxruntime raises many types
            return None
        for rotated, interleaved, (cosine, sine) in itertools.product(
            (count, 2 * count), (False, True), ((0, 1), (1, 0))
        ):
            if rotated % 2 or rotated > size[1]:
                continue
            rotation = Rotation((tables[cosine], tables[sine]), rotated, interleaved, count)
            if np.array_equal(result, _rotate(x.reshape(result.shape), columns[cosine], columns[sine], rotation)):
                return rotation
        return None

    def _run(self, nodes: Sequence[onnx.NodeProto], feed: dict[str, Array], name: str) -> Array:
        """Return what nodes compute of some values."""
        graph = onnx.GraphProto(name="rotation")
        for node in nodes:
            graph.node.append(node)
            if node.op_type in _RESHAPING:  # its shape may be computed by others
                shape = np.array(fixed_shape(self._seen.shapes.get(node.output[0], ())), np.int64)
                target = f"{node.output[0]}/shape"
                graph.initializer.append(numpy_helper.from_array(shape, target))
                graph.node[-1].CopyFrom(helper.make_node("Reshape", [node.input[0], target], node.output))
        used = {read for node in graph.node for read in node.input}
        constants = {one: value for one, value in self._seen.constants.items() if one in used - feed.keys()}
        graph.initializer.extend(numpy_helper.from_array(value, one) for one, value in constants.items())
        graph.input.extend(
            helper.make_tensor_value_info(one, TensorProto.FLOAT, value.shape) for one, value in feed.items()
        )
        graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", self._opset)], ir_version=8)
        options = analysis_options(ort.GraphOptimizationLevel.ORT_DISABLE_ALL)
        return np.asarray(open_session(model, options, "a rotation").run([name], feed)[0])

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


def _following(nodes: Sequence[onnx.NodeProto], roots: Collection[str]) -> set[str]:
    """Return all values that follow from some, other than from their shapes."""
    following = {*roots}
    for node in nodes:
        if node.op_type != "Shape" and not following.isdisjoint(node.input):
            following.update(node.output)
    return following


def _rotate(x: Array, cosines: Array, sines: Array, rotation: Rotation) -> Array:
    """Return the heads of tokens, [tokens, heads, width], rotated with tables [tokens, columns]."""
    rotated, result = rotation.rotated, x.copy()
    half = rotated // 2
    first, second = (slice(0, half), slice(half, rotated))
    if rotation.interleaved:
        first, second = slice(0, rotated, 2), slice(1, rotated, 2)
    of_element = np.empty(rotated, np.int64)  # the column of each element
    of_element[first] = of_element[second] = np.arange(half)
    if rotation.columns == rotated:
        of_element = np.arange(rotated)
    partners = np.empty_like(x[..., :rotated])
    partners[..., first], partners[..., second] = -x[..., second], x[..., first]
    cosine, sine = (table[:, None, of_element] for table in (cosines, sines))
    result[..., :rotated] = x[..., :rotated] * cosine + partners * sine
    return result
