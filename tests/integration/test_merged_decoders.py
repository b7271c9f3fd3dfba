"""Merged decoders: a branch for prompts and one for the tokens after them, as optimum writes them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import chrion
from chrion import Generator
from chrion.errors import GenerationError
from chrion.generation.engine import SelectiveEngine
from chrion.generation.open_engine import MergedEngine
from chrion.generation.rewrites.decoder import decoder_signature
from chrion.graph.rewrite import rename_reads
from chrion.native import operators_available
from decoder_support import PlainDecoder, small_decoder, with_hidden_context
from seams.generation import loop_of
from sliding_window import trim_caches

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [10, 11]]


def blind(graph: onnx.GraphProto) -> None:
    """Let every token attend to all others, as a model traced with one token does."""
    (visible,) = (node for node in graph.node if node.op_type == "LessOrEqual")
    visible.op_type = "GreaterOrEqual"
    visible.input[1] = "zero"


def merge(model: onnx.ModelProto, *, traced: bool = False) -> onnx.ModelProto:
    """Return a merged decoder.

    Args:
        model: A decoder, which becomes the branch with past keys and values.
        traced: That branch is right for single tokens only.
    """
    cached, shared = model.graph, {tensor.name for tensor in model.graph.initializer}
    first = onnx.GraphProto()  # the same without past keys and values
    first.CopyFrom(cached)
    for value in cached.input:
        if "past" in value.name:
            _, heads, _, width = (dimension.dim_value for dimension in value.type.tensor_type.shape.dim)
            nothing = np.zeros((1, heads, 0, width), np.float32)
            first.initializer.append(numpy_helper.from_array(nothing, f"first/{value.name}"))
    names = {t.name.removeprefix("first/"): t.name for t in first.initializer if t.name.startswith("first/")}
    names |= {name: f"first/{name}" for node in first.node for name in node.output if name}
    rename_reads(first.node, names)
    for node in first.node:
        node.output[:] = [names.get(name, "") for name in node.output]
    if traced:
        blind(cached)
    bodies = {}
    for key, graph, prefix in (("then_branch", cached, ""), ("else_branch", first, "first/")):
        kinds = [(prefix + o.name, o.type.tensor_type.elem_type) for o in cached.output]
        outputs = [helper.make_tensor_value_info(name, kind, None) for name, kind in kinds]
        own = [tensor for tensor in graph.initializer if tensor.name not in shared]
        bodies[key] = helper.make_graph(graph.node, key, [], outputs, own)
    chosen = helper.make_node("If", ["use_cache_branch"], [o.name for o in cached.output], "merged", **bodies)
    flag = helper.make_tensor_value_info("use_cache_branch", TensorProto.BOOL, [1])
    graph = helper.make_graph([chosen], "merged", [*cached.input, flag], cached.output, cached.initializer)
    return helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)


def generated(generator: Generator) -> list[list[int]]:
    streams = [generator.submit(ids, 12) for ids in PROMPTS]
    return [stream.result(60) for stream in streams]


@pytest.mark.parametrize("name", ["gpt2-decoder", "llama-decoder-onnx"])
def test_the_branch_with_a_cache_is_split(name: str) -> None:
    """If it computes prompts, too, requests share its token-wise operators, and have plain onnxruntime's tokens."""
    plain = PlainDecoder(small_decoder(name, layers=1))
    with Generator(merge(small_decoder(name, layers=1)), threads=1, chunk=2) as generator:
        assert generator.refused == ""
        assert isinstance(loop_of(generator).engine, SelectiveEngine)
        assert generated(generator) == [plain.generate(ids, 12) for ids in PROMPTS]


@pytest.mark.skipif(not operators_available(), reason="native attention is not compiled")
def test_the_slots_limit_the_requests_of_a_split_branch() -> None:
    """Calls of the whole model serve 2^17 tokens if nothing states the context: shorter requests need no parts."""
    model = merge(with_hidden_context(small_decoder("llama-decoder", layers=1, context=4096)))
    with Generator(model, threads=1, kv_slots=1 << 17) as generator:
        assert isinstance(loop_of(generator).engine, SelectiveEngine)
        assert (generator.context, generator.weight_copies) == (0, 1)


