"""Decoders that compute positions or cast their caches: requests of a batch have plain onnxruntime's tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import chrion
from chrion.generation.engine import SelectiveEngine
from decoder_support import PlainDecoder, small_decoder, with_window
from seams.generation import loop_of

PROMPTS = [[1, 2, 3], [4], [(at * at) % 61 for at in range(30)], [10, 11], [5] * 17]
Change = Callable[[onnx.ModelProto], None]


def add_constants(model: onnx.ModelProto, **values: object) -> None:
    model.graph.initializer.extend(numpy_helper.from_array(np.array(value), name) for name, value in values.items())


def node(kind: str, inputs: list[str], output: str, **attributes: int) -> onnx.NodeProto:
    return helper.make_node(kind, inputs, [output], output, **attributes)


#: Nodes between the list of positions and their matrix.
ARRANGED = {
    "row": [node("Unsqueeze", ["list", "a0"], "counted")],
    "reshaped": [node("Reshape", ["list", "row"], "counted")],
    "planes": [node("Unsqueeze", ["list", "a01"], "planes"), node("Squeeze", ["planes", "a1"], "counted")],
    "column": [node("Unsqueeze", ["list", "a02"], "column"), node("Squeeze", ["column", "a2"], "counted")],
    "cast": [node("Cast", ["list"], "short", to=TensorProto.INT32), node("Unsqueeze", ["short", "a0"], "counted")],
}


def compute_positions(model: onnx.ModelProto, arranged: list[onnx.NodeProto], most: int | None = None) -> None:
    """Compute positions from the lengths of the cache and of the tokens, in place of an input.

    Args:
        model: A decoder of the zoo; it is changed.
        arranged: What becomes of the list of positions.
        most: The greatest number from which positions count.
    """
    model.graph.input.remove(next(value for value in model.graph.input if value.name == "position_ids"))
    add_constants(model, step=1, scalar=[0], a0=[0], a1=[1], a2=[2], a01=[0, 1], a02=[0, 2], row=[1, -1])
    for other in model.graph.node:
        other.input[:] = ["counted" if name == "position_ids" else name for name in other.input]
    nodes = [
        node("Shape", ["past_key_values.0.key"], "past/list", start=2, end=3),
        node("Squeeze", ["past/list", "scalar"], "past"),
        node("Shape", ["input_ids"], "new/list", start=1, end=2),
        node("Squeeze", ["new/list", "scalar"], "new"),
        node("Add", ["first", "new"], "end"),
        node("Range", ["first", "end", "step"], "list"),
        *arranged,
    ]
    add_constants(model, most=most or 0)
    nodes.insert(2, node("Min", ["past", "most"], "first") if most else node("Identity", ["past"], "first"))
    for added in reversed(nodes):
        model.graph.node.insert(0, added)


def check_texts(model: onnx.ModelProto, *, increments: bool) -> None:
    """Assert that requests which run together have the tokens that they have by themselves."""
    plain = PlainDecoder(model)
    with chrion.Generator(model, threads=1) as generator:
        engine = loop_of(generator).engine
        assert isinstance(engine, SelectiveEngine)
        assert (engine.pooled is not None) == increments
        streams = [generator.submit(prompt, 20) for prompt in PROMPTS]
        assert [s.result(60) for s in streams] == [plain.generate_with_cache(prompt, 20) for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("arranged", "name"),
    [*zip(ARRANGED.values(), itertools.cycle(["gpt2-decoder", "llama-decoder", "llama-decoder-onnx"]), strict=False)],
    ids=ARRANGED,
)
def test_positions_that_count_from_the_past(name: str, arranged: list[onnx.NodeProto]) -> None:
    """Their caches grow in place and increments run in one call, as with positions that are an input."""
    model = small_decoder(name, layers=1)
    compute_positions(model, arranged)
    check_texts(model, increments=True)


def test_positions_for_grouped_attention() -> None:
    """A table that is read by computed positions, with attention that has buffers of its own and without."""
    model = small_decoder("gpt2-decoder-grouped", layers=1)
    compute_positions(model, ARRANGED["row"])
    check_texts(model, increments=True)
    check_texts(with_window(model), increments=False)


def test_positions_that_only_look_alike() -> None:
    """Numbers that count from at most 20 are the positions of short texts only; longer ones have their own, too."""
    model = small_decoder("llama-decoder", layers=1)
    compute_positions(model, ARRANGED["row"], most=20)
    check_texts(model, increments=False)


def cast_caches(model: onnx.ModelProto, inside: int, outside: int, *, sized: bool = False) -> None:
    """Append to caches of another element type than their inputs and outputs have.

    Args:
        model: A decoder of the zoo with plain operators; it is changed.
        inside: The type in which keys and values are joined.
        outside: That of past and present keys and values.
        sized: Read the shape of past keys after their cast, with the length of the text.
    """
    for value in (*model.graph.input, *model.graph.output):
        if value.name.startswith(("past", "present")):
            value.type.tensor_type.elem_type = outside
    nodes: list[onnx.NodeProto] = []
    for other in model.graph.node:
        present = other.output[0]
        if not present.startswith("present"):
            other.input[:] = [f"{name}/used" if name.startswith("present") else name for name in other.input]
            nodes.append(other)
            continue
        past, new = other.input
        nodes += [
            node("Cast", [new], f"{present}/new", to=inside),
            node("Cast", [past], f"{present}/past", to=inside),
            node("Concat", [f"{present}/past", f"{present}/new"], f"{present}/all", axis=2),
            node("Cast", [f"{present}/all"], present, to=outside),
            node("Cast", [f"{present}/all"], f"{present}/used", to=TensorProto.FLOAT),
        ]
        if sized:
            nodes.append(node("Shape", [f"{present}/past"], f"{present}/sizes"))
    del model.graph.node[:]
    model.graph.node.extend(nodes)


HALF, FULL = TensorProto.FLOAT16, TensorProto.FLOAT


@pytest.mark.parametrize(
    ("name", "inside", "outside"),
    [("gpt2-decoder", FULL, FULL), ("llama-decoder", HALF, FULL), ("gpt2-decoder", HALF, HALF)],
)
def test_casts_without_loss(name: str, inside: int, outside: int) -> None:
    """A cast of present keys and values to the same or a longer type leaves caches that grow in place."""
    model = small_decoder(name, layers=1)
    cast_caches(model, inside, outside)
    check_texts(model, increments=True)


def test_the_shape_of_cast_keys() -> None:
    """The shape of past keys is known without them, also behind their cast."""
    model = small_decoder("llama-decoder")
    cast_caches(model, HALF, FULL, sized=True)
    compute_positions(model, ARRANGED["row"])
    shape = next(other for other in model.graph.node if other.output[0] == "past/list")
    shape.input[0] = "present.0.key/past"
    model.graph.node.remove(shape)
    at = next(at for at, other in enumerate(model.graph.node) if other.output[0] == "past")
    cast = next(other for other in model.graph.node if other.output[0] == "present.0.key/past")
    model.graph.node.remove(cast)
    model.graph.node.insert(at, shape)
    model.graph.node.insert(at, cast)
    check_texts(model, increments=True)


def test_casts_with_loss() -> None:
    """Attention reads new keys and values before they are rounded; the model's own present is kept."""
    model = small_decoder("llama-decoder", layers=1)
    cast_caches(model, FULL, HALF)
    check_texts(model, increments=False)
