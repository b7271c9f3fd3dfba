"""Iterations of several requests in one call: equal to the parts, or not used."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import chrion
from chrion.errors import GenerationError
from chrion.generation.cache import CacheManager, RequestCache
from chrion.generation.engine import _FEWEST_BESIDE_OTHERS, SelectiveEngine
from chrion.generation.iteration import Work
from chrion.generation.open_engine import open_engine
from chrion.graph.cache_append import append_caches
from chrion.graph.decoder import decoder_signature
from chrion.graph.observation import observe
from chrion.graph.pooled_cache import pool_caches
from decoder_support import FORMS, PlainDecoder, small_decoder, with_window

APPENDED = FORMS
pytestmark = pytest.mark.usefixtures("attention")
Array = np.ndarray[Any, Any]


def engine_of(model: onnx.ModelProto) -> SelectiveEngine:
    """Return an engine with a thread."""
    engine = open_engine(chrion.load(model), threads=1)
    assert isinstance(engine, SelectiveEngine)
    return engine


def batch_of(engine: SelectiveEngine, texts: list[list[int]], capacity: int = 40) -> list[Work]:
    """Return requests whose caches have all tokens but the last one, which is new."""
    manager = CacheManager(engine.signature, capacity * len(texts), by_token=True)
    caches = [manager.get(at, capacity) for at in range(len(texts))]
    for cache, text in zip(caches, texts, strict=True):
        if len(text) > 1:
            engine.run([Work(cache, np.array(text[:-1]), 0, wanted=False)])
    return [Work(cache, np.array(text[-1:]), len(text) - 1) for cache, text in zip(caches, texts, strict=True)]


@pytest.mark.parametrize("name", APPENDED)
def test_increments_of_different_lengths_equal_plain_onnxruntime(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of 1 to 33 tokens get the scores of plain onnxruntime, and write what the next iteration reads."""
    model = small_decoder(name)
    engine, plain = engine_of(model), PlainDecoder(model)
    assert engine._pooled is not None
    pick = np.random.default_rng(3)
    texts = [[int(t) for t in pick.integers(0, 61, length)] for length in (1, 33, 2, 17, 18)]
    batch = batch_of(engine, texts)
    monkeypatch.setattr(engine, "_fallback", lambda _: pytest.fail("one call is enough"))
    for _ in range(3):
        outcomes = engine.run(batch)
        following = []
        for text, work, outcome in zip(texts, batch, outcomes, strict=True):
            expected = plain.scores(text)[-1]
            assert isinstance(outcome, np.ndarray), outcome
            np.testing.assert_allclose(outcome, expected, atol=2e-5 * max(1, np.abs(expected).max()), rtol=0)
            text.append(int(np.argmax(expected)))
            following.append(Work(work.cache, np.array(text[-1:]), len(text) - 1))
        batch = following


@pytest.mark.usefixtures("several_operators")
@pytest.mark.parametrize("count", [_FEWEST_BESIDE_OTHERS - 1, _FEWEST_BESIDE_OTHERS])
def test_increments_beside_prompts(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many single tokens run in a call of their own, and the prompts among them by parts; all have their own scores."""
    model = small_decoder("llama-decoder")
    engine, plain = engine_of(model), PlainDecoder(model)
    pick = np.random.default_rng(4)
    texts = [[int(t) for t in pick.integers(0, 61, pick.integers(2, 30))] for _ in range(count)]
    batch = batch_of(engine, texts)
    manager = CacheManager(engine.signature, 100, by_token=True)
    for at, prompt in enumerate(([7, 8, 9], [1, 2])):
        texts.insert(3 * at, prompt)
        batch.insert(3 * at, Work(manager.get(at, 40), np.array(prompt), 0))
    by_parts: list[int] = []
    run_parts = engine._fallback
    monkeypatch.setattr(engine, "_fallback", lambda works: by_parts.append(len(works)) or run_parts(works))
    for text, outcome in zip(texts, engine.run(batch), strict=True):
        assert isinstance(outcome, np.ndarray), outcome
        np.testing.assert_allclose(outcome, plain.scores(text)[-1], atol=2e-5)
    assert by_parts == [2 if count == _FEWEST_BESIDE_OTHERS else count + 2]


def test_scores_that_are_not_wanted_and_tokens_that_do_not_exist() -> None:
    """One request wants no scores, one has a token outside the vocabulary; the third is not affected."""
    model = small_decoder("llama-decoder")
    engine = engine_of(model)
    batch = batch_of(engine, [[1, 2], [3, 61], [4, 5, 6]])
    first, wrong, last = engine.run([dataclasses.replace(batch[0], wanted=False), *batch[1:]])
    assert first is None
    assert isinstance(wrong, GenerationError)
    assert isinstance(last, np.ndarray)
    np.testing.assert_allclose(last, PlainDecoder(model).scores([4, 5, 6])[-1], atol=2e-5)


def test_a_call_that_fails_after_it_has_written_keys_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request is run again by itself over what the call has written, and so are those of the next iteration."""
    model = small_decoder("llama-decoder")
    engine, plain = engine_of(model), PlainDecoder(model)
    assert engine._pooled is not None
    run, failed = engine._pooled.run, []

    def fail(batch: list[Work]) -> list[Any]:
        outcomes = run(batch)
        if len(batch) > 1:
            failed.append(len(batch))
            raise RuntimeError("the device is gone")
        return outcomes

    monkeypatch.setattr(engine._pooled, "run", fail)
    texts = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10]]
    batch = batch_of(engine, texts)
    for at in range(3):
        for text, outcome in zip(texts, engine.run(batch), strict=True):
            assert isinstance(outcome, np.ndarray), outcome
            np.testing.assert_allclose(outcome, plain.scores(text)[-1], atol=2e-5)
            text.append(11 + at)
        batch = [Work(w.cache, np.array(text[-1:]), len(text) - 1) for w, text in zip(batch, texts, strict=True)]
    assert failed == [3, 3, 3]


