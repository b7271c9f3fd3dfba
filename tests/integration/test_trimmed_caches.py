"""Which operators between a past input and its present output may drop rows of the cache."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import chrion
from chrion.generation.rewrites.decoder import decoder_signature
from chrion.generation.rewrites.long_texts import find_trimmed_caches
from decoder_support import FORMS, small_decoder
from sliding_window import trim_caches

NUMBERS = {
    "pair": [0, 1],
    "from": [-3],
    "to": [2**62],
    "rows-axis": [2],
    "width-axis": [3],
    "many": [0, 0],
    "flag": [True],
}


def with_output(*nodes: onnx.NodeProto) -> onnx.ModelProto:
    """Return a decoder that computes ``present.1.key`` by nodes from the value that it was before, ``joined``."""
    model = small_decoder("llama-decoder")
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = ["joined" if name == "present.1.key" else name for name in names]
    model.graph.node.extend(nodes)
    model.graph.initializer.extend(numpy_helper.from_array(np.array(value), name) for name, value in NUMBERS.items())
    return model


def trimmed(model: onnx.ModelProto) -> dict[str, str]:
    graph = chrion.load(model)
    return find_trimmed_caches(graph, decoder_signature(graph))


def make(kind: str, inputs: list[str], outputs: list[str], **attributes: int) -> onnx.NodeProto:
    return helper.make_node(kind, inputs, outputs, kind, **attributes)


@pytest.mark.parametrize("name", FORMS)
def test_caches_that_are_joined_keep_all_rows(name: str) -> None:
    """Nothing is found in decoders that append new rows, whichever operator does so."""
    assert trimmed(small_decoder(name)) == {}


def test_layers_with_a_window() -> None:
    """Their caches are named with the first operator at fault, those of the other layers are not."""
    model = trim_caches(small_decoder("llama-decoder", layers=3), 8, (0, 2))
    names = [f"present.{layer}.{kind}" for layer in (0, 2) for kind in ("key", "value")]
    assert trimmed(model) == {name: f"Slice 'trim {name}'" for name in names}


@pytest.mark.parametrize(
    "nodes",
    [
        [make("Slice", ["joined", "from", "to", "rows-axis"], ["present.1.key"])],
        [make("Gather", ["joined", "many"], ["present.1.key"], axis=2)],
        [make("Split", ["joined"], ["present.1.key", "rest"], axis=2)],
        [make("Compress", ["joined", "flag"], ["present.1.key"], axis=2)],
        [make("ReduceMax", ["joined"], ["present.1.key"])],
        [make("GatherND", ["joined", "many"], ["few"]), make("Unsqueeze", ["few", "pair"], ["present.1.key"])],
    ],
    ids=lambda nodes: nodes[0].op_type,
)
def test_operators_that_may_drop_rows(nodes: list[onnx.NodeProto]) -> None:
    """Those that select along the axis of rows, and others that are not known to keep all."""
    assert trimmed(with_output(*nodes)) == {"present.1.key": f"{nodes[0].op_type} {nodes[0].name!r}"}


@pytest.mark.parametrize(
    "nodes",
    [
        [make("Slice", ["joined", "from", "to", "width-axis"], ["present.1.key"])],
        [make("Gather", ["joined", "many"], ["present.1.key"], axis=3)],
        [make("Split", ["joined"], ["present.1.key", "rest"], axis=3)],
        [
            make("Cast", ["joined"], ["half"], to=TensorProto.FLOAT16),
            make("CastLike", ["half", "joined"], ["present.1.key"]),
        ],
        [make("Shape", ["joined"], ["sizes"]), make("ConstantOfShape", ["sizes"], ["present.1.key"])],
    ],
    ids=lambda nodes: nodes[0].op_type,
)
def test_operators_that_keep_rows(nodes: list[onnx.NodeProto]) -> None:
    """Those along an axis of fixed length, and those that read no more than the number of rows."""
    assert trimmed(with_output(*nodes)) == {}
