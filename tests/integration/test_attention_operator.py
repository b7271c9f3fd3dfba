"""The native operator for attention to pooled caches: equal to its definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from chrion.generation.rewrites.pooled_attention import DOMAIN, OPERATOR, WIDEST
from chrion.native import operators_available, register_operators
from property_tests import examples

Array = np.ndarray[Any, Any]
pytestmark = pytest.mark.skipif(not operators_available(), reason="native attention is not compiled")
#: Of single precision, for sums of some hundred products.
TOLERANCE = 1e-4
#: Of random batches.
SEEDS = st.integers(0, 2**32 - 1)
#: The fixture of the instructions may hold for all examples of a test.
SAME_INSTRUCTIONS = {"suppress_health_check": [HealthCheck.function_scoped_fixture]}


def open_operator(
    heads: int,
    shared: int,
    width: int,
    scale: float,
    cap: float,
    threads: int = 2,
    rotated: int = 0,
    interleaved: int = 0,
    columns: int = 0,
    *,
    packed: bool = False,
) -> Any:
    """Return a session of the operator alone; packed: of one input for queries, keys and values."""
    names = ["queries", *(["", ""] if packed else ["keys", "values"]), "key-pool", "value-pool", "past", "start"]
    types = [TensorProto.FLOAT] * 5 + [TensorProto.INT64] * 2
    if rotated:
        names, types = [*names, "cosines", "sines"], [*types, TensorProto.FLOAT, TensorProto.FLOAT]
    sizes = {"heads": heads, "shared": shared, "width": width, "scale": scale, "cap": cap}
    sizes |= {"rotated": rotated, "interleaved": interleaved, "columns": columns}
    node = helper.make_node(OPERATOR, names, ["output"], domain=DOMAIN, shape=[0, 1, heads * width], **sizes)
    inputs = [helper.make_tensor_value_info(name, kind, None) for name, kind in zip(names, types, strict=True) if name]
    graph = helper.make_graph([node], "g", inputs, [helper.make_tensor_value_info("output", TensorProto.FLOAT, None)])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 1)]
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 4
    register_operators(options)
    content = helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()
    return ort.InferenceSession(content, options, ["CPUExecutionProvider"])


def run_in_place(session: Any, feed: dict[str, Array]) -> Array:
    """Run a session on the arrays themselves, which it may write to."""
    binding = session.io_binding()
    for name, array in feed.items():
        binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
    binding.bind_output("output", "cpu")
    session.run_with_iobinding(binding)
    return np.asarray(binding.copy_outputs_to_cpu()[0])


def pack(feed: dict[str, Array]) -> dict[str, Array]:
    """Return inputs with queries, keys and values side by side, and with copies of the pools."""
    rows = {"queries": np.concatenate([feed[name] for name in ("queries", "keys", "values")], axis=1)}
    others = {name: array.copy() for name, array in feed.items() if name not in {"queries", "keys", "values"}}
    return rows | others


def attend(feed: dict[str, Array], scale: float, cap: float) -> Array:
    """Return softmax(scale * q.k) v of every token and head in double precision, with the pool already written."""
    queries, keys, values = (feed[name].astype(np.float64) for name in ("queries", "key-pool", "value-pool"))
    found = np.zeros_like(queries)
    heads = (keys.shape[1], -1, queries.shape[2])  # those that share keys are neighbours
    for token, (past, start) in enumerate(zip(feed["past"][:, 0], feed["start"][:, 0], strict=True)):
        rows = slice(start, start + past + 1)
        scores = scale * queries[token].reshape(heads) @ keys[rows].transpose(1, 2, 0)
        scores = cap * np.tanh(scores) if cap else scores
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        found[token] = (weights @ values[rows].transpose(1, 0, 2)).reshape(found[token].shape)
    return found


def draw(random: np.random.Generator, heads: int, shared: int, width: int) -> dict[str, Array]:
    """Return inputs of a random batch of prompts, chunks and requests that decode: of many heads, a few."""
    past, start, rows = [], [], int(random.integers(0, 3))
    for _ in range(int(random.integers(1, 2 + min(4, 4096 // (heads * width))))):
        before, new = int(random.choice([0, 1, 5, 63, 64, 65, 300])), int(random.choice([1, 1, 2, 5, 33, 70]))
        past += range(before, before + new)
        start += [rows] * new
        rows += before + new
    rows += int(random.integers(0, 3))
    counts = {"past": np.array(past)[:, None], "start": np.array(start)[:, None]}
    shapes = {"queries": (len(past), heads), "keys": (len(past), shared), "values": (len(past), shared)}
    shapes |= {"key-pool": (rows, shared), "value-pool": (rows, shared)}
    arrays = {name: random.standard_normal((*shape, width), np.float32) for name, shape in shapes.items()}
    return arrays | counts


def turn(x: Array, angles: Array, interleaved: int) -> Array:
    """Return heads [N, heads, width] with their first elements, as complex numbers, times exp(i angle), [N, pairs]."""
    count = 2 * angles.shape[1]
    parts = x[..., :count].astype(np.float64)
    pairs = parts.reshape(*parts.shape[:2], -1, 2) if interleaved else np.stack(np.split(parts, 2, axis=-1), axis=-1)
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angles)[:, None]
    both = np.stack([turned.real, turned.imag], axis=-1)
    found = both.reshape(parts.shape) if interleaved else np.concatenate([both[..., 0], both[..., 1]], axis=-1)
    return np.concatenate([found, x[..., count:]], axis=-1)


@given(seed=SEEDS)
@examples(80, **SAME_INSTRUCTIONS)
def test_rotated_queries_and_keys(instructions: int, seed: int) -> None:
    """The pool gets rotated keys, and rotated queries are compared with them: products of complex numbers."""
    random = np.random.default_rng([seed, instructions])
    interleaved, repeated = int(random.integers(2)), bool(random.integers(2))
    shared, group = int(random.integers(1, 4)), int(random.choice([1, 2, 4, 33]))
    width = int(random.choice([2, 8, 16, 24, 64, 80, WIDEST]))
    rotated = 2 * int(random.integers(1, width // 2 + 1))
    sizes = (shared * group, shared, width, width**-0.5, 0.0, 2)
    rotation = (rotated, interleaved, rotated if repeated else rotated // 2)  # a column for each element or pair
    feed = draw(random, shared * group, shared, width)
    angles = random.uniform(-9, 9, (len(feed["past"]), rotated // 2))
    columns = angles
    if repeated:
        columns = np.repeat(angles, 2, axis=1) if interleaved else np.concatenate([angles, angles], axis=1)
    feed |= {"cosines": np.cos(columns).astype(np.float32), "sines": np.sin(columns).astype(np.float32)}
    written = {name: feed[name].copy() for name in ("key-pool", "value-pool")}
    rows = (feed["start"] + feed["past"])[:, 0]
    written["key-pool"][rows] = turn(feed["keys"], angles, interleaved)
    written["value-pool"][rows] = feed["values"]
    turned = feed | written | {"queries": turn(feed["queries"], angles, interleaved)}
    found = run_in_place(open_operator(*sizes, *rotation), feed)
    np.testing.assert_allclose(feed["key-pool"], written["key-pool"], atol=1e-5, rtol=0)
    np.testing.assert_array_equal(feed["value-pool"], written["value-pool"])
    expected = attend(turned, width**-0.5, 0.0)
    np.testing.assert_allclose(found.reshape(expected.shape), expected, atol=TOLERANCE, rtol=0)
    np.testing.assert_array_equal(run_in_place(open_operator(*sizes, *rotation, packed=True), pack(feed)), found)


@pytest.mark.parametrize("rotated", [-2, 3, 18])
def test_a_number_of_rotated_elements_that_does_not_fit_is_refused(rotated: int) -> None:
    """It is even and not above the width."""
    with pytest.raises(Exception, match="expected an even number of rotated elements"):
        open_operator(2, 1, 16, 1.0, 0.0, rotated=rotated)


@pytest.mark.parametrize("columns", [0, 3, 16])
def test_columns_of_tables_that_do_not_fit_are_refused(columns: int) -> None:
    """There is one for each element or for each pair."""
    with pytest.raises(Exception, match="expected a column for each rotated element"):
        open_operator(2, 1, 16, 1.0, 0.0, rotated=8, columns=columns)


@pytest.mark.parametrize("shapes", [((1, 3), (1, 3)), ((1, 4), (1, 8)), ((3, 4), (3, 4)), ((1, 8), (1, 8))])
def test_tables_that_do_not_fit_are_errors(shapes: tuple[tuple[int, int], tuple[int, int]]) -> None:
    """Nothing is read beyond their ends."""
    session = open_operator(2, 2, 16, 1.0, 0.0, rotated=8, columns=4)
    arrays = {name: np.zeros((1, 2, 16), np.float32) for name in ("queries", "keys", "values")}
    pools = {name: np.zeros((4, 2, 16), np.float32) for name in ("key-pool", "value-pool")}
    counts = {name: np.zeros((1, 1), np.int64) for name in ("past", "start")}
    tables = {name: np.zeros(shape, np.float32) for name, shape in zip(("cosines", "sines"), shapes, strict=True)}
    with pytest.raises(Exception, match="sizes of inputs do not match"):
        run_in_place(session, arrays | pools | counts | tables)


@given(seed=SEEDS)
@examples(100, **SAME_INSTRUCTIONS)
def test_the_operator_equals_its_definition(instructions: int, seed: int) -> None:
    """Groups of heads, widths, factors, caps and batches are random; new rows are written, and no others."""
    random = np.random.default_rng([seed, instructions])
    shared, group = int(random.integers(1, 5)), int(random.choice([1, 2, 3, 4, 8, 33]))
    width = int(random.choice([1, 4, 6, 8, 16, 18, 24, 32, 33, 64, 80, 100, 128, WIDEST]))
    scale, cap = float(random.choice([width**-0.5, 1.0, -0.3, 0.0])), float(random.choice([0.0, 0.0, 5.0]))
    sizes = (shared * group, shared, width, scale, cap)
    feed = draw(random, shared * group, shared, width)
    unwritten = {name: feed[name].copy() for name in ("key-pool", "value-pool")}
    written = feed | {name: pool.copy() for name, pool in unwritten.items()}
    for kind in ("key", "value"):
        written[f"{kind}-pool"][(feed["start"] + feed["past"])[:, 0]] = feed[f"{kind}s"]
    found = run_in_place(open_operator(*sizes, threads=int(random.integers(1, 3))), feed)
    for name in ("key-pool", "value-pool"):
        np.testing.assert_array_equal(feed[name], written[name])
    expected = attend(written, scale, cap)
    np.testing.assert_allclose(found.reshape(expected.shape), expected, atol=TOLERANCE, rtol=0)
    before = pack(feed | unwritten)
    np.testing.assert_array_equal(run_in_place(open_operator(*sizes, packed=True), before), found)
    for name in ("key-pool", "value-pool"):
        np.testing.assert_array_equal(before[name], written[name])


def test_large_scores_and_values_that_are_not_numbers(instructions: int) -> None:
    """The softmax does not overflow, tiny probabilities become 0, and NaN reaches those who see it, only them."""
    del instructions
    session = open_operator(2, 2, 16, 1.0, 0.0)
    random = np.random.default_rng(0)
    feed = {
        "queries": np.full((3, 2, 16), 100.0, np.float32),
        "keys": random.standard_normal((3, 2, 16), np.float32),
        "values": random.standard_normal((3, 2, 16), np.float32),
        "key-pool": random.standard_normal((40, 2, 16), np.float32),
        "value-pool": random.standard_normal((40, 2, 16), np.float32),
        "past": np.array([[18], [19], [10]]),
        "start": np.array([[0], [0], [29]]),
    }
    found = run_in_place(session, feed)
    np.testing.assert_allclose(found.reshape(3, 2, 16), attend(feed, 1.0, 0.0), atol=TOLERANCE)
    feed["key-pool"][3, 1, 5] = np.nan
    found = run_in_place(session, feed).reshape(3, 2, 16)
    assert np.isnan(found[:2, 1]).all()
    assert np.isfinite(found[:2, 0]).all()
    assert np.isfinite(found[2]).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"past": np.array([[-1]])}, "a row is outside the pool"),
        ({"past": np.array([[8]])}, "a row is outside the pool"),
        ({"start": np.array([[-1]])}, "a row is outside the pool"),
        ({"start": np.array([[2**62]])}, "a row is outside the pool"),
        ({"past": np.array([[0], [1]])}, "sizes of inputs do not match"),
        ({"keys": np.zeros((1, 1, 8), np.float32)}, "sizes of inputs do not match"),
        ({"value-pool": np.zeros((7, 2, 8), np.float32)}, "sizes of inputs do not match"),
    ],
)
def test_inputs_that_do_not_match_are_errors(change: dict[str, Array], message: str) -> None:
    """Nothing outside the pool is read or written."""
    shapes = {"queries": (1, 4, 8), "keys": (1, 2, 8), "values": (1, 2, 8), "key-pool": (8, 2, 8)}
    feed: dict[str, Array] = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    feed |= {"value-pool": np.ones((8, 2, 8), np.float32), "past": np.array([[7]]), "start": np.array([[0]])}
    session = open_operator(4, 2, 8, 1.0, 0.0)
    np.testing.assert_allclose(run_in_place(session, feed), 1.0, rtol=1e-6)
    with pytest.raises(Exception, match=message):
        run_in_place(session, feed | change)


@pytest.mark.parametrize("rows", [(1, 4), (1, 7), (2, 8), (0, 8)])
def test_packed_rows_that_do_not_fit_are_errors(rows: tuple[int, int]) -> None:
    """They have the queries, the keys and the values of each token."""
    feed: dict[str, Array] = {name: np.ones((8, 2, 8), np.float32) for name in ("key-pool", "value-pool")}
    feed |= {"past": np.array([[7]]), "start": np.array([[0]])}
    session = open_operator(4, 2, 8, 1.0, 0.0, packed=True)
    queries = {"queries": np.ones((1, 8, 8), np.float32)}
    np.testing.assert_allclose(run_in_place(session, feed | queries), 1.0, rtol=1e-6)
    with pytest.raises(Exception, match="sizes of inputs do not match"):
        run_in_place(session, feed | {"queries": np.ones((*rows, 8), np.float32)})


def test_no_tokens() -> None:
    """A batch without tokens has a result without elements."""
    feed = draw(np.random.default_rng(1), 4, 2, 8)
    feed = {name: array if name.endswith("pool") else array[:0] for name, array in feed.items()}
    assert run_in_place(open_operator(4, 2, 8, 1.0, 0.0), feed).shape == (0, 1, 32)
    assert run_in_place(open_operator(4, 2, 8, 1.0, 0.0, packed=True), pack(feed)).shape == (0, 1, 32)
    feed |= {name: np.zeros((0, 4), np.float32) for name in ("cosines", "sines")}
    assert run_in_place(open_operator(4, 2, 8, 1.0, 0.0, rotated=8, columns=4), feed).shape == (0, 1, 32)


@pytest.mark.parametrize("sizes", [(3, 2, 8), (2, 4, 8), (2, 2, WIDEST + 1), (0, 0, 8)])
def test_heads_that_do_not_fit_are_refused(sizes: tuple[int, int, int]) -> None:
    """A session of such an operator is not opened."""
    with pytest.raises(Exception, match="expected heads that share keys evenly"):
        open_operator(*sizes, 1.0, 0.0)
