"""Inputs and outputs of decoders beside the usual ones: other types, chosen logits, more outputs, and refusals."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import chrion
from chrion.devices.providers import CPU_PROVIDER
from chrion.errors import ModelError
from chrion.generation.cache import RequestCache
from chrion.generation.engine import PlainDecoderEngine, SelectiveEngine
from chrion.generation.iteration import Work
from chrion.generation.rewrites.decoder import decoder_signature
from chrion.generation.session_threads import SessionThreads
from decoder_support import PlainDecoder, check_scores, small_decoder
from seams.generation import loop_of

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [10, 11]]
KINDS = {np.int32: TensorProto.INT32, np.int64: TensorProto.INT64}
Change = Callable[[onnx.ModelProto], None]


def add_constants(model: onnx.ModelProto, **values: Any) -> None:
    model.graph.initializer.extend(numpy_helper.from_array(np.array(value), name) for name, value in values.items())


def before_head(model: onnx.ModelProto, *nodes: onnx.NodeProto) -> None:
    """Insert nodes from ``hidden`` to ``chosen`` before the product with the vocabulary."""
    at, head = next((at, node) for at, node in enumerate(model.graph.node) if "logits" in node.output)
    hidden, head.input[0] = head.input[0], "chosen"
    for node in nodes:
        node.input[:] = [hidden if name == "hidden" else name for name in node.input]
    for node in reversed(nodes):
        model.graph.node.insert(at, node)


def with_int32(model: onnx.ModelProto) -> None:
    """Let the model take tokens, mask and positions of 32 bits."""
    for value in model.graph.input:
        if value.type.tensor_type.elem_type == TensorProto.INT64:
            value.type.tensor_type.elem_type = TensorProto.INT32
            for node in model.graph.node:
                node.input[:] = [f"{value.name}/long" if name == value.name else name for name in node.input]
            cast = helper.make_node("Cast", [value.name], [f"{value.name}/long"], to=TensorProto.INT64)
            model.graph.node.insert(0, cast)


def keeping(kind: type, shape: list[int]) -> Change:
    """Return what lets a model compute as many of the last logits as an input says, as transformers.js does."""

    def change(model: onnx.ModelProto) -> None:
        model.graph.input.append(helper.make_tensor_value_info("num_logits_to_keep", KINDS[kind], shape))
        add_constants(model, first=[1], all=[2**63 - 1])
        before_head(
            model,
            helper.make_node("Cast", ["num_logits_to_keep"], ["kept/long"], to=TensorProto.INT64),
            helper.make_node("Neg", ["kept/long"], ["kept/back"]),
            helper.make_node("Reshape", ["kept/back", "first"], ["kept/first"]),
            helper.make_node("Slice", ["hidden", "kept/first", "all", "first"], ["chosen"]),
        )

    return change


def last_by_slice(model: onnx.ModelProto) -> None:
    add_constants(model, minus=[-1], all=[2**62], axis=[1])
    before_head(model, helper.make_node("Slice", ["hidden", "minus", "all", "axis"], ["chosen"], "keep-last"))


def last_by_length(model: onnx.ModelProto) -> None:
    add_constants(model, first=[1])
    before_head(
        model,
        helper.make_node("Shape", ["input_ids"], ["length"], start=1, end=2),
        helper.make_node("Sub", ["length", "first"], ["before-length"]),
        helper.make_node("Slice", ["hidden", "before-length", "length", "first", "first"], ["chosen"]),
    )


def last_by_gather(model: onnx.ModelProto) -> None:
    add_constants(model, minus=[-1])
    before_head(model, helper.make_node("Gather", ["hidden", "minus"], ["chosen"], axis=1))


def last_by_index(model: onnx.ModelProto) -> None:
    """Remove the axis of tokens and add it again, as the model builder of onnxruntime-genai does."""
    add_constants(model, minus=-1, axis=[1])
    before_head(
        model,
        helper.make_node("Gather", ["hidden", "minus"], ["last"], axis=1),
        helper.make_node("Unsqueeze", ["last", "axis"], ["chosen"]),
    )


def with_hidden_states(model: onnx.ModelProto) -> None:
    """Return the hidden states, too."""
    head = next(node for node in model.graph.node if "logits" in node.output)
    model.graph.output.append(helper.make_tensor_value_info(head.input[0], TensorProto.FLOAT, None))


CHANGES = {
    "int32": with_int32,
    "kept scalar": keeping(np.int64, []),
    "kept int32": keeping(np.int32, [1]),
    "slice": last_by_slice,
    "length": last_by_length,
    "gather": last_by_gather,
    "index": last_by_index,
    "hidden states": with_hidden_states,
}


@pytest.mark.parametrize(
    ("change", "name"),
    [
        *zip(
            CHANGES.values(),
            itertools.cycle(["gpt2-decoder", "llama-decoder-onnx", "llama-decoder-grouped"]),
            strict=False,
        )
    ],
    ids=CHANGES,
)
def test_texts_equal_plain_onnxruntime(name: str, change: Change) -> None:
    """Such decoders are split and have increments like others, and run one by one with the same results."""
    model = small_decoder(name, layers=1)
    change(model)
    graph, plain = chrion.load(model), PlainDecoder(model)
    with chrion.Generator(graph, threads=1, chunk=3) as generator:
        engine = loop_of(generator).engine
        assert isinstance(engine, SelectiveEngine)
        assert engine.pooled is not None
        streams = [generator.submit(prompt, 10) for prompt in PROMPTS]
        assert [stream.result(60) for stream in streams] == [plain.generate(prompt, 10) for prompt in PROMPTS]
    alone = PlainDecoderEngine(graph, decoder_signature(graph), SessionThreads(1), [CPU_PROVIDER], "not split")
    cache = RequestCache(alone.signature, 4, by_token=False)
    for end, past in ((3, 0), (4, 3)):
        check_scores(alone.run([Work(cache, range(past, end), past)]), [range(end)], plain)


def test_the_last_token_beside_the_others() -> None:
    """Logits that depend on other tokens than the last one are not split, and those of plain onnxruntime."""
    model = small_decoder("llama-decoder", layers=1)
    add_constants(model, minus=[-1], all=[2**62], axis=[1])
    before_head(
        model,
        helper.make_node("Slice", ["hidden", "minus", "all", "axis"], ["last"], "keep-last"),
        helper.make_node("ReduceMean", ["hidden"], ["mean"], axes=[1], keepdims=1),
        helper.make_node("Sub", ["last", "mean"], ["chosen"]),
    )
    plain = PlainDecoder(model)
    with chrion.Generator(model, threads=1) as generator:
        assert "may mix tokens outside the attention of a layer" in generator.refused
        assert generator.submit([1, 2, 3], 6).result(60) == plain.generate_with_cache([1, 2, 3], 6)


@pytest.mark.parametrize("name", ["gpt2-decoder-grouped", "llama-decoder", "llama-decoder-onnx"])
def test_the_place_at_fault_is_the_first_one(name: str) -> None:
    """An operator at the beginning makes every layer depend on it; the message names it, and no later sum."""
    model = small_decoder(name)
    at, words = next((at, node) for at, node in enumerate(model.graph.node) if "input_ids" in node.input[1:])
    result, words.output[0] = words.output[0], "words-of-tokens"
    unknown = helper.make_node("Einsum", ["words-of-tokens"], [result], "at-the-beginning", equation="bth->bth")
    model.graph.node.insert(at + 1, unknown)
    plain = PlainDecoder(model)
    with chrion.Generator(model, threads=1) as generator:
        assert generator.refused.endswith("Einsum 'at-the-beginning' may mix tokens outside the attention of a layer")
        assert generator.submit([1, 2, 3], 6).result(60) == plain.generate([1, 2, 3], 6)


def test_logits_that_do_not_depend_on_a_layer() -> None:
    """Some exports of small models skip layers; the message says so, and texts are plain onnxruntime's."""
    model = small_decoder("llama-decoder")
    first = next(node for node in model.graph.node if node.output[0].startswith("block1/"))
    head = next(node for node in model.graph.node if "logits" in node.output)
    head.input[0] = first.input[0]
    plain = PlainDecoder(model)
    with chrion.Generator(model, threads=1) as generator:
        assert generator.refused.endswith("the logits do not depend on 'past_key_values.1.key'")
        assert generator.submit([1, 2, 3], 6).result(60) == plain.generate([1, 2, 3], 6)


