"""Iterations of several requests in one call: equal to the parts, or not used."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import chrion
from chrion.errors import GenerationError
from chrion.generation.cache import CacheManager, RequestCache
from chrion.generation.engine import FEWEST_BESIDE_OTHERS, SelectiveEngine
from chrion.generation.equivalence import Run
from chrion.generation.iteration import Outcome, Work
from chrion.generation.rewrites.cache_append import append_caches
from chrion.generation.rewrites.decoder import decoder_signature
from chrion.generation.rewrites.observation import Decoder
from chrion.generation.rewrites.plain_attention import expand_attention
from chrion.generation.rewrites.pooled_cache import pool_caches
from chrion.graph.rewrite import RewriteError
from decoder_support import PlainDecoder, check_scores, engine_of, shared_engine, small_decoder
from seams.generation import around_calls, around_parts


def batch_of(engine: SelectiveEngine, texts: list[list[int]], capacity: int = 40) -> list[Work]:
    """Return requests whose caches have all tokens but the last one, which is new."""
    manager = CacheManager(engine.signature, capacity * len(texts), by_token=True)
    caches = [manager.get(at, capacity) for at in range(len(texts))]
    for cache, text in zip(caches, texts, strict=True):
        if len(text) > 1:
            engine.run([Work(cache, np.array(text[:-1]), 0, wanted=False)])
    return [Work(cache, np.array(text[-1:]), len(text) - 1) for cache, text in zip(caches, texts, strict=True)]


@pytest.fixture(scope="module")
def plain() -> PlainDecoder:
    return PlainDecoder(small_decoder("llama-decoder"))


@pytest.mark.parametrize("count", [FEWEST_BESIDE_OTHERS - 1, FEWEST_BESIDE_OTHERS])
def test_increments_beside_prompts(count: int, plain: PlainDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many single tokens run in a call of their own, and the prompts among them by parts; all have their own scores."""
    engine = shared_engine("llama-decoder", native=False)
    pick = np.random.default_rng(4)
    texts = [[int(t) for t in pick.integers(0, 61, pick.integers(2, 30))] for _ in range(count)]
    batch = batch_of(engine, texts)
    manager = CacheManager(engine.signature, 100, by_token=True)
    for at, prompt in enumerate(([7, 8, 9], [1, 2])):
        texts.insert(3 * at, prompt)
        batch.insert(3 * at, Work(manager.get(at, 40), np.array(prompt), 0))
    by_parts: list[int] = []
    around_parts(monkeypatch, engine, lambda run, works: by_parts.append(len(works)) or run(works))
    check_scores(engine.run(batch), texts, plain)
    assert by_parts == [2 if count == FEWEST_BESIDE_OTHERS else count + 2]


def test_scores_that_are_not_wanted_and_tokens_that_do_not_exist(plain: PlainDecoder, *, native: bool) -> None:
    """One request wants no scores, one has a token outside the vocabulary; the third is not affected."""
    engine = shared_engine("llama-decoder", native=native)
    batch = batch_of(engine, [[1, 2], [3, 61], [4, 5, 6]])
    first, wrong, last = engine.run([dataclasses.replace(batch[0], wanted=False), *batch[1:]])
    assert first is None
    assert isinstance(wrong, GenerationError)
    check_scores([last], [[4, 5, 6]], plain)


def test_a_call_that_fails_after_it_has_written_keys_and_values(
    plain: PlainDecoder, monkeypatch: pytest.MonkeyPatch, *, native: bool
) -> None:
    """Each request is run again by itself over what the call has written, and so are those of the next iteration."""
    engine, failed = shared_engine("llama-decoder", native=native), []

    def fail(run: Run, batch: Sequence[Work]) -> list[Outcome]:
        outcomes = run(batch)
        if len(batch) > 1:
            failed.append(len(batch))
            raise RuntimeError("the device is gone")
        return outcomes

    around_calls(monkeypatch, engine, fail)
    texts = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10]]
    batch = batch_of(engine, texts)
    for at in range(3):
        check_scores(engine.run(batch), texts, plain)
        for text in texts:
            text.append(11 + at)
        batch = [Work(w.cache, np.array(text[-1:]), len(text) - 1) for w, text in zip(batch, texts, strict=True)]
    assert failed == [3, 3, 3]


def test_prompts_long_pads_and_several_pools_run_by_parts() -> None:
    """The call serves single tokens of one pool, unless most of what it reads are pads."""
    engine = shared_engine("llama-decoder", native=False, context=4096)
    assert engine.pooled is not None
    manager = CacheManager(engine.signature, 6000, by_token=True)
    short, long = (manager.get(at, capacity) for at, capacity in enumerate((10, 3000)))
    own = RequestCache(engine.signature, 10, by_token=True)
    one = np.array([1])
    serves = engine.pooled.serves
    assert serves([Work(short, one, 5), Work(long, one, 2000)])
    assert not serves([Work(short, one, 5), Work(long, one, 2500)])
    assert not serves([Work(short, np.array([1, 2]), 5)])
    assert not serves([Work(short, one, 5), Work(own, one, 5)])
    assert serves([Work(own, one, 5)])


