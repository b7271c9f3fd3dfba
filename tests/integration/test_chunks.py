"""Prompts in chunks: the tokens of whole prompts, or prompts that stay whole."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import quantize_dynamic
from test_computed_positions import ARRANGED, compute_positions

import chrion
from chrion.generation.engine import PlainDecoderEngine, SelectiveEngine
from chrion.generation.rewrites.long_texts import reduces_positions
from decoder_support import PlainDecoder, small_decoder
from seams.generation import loop_of
from sliding_window import trim_caches

PROMPTS = [[1], [9, 8, 7, 6, 5, 4, 3], [(at * at) % 61 for at in range(30)]]
CHUNK = 3


def seeing_all(model: onnx.ModelProto) -> onnx.ModelProto:
    """Let each token of a prompt see all of them, as a prefix language model does."""
    (causal,) = (node for node in model.graph.node if node.op_type == "LessOrEqual")
    causal.op_type = "GreaterOrEqual"
    causal.input[1] = "zero"
    return model


def with_int8(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    """Quantise a decoder dynamically: the scale of activations follows from all tokens of an iteration."""
    source, target = folder / "float.onnx", folder / "int8.onnx"
    onnx.save(model, source)
    quantize_dynamic(source, target)
    return onnx.load(target)


def with_long_positions(model: onnx.ModelProto, length: int) -> onnx.ModelProto:
    """Rotate slower if the text has more than some tokens, by a branch, as models of onnxruntime-genai do."""
    tables = {
        tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer if "table" in tensor.name
    }
    model.graph.initializer.append(numpy_helper.from_array(np.array(length), "most"))
    nodes = [
        helper.make_node("ReduceMax", ["position_ids"], ["last"], keepdims=0),
        helper.make_node("GreaterOrEqual", ["last", "most"], ["long"]),
    ]
    for name, table in tables.items():
        bodies = {}
        for branch, rows in (("then_branch", table[np.arange(len(table)) // 3]), ("else_branch", table)):
            value = numpy_helper.from_array(rows, f"{branch}/{name}")
            output = helper.make_tensor_value_info(value.name, TensorProto.FLOAT, table.shape)
            constant = helper.make_node("Constant", [], [value.name], value=value)
            bodies[branch] = helper.make_graph([constant], branch, [], [output])
        nodes.append(helper.make_node("If", ["long"], [f"chosen/{name}"], f"choose {name}", **bodies))
    for node in model.graph.node:
        node.input[:] = [f"chosen/{name}" if name in tables else name for name in node.input]
    for node in reversed(nodes):
        model.graph.node.insert(0, node)
    return model


def with_unknown_operator(model: onnx.ModelProto) -> onnx.ModelProto:
    """Add an operator to a decoder that is not known to treat tokens by themselves, although it does."""
    producer = next(node for node in model.graph.node if "logits" in node.output)
    producer.output[0] = "own"
    model.graph.node.append(helper.make_node("Einsum", ["own"], ["logits"], "unknown", equation="btv->btv"))
    return model


def generated(model: onnx.ModelProto, chunk: int) -> tuple[list[list[int]], int, type]:
    """Return the tokens of all prompts, the chunk that the generator uses, and its kind of engine."""
    with chrion.Generator(model, threads=1, chunk=chunk) as generator:
        streams = [generator.submit(prompt, 9) for prompt in PROMPTS]
        return (
            [stream.result(60) for stream in streams],
            loop_of(generator).scheduler.chunk,
            type(loop_of(generator).engine),
        )


@pytest.mark.parametrize("name", ["gpt2-decoder", "llama-decoder-onnx", "llama-decoder-grouped"])
def test_prompts_in_chunks_have_the_tokens_of_whole_ones(name: str) -> None:
    """Decoders whose tokens see the earlier ones only are divided, also those with few positions."""
    plain = PlainDecoder(small_decoder(name))
    expected = [plain.generate_with_cache(prompt, 9) for prompt in PROMPTS]
    assert generated(small_decoder(name), CHUNK) == (expected, CHUNK, SelectiveEngine)


def test_a_decoder_that_runs_one_request_after_another() -> None:
    """Its prompts are divided if that was tried with equal results."""
    plain = PlainDecoder(model := with_unknown_operator(small_decoder("llama-decoder")))
    expected = [plain.generate_with_cache(prompt, 9) for prompt in PROMPTS]
    assert generated(model, CHUNK) == (expected, CHUNK, PlainDecoderEngine)


def with_length(model: onnx.ModelProto) -> onnx.ModelProto:
    """Shift the positions of texts beyond 2100 tokens."""
    model.graph.initializer.append(numpy_helper.from_array(np.array(2100), "limit"))
    for node in model.graph.node:
        node.input[:] = ["shifted" if name == "position_ids" else name for name in node.input]
    for node in (
        helper.make_node("Sub", ["position_ids", "beyond"], ["shifted"]),
        helper.make_node("Cast", ["long"], ["beyond"], to=TensorProto.INT64),
        helper.make_node("Greater", ["last", "limit"], ["long"]),
        helper.make_node("ReduceMax", ["flat"], ["last"], keepdims=0),
        helper.make_node("Flatten", ["position_ids"], ["flat"]),
    ):
        model.graph.node.insert(0, node)
    return model


@pytest.mark.parametrize(
    ("change", "engine"),
    [
        (lambda model, _: seeing_all(model), SelectiveEngine),
        (lambda model, _: with_unknown_operator(seeing_all(model)), PlainDecoderEngine),
        (with_int8, PlainDecoderEngine),
        (lambda model, _: with_long_positions(model, 20), PlainDecoderEngine),
        (lambda model, _: trim_caches(model, 6), PlainDecoderEngine),
        (lambda model, _: with_length(model), SelectiveEngine),
        (lambda model, _: with_unknown_operator(with_length(model)), PlainDecoderEngine),
    ],
    ids=["prefix", "prefix one by one", "int8", "branches", "window", "length", "length one by one"],
)
def test_prompts_that_chunks_would_change_stay_whole(
    change: Callable[[onnx.ModelProto, Path], onnx.ModelProto],
    engine: type,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The tokens are those of prompts that are read at once, whatever the chunk; the log says why."""
    model = change(small_decoder("llama-decoder"), tmp_path)
    plain = PlainDecoder(model)
    expected = [plain.generate_with_cache(prompt, 9) for prompt in PROMPTS]
    with caplog.at_level(logging.INFO, "chrion"):
        assert generated(model, CHUNK) == (expected, 0, engine)
    assert "prompts run as a whole: chunks would change their results" in caplog.text


