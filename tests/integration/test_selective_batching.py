"""Selective batching: any mix of requests gives each request the results that it has by itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import onnx
import pytest
from onnx import helper
from sample import read_sample

import chrion
from chrion.errors import GenerationError, ModelError
from chrion.generation.engine import PlainDecoderEngine, SelectiveEngine
from chrion.generation.iteration import Outcome, Work
from chrion.generation.open_engine import open_engine
from chrion.generation.rewrites.decoder import decoder_signature
from chrion.generation.rewrites.selective import split_decoder
from chrion.native import operators_available
from decoder_support import (
    FORMS,
    PlainDecoder,
    check_scores,
    engine_of,
    is_native,
    shared_engine,
    small_decoder,
    with_window,
)
from request_mixes import Conversation, check_random_mixes
from seams.generation import around_calls


@pytest.mark.parametrize("name", FORMS)
def test_random_mixes_equal_plain_onnxruntime(name: str, *, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With native attention any batch is one call; without it one of single tokens is, and each runs once."""
    engine = shared_engine(name, native=native)
    assert (engine.refused, engine.by_token, is_native(engine)) == ("", True, native)
    calls: list[int] = []
    around_calls(monkeypatch, engine, lambda run, batch: calls.append(len(batch)) or run(batch))

    def run(batch: Sequence[Work]) -> list[Outcome]:
        calls.clear()
        outcomes = engine.run(batch)
        assert calls == ([len(batch)] if native or all(len(work.ids) == 1 for work in batch) else [])
        return outcomes

    check_random_mixes(engine, PlainDecoder(small_decoder(name)), 25, run)


@pytest.mark.parametrize("name", ["gpt2-decoder-grouped", "llama-decoder-grouped"])
def test_attention_with_a_window_stays_fused(name: str) -> None:
    """It has buffers of its own, so that requests run by parts."""
    model = with_window(small_decoder(name))
    engine = engine_of(model)
    assert (engine.refused, engine.by_token, engine.pooled) == ("", False, None)
    check_random_mixes(engine, PlainDecoder(model), 25)


@pytest.mark.skipif(not operators_available(), reason="native attention is not compiled")
@pytest.mark.parametrize(
    "stem",
    [
        "genai_models-llama",
        "optimum_models-gpt2-past",
        "transformer_models-gpt2-past-dynamo",
        "transformer_models-llama-past",
    ],
)
def test_exported_decoders_are_split(stem: str, tmp_path: Path) -> None:
    """Decoders of optimum, transformers and the model builder of onnxruntime-genai equal plain onnxruntime."""
    model = read_sample(stem, tmp_path).model
    engine = open_engine(chrion.load(model), threads=1)
    assert isinstance(engine, SelectiveEngine)
    assert engine.pooled is not None  # which has been compared with the parts
    assert is_native(engine)
    check_random_mixes(engine, PlainDecoder(model, engine.signature.cache_shapes[0]), 10)


def test_parts_share_what_is_equal() -> None:
    """The attention parts of all layers are one model without large weights, which the other parts have once."""
    graph = chrion.load(small_decoder("llama-decoder", layers=3))
    split = split_decoder(graph, decoder_signature(graph))
    attention = [part.model for part in split.parts if part.by_request]
    assert len(attention) == 4  # the mask, and three layers
    assert len(set(attention)) == 2

    def large_weights(models: Iterable[onnx.ModelProto]) -> int:
        tensors = [tensor for model in models for tensor in model.graph.initializer]
        return sum(len(tensor.dims) == 2 and min(tensor.dims) > 8 for tensor in tensors)

    assert large_weights(map(onnx.ModelProto.FromString, attention)) == 0
    others = [onnx.ModelProto.FromString(part.model) for part in split.parts if not part.by_request]
    assert large_weights(others) == large_weights([graph.model])


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
    assert isinstance(engine, PlainDecoderEngine)
    assert "may mix tokens" in engine.refused
    request = Conversation(engine)
    check_scores(engine.run([request.work([3, 4, 5])]), [[3, 4, 5]], PlainDecoder(model))


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


def test_only_the_request_at_fault_fails(*, native: bool) -> None:
    """A token outside the vocabulary fails its own request; the others of the batch have their results."""
    engine = shared_engine("llama-decoder", native=native)
    batch = [Conversation(engine).work(ids) for ids in ([1, 2], [61], [5])]
    first, wrong, last = engine.run(batch)
    assert isinstance(wrong, GenerationError)
    check_scores([first, last], [[1, 2], [5]], PlainDecoder(small_decoder("llama-decoder")))
