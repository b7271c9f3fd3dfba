"""Attention to pooled caches as one native operator: equal to its definition, and used only where that is meant."""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import chrion
from chrion.generation.attention import AttentionPart
from chrion.generation.cache import CacheManager, CachePool, RequestCache
from chrion.generation.engine import SelectiveEngine
from chrion.generation.generator import Generator
from chrion.generation.iteration import Work
from chrion.generation.open_engine import open_engine
from chrion.generation.pooled_session import PooledSession
from chrion.generation.query_blocks import PASS
from chrion.graph.pooled_attention import DOMAIN, OPERATOR, WIDEST
from chrion.native import operators_available, register_operators
from decoder_support import FORMS, PlainDecoder, small_decoder, with_window

Array = np.ndarray[Any, Any]
pytestmark = pytest.mark.skipif(not operators_available(), reason="native attention is not compiled")
#: Of single precision, for sums of some hundred products.
TOLERANCE = 1e-4


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
    group = queries.shape[1] // keys.shape[1]
    for token, (past, start) in enumerate(zip(feed["past"][:, 0], feed["start"][:, 0], strict=True)):
        rows = slice(start, start + past + 1)
        for head in range(queries.shape[1]):
            scores = scale * (keys[rows, head // group] @ queries[token, head])
            scores = cap * np.tanh(scores) if cap else scores
            weights = np.exp(scores - scores.max())
            found[token, head] = weights / weights.sum() @ values[rows, head // group]
    return found


def draw(random: np.random.Generator, heads: int, shared: int, width: int) -> tuple[dict[str, Array], int]:
    """Return inputs of a random batch of prompts, chunks and requests that decode; and the rows of its pool."""
    past, start, rows = [], [], int(random.integers(0, 3))
    for _ in range(int(random.integers(1, 6))):
        before, new = int(random.choice([0, 1, 5, 63, 64, 65, 300])), int(random.choice([1, 1, 2, 5, 33, 70]))
        past += range(before, before + new)
        start += [rows] * new
        rows += before + new
    rows += int(random.integers(0, 3))
    counts = {"past": np.array(past)[:, None], "start": np.array(start)[:, None]}
    shapes = {"queries": (len(past), heads), "keys": (len(past), shared), "values": (len(past), shared)}
    shapes |= {"key-pool": (rows, shared), "value-pool": (rows, shared)}
    arrays = {name: random.standard_normal((*shape, width), np.float32) for name, shape in shapes.items()}
    return arrays | counts, rows


def turn(x: Array, angles: Array, interleaved: int) -> Array:
    """Return heads [N, heads, width] with their first elements, as complex numbers, times exp(i angle), [N, pairs]."""
    count = 2 * angles.shape[1]
    parts = x[..., :count].astype(np.float64)
    pairs = parts.reshape(*parts.shape[:2], -1, 2) if interleaved else np.stack(np.split(parts, 2, axis=-1), axis=-1)
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angles)[:, None]
    both = np.stack([turned.real, turned.imag], axis=-1)
    found = both.reshape(parts.shape) if interleaved else np.concatenate([both[..., 0], both[..., 1]], axis=-1)
    return np.concatenate([found, x[..., count:]], axis=-1)


@pytest.mark.parametrize("interleaved", [0, 1], ids=["halves", "neighbours"])
@pytest.mark.parametrize("repeated", [False, True], ids=["columns for pairs", "columns for elements"])
def test_rotated_queries_and_keys(instructions: int, interleaved: int, *, repeated: bool) -> None:
    """The pool gets rotated keys, and rotated queries are compared with them: products of complex numbers."""
    random = np.random.default_rng([instructions, interleaved, repeated])
    for _ in range(10):
        shared, group = int(random.integers(1, 4)), int(random.choice([1, 2, 4, 33]))
        width = int(random.choice([2, 8, 16, 24, 64, 80, WIDEST]))
        rotated = 2 * int(random.integers(1, width // 2 + 1))
        tables = rotated if repeated else rotated // 2
        session = open_operator(shared * group, shared, width, width**-0.5, 0.0, 2, rotated, interleaved, tables)
        feed, _ = draw(random, shared * group, shared, width)
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
        found = run_in_place(session, feed)
        np.testing.assert_allclose(feed["key-pool"], written["key-pool"], atol=1e-5, rtol=0)
        np.testing.assert_array_equal(feed["value-pool"], written["value-pool"])
        expected = attend(turned, width**-0.5, 0.0)
        np.testing.assert_allclose(found.reshape(expected.shape), expected, atol=TOLERANCE, rtol=0)
        together = open_operator(
            shared * group, shared, width, width**-0.5, 0.0, 2, rotated, interleaved, tables, packed=True
        )
        np.testing.assert_array_equal(run_in_place(together, pack(feed)), found)


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


@pytest.mark.parametrize("seed", range(8))
def test_the_operator_equals_its_definition(instructions: int, seed: int) -> None:
    """Groups of heads, widths, factors, caps and batches are random; new rows are written, and no others."""
    random = np.random.default_rng([seed, instructions])
    for _ in range(12):
        shared, group = int(random.integers(1, 5)), int(random.choice([1, 2, 3, 4, 8, 33]))
        width = int(random.choice([1, 4, 6, 8, 16, 18, 24, 32, 33, 64, 80, 100, 128, WIDEST]))
        scale, cap = float(random.choice([width**-0.5, 1.0, -0.3, 0.0])), float(random.choice([0.0, 0.0, 5.0]))
        session = open_operator(shared * group, shared, width, scale, cap, threads=int(random.integers(1, 3)))
        feed, _ = draw(random, shared * group, shared, width)
        unwritten = {name: feed[name].copy() for name in ("key-pool", "value-pool")}
        written = feed | {name: pool.copy() for name, pool in unwritten.items()}
        for kind in ("key", "value"):
            written[f"{kind}-pool"][(feed["start"] + feed["past"])[:, 0]] = feed[f"{kind}s"]
        found = run_in_place(session, feed)
        for name in ("key-pool", "value-pool"):
            np.testing.assert_array_equal(feed[name], written[name])
        expected = attend(written, scale, cap)
        np.testing.assert_allclose(found.reshape(expected.shape), expected, atol=TOLERANCE, rtol=0)
        before = pack(feed | unwritten)
        together = open_operator(shared * group, shared, width, scale, cap, packed=True)
        np.testing.assert_array_equal(run_in_place(together, before), found)
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
    feed, _ = draw(np.random.default_rng(1), 4, 2, 8)
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


def engine_of(model: onnx.ModelProto, threads: int = 1) -> SelectiveEngine:
    engine = open_engine(chrion.load(model), threads)
    assert isinstance(engine, SelectiveEngine)
    return engine


def is_native(engine: SelectiveEngine) -> bool:
    """Return whether attention is the native operator."""
    return engine._pooled is not None and engine._pooled._decoder.longest > 0


def rotated_elements(engine: SelectiveEngine) -> int:
    """Return how many elements of a head the operators of all layers rotate."""
    assert engine._pooled is not None
    operators = [node for node in engine._pooled._decoder.model.graph.node if node.op_type == OPERATOR]
    (rotated,) = {attribute.i for node in operators for attribute in node.attribute if attribute.name == "rotated"}
    return int(rotated)


def products(engine: SelectiveEngine) -> int:
    """Return the number of products of a pooled decoder."""
    assert engine._pooled is not None
    return sum(node.op_type == "MatMul" for node in engine._pooled._decoder.model.graph.node)


@pytest.mark.parametrize("name", FORMS)
def test_any_batch_is_one_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts, chunks and requests that decode, some of whose scores are not wanted, equal plain onnxruntime."""
    model = small_decoder(name)
    engine, plain = engine_of(model), PlainDecoder(model)
    assert is_native(engine)
    assert rotated_elements(engine) == (16 if "llama" in name else 0)
    assert products(engine) == 4 * len(engine.signature.past) // 2 + 1  # of each layer, and that of the logits
    monkeypatch.setattr(engine, "_fallback", lambda _: pytest.fail("one call is enough"))
    pick = np.random.default_rng(7)
    pool = CachePool(engine.signature, 400)
    texts = [[int(t) for t in pick.integers(0, 61, 60)] for _ in range(6)]
    caches = [RequestCache(engine.signature, 60, by_token=True, pool=pool) for _ in texts]
    past = [0] * len(texts)
    for _ in range(12):
        chosen = [int(at) for at in pick.permutation(len(texts))[: pick.integers(1, 7)] if past[at] < 60]
        counts = [min(int(pick.choice([1, 1, 7, 20])), 60 - past[at]) for at in chosen]
        wanted = [bool(pick.integers(0, 2)) for _ in chosen]
        batch = [
            Work(caches[at], np.array(texts[at][past[at] : past[at] + count]), past[at], want)
            for at, count, want in zip(chosen, counts, wanted, strict=True)
        ]
        for at, count, want, outcome in zip(chosen, counts, wanted, engine.run(batch) if batch else [], strict=True):
            past[at] += count
            if not want:
                assert outcome is None
                continue
            expected = plain.scores(texts[at][: past[at]])[-1]
            assert isinstance(outcome, np.ndarray), outcome
            np.testing.assert_allclose(outcome, expected, atol=2e-5 * max(1, np.abs(expected).max()), rtol=0)


def test_a_long_prompt_runs_in_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call has more tokens of a request than a pass, and only the last one computes scores."""
    model = small_decoder("llama-decoder", context=1024)
    engine, plain = engine_of(model, threads=2), PlainDecoder(model)
    assert engine._pooled is not None
    run, calls = engine._pooled.run, []

    def counted(batch: list[Work]) -> Any:
        calls.append([(len(work.ids), work.wanted) for work in batch])
        return run(batch)

    monkeypatch.setattr(engine._pooled, "run", counted)
    pool = CachePool(engine.signature, 1100)
    texts = [[int(t) for t in np.random.default_rng(8).integers(0, 61, length)] for length in (PASS + 300, 9)]
    batch = [
        Work(RequestCache(engine.signature, len(t), by_token=True, pool=pool), np.array(t), 0, wanted=True)
        for t in texts
    ]
    for text, outcome in zip(texts, engine.run(batch), strict=True):
        assert isinstance(outcome, np.ndarray), outcome
        np.testing.assert_allclose(outcome, plain.scores(text)[-1], atol=5e-5)
    assert calls == [[(PASS, False), (9, True)], [(300, True)]]


def test_caches_in_several_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request for which a pool had no consecutive rows has its own one, and a call of its own; none runs by parts."""
    model = small_decoder("llama-decoder")
    engine, plain = engine_of(model), PlainDecoder(model)
    assert engine._pooled is not None
    run, calls = engine._pooled.run, []
    monkeypatch.setattr(engine._pooled, "run", lambda batch: calls.append(len(batch)) or run(batch))
    manager = CacheManager(engine.signature, 100, by_token=True)
    caches = [manager.get(at, 10) for at in range(10)]
    manager.release(1)
    manager.release(3)
    caches = [caches[0], manager.get(10, 20), *caches[2:3], *caches[4:]]
    assert len({id(cache.pool) for cache in caches}) == 2
    texts = [[int(t) for t in np.random.default_rng(at).integers(0, 61, 8)] for at in range(len(caches))]
    for ids in ([slice(0, 3)] * 9, [slice(3, 5), slice(3, 8), *[slice(3, 4)] * 7]):
        batch = [Work(c, np.array(t[own]), own.start) for c, t, own in zip(caches, texts, ids, strict=True)]
        for text, own, outcome in zip(texts, ids, engine.run(batch), strict=True):
            assert isinstance(outcome, np.ndarray), outcome
            np.testing.assert_allclose(outcome, plain.scores(text[: own.stop])[-1], atol=5e-5)
    assert calls == [8, 1] * 2


@pytest.mark.parametrize(
    ("stated", "slots", "kept"),
    [(True, 1 << 17, False), (True, (1 << 17) + 1, False), (False, 1 << 17, False), (False, (1 << 17) + 1, True)],
)
def test_parts_are_kept_only_if_requests_may_need_them(
    slots: int, monkeypatch: pytest.MonkeyPatch, *, stated: bool, kept: bool
) -> None:
    """Otherwise they and their copy of the weights have gone before the session of the whole model is opened.

    Masks are checked for 2^17 tokens if a model does not state its context.
    """
    parts: list[weakref.ref[AttentionPart]] = []
    alive: list[bool] = []

    class NotedPart(AttentionPart):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            parts.append(weakref.ref(self))

    class NotedSession(PooledSession):
        def __init__(self, *arguments: Any) -> None:
            alive.append(any(part() is not None for part in parts))
            super().__init__(*arguments)

    monkeypatch.setattr("chrion.generation.split_session.AttentionPart", NotedPart)
    monkeypatch.setattr("chrion.generation.pooled_session.PooledSession", NotedSession)
    model = small_decoder("llama-decoder", context=4096)
    if not stated:
        monkeypatch.setattr("chrion.graph.decoder.table_rows", lambda *_: 0)
    with Generator(model, threads=1, kv_slots=slots) as generator:
        assert is_native(generator._loop.engine)
        assert generator.submit([1, 2, 3], 5).result(60) == PlainDecoder(model).generate([1, 2, 3], 5)
        assert parts
        assert [*alive, any(part() is not None for part in parts)] == [kept, kept]
        assert generator.weight_copies == 1 + kept


def test_several_batches_at_a_time() -> None:
    """Threads that share the session and the pool do not affect each other."""
    model = small_decoder("llama-decoder-grouped")
    engine, plain = engine_of(model, threads=2), PlainDecoder(model)
    pool = CachePool(engine.signature, 200)
    texts = [[int(t) for t in np.random.default_rng(at).integers(0, 61, 40)] for at in range(4)]
    caches = [RequestCache(engine.signature, 40, by_token=True, pool=pool) for _ in texts]
    found: list[list[Any]] = [[] for _ in texts]

    def generate(number: int) -> None:
        text, cache = texts[number], caches[number]
        for at in range(40):
            found[number] += engine.run([Work(cache, np.array(text[at : at + 1]), at)])

    threads = [threading.Thread(target=generate, args=(at,)) for at in range(len(texts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for text, scores in zip(texts, found, strict=True):
        np.testing.assert_allclose(scores, plain.scores(text), atol=5e-5)


def before_softmax(model: onnx.ModelProto, add: Callable[[str, str], list[onnx.NodeProto]]) -> onnx.ModelProto:
    """Insert nodes before each softmax; ``add`` returns those that compute a name from another one."""
    nodes = []
    for node in model.graph.node:
        if node.op_type == "Softmax":
            nodes += add(node.input[0], f"{node.input[0]}/changed")
            node.input[0] += "/changed"
        nodes.append(node)
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model


def added_number(model: onnx.ModelProto, value: Any) -> str:
    name = f"test/{len(model.graph.initializer)}"
    model.graph.initializer.append(numpy_helper.from_array(np.array(value, np.float32), name))
    return name


def with_slope(model: onnx.ModelProto) -> onnx.ModelProto:
    """Let earlier tokens count less, as ALiBi does."""
    slope, one = added_number(model, -0.125), added_number(model, [[[1.0]]])
    axis = numpy_helper.from_array(np.array(3), "test/axis")
    model.graph.initializer.append(axis)

    def add(before: str, after: str) -> list[onnx.NodeProto]:
        ones = [f"{after}/{part}" for part in ("shape", "ones", "places", "bias")]
        return [
            helper.make_node("Shape", [before], ones[:1]),
            helper.make_node("Expand", [one, ones[0]], ones[1:2]),
            helper.make_node("CumSum", [ones[1], "test/axis"], ones[2:3], reverse=1),
            helper.make_node("Mul", [ones[2], slope], ones[3:]),
            helper.make_node("Add", [before, ones[3]], [after]),
        ]

    return before_softmax(model, add)


def with_cap(model: onnx.ModelProto) -> onnx.ModelProto:
    """Cap the scores at 2, before the mask is added."""
    cap = added_number(model, 2.0)
    nodes = []
    for node in model.graph.node:
        nodes.append(node)
        if node.op_type == "Mul" and any(r.op_type == "Add" and node.output[0] in r.input for r in model.graph.node):
            readers = [r for r in model.graph.node if node.output[0] in r.input]
            if len(readers) == 1 and any(
                s.op_type == "Softmax" and s.input[0] == readers[0].output[0] for s in model.graph.node
            ):
                out = node.output[0]
                nodes.append(helper.make_node("Div", [out, cap], [f"{out}/ratio"]))
                nodes.append(helper.make_node("Tanh", [f"{out}/ratio"], [f"{out}/tanh"]))
                nodes.append(helper.make_node("Mul", [f"{out}/tanh", cap], [f"{out}/capped"]))
                readers[0].input[list(readers[0].input).index(out)] = f"{out}/capped"
    assert len(nodes) > len(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model


def with_doubled_scores(model: onnx.ModelProto) -> onnx.ModelProto:
    """Multiply the masked scores."""
    two = added_number(model, 2.0)
    return before_softmax(model, lambda before, after: [helper.make_node("Mul", [before, two], [after])])


def with_halved_negative_scores(model: onnx.ModelProto) -> onnx.ModelProto:
    """Halve the scores below 0, which is no attention that is known."""
    return before_softmax(model, lambda before, after: [helper.make_node("LeakyRelu", [before], [after], alpha=0.5)])


def with_window_of_8(model: onnx.ModelProto) -> onnx.ModelProto:
    """Let each token see the last 8 ones."""
    at, causal = next((at, node) for at, node in enumerate(model.graph.node) if node.op_type == "LessOrEqual")
    (columns, rows), visible = causal.input, causal.output[0]
    causal.output[0] = "test/causal"
    model.graph.initializer.append(numpy_helper.from_array(np.array(8), "test/window"))
    model.graph.node.insert(at + 1, helper.make_node("Sub", [rows, "test/window"], ["test/first"]))
    model.graph.node.insert(at + 2, helper.make_node("Greater", [columns, "test/first"], ["test/near"]))
    model.graph.node.insert(at + 3, helper.make_node("And", ["test/causal", "test/near"], [visible]))
    return model


@pytest.mark.parametrize("family", ["gpt2-decoder", "llama-decoder"])
@pytest.mark.parametrize(
    ("change", "native"),
    [
        (with_cap, True),
        (with_doubled_scores, True),
        (with_slope, False),
        (with_halved_negative_scores, False),
        (with_window_of_8, False),
    ],
)
def test_other_attention(family: str, change: Callable[[onnx.ModelProto], onnx.ModelProto], *, native: bool) -> None:
    """What the operator computes is recognised, and other attention stays; both equal plain onnxruntime."""
    model = change(small_decoder(family))
    engine, plain = engine_of(model), PlainDecoder(model)
    assert is_native(engine) == native
    pool = CachePool(engine.signature, 200)
    texts = [[int(t) for t in np.random.default_rng(at).integers(0, 61, 20 + at)] for at in range(4)]
    caches = [RequestCache(engine.signature, 30, by_token=True, pool=pool) for _ in texts]
    for first, last in ((0, 15), (15, 16), (16, 18)):
        batch = [Work(cache, np.array(t[first:last]), first) for t, cache in zip(texts, caches, strict=True)]
        for text, outcome in zip(texts, engine.run(batch), strict=True):
            assert isinstance(outcome, np.ndarray), outcome
            np.testing.assert_allclose(outcome, plain.scores(text[:last])[-1], atol=5e-5)


def test_a_window_that_no_trial_reaches() -> None:
    """A window beyond the tokens of a trial shows in the mask of the longest request."""
    model = small_decoder("llama-decoder", context=4096)
    windowed = with_window_of_8(small_decoder("llama-decoder", context=4096))
    size = next(t for t in windowed.graph.initializer if t.name == "test/window")
    size.CopyFrom(numpy_helper.from_array(np.array(3000), size.name))
    assert is_native(engine_of(model))
    assert not is_native(engine_of(windowed))


@pytest.mark.parametrize(("tokens", "native"), [(3000.0, False), (1e9, True)])
@pytest.mark.parametrize("place", ["queries", "scores"])
def test_a_factor_that_grows_beyond_what_a_trial_reaches(tokens: float, place: str, *, native: bool) -> None:
    """Queries or scores are multiplied by the length of a request, divided by a number, and by 1 at least."""
    model = small_decoder("llama-decoder", context=4096)
    graph = model.graph
    for name, value in (("one", 1), ("tokens", np.float32(tokens)), ("least", np.float32(1))):
        graph.initializer.append(numpy_helper.from_array(np.array(value), f"test/{name}"))
    nodes = [
        helper.make_node("Shape", ["attention_mask"], ["test/shape"]),
        helper.make_node("Gather", ["test/shape", "test/one"], ["test/total"], axis=0),
        helper.make_node("Cast", ["test/total"], ["test/length"], to=TensorProto.FLOAT),
        helper.make_node("Div", ["test/length", "test/tokens"], ["test/ratio"]),
        helper.make_node("Max", ["test/ratio", "test/least"], ["test/factor"]),
    ]
    producer = {node.output[0]: node for node in graph.node}
    products = set()
    for softmax in (node for node in graph.node if node.op_type == "Softmax"):
        name = softmax.input[0]
        while producer[name].op_type != "MatMul":
            name = producer[name].input[0]
        products.add(name)
    assert products
    for node in graph.node:
        nodes.append(node)
        if node.output[0] in products:
            at = len(nodes) - 1 if place == "queries" else len(nodes)
            source = node.input if place == "queries" else node.output
            changed = f"test/{place}/{node.output[0]}"
            before, after = (source[0], changed) if place == "queries" else (changed, source[0])
            nodes.insert(at, helper.make_node("Mul", [before, "test/factor"], [after]))
            source[0] = changed
    del graph.node[:]
    graph.node.extend(nodes)
    assert is_native(engine_of(model)) == native


def test_a_mask_of_all_pairs_is_computed_for_fewer_tokens() -> None:
    """One of [tokens, tokens] would not fit in memory for as many as there may be; longer requests run by parts."""
    model = small_decoder("llama-decoder", context=1 << 17)
    at, causal = next((at, node) for at, node in enumerate(model.graph.node) if node.op_type == "LessOrEqual")
    (columns, rows), visible = causal.input, causal.output[0]
    column = numpy_helper.from_array(np.array([1]), "test/column")
    model.graph.initializer.append(column)
    del model.graph.node[at]
    for node in (
        helper.make_node("Unsqueeze", [columns, column.name], ["test/rows"]),
        helper.make_node("LessOrEqual", [columns, "test/rows"], ["test/pairs"]),
        helper.make_node("Squeeze", [rows, column.name], ["test/own"]),
        helper.make_node("Gather", ["test/pairs", "test/own"], [visible], axis=0),
    )[::-1]:
        model.graph.node.insert(at, node)
    engine, plain = engine_of(model), PlainDecoder(model)
    assert is_native(engine)
    assert engine._pooled is not None
    assert engine._pooled._decoder.longest == 4096
    pool = CachePool(engine.signature, 5000)
    cache = RequestCache(engine.signature, 5000, by_token=True, pool=pool)
    (outcome,) = engine.run([Work(cache, np.arange(9), 0)])
    np.testing.assert_allclose(outcome, plain.scores(list(range(9)))[-1], atol=5e-5)
    assert engine._pooled.serves([Work(cache, np.array([1]), 4095)])
    assert not engine._pooled.serves([Work(cache, np.array([1]), 4096)])
    text = [at * at % 61 for at in range(4100)]
    (outcome,) = engine.run([Work(cache, np.array(text), 0)])
    np.testing.assert_allclose(outcome, plain.scores(text)[-1], atol=5e-5)


def test_fused_attention_with_a_window_stays() -> None:
    """GroupQueryAttention with a window has buffers of its own."""
    assert not is_native(engine_of(with_window(small_decoder("llama-decoder-grouped"))))


def test_more_rows_than_one_head_is_wide_stay() -> None:
    """Heads that are wider than the operator takes have attention of several operators."""
    model = small_decoder("gpt2-decoder", hidden=2 * (WIDEST + 16), heads=2)
    engine, plain = engine_of(model), PlainDecoder(model)
    assert not is_native(engine)
    pool = CachePool(engine.signature, 20)
    (outcome,) = engine.run([Work(RequestCache(engine.signature, 9, by_token=True, pool=pool), np.arange(9), 0)])
    np.testing.assert_allclose(outcome, plain.scores(list(range(9)))[-1], atol=5e-5)


def test_tokens_without_the_library(tmp_path: Path, several_operators: None) -> None:
    """Where nothing was compiled, the same tokens are generated."""
    del several_operators
    model = small_decoder("llama-decoder")
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    with Generator(path, threads=1, max_batch=4) as generator:
        assert not is_native(generator._loop.engine)
        streams = [generator.submit([at, at + 1, 5], 12) for at in range(4)]
        found = [stream.result() for stream in streams]
    assert found == [PlainDecoder(model).generate([at, at + 1, 5], 12) for at in range(4)]