@pytest.mark.parametrize(("scale", "native"), [(1.0, True), (1e-5, False)], indirect=["native"])
def test_a_model_whose_requests_affect_each_other_in_a_rectangle_runs_by_parts(scale: float, *, native: bool) -> None:
    """A mean over the batch is that of one request in the parts, and of all of them in one call; small scores count."""
    del native
    model = small_decoder("llama-decoder", layers=1)
    producer = next(node for node in model.graph.node if "logits" in node.output)
    producer.output[0] = "large"
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32([scale]), "logits-scale"))
    model.graph.node.append(helper.make_node("Mul", ["large", "logits-scale"], ["own"]))
    model.graph.node.append(helper.make_node("ReduceMean", ["own"], ["mean"], axes=[0], keepdims=1))
    model.graph.node.append(helper.make_node("Add", ["own", "mean"], ["logits"]))
    engine = engine_of(model)
    assert engine.pooled is None
    texts = [[1, 2, 3], [4, 5]]
    check_scores(engine.run(batch_of(engine, texts)), texts, PlainDecoder(model), 2e-5 * scale)


@pytest.mark.parametrize(("name", "native"), [("gpt2-decoder", True), ("llama-decoder", False)], indirect=["native"])
def test_tokens_that_see_only_the_last_ones(name: str, *, native: bool) -> None:
    """A window that follows from the length of the past would hide short requests beside one longer than it."""
    del native
    model = small_decoder(name, layers=1)
    at, causal = next((at, node) for at, node in enumerate(model.graph.node) if node.op_type == "LessOrEqual")
    columns, rows = causal.input
    visible, causal.output[0] = causal.output[0], "causal"
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(20), "window"))
    model.graph.node.insert(at + 1, helper.make_node("Sub", [rows, "window"], ["first"]))
    model.graph.node.insert(at + 2, helper.make_node("Greater", [columns, "first"], ["near"]))
    model.graph.node.insert(at + 3, helper.make_node("And", ["causal", "near"], [visible]))
    engine, plain = engine_of(model), PlainDecoder(model)
    assert engine.pooled is not None
    assert engine.pooled.longest == 15  # of 63, 31 and 15 tokens
    pick = np.random.default_rng(5)
    for lengths in ((3, 34, 18), (3, 16, 9), (34,)):
        texts = [[int(t) for t in pick.integers(0, 61, length)] for length in lengths]
        batch = batch_of(engine, texts)
        assert engine.pooled.serves(batch) == (lengths != (3, 34, 18))
        check_scores(engine.run(batch), texts, plain)


def test_requests_that_are_not_the_first_axis_of_a_value(*, native: bool) -> None:
    """Its operators are not joined, and requests still decode in one call."""
    del native
    model = small_decoder("llama-decoder", layers=1)
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
    engine = engine_of(model)
    assert engine.pooled is not None
    texts = [[1, 2, 3], [4, 5]]
    check_scores(engine.pooled.run(batch_of(engine, texts)), texts, PlainDecoder(model))


def test_attention_with_an_attribute_that_is_not_known() -> None:
    """It may mean something else, such as a window of later versions."""
    graph = chrion.load(small_decoder("llama-decoder-onnx"))
    decoder = Decoder(graph, decoder_signature(graph), graph.model)
    assert append_caches(expand_attention(decoder)).appended
    attention = next(node for node in graph.model.graph.node if node.op_type == "Attention")
    attention.attribute.append(helper.make_attribute("left_window_size", 4))
    with pytest.raises(RewriteError, match=r"^Attention '.*' has left_window_size = 4"):
        expand_attention(decoder)


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
    decoder = append_caches(Decoder(graph, decoder_signature(graph), graph.model))
    assert not {value.name for value in pool_caches(decoder).model.graph.input} & {*decoder.signature.past}
    without_mask = dataclasses.replace(decoder.signature, inputs=("input_ids", "position_ids"))
    with pytest.raises(RewriteError, match="'attention_mask'"):
        pool_caches(dataclasses.replace(decoder, signature=without_mask))
    decoder.model.graph.node.insert(0, helper.make_node("Neg", ["past_key_values.1.key"], ["other"], "negative"))
    with pytest.raises(RewriteError, match=r"Neg 'negative' reads 'past_key_values.1.key'") as refused:
        pool_caches(decoder)
    assert refused.value.operator == "Neg 'negative'"
