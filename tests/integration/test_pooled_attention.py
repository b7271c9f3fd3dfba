"""Decoders with attention as one native operator: one call for any batch, and only where that is meant."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from chrion.generation.cache import CacheManager, CachePool, RequestCache
from chrion.generation.engine import SelectiveEngine
from chrion.generation.equivalence import Run
from chrion.generation.generator import Generator
from chrion.generation.iteration import Outcome, Work
from chrion.generation.query_blocks import PASS
from chrion.generation.rewrites.pooled_attention import OPERATOR, WIDEST
from chrion.native import operators_available
from decoder_support import (
    FORMS,
    PlainDecoder,
    check_scores,
    engine_of,
    is_native,
    shared_engine,
    small_decoder,
    with_hidden_context,
)
from seams.generation import around_calls, loop_of, noted_parts

pytestmark = pytest.mark.skipif(not operators_available(), reason="native attention is not compiled")


@pytest.mark.parametrize("name", FORMS)
def test_operators_of_decoders(name: str) -> None:
    """Each layer has one operator, which rotates all of a head or nothing, and four products."""
    engine = shared_engine(name, native=True)
    assert engine.pooled is not None
    nodes = engine.pooled.decoder.model.graph.node
    operators = [node for node in nodes if node.op_type == OPERATOR]
    rotated = [attribute.i for node in operators for attribute in node.attribute if attribute.name == "rotated"]
    assert rotated == [16 if "llama" in name else 0] * 2
    assert sum(node.op_type == "MatMul" for node in nodes) == 4 * 2 + 1  # of each layer, and that of the logits


def test_a_long_prompt_runs_in_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call has more tokens of a request than a pass, and only the last one computes scores."""
    model = small_decoder("llama-decoder", layers=1, context=1024)
    engine, calls = engine_of(model, threads=2), []

    def note(run: Run, batch: Sequence[Work]) -> list[Outcome]:
        calls.append([(len(work.ids), work.wanted) for work in batch])
        return run(batch)

    around_calls(monkeypatch, engine, note)
    pool = CachePool(engine.signature, 1100)
    texts = [[int(t) for t in np.random.default_rng(8).integers(0, 61, length)] for length in (PASS + 300, 9)]
    batch = [Work(RequestCache(engine.signature, len(t), by_token=True, pool=pool), np.array(t), 0) for t in texts]
    check_scores(engine.run(batch), texts, PlainDecoder(model), 5e-5)
    assert calls == [[(PASS, False), (9, True)], [(300, True)]]


