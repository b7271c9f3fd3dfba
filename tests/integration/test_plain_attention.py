"""Fused attention as plain operators: the results of onnxruntime's own operators, for every form of them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from chrion.generation.cache import CacheManager
from chrion.generation.engine import SelectiveEngine
from chrion.generation.iteration import Work
from decoder_support import PlainDecoder, check_scores, engine_of, small_decoder, with_window
from seams.generation import around_calls

Change = Callable[[onnx.ModelProto], object]
#: Heads of 32 elements, of which a rotation may have half.
WIDE = {"hidden": 128, "heads": 4, "kv_heads": 2}


def grouped(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    """Return the fused nodes of a model."""
    return [node for node in model.graph.node if node.op_type in {"GroupQueryAttention", "Attention"}]


def with_attributes(**attributes: float) -> Change:
    """Return a change of all fused nodes."""

    def change(model: onnx.ModelProto) -> None:
        for node in grouped(model):
            node.attribute.extend(helper.make_attribute(name, value) for name, value in attributes.items())

    return change


def rotate_half(model: onnx.ModelProto) -> None:
    """Rotate the first half of a head only, by angles that have no pattern."""
    pick = np.random.default_rng(1)
    for tensor in model.graph.initializer:
        if tensor.name in {"cos_table", "sin_table"}:
            rows = numpy_helper.to_array(tensor).shape[0]
            tensor.CopyFrom(numpy_helper.from_array(pick.standard_normal((rows, 8)).astype(np.float32), tensor.name))


def do_not_rotate(model: onnx.ModelProto) -> None:
    """Leave queries and keys as they are."""
    for node in grouped(model):
        del node.input[7:]
        next(a for a in node.attribute if a.name == "do_rotary").i = 0


def pack(model: onnx.ModelProto) -> None:
    """Give queries, keys and values side by side."""
    for node in grouped(model):
        packed = f"{node.name}/packed"
        at = list(model.graph.node).index(node)
        model.graph.node.insert(at, helper.make_node("Concat", node.input[:3], [packed], axis=-1))
        node.input[:3] = [packed, "", ""]


def read_positions(model: onnx.ModelProto) -> None:
    """Give the positions of the tokens."""
    for node in grouped(model):
        node.input.append("position_ids")


def without_positions(model: onnx.ModelProto) -> None:
    """Remove the input that nothing reads."""
    model.graph.input.remove(next(value for value in model.graph.input if value.name == "position_ids"))


def with_narrow_inputs(model: onnx.ModelProto) -> None:
    """Read tokens, mask and positions of 32 bits."""
    for value in model.graph.input:
        if value.type.tensor_type.elem_type == onnx.TensorProto.INT64:
            value.type.tensor_type.elem_type = onnx.TensorProto.INT32
    for node in model.graph.node:
        if "attention_mask" in node.input and node.op_type == "ReduceSum":
            node.input[0] = "mask64"
    model.graph.node.insert(0, helper.make_node("Cast", ["attention_mask"], ["mask64"], to=onnx.TensorProto.INT64))


def hide_by_condition(model: onnx.ModelProto) -> None:
    """Give the tokens that each token sees, in place of what is added to scores."""
    producer = {name: node for node in model.graph.node for name in node.output}
    for node in grouped(model):
        node.input[3] = producer[node.input[3]].input[0]


FORMS: dict[str, list[Change]] = {
    "as it is": [],
    "half a rotation, given positions": [rotate_half, read_positions],
    "no rotation, no positions": [do_not_rotate, without_positions],
    "neighbours rotated, packed": [with_attributes(rotary_interleaved=1), pack],
    "another scale, limited scores": [with_attributes(scale=0.5, softcap=0.05)],
    "32 bits": [with_narrow_inputs],
}

#: Those of ONNX's ``Attention``.
STANDARD_FORMS: dict[str, list[Change]] = {
    "as it is": [],
    "another scale, limited scores": [with_attributes(scale=0.5, softcap=0.05)],
    "a condition": [hide_by_condition],
}


def check_mix(model: onnx.ModelProto, engine: SelectiveEngine) -> None:
    """Compare the scores of prompts, chunks, and decode steps in three iterations with plain onnxruntime."""
    plain = PlainDecoder(model)
    pick = np.random.default_rng(7)
    texts = [[int(token) for token in pick.integers(0, 61, length)] for length in (13, 4, 31, 10)]
    manager = CacheManager(engine.signature, 40 * len(texts), by_token=engine.by_token)
    caches = [manager.get(at, 40) for at in range(len(texts))]
    bounds = ((0, 0, 0, 0), (7, 1, 29, 8), (12, 3, 30, 9), (13, 4, 31, 10))
    for begin, ends in itertools.pairwise(bounds):
        batch = [
            Work(cache, np.array(text[start:end]), start)
            for cache, text, start, end in zip(caches, texts, begin, ends, strict=True)
        ]
        run = engine.run
        if ends == bounds[-1] and engine.pooled is not None:  # one token of each: in one call
            assert engine.pooled.serves(batch)
            run = engine.pooled.run
        check_scores(run(batch), [text[:end] for text, end in zip(texts, ends, strict=True)], plain)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *(pytest.param("llama-decoder-grouped", changes, id=form) for form, changes in FORMS.items()),
        *(pytest.param("llama-decoder-onnx", changes, id=f"ONNX, {form}") for form, changes in STANDARD_FORMS.items()),
    ],
)
def test_every_form_has_the_scores_of_the_fused_operator(name: str, changes: list[Change]) -> None:
    """All forms run as plain operators, and requests that decode in one call."""
    model = small_decoder(name, **WIDE)
    for change in changes:
        change(model)
    engine = engine_of(model)
    assert engine.by_token
    assert engine.pooled is not None
    check_mix(model, engine)


@pytest.mark.parametrize(
    "change", [functools.partial(with_window, window=16), with_attributes(smooth_softmax=1)], ids=["window", "softmax"]
)
def test_other_kinds_of_attention_stay_fused(change: Change) -> None:
    """A window that is longer than the trials, and a softmax with another denominator, are left to onnxruntime."""
    model = small_decoder("llama-decoder-grouped", **WIDE)
    change(model)
    engine = engine_of(model)
    assert not engine.by_token
    check_mix(model, engine)


def as_standard(model: onnx.ModelProto) -> None:
    """Rotate queries and keys by ONNX's operator, outside attention."""
    model.opset_import[0].version = 23
    model.graph.initializer.append(numpy_helper.from_array(np.array([-1]), "last-axis"))
    nodes = []
    for node in model.graph.node:
        if node.op_type == "ReduceMean":  # since opset 18, its axes are an input
            del node.attribute[:]
            node.input.append("last-axis")
        if node.op_type == "GroupQueryAttention":
            for at, heads in ((0, WIDE["heads"]), (1, WIDE["kv_heads"])):
                inputs = [node.input[at], "cos_table", "sin_table", "position_ids"]
                node.input[at] = f"{node.name}/{at}"
                nodes.append(helper.make_node("RotaryEmbedding", inputs, [node.input[at]], num_heads=heads))
            del node.input[7:]
            next(a for a in node.attribute if a.name == "do_rotary").i = 0
        nodes.append(node)
    del model.graph.node[:]
    model.graph.node.extend(nodes)


@pytest.mark.parametrize("change", [lambda _: None, as_standard], ids=["fused", "standard"])
def test_prompts_of_more_tokens_than_the_tables_have_rows_run_together(
    change: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rotation of a batch is limited by the positions of each request, not by the number of all tokens."""
    model = small_decoder("llama-decoder-grouped", **WIDE)
    change(model)
    engine, calls = engine_of(model), list[int]()
    around_calls(monkeypatch, engine, lambda run, batch: calls.append(len(batch)) or run(batch))
    texts = [[(3 * at + token) % 61 for token in range(60)] for at in range(3)]  # of 64 positions
    manager = CacheManager(engine.signature, 180, by_token=engine.by_token)
    check_scores(
        engine.run([Work(manager.get(at, 60), np.array(text), 0) for at, text in enumerate(texts)]),
        texts,
        PlainDecoder(model),
    )
    assert calls == [3]