@pytest.mark.usefixtures("several_operators")
def test_prompts_long_pads_and_several_pools_run_by_parts() -> None:
    """The call serves single tokens of one pool, unless most of what it reads are pads."""
    engine = engine_of(small_decoder("llama-decoder", context=4096))
    assert engine._pooled is not None
    manager = CacheManager(engine.signature, 6000, by_token=True)
    short, long = (manager.get(at, capacity) for at, capacity in enumerate((10, 3000)))
    own = RequestCache(engine.signature, 10, by_token=True)
    one = np.array([1])
    serves = engine._pooled.serves
    assert serves([Work(short, one, 5), Work(long, one, 2000)])
    assert not serves([Work(short, one, 5), Work(long, one, 2500)])
    assert not serves([Work(short, np.array([1, 2]), 5)])
    assert not serves([Work(short, one, 5), Work(own, one, 5)])
    assert serves([Work(own, one, 5)])


@pytest.mark.parametrize("scale", [1.0, 1e-5])
def test_a_model_whose_requests_affect_each_other_in_a_rectangle_runs_by_parts(scale: float) -> None:
    """A mean over the batch is that of one request in the parts, and of all of them in one call; small scores count."""
    model = small_decoder("llama-decoder")
    producer = next(node for node in model.graph.node if "logits" in node.output)
    producer.output[0] = "large"
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32([scale]), "logits-scale"))
    model.graph.node.append(helper.make_node("Mul", ["large", "logits-scale"], ["own"]))
    model.graph.node.append(helper.make_node("ReduceMean", ["own"], ["mean"], axes=[0], keepdims=1))
    model.graph.node.append(helper.make_node("Add", ["own", "mean"], ["logits"]))
    engine = engine_of(model)
    assert engine._pooled is None
    texts = [[1, 2, 3], [4, 5]]
    for text, outcome in zip(texts, engine.run(batch_of(engine, texts)), strict=True):
        assert isinstance(outcome, np.ndarray)
        np.testing.assert_allclose(outcome, PlainDecoder(model).scores(text)[-1], atol=2e-5 * scale, rtol=1e-4)