def test_caches_in_several_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request for which a pool had no consecutive rows has its own one, and a call of its own; none runs by parts."""
    engine, plain = shared_engine("llama-decoder", native=True), PlainDecoder(small_decoder("llama-decoder"))
    calls: list[int] = []
    around_calls(monkeypatch, engine, lambda run, batch: calls.append(len(batch)) or run(batch))
    manager = CacheManager(engine.signature, 100, by_token=True)
    caches = [manager.get(at, 10) for at in range(10)]
    manager.release(1)
    manager.release(3)
    caches = [caches[0], manager.get(10, 20), *caches[2:3], *caches[4:]]
    assert len({id(cache.pool) for cache in caches}) == 2
    texts = [[int(t) for t in np.random.default_rng(at).integers(0, 61, 8)] for at in range(len(caches))]
    for ids in ([slice(0, 3)] * 9, [slice(3, 5), slice(3, 8), *[slice(3, 4)] * 7]):
        batch = [Work(c, np.array(t[own]), own.start) for c, t, own in zip(caches, texts, ids, strict=True)]
        check_scores(engine.run(batch), [t[: own.stop] for t, own in zip(texts, ids, strict=True)], plain, 5e-5)
    assert calls == [8, 1] * 2


@pytest.mark.parametrize(
    ("stated", "slots", "kept"), [(True, (1 << 17) + 1, False), (False, 1 << 17, False), (False, (1 << 17) + 1, True)]
)
def test_parts_are_kept_only_if_requests_may_need_them(
    slots: int, monkeypatch: pytest.MonkeyPatch, *, stated: bool, kept: bool
) -> None:
    """Otherwise they and their copy of the weights have gone before the session of the whole model is opened.

    Masks are checked for 2^17 tokens if a model does not state its context.
    """
    model = small_decoder("llama-decoder", layers=1, context=4096)
    if not stated:
        with_hidden_context(model)
    alive = noted_parts(monkeypatch)
    with Generator(model, threads=1, kv_slots=slots) as generator:
        engine = loop_of(generator).engine
        assert isinstance(engine, SelectiveEngine)
        assert is_native(engine)
        assert generator.submit([1, 2, 3], 5).result(60) == PlainDecoder(model).generate([1, 2, 3], 5)
        assert alive() == [kept, kept]
        assert generator.weight_copies == 1 + kept


def test_several_batches_at_a_time() -> None:
    """Threads that share the session and the pool do not affect each other."""
    name = "llama-decoder-grouped"
    engine, plain = shared_engine(name, native=True), PlainDecoder(small_decoder(name))
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


@pytest.mark.parametrize(
    ("name", "change", "native"),
    [
        ("gpt2-decoder", with_cap, True),
        ("llama-decoder", with_cap, True),
        ("llama-decoder", with_doubled_scores, True),
        ("gpt2-decoder", with_slope, False),
        ("gpt2-decoder", with_halved_negative_scores, False),
        ("llama-decoder", with_window_of_8, False),
    ],
)
def test_other_attention(name: str, change: Callable[[onnx.ModelProto], onnx.ModelProto], *, native: bool) -> None:
    """What the operator computes is recognised, and other attention stays; both equal plain onnxruntime."""
    model = change(small_decoder(name))
    engine, plain = engine_of(model), PlainDecoder(model)
    assert is_native(engine) == native
    pool = CachePool(engine.signature, 200)
    texts = [[int(t) for t in np.random.default_rng(at).integers(0, 61, 20 + at)] for at in range(4)]
    caches = [RequestCache(engine.signature, 30, by_token=True, pool=pool) for _ in texts]
    for first, last in ((0, 15), (15, 16), (16, 18)):
        batch = [Work(cache, np.array(t[first:last]), first) for t, cache in zip(texts, caches, strict=True)]
        check_scores(engine.run(batch), [text[:last] for text in texts], plain, 5e-5)


def test_a_window_that_no_trial_reaches() -> None:
    """A window beyond the tokens of a trial shows in the mask of the longest request."""
    windowed = with_window_of_8(small_decoder("llama-decoder", layers=1, context=4096))
    size = next(t for t in windowed.graph.initializer if t.name == "test/window")
    size.CopyFrom(numpy_helper.from_array(np.array(3000), size.name))
    assert not is_native(engine_of(windowed))


@pytest.mark.parametrize(("tokens", "native"), [(3000.0, False), (1e9, True)])
@pytest.mark.parametrize("place", ["queries", "scores"])
def test_a_factor_that_grows_beyond_what_a_trial_reaches(tokens: float, place: str, *, native: bool) -> None:
    """Queries or scores are multiplied by the length of a request, divided by a number, and by 1 at least."""
    model = small_decoder("llama-decoder", layers=1, context=4096)
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
    model = small_decoder("llama-decoder", layers=1, context=1 << 17)
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
    engine = engine_of(model)
    assert engine.pooled is not None
    assert engine.pooled.decoder.longest == 4096
    pool = CachePool(engine.signature, 5000)
    cache = RequestCache(engine.signature, 5000, by_token=True, pool=pool)
    check_scores(engine.run([Work(cache, np.arange(9), 0)]), [range(9)], PlainDecoder(model))
    assert engine.pooled.serves([Work(cache, np.array([1]), 4095)])
    assert not engine.pooled.serves([Work(cache, np.array([1]), 4096)])
    assert engine.weight_copies == 2


def test_heads_that_are_wider_than_the_operator_takes_stay() -> None:
    """They have attention of several operators."""
    model = small_decoder("gpt2-decoder", layers=1, hidden=WIDEST + 16, heads=1)
    engine = engine_of(model)
    assert not is_native(engine)
    pool = CachePool(engine.signature, 20)
    batch = [Work(RequestCache(engine.signature, 9, by_token=True, pool=pool), np.arange(9), 0)]
    check_scores(engine.run(batch), [range(9)], PlainDecoder(model))
