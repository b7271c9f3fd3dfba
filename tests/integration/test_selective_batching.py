"""Selective batching: any mix of requests gives each request the results that it has by itself."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from sample import read_sample

import chrion
from chrion.errors import GenerationError, ModelError
from chrion.generation.cache import CachePool, RequestCache
from chrion.generation.engine import PlainEngine, SelectiveEngine
from chrion.generation.iteration import Engine, Work
from chrion.generation.open_engine import open_engine
from chrion.graph.decoder import decoder_signature
from chrion.graph.selective import split_decoder
from decoder_support import FORMS, PlainDecoder, small_decoder, with_window

#: Single-precision rounding over a few layers: products of other sizes add in another order.
TOLERANCE = 2e-5
LENGTH = 40
EXPORTS = [
    "optimum_models-gpt2-past",
    "genai_models-llama",
    "transformer_models-gpt2-past",
    "transformer_models-gpt2-past-dynamo",
    "transformer_models-llama-past",
]
Array = np.ndarray[Any, Any]


class Conversation:
    """A request with all tokens that it has had so far, and its cache, in a pool or with memory of its own."""

    def __init__(self, engine: Engine, pool: CachePool | None = None) -> None:
        self.engine = engine
        self.cache = RequestCache(engine.signature, LENGTH, by_token=engine.by_token, pool=pool)
        self.ids: list[int] = []

    def work(self, ids: list[int]) -> Work:
        work = Work(self.cache, np.array(ids, np.int64), len(self.ids))
        self.ids += ids
        return work


def check_random_mixes(engine: Engine, plain: PlainDecoder, seed: int, iterations: int, vocabulary: int) -> int:
    """Run random batches of initiations, increments and chunks; return how many requests were compared."""
    pick = np.random.default_rng(seed)
    memory = CachePool(engine.signature, 6 * LENGTH)
    pool = [Conversation(engine, memory) for _ in range(6)]
    compared = 0
    for _ in range(iterations):
        for at in pick.permutation(6)[:2]:
            if len(pool[at].ids) > LENGTH - 10:
                pool[at].cache.release()
                pool[at] = Conversation(engine, memory)
        chosen = [pool[at] for at in pick.permutation(6)[: pick.integers(1, 7)]]
        batch = []
        for request in chosen:
            most = LENGTH - len(request.ids)
            count = 1 if request.ids and pick.random() < 0.9 else int(pick.integers(1, 9))
            batch.append(request.work([int(t) for t in pick.integers(0, vocabulary, min(count, most))] or [0]))
        for request, outcome in zip(chosen, engine.run(batch), strict=True):
            assert isinstance(outcome, np.ndarray), outcome
            expected = plain.scores(request.ids)[-1]
            np.testing.assert_allclose(outcome, expected, atol=TOLERANCE * max(1, np.abs(expected).max()), rtol=0)
            assert int(np.argmax(outcome)) == int(np.argmax(expected))
            compared += 1
    return compared


@pytest.mark.usefixtures("attention")
@pytest.mark.parametrize("name", [*FORMS, "gpt2-decoder-grouped with a window", "llama-decoder-grouped with a window"])
def test_random_mixes_equal_plain_onnxruntime(name: str) -> None:
    """Hundreds of requests in mixed batches have the scores of plain onnxruntime on their whole text."""
    name, _, window = name.partition(" ")
    model = with_window(small_decoder(name)) if window else small_decoder(name)
    engine = open_engine(chrion.load(model), threads=1)
    assert engine.refused == ""
    assert engine.by_token == (not window)
    assert check_random_mixes(engine, PlainDecoder(model), seed=1, iterations=60, vocabulary=61) > 100


@pytest.mark.usefixtures("attention")
@pytest.mark.parametrize("stem", EXPORTS)
def test_exported_decoders_are_split(stem: str, tmp_path: Path) -> None:
    """Decoders of optimum, transformers and the model builder of onnxruntime-genai equal plain onnxruntime."""
    model = read_sample(stem, tmp_path).model
    graph = chrion.load(model)
    engine = open_engine(graph, threads=1)
    assert engine.refused == ""
    plain = PlainDecoder(model, engine.signature.cache_shapes[0])
    assert check_random_mixes(engine, plain, seed=2, iterations=15, vocabulary=engine.signature.vocabulary) > 20


def test_equal_layers_share_one_attention_session() -> None:
    """The attention parts of all layers are the same model."""
    split = split_decoder(graph := chrion.load(small_decoder("llama-decoder", layers=5)), decoder_signature(graph))
    attention = [part.model for part in split.parts if part.by_request]
    assert len(attention) == 6  # the mask, and five layers
    assert len(set(attention)) == 2


def test_parts_hold_every_weight_once() -> None:
    """No attention part has a large weight, and the token-wise parts have all of them."""
    graph = chrion.load(small_decoder("llama-decoder"))
    split = split_decoder(graph, decoder_signature(graph))
    places = {True: 0, False: 0}
    for part in split.parts:
        for tensor in onnx.ModelProto.FromString(part.model).graph.initializer:
            places[part.by_request] += len(tensor.dims) == 2 and min(tensor.dims) > 8
    assert places[True] == 0
    assert places[False] == sum(len(t.dims) == 2 and min(t.dims) > 8 for t in graph.model.graph.initializer)


def mixing(model: onnx.ModelProto) -> onnx.ModelProto:
    """Subtract the mean over all tokens from the logits."""
    producer = next(node for node in model.graph.node if "logits" in node.output)
    producer.output[0] = "own"
    model.graph.node.append(helper.make_node("ReduceMean", ["own"], ["mean"], "over-tokens", axes=[1], keepdims=1))
    model.graph.node.append(helper.make_node("Sub", ["own", "mean"], ["logits"]))
    return model


def test_a_model_that_mixes_tokens_is_refused_by_name_and_served_one_by_one() -> None:
    """The message names the operator; requests then have their own results all the same."""
    model = mixing(small_decoder("gpt2-decoder"))
    graph = chrion.load(model)
    with pytest.raises(ModelError, match="no selective batching: ReduceMean 'over-tokens' may mix tokens"):
        split_decoder(graph, decoder_signature(graph))
    engine = open_engine(graph, threads=1)
    assert isinstance(engine, PlainEngine)
    assert "may mix tokens" in engine.refused
    request = Conversation(engine)
    outcome = engine.run([request.work([3, 4, 5])])[0]
    assert isinstance(outcome, np.ndarray)
    np.testing.assert_allclose(outcome, PlainDecoder(model).scores([3, 4, 5])[-1], atol=TOLERANCE)


def test_a_value_that_depends_on_the_number_of_tokens_is_refused() -> None:
    """Logits divided by the length of the text would differ in a batch."""
    model = small_decoder("gpt2-decoder")
    producer = next(node for node in model.graph.node if "logits" in node.output)
    producer.output[0] = "own"
    model.graph.node.append(helper.make_node("Shape", ["input_ids"], ["length"], start=1, end=2))
    model.graph.node.append(helper.make_node("Cast", ["length"], ["count"], to=onnx.TensorProto.FLOAT))
    model.graph.node.append(helper.make_node("Div", ["own", "count"], ["logits"], name="by-length"))
    graph = chrion.load(model)
    with pytest.raises(ModelError, match="no selective batching: Div 'by-length' joins tokens with other values"):
        split_decoder(graph, decoder_signature(graph))


def test_other_models_are_no_decoders() -> None:
    """A model without a cache is refused with what was expected."""
    graph = chrion.load(chrion.zoo.build("lstm", {"layers": 1, "seq": 2}))
    with pytest.raises(ModelError, match=r"cache: found no input 'input_ids', but 'X' \(expected input_ids"):
        decoder_signature(graph)


def test_only_the_request_at_fault_fails() -> None:
    """A token outside the vocabulary fails its own request; the others of the batch have their results."""
    model = small_decoder("llama-decoder")
    engine = open_engine(chrion.load(model), threads=1)
    assert isinstance(engine, SelectiveEngine)
    requests = [Conversation(engine) for _ in range(3)]
    batch = [request.work(ids) for request, ids in zip(requests, ([1, 2], [61], [5]), strict=True)]
    first, wrong, last = engine.run(batch)
    assert isinstance(wrong, GenerationError)
    plain = PlainDecoder(model)
    for outcome, ids in ((first, [1, 2]), (last, [5])):
        assert isinstance(outcome, np.ndarray)
        np.testing.assert_allclose(outcome, plain.scores(ids)[-1], atol=TOLERANCE)


def test_prompts_of_which_more_follows_have_no_scores() -> None:
    """A chunk without a wanted token leaves its keys and values, and computes no logits."""
    model = small_decoder("gpt2-decoder")
    engine = open_engine(chrion.load(model), threads=1)
    request = Conversation(engine)
    work = request.work([7, 8, 9])
    assert engine.run([Work(work.cache, work.ids, 0, wanted=False)]) == [None]
    outcome = engine.run([request.work([10])])[0]
    assert isinstance(outcome, np.ndarray)
    np.testing.assert_allclose(outcome, PlainDecoder(model).scores([7, 8, 9, 10])[-1], atol=TOLERANCE)


def test_the_samples_are_the_models_that_exporters_wrote() -> None:
    """The exports in this test have control flow or shape computations that the zoo's decoders do not have."""
    folder = Path(__file__).parents[1] / "exporters" / "sample"
    for stem in EXPORTS:
        found = onnx.load_from_string(gzip.decompress((folder / f"{stem}.onnx.gz").read_bytes()))
        assert found.producer_name != "chrion"