@pytest.mark.parametrize(("name", "chunk"), [("gpt2-decoder", 2), ("llama-decoder", 0)])
def test_a_branch_for_single_tokens_serves_one_request_after_another(name: str, chunk: int) -> None:
    """Prompts then run by the other branch, and parts of them that follow others token by token."""
    plain = PlainDecoder(small_decoder(name))
    with Generator(merge(small_decoder(name), traced=True), threads=1, chunk=chunk) as generator:
        assert isinstance(loop_of(generator).engine, MergedEngine)
        assert generator.refused.endswith("its branch with a cache computes prompts otherwise than the other branch")
        assert generated(generator) == [plain.generate(ids, 12) for ids in PROMPTS]


def test_a_branch_without_scores_of_prompts_is_not_used_for_them() -> None:
    """The branch with past keys and values gives numbers for single tokens only, and NaN for several."""
    merged = merge(small_decoder("llama-decoder", layers=1))
    (node,) = merged.graph.node
    cached = next(attribute.g for attribute in node.attribute if attribute.name == "then_branch")
    next(other for other in cached.node if "logits" in other.output).output[0] = "own"
    for kind, inputs, output, options in (
        ("Shape", ["input_ids"], "tokens", {"start": 1, "end": 2}),
        ("Cast", ["tokens"], "count", {"to": TensorProto.FLOAT}),
        ("Sub", ["two", "count"], "single", {}),
        ("Log", ["single"], "zero-or-nan", {}),
        ("Add", ["own", "zero-or-nan"], "logits", {}),
    ):
        cached.node.append(helper.make_node(kind, inputs, [output], **options))
    cached.initializer.append(numpy_helper.from_array(np.float32([2]), "two"))
    plain = PlainDecoder(small_decoder("llama-decoder", layers=1))
    with Generator(merged, threads=1, chunk=2) as generator:
        assert isinstance(loop_of(generator).engine, MergedEngine)
        assert generator.refused.endswith("its branch with a cache computes prompts otherwise than the other branch")
        assert generated(generator) == [plain.generate(ids, 12) for ids in PROMPTS]


def test_branches_that_trim_their_caches() -> None:
    """Each branch returns the rows that the next token sees; requests run one by one, longer than that."""
    plain = PlainDecoder(trim_caches(small_decoder("llama-decoder"), 3))
    with Generator(merge(trim_caches(small_decoder("llama-decoder"), 3)), threads=1) as generator:
        assert isinstance(loop_of(generator).engine, MergedEngine)
        assert "Slice 'trim present.0.key' may drop rows of 'present.0.key'" in generator.refused
        assert generated(generator) == [plain.generate(ids, 12) for ids in PROMPTS]


def test_a_merged_decoder_with_few_positions() -> None:
    """A model that cannot run the prompt of the comparison generates by both branches."""
    plain = PlainDecoder(small_decoder("gpt2-decoder", layers=1, context=8))
    with Generator(merge(small_decoder("gpt2-decoder", layers=1, context=8)), threads=1) as generator:
        assert isinstance(loop_of(generator).engine, MergedEngine)
        assert "it cannot run a prompt of 9 tokens" in generator.refused
        assert generator.submit([1, 2, 3], 5).result(60) == plain.generate([1, 2, 3], 5)


def test_the_context_that_the_configuration_states(tmp_path: Path) -> None:
    """The configuration beside a model has a length that its tables do not state; the smaller one of both counts."""
    for model, stated, expected in (
        (merge(small_decoder("gpt2-decoder", layers=1)), None, 64),
        (merge(small_decoder("gpt2-decoder", layers=1)), 1024, 64),
        (merge(small_decoder("gpt2-decoder", layers=1)), 50, 50),
        (merge(with_hidden_context(small_decoder("gpt2-decoder", layers=1))), None, 0),
        (merge(with_hidden_context(small_decoder("gpt2-decoder", layers=1))), 50, 50),
    ):
        onnx.save(model, tmp_path / "model.onnx")
        (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": stated}))
        assert decoder_signature(chrion.load(tmp_path / "model.onnx")).context == expected


def test_a_failure_beyond_an_unknown_context_says_so() -> None:
    """A request that exceeds a length that nothing states fails with a hint, and later ones are served."""
    plain = PlainDecoder(with_hidden_context(small_decoder("gpt2-decoder", layers=1)))
    with Generator(
        merge(with_hidden_context(small_decoder("gpt2-decoder", layers=1)), traced=True), threads=1
    ) as generator:
        assert generator.context == 0
        stream = generator.submit([1] * 60, 30)
        with pytest.raises(GenerationError, match="does not state its context length") as failed:
            stream.result(60)
        assert "\n" not in str(failed.value)
        assert generator.submit([1, 2], 3).result(60) == plain.generate([1, 2], 3)