@pytest.mark.parametrize("arranged", ARRANGED.values(), ids=ARRANGED)
def test_computed_positions_that_are_compared_as_a_whole(arranged: list[onnx.NodeProto]) -> None:
    """The greatest position of a text is found however positions are computed; without it nothing is found."""
    for change, found in ((with_length, True), (lambda model: model, False)):
        model = change(small_decoder("llama-decoder"))
        compute_positions(model, arranged)
        assert reduces_positions(model) == found


def test_a_limit_of_computed_positions_that_no_trial_reaches() -> None:
    """A model that counts its positions itself and compares the greatest one with 2100 reads prompts as a whole."""
    model = with_length(small_decoder("llama-decoder", context=5000))
    compute_positions(model, ARRANGED["column"])
    plain = PlainDecoder(model := with_unknown_operator(model))
    prompt = [(at * at) % 61 for at in range(2150)]
    with chrion.Generator(model, threads=1, chunk=512) as generator:
        assert generator.refused
        assert loop_of(generator).scheduler.chunk == 0
        assert generator.submit(prompt, 2).result(60) == plain.generate_with_cache(prompt, 2)


def test_nothing_is_tried_without_chunks(caplog: pytest.LogCaptureFixture) -> None:
    """Opening a decoder that is not split takes no runs for a question that nobody asks."""
    model = with_unknown_operator(seeing_all(small_decoder("llama-decoder")))
    with caplog.at_level(logging.INFO, "chrion"):
        assert generated(model, 0)[1] == 0
    assert "prompts run as a whole" not in caplog.text


@pytest.mark.parametrize(
    ("context", "change"),
    [(1, with_unknown_operator), (2, lambda model: model), (5, with_unknown_operator), (14, lambda model: model)],
)
def test_models_with_few_positions(context: int, change: Callable[[onnx.ModelProto], onnx.ModelProto]) -> None:
    """What is tried fits into the context; the prompt may fill it."""
    model = change(small_decoder("gpt2-decoder", context=context))
    prompt = [at % 61 for at in range(context)]
    with chrion.Generator(model, threads=1, chunk=2) as generator:
        assert loop_of(generator).scheduler.chunk == 2
        assert generator.submit(prompt, 1).result(60) == PlainDecoder(model).generate(prompt, 1)
