"""Rotations of queries by the positions of their tokens, in the ways in which exporters write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from chrion.generation.rewrites.observation import Observation, Size
from chrion.generation.rewrites.rotation import Rotation, RotationFinder

Array = np.ndarray[Any, Any]
HEADS, WIDTH, BATCH = 3, 8, 5
#: The version of ONNX's operators: in the first of these, Split has the attribute "num_outputs".
OPSET = 18


class Net:
    """Nodes that rotate ``x`` [batch, 1, heads * width] with tables ``cos`` and ``sin``, [batch, 1, 1, columns]."""

    def __init__(self, columns: int) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, Array] = {}
        self.columns = columns
        self.op("Mul", "input_ids", "input_ids", output="x")
        self.heads = self.op("Reshape", "x", np.array([0, 1, HEADS, WIDTH]), output="heads")

    def op(self, kind: str, *inputs: Any, output: str = "", outputs: int = 1, **attributes: Any) -> Any:
        """Add a node; arrays become constants."""
        names = []
        for value in inputs:
            name = value if isinstance(value, str) else f"c{len(self.constants)}"
            self.constants |= {} if isinstance(value, str) else {name: value}
            names.append(name)
        first = output or f"v{len(self.nodes)}"
        found = [first] if outputs == 1 else [f"{first}.{at}" for at in range(outputs)]
        self.nodes.append(helper.make_node(kind, names, found, **attributes))
        return first if outputs == 1 else found

    def cut(self, x: str, start: int, end: int, step: int = 1) -> str:
        """Add a slice of the last axis."""
        return str(self.op("Slice", x, *(np.array([n]) for n in (start, end, -1, step))))

    def join(self, *parts: str, axis: int = -1) -> str:
        return str(self.op("Concat", *parts, axis=axis))

    def turned(self, x: str, partner: str) -> str:
        """Add ``x * cos + partner * sin``."""
        return str(self.op("Add", self.op("Mul", x, "cos"), self.op("Mul", "sin", partner)))


def with_slices(net: Net) -> str:
    """Transformers: x * cos + concat(-second half, first half) * sin."""
    half = WIDTH // 2
    return net.turned(net.heads, net.join(net.op("Neg", net.cut(net.heads, half, 2**62)), net.cut(net.heads, 0, half)))


def partly(net: Net) -> str:
    """GPT-NeoX, Phi: only the first four elements of a head."""
    part = net.cut(net.heads, 0, 4)
    first, second = net.op("Split", part, np.array([2, 2]), outputs=2, axis=-1)
    return net.join(net.turned(part, net.join(net.op("Neg", second), first)), net.cut(net.heads, 4, WIDTH))


def with_split(net: Net) -> str:
    """Halves with tables of half the width, and a difference."""
    first, second = net.op("Split", net.heads, outputs=2, axis=3, num_outputs=2)
    below = net.op("Sub", net.op("Mul", first, "cos"), net.op("Mul", second, "sin"))
    return net.join(below, net.op("Add", net.op("Mul", second, "cos"), net.op("Mul", first, "sin")), axis=3)


def with_neighbours(net: Net) -> str:
    """GPT-J: partners are neighbours, stacked on a new axis."""
    even, odd = net.cut(net.heads, 0, WIDTH, 2), net.cut(net.heads, 1, WIDTH, 2)
    pair = [net.op("Unsqueeze", part, np.array([-1])) for part in (net.op("Neg", odd), even)]
    return net.turned(net.heads, net.op("Reshape", net.join(*pair), np.array([0, 1, HEADS, WIDTH])))


def with_neighbours_of_pairs(net: Net) -> str:
    """Neighbours are moved apart by a transposition, rotated as halves, and moved back."""
    apart = net.op("Reshape", net.heads, np.array([0, 1, HEADS, WIDTH // 2, 2]))
    apart = net.op("Transpose", apart, perm=[0, 1, 2, 4, 3])
    apart = net.op("Reshape", apart, np.array([0, 1, HEADS, WIDTH]))
    first, second = net.op("Split", apart, outputs=2, axis=-1, num_outputs=2)
    below = net.op("Sub", net.op("Mul", first, "cos"), net.op("Mul", second, "sin"))
    above = net.op("Add", net.op("Mul", first, "sin"), net.op("Mul", second, "cos"))
    both = net.op("Reshape", net.join(below, above), np.array([0, 1, HEADS, 2, WIDTH // 2]))
    return str(
        net.op("Reshape", net.op("Transpose", both, perm=[0, 1, 2, 4, 3]), np.array([0, 1, HEADS, WIDTH])),
    )


FORMS: dict[Callable[[Net], str], tuple[int, int, bool]] = {
    with_slices: (WIDTH, WIDTH, False),
    partly: (4, 4, False),
    with_split: (WIDTH // 2, WIDTH, False),
    with_neighbours: (WIDTH, WIDTH, True),
    with_neighbours_of_pairs: (WIDTH // 2, WIDTH, True),
}


def run(net: Net, tables: Array) -> dict[str, Array]:
    """Return all values, as ONNX defines them."""
    names = [name for node in net.nodes for name in node.output]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in (*names,)]
    inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in ("input_ids", "cos", "sin")]
    weights = [numpy_helper.from_array(value, name) for name, value in net.constants.items()]
    model = helper.make_model(helper.make_graph(net.nodes, "g", inputs, values, weights))
    x = np.random.default_rng(1).random((BATCH, 1, HEADS * WIDTH), np.float32) + 1
    feed = {"input_ids": x, "cos": tables[0], "sin": tables[1]}
    return feed | dict(zip(names, ReferenceEvaluator(model).run(None, feed), strict=True))


def seen_in(net: Net, values: dict[str, Array]) -> Observation:
    """Return the shapes, with the first axis as the batch."""
    shapes = {name: (Size(0, 0, 1), *(Size(0, 0, n) for n in v.shape[1:])) for name, v in values.items()}
    return Observation(shapes, {}, net.constants, {})


def finder_of(net: Net, values: dict[str, Array]) -> RotationFinder:
    return RotationFinder(net.nodes, seen_in(net, values), {"cos", "sin"}, OPSET)


def columns_of(net: Net) -> Array:
    return np.random.default_rng(0).random((2, BATCH, 1, 1, net.columns), np.float32)


def rotate(x: Array, tables: Array, rotation: Rotation) -> Array:
    """Return a rotation, by its matrix."""
    rotated, columns = rotation.rotated, tables.shape[-1]
    found = x.reshape(BATCH, HEADS, WIDTH).copy()
    for pair in range(rotated // 2):
        i, j = (2 * pair, 2 * pair + 1) if rotation.interleaved else (pair, pair + rotated // 2)
        at = (i, j) if columns == rotated else (pair, pair)
        cos, sin = ([tables[kind][:, 0, 0, column] for column in at] for kind in (0, 1))
        matrix = np.array([[cos[0], -sin[0]], [sin[1], cos[1]]])  # [2, 2, batch]
        found[..., [i, j]] = np.einsum("ijb,bhj->bhi", matrix, x.reshape(BATCH, HEADS, WIDTH)[..., [i, j]])
    return found


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_forms_of_exporters(form: Callable[[Net], str]) -> None:
    """The rotation that is found, applied by its matrix, gives what the nodes compute."""
    columns, rotated, interleaved = FORMS[form]
    net = Net(columns)
    output, tables = form(net), columns_of(net)
    values = run(net, tables)
    source, found = finder_of(net, values).find(output, HEADS, WIDTH)
    assert found == Rotation(("cos", "sin"), rotated, interleaved, columns)
    assert source in {"x", "heads"}
    expected = values[output].reshape(BATCH, HEADS, WIDTH)
    np.testing.assert_allclose(rotate(values[source], tables, found), expected, atol=1e-6)


def with_other_sign(net: Net) -> str:
    """The partner of the second half is subtracted."""
    half = WIDTH // 2
    return net.turned(net.heads, net.join(net.cut(net.heads, half, WIDTH), net.op("Neg", net.cut(net.heads, 0, half))))


def with_other_partners(net: Net) -> str:
    """Partners are in reverse order."""
    parts = [net.op("Neg", net.cut(net.heads, at, at + 1)) for at in (7, 6, 5, 4)]
    return net.turned(net.heads, net.join(*parts, *(net.cut(net.heads, at, at + 1) for at in (3, 2, 1, 0))))


def of_two_values(net: Net) -> str:
    """Partners are those of another value."""
    other = net.op("Sqrt", net.heads)
    half = WIDTH // 2
    return net.turned(net.heads, net.join(net.op("Neg", net.cut(other, half, WIDTH)), net.cut(other, 0, half)))


def of_all_tokens(net: Net) -> str:
    """A number of each token is multiplied by one."""
    axes = np.array([1, 2, 3])
    numbers = [net.op("ReduceMax", name, axes, keepdims=0) for name in (net.heads, "cos")]
    return str(net.op("Add", net.heads, net.op("Unsqueeze", net.op("Mul", *numbers), axes)))


def with_a_third_term(net: Net) -> str:
    """Something is added to a rotation."""
    return str(net.op("Add", with_slices(net), net.heads))


def not_at_all(net: Net) -> str:
    """Nothing is rotated."""
    return str(net.op("Identity", net.heads))


def with_a_weight(net: Net) -> str:
    """The table is a weight, the same for all tokens."""
    half, weight = WIDTH // 2, np.ones(WIDTH, np.float32)
    partner = net.join(net.op("Neg", net.cut(net.heads, half, WIDTH)), net.cut(net.heads, 0, half))
    return str(net.op("Add", net.op("Mul", net.heads, weight), net.op("Mul", partner, weight)))


@pytest.mark.parametrize(
    "form",
    [
        with_other_sign,
        with_other_partners,
        of_two_values,
        of_all_tokens,
        with_a_third_term,
        not_at_all,
        with_a_weight,
    ],
    ids=lambda form: form.__name__,
)
def test_what_is_no_rotation(form: Callable[[Net], str]) -> None:
    """It stays as it is."""
    net = Net(WIDTH)
    output = form(net)
    values = run(net, columns_of(net))
    assert finder_of(net, values).find(output, HEADS, WIDTH) == (output, Rotation())


def test_a_weight_before_a_rotation_belongs_to_the_source() -> None:
    """Norms of queries multiply by a weight, which is no table."""
    net = Net(WIDTH)
    net.heads = net.op("Mul", net.heads, np.full((1, 1, 1, WIDTH), 2, np.float32))
    output = with_slices(net)
    values = run(net, columns_of(net))
    found = finder_of(net, values).find(output, HEADS, WIDTH)
    assert found == (net.heads, Rotation(("cos", "sin"), WIDTH, columns=WIDTH))


def test_a_table_before_a_rotation_belongs_to_the_source() -> None:
    """Elements that are multiplied by a table, before they are rotated with it, are those of another value."""
    net = Net(WIDTH)
    net.heads = net.op("Mul", net.heads, "cos")
    output = with_slices(net)
    values = run(net, columns_of(net))
    found = finder_of(net, values).find(output, HEADS, WIDTH)
    assert found == (net.heads, Rotation(("cos", "sin"), WIDTH, columns=WIDTH))


@pytest.mark.parametrize("kind", ["Add", "Relu"])
def test_many_layers_of_equal_width(kind: str) -> None:
    """The search ends soon, however many sums of a value with itself, or other operators, are before queries."""
    net = Net(WIDTH)
    x = net.heads
    for _ in range(500):
        x = net.op(kind, x, net.op("Neg", x)) if kind == "Add" else net.op(kind, x)
    seen = seen_in(net, {name: np.zeros((BATCH, 1, HEADS, WIDTH)) for node in net.nodes for name in node.output})
    assert RotationFinder(net.nodes, seen, {"cos", "sin"}, OPSET).find(x, HEADS, WIDTH) == (x, Rotation())


@pytest.mark.parametrize("domain", ["", "com.microsoft"])
def test_the_operator(domain: str) -> None:
    """The rows of its tables are selected once for queries and keys."""
    order = ["positions", "cos", "sin"] if domain else ["cos", "sin", "positions"]
    nodes = [
        helper.make_node("RotaryEmbedding", [name, *order], [f"{name}/rotated"], domain=domain, num_heads=HEADS)
        for name in ("input_ids", "keys")
    ]
    batch, one = Size(0, 0, 1), Size(1, 0, 0)
    seen = Observation({"positions": (batch, one)}, {}, {}, {})
    finder = RotationFinder(nodes, seen, {"positions"}, OPSET)
    found = [finder.find(f"{name}/rotated", HEADS, WIDTH) for name in ("input_ids", "keys")]
    selections = finder.take_selections(found[0][1].tables)
    assert [list(node.input) for node in selections] == [["cos", "positions"], ["sin", "positions"]]
    rotation = Rotation(tuple(node.output[0] for node in selections), WIDTH, columns=WIDTH // 2)
    assert found == [("input_ids", rotation), ("keys", rotation)]
    assert not finder.take_selections(rotation.tables)


@pytest.mark.parametrize(
    ("attributes", "shape"),
    [({"scale": 2.0}, 2), ({"is_packed_batching": 1}, 2), ({"another": 1}, 2), ({"num_heads": 2}, 2), ({}, 1)],
)
def test_the_operator_with_something_else(attributes: dict[str, Any], shape: int) -> None:
    """A factor, packed batches, an unknown attribute, other heads and one position for the batch are left alone."""
    inputs = ["input_ids", "positions", "cos", "sin"]
    node = helper.make_node("RotaryEmbedding", inputs, ["y"], domain="com.microsoft", **attributes)
    seen = Observation({"positions": (Size(0, 0, 1), Size(1, 0, 0))[:shape]}, {}, {}, {})
    assert RotationFinder([node], seen, {"positions"}, OPSET).find("y", HEADS, WIDTH) == ("y", Rotation())
