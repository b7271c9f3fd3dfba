"""Decoders that are not split: their requests run one by one, with the results of plain onnxruntime."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import chrion
from chrion.errors import GenerationError, ModelError
from chrion.generation.cache import RequestCache
from chrion.generation.engine import PlainDecoderEngine
from chrion.generation.iteration import Work
from chrion.generation.open_engine import open_engine
from decoder_support import PlainDecoder, small_decoder
from sliding_window import trim_caches

PROMPTS = [[1], [3, 4, 5], [7] * 12, list(range(20))]


def joined_apart(model: onnx.ModelProto) -> onnx.ModelProto:
    """Let a decoder return its keys and values by nodes that nothing else reads."""
    for node in [node for node in model.graph.node if node.output[0].startswith("present")]:
        name, node.output[0] = node.output[0], f"joined/{node.output[0]}"
        for other in model.graph.node:
            other.input[:] = [f"joined/{name}" if read == name else read for read in other.input]
    return model


@pytest.mark.parametrize(("window", "layers"), [(2, (0, 1)), (5, (0,)), (30, (1,)), (2, (1,))])
def test_caches_that_the_model_trims(window: int, layers: tuple[int, ...]) -> None:
    """Prompts and texts longer than the window of some layers have the tokens of the whole text without a cache."""
    model = trim_caches(small_decoder("llama-decoder"), window, layers)
    plain = PlainDecoder(model)
    with chrion.Generator(model, threads=1, max_batch=3) as generator:
        place = f"Slice 'trim present.{layers[0]}.key' may drop rows of 'present.{layers[0]}.key'"
        assert generator.refused == f"llama-decoder: no selective batching: {place}"
        streams = [generator.submit(prompt, 15) for prompt in PROMPTS]
        found = [stream.result(60) for stream in streams]
    assert found == [plain.generate(prompt, 15) for prompt in PROMPTS]


def test_trimmed_rows_of_requests_that_keep_their_place() -> None:
    """In a fixed batch, a request that has ended repeats its last token while the others go on."""
    model = trim_caches(small_decoder("gpt2-decoder"), 4, (1,))
    plain = PlainDecoder(model)
    with chrion.Generator(model, threads=1, max_batch=3, policy="request") as generator:
        streams = [generator.submit([5, 6, 7], count) for count in (1, 9, 20)]
        assert [stream.result(60) for stream in streams] == [plain.generate([5, 6, 7], n) for n in (1, 9, 20)]


@pytest.mark.parametrize("rows", [2, 4])
def test_a_cache_of_an_unexpected_size_fails_its_request(rows: int) -> None:
    """A layer without a window returns a row for each token; other numbers are named, and nothing is kept."""
    model = joined_apart(small_decoder("llama-decoder"))
    # For three new tokens, the keys of the first layer are in a row too many or too few.
    nodes = [
        *count_tokens(model, 3),
        helper.make_node("Shape", ["joined/present.0.key"], ["all"], start=2, end=3),
        helper.make_node("Mul", ["at-fault", "difference"], ["change"]),
        helper.make_node("Add", ["all", "change"], ["rows"]),
        helper.make_node("Concat", ["heads", "rows", "rest"], ["wrong-shape"], axis=0),
        helper.make_node("Reshape", ["joined/present.0.key", "wrong-shape"], ["present.0.key"]),
        helper.make_node("Slice", ["joined/present.1.value", "from", "to", "axis"], ["present.1.value"]),
    ]
    model.graph.node.extend([*nodes, *(identity(name) for name in ("0.value", "1.key"))])
    constants = {"difference": [rows - 3], "heads": [0, 0], "rest": [-1], "from": [-30], "to": [2**62], "axis": [2]}
    for name, value in constants.items():
        model.graph.initializer.append(numpy_helper.from_array(np.array(value), name))
    engine = open_engine(chrion.load(model), threads=1)
    assert isinstance(engine, PlainDecoderEngine)
    cache = RequestCache(engine.signature, 8, by_token=False)
    (outcome,) = engine.run([Work(cache, np.array([1, 2, 3]), 0)])
    assert isinstance(outcome, GenerationError)
    assert str(outcome) == f"the iteration failed: 'present.0.key' has {rows} rows, expected 3"


def count_tokens(model: onnx.ModelProto, count: int) -> list[onnx.NodeProto]:
    """Return the nodes of a value ``at-fault`` that is 1 for a number of new tokens, and 0 for any other."""
    model.graph.initializer.append(numpy_helper.from_array(np.array([count]), "wrong"))
    return [
        helper.make_node("Shape", ["input_ids"], ["count"], start=1, end=2),
        helper.make_node("Equal", ["count", "wrong"], ["is-at-fault"]),
        helper.make_node("Cast", ["is-at-fault"], ["at-fault"], to=TensorProto.INT64),
    ]


def identity(name: str) -> onnx.NodeProto:
    """Return the node of a cache that is as it was joined."""
    return helper.make_node("Identity", [f"joined/present.{name}"], [f"present.{name}"])


def test_a_model_that_returns_new_keys_and_values_only() -> None:
    """Its caller would have to append them; the model is refused when it is opened."""
    model = joined_apart(small_decoder("gpt2-decoder"))
    new = {
        node.output[0].removeprefix("joined/"): node.input[1] for node in model.graph.node if node.op_type == "Concat"
    }
    for name in (f"present.{layer}.{kind}" for layer in (0, 1) for kind in ("key", "value")):
        model.graph.node.append(helper.make_node("Identity", [new[name]], [name]))
    with pytest.raises(
        ModelError, match=r"cannot run 1 new and 2 past tokens: 'present\.0\.key' has 1 rows, expected 3"
    ):
        open_engine(chrion.load(model), threads=1)


def failing(count: int) -> onnx.ModelProto:
    """Return a decoder that fails for a number of new tokens."""
    model = small_decoder("llama-decoder")
    ids = [node for node in model.graph.node if "input_ids" in node.input and node.op_type == "Gather"]
    model.graph.initializer.append(numpy_helper.from_array(np.array([99]), "far"))
    nodes = [
        *count_tokens(model, count),
        helper.make_node("Mul", ["at-fault", "far"], ["shift"]),
        helper.make_node("Add", ["input_ids", "shift"], ["ids"]),
    ]
    for node in ids:
        node.input[1] = "ids"
    for node in reversed(nodes):
        model.graph.node.insert(0, node)
    return model


@pytest.mark.parametrize(("count", "about"), [(1, "1 new and 2 past"), (2, "2 new and 0 past")])
def test_a_model_that_cannot_run_is_refused_when_it_is_opened(count: int, about: str) -> None:
    """Onnxruntime opens some models that it cannot run, for prompts or for single tokens only."""
    with pytest.raises(ModelError, match=f"onnxruntime cannot run {about} tokens: "):
        chrion.Generator(failing(count), threads=1)


def test_a_model_whose_file_was_overwritten_is_refused_when_it_is_opened(tmp_path: Path) -> None:
    """The session of the whole model reads the file again; the error names it."""
    path = tmp_path / "gone.onnx"
    onnx.save(trim_caches(small_decoder("gpt2-decoder"), 30), path)
    graph = chrion.load(path)
    path.write_bytes(b"")
    with pytest.raises(ModelError, match=r"gone\.onnx has changed since .* cannot be opened again"):
        chrion.Generator(graph, threads=1)


@pytest.mark.parametrize("context", [1, 2, 3])
def test_models_with_few_positions(context: int) -> None:
    """What is tried when a model is opened is no longer than its context."""
    model = trim_caches(small_decoder("gpt2-decoder", context=context), 30)
    with chrion.Generator(model, threads=1) as generator:
        assert generator.refused
        assert generator.submit([1], context).result(60) == PlainDecoder(model).generate([1], context)