@pytest.mark.parametrize("name", ["gpt2-decoder", "llama-decoder"])
def test_tokens_that_see_only_the_last_ones(name: str) -> None:
    """A window that follows from the length of the past would hide short requests beside one longer than it."""
    model = small_decoder(name)
    at, causal = next((at, node) for at, node in enumerate(model.graph.node) if node.op_type == "LessOrEqual")
    columns, rows = causal.input
    visible, causal.output[0] = causal.output[0], "causal"
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(20), "window"))
    model.graph.node.insert(at + 1, helper.make_node("Sub", [rows, "window"], ["first"]))
    model.graph.node.insert(at + 2, helper.make_node("Greater", [columns, "first"], ["near"]))
    model.graph.node.insert(at + 3, helper.make_node("And", ["causal", "near"], [visible]))
    engine, plain = engine_of(model), PlainDecoder(model)
    assert engine._pooled is not None
    assert engine._pooled.longest == 15  # of 63, 31 and 15 tokens
    pick = np.random.default_rng(5)
    for lengths in ((3, 34, 18), (3, 16, 9), (34,)):
        texts = [[int(t) for t in pick.integers(0, 61, length)] for length in lengths]
        batch = batch_of(engine, texts)
        assert engine._pooled.serves(batch) == (lengths != (3, 34, 18))
        for text, outcome in zip(texts, engine.run(batch), strict=True):
            assert isinstance(outcome, np.ndarray), outcome
            np.testing.assert_allclose(outcome, plain.scores(text)[-1], atol=2e-5)


def test_requests_that_are_not_the_first_axis_of_a_value() -> None:
    """Its operators are not joined, and requests still decode in one call."""
    model = small_decoder("llama-decoder")
    producer = next(node for node in model.graph.node if "logits" in node.output)
    producer.output[0] = "own"
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([0]), "first"))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(61, np.float32), "ones"))
    nodes: list[tuple[str, list[str], dict[str, Any]]] = [
        ("Unsqueeze", ["own", "first", "wide"], {}),
        ("Transpose", ["wide", "tokens"], {"perm": [0, 2, 1, 3]}),
        ("LayerNormalization", ["tokens", "ones", "normal"], {}),  # onnxruntime moves no transposition past it
        ("Transpose", ["normal", "back"], {"perm": [0, 2, 1, 3]}),
        ("Squeeze", ["back", "first", "logits"], {}),
    ]
    for kind, names, attributes in nodes:
        model.graph.node.append(helper.make_node(kind, names[:-1], names[-1:], **attributes))
    engine, plain = engine_of(model), PlainDecoder(model)
    assert engine._pooled is not None
    texts = [[1, 2, 3], [4, 5]]
    for text, outcome in zip(texts, engine._pooled.run(batch_of(engine, texts)), strict=True):
        assert isinstance(outcome, np.ndarray)
        np.testing.assert_allclose(outcome, plain.scores(text)[-1], atol=2e-5)


def test_a_model_with_caches_in_other_places_has_no_pool() -> None:
    """GroupQueryAttention with a window writes to its own buffers; its requests decode by parts."""
    engine = engine_of(with_window(small_decoder("llama-decoder-grouped")))
    assert engine._pooled is None
    assert not engine.by_token


def test_attention_with_an_attribute_that_is_not_known() -> None:
    """It may mean something else without past keys and values, such as a window of later versions."""
    graph = chrion.load(small_decoder("llama-decoder-onnx"))
    signature = decoder_signature(graph)
    seen = observe(graph, signature)
    assert append_caches(graph.model, signature, seen) is not None
    attention = next(node for node in graph.model.graph.node if node.op_type == "Attention")
    attention.attribute.append(helper.make_attribute("left_window_size", 4))
    assert append_caches(graph.model, signature, seen) is None


def test_past_keys_may_give_their_shape_and_nothing_else() -> None:
    """``Shape`` of past keys has a substitute; any other use of them is refused, as is a model without a mask."""
    model = small_decoder("llama-decoder")
    model.graph.node.insert(0, helper.make_node("Shape", ["past_key_values.1.key"], ["sizes"]))
    model.graph.node.insert(1, helper.make_node("Gather", ["sizes", "two"], ["past-length"]))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([2]), "two"))
    producer = next(node for node in model.graph.node if "logits" in node.output)
    producer.output[0] = "own"
    model.graph.node.append(helper.make_node("Cast", ["past-length"], ["length"], to=onnx.TensorProto.FLOAT))
    model.graph.node.append(helper.make_node("Add", ["own", "length"], ["logits"]))
    graph = chrion.load(model)
    signature = decoder_signature(graph)
    appended = append_caches(graph.model, signature, observe(graph, signature))
    assert appended is not None
    pooled = pool_caches(appended, signature)
    assert pooled is not None
    assert list(pooled.past_shapes.values()) == [(1, 16)]
    assert pool_caches(appended, dataclasses.replace(signature, inputs=("input_ids", "position_ids"))) is None
    appended.model.graph.node.insert(0, helper.make_node("Neg", ["past_key_values.1.key"], ["other"]))
    assert pool_caches(appended, signature) is None
