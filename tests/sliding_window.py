"""Decoders whose layers keep the keys and values of their last tokens only, as transformers' DynamicCache does."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import helper, numpy_helper

_NEAR = "mask-near"


def trim_caches(model: onnx.ModelProto, window: int, layers: Sequence[int] = (0, 1)) -> onnx.ModelProto:
    """Let layers of a decoder see their last tokens only, and keep the rows of those that the next token sees.

    Args:
        model: A decoder of the zoo with plain operators; it is changed.
        window: The tokens that a token sees, with itself.
        layers: The layers.
    """
    graph = model.graph
    seen = next(node.output[0] for node in graph.node if node.op_type == "Where")
    whole = next(node for node in graph.node if node.input[0] == seen)
    at = list(graph.node).index(whole) + 1
    before, after = list(graph.node[:at]), list(graph.node[at:])
    before += _mask_near(graph, seen, whole.input[1], window)
    for layer in layers:
        before += _mask_of_held(layer)
        names = [f"present.{layer}.{kind}" for kind in ("key", "value")]
        own = {whole.output[0]: f"mask/{layer}", **{name: f"all/{name}" for name in names}}
        for node in after:
            node.output[:] = [own.get(name, name) for name in node.output]
            if node.output[0].startswith(f"block{layer}/"):
                node.input[:] = [own.get(name, name) for name in node.input]
        after += [helper.make_node("Slice", [own[n], "kept", "end", "axis-of-rows"], [n], f"trim {n}") for n in names]
    del graph.node[:]
    graph.node.extend([*before, *after])
    return model


def _mask_near(graph: onnx.GraphProto, seen: str, axis: str, window: int) -> list[onnx.NodeProto]:
    """Return nodes for the mask of all tokens that lets each one see the last ones only, and add their constants."""
    numbers = {"window": window, "kept": [1 - window], "end": [2**62], "axis-of-rows": [2], "last-axis": [-1]}
    graph.initializer.extend(numpy_helper.from_array(np.array(value), name) for name, value in numbers.items())
    graph.initializer.append(numpy_helper.from_array(np.float32(-1e9), "hidden"))
    columns, rows = next(node.input for node in graph.node if node.op_type == "LessOrEqual")
    return [
        helper.make_node("Sub", [rows, "window"], ["first"]),
        helper.make_node("Greater", [columns, "first"], ["near"]),
        helper.make_node("Where", ["near", seen, "hidden"], ["seen-near"]),
        helper.make_node("Unsqueeze", ["seen-near", axis], [_NEAR]),
        helper.make_node("Shape", ["input_ids"], ["new"], start=1, end=2),
    ]


def _mask_of_held(layer: int) -> list[onnx.NodeProto]:
    """Return nodes for the part of the mask that belongs to the tokens that a layer holds, and to the new ones."""
    past, held, count, first = f"past_key_values.{layer}.key", f"held/{layer}", f"count/{layer}", f"first/{layer}"
    return [
        helper.make_node("Shape", [past], [held], start=2, end=3),
        helper.make_node("Add", [held, "new"], [count]),
        helper.make_node("Neg", [count], [first]),
        helper.make_node("Slice", [_NEAR, first, "end", "last-axis"], [f"mask/{layer}"]),
    ]