def renamed(**names: str) -> Change:
    """Return what renames inputs and outputs."""

    def change(model: onnx.ModelProto) -> None:
        known = {old.replace("__", "."): new for old, new in names.items()}
        for value in (*model.graph.input, *model.graph.output):
            value.name = known.get(value.name, value.name)
        for node in model.graph.node:
            node.input[:] = [known.get(name, name) for name in node.input]
            node.output[:] = [known.get(name, name) for name in node.output]

    return change


def typed(kind: int, *names: str) -> Change:
    """Return what changes the type of inputs, which are then read by casts."""

    def change(model: onnx.ModelProto) -> None:
        for name in names:
            value = next(value for value in model.graph.input if value.name == name)
            before, value.type.tensor_type.elem_type = value.type.tensor_type.elem_type, kind
            renamed(**{name: f"{name}/before"})(model)
            value.name = name
            model.graph.node.insert(0, helper.make_node("Cast", [name], [f"{name}/before"], to=before))

    return change


CACHES = [f"past_key_values.{layer}.{kind}" for layer in (0, 1) for kind in ("key", "value")]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (renamed(input_ids="inputs_embeds"), "found no input 'input_ids', but 'inputs_embeds' (expected"),
        (renamed(position_ids="beams"), "unexpected input 'beams' (int64[batch_size x sequence_length])"),
        (renamed(past_key_values__0__key="past_key_values.0.key_value"), "input 'past_key_values.0.key_value' (float["),
        (
            renamed(past_key_values__1__value="past_key_values.3.value", present__1__value="present.3.value"),
            "found no input 'past_key_values.1.value', but 'past_key_values.3.value'",
        ),
        (renamed(logits="hidden_states"), "found no output 'logits', but 'hidden_states', 'present.0.key'"),
        (renamed(present__1__key="cache"), "found no output 'present.1.key', but"),
        (renamed(position_ids="encoder_mask"), "part of an encoder-decoder model, which reads 'encoder_mask'"),
        (
            renamed(past_key_values__0__key="past_key_values.0.encoder.key"),
            "part of an encoder-decoder model, which reads 'past_key_values.0.encoder.key'",
        ),
        (typed(TensorProto.FLOAT, "input_ids"), "expected int64 or int32 for the input 'input_ids', found float["),
        (typed(TensorProto.FLOAT16, CACHES[0]), "one type, float or float16, found ['tensor(float)', 'te"),
        (
            typed(TensorProto.DOUBLE, *CACHES),
            "expected a cache of one type, float or float16, found ['tensor(double)']",
        ),
        (renamed(past_key_values__0__key="past_conv.0"), "some layers have a state in place of keys and values"),
        (
            renamed(past_key_values__1__key="past_key_values.1.ssm_state"),
            "the input 'past_key_values.1.ssm_state' (text",
        ),
    ],
)
def test_other_layouts_are_refused_by_name(change: Change, message: str) -> None:
    """The message names the input or the output that is missing or unexpected, in one line."""
    model = small_decoder("gpt2-decoder")
    change(model)
    with pytest.raises(ModelError) as refused:
        decoder_signature(chrion.load(model))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
