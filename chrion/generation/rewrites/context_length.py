"""The context length of a decoder: for how many tokens it has positions.

Models state it in different places: by the rows of a table that is read by position, which may be in the branches of a
merged decoder, or in the configuration that transformers or onnxruntime-genai writes beside the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from chrion.common.files import parse_json
from chrion.errors import ModelError
from chrion.generation.rewrites.model_folder import find_beside
from chrion.graph.rewrite import int_attribute

#: Operators that change the shape or the type of positions, but not their values.
_SAME_VALUES = frozenset({"Cast", "Expand", "Flatten", "Identity", "Reshape", "Squeeze", "Tile", "Unsqueeze"})
#: Inputs that are tables of rotary embeddings, if they are weights.
_ROTARY = {"GroupQueryAttention": (7, 8), "RotaryEmbedding": (1, 2, 3)}
#: Operators that read rows of a table, and their attributes for its axis.
_READING = {"Gather": "axis", "GatherBlockQuantized": "gather_axis", "GatherND": "batch_dims"}
#: Keys of a configuration for the context length.
_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "context_length")
#: A factor that no model has.
_MOST_SCALING = 1e6
#: The configurations beside a model, and the parts of them that concern the text.
_CONFIGURATIONS = (("config.json", "text_config"), ("genai_config.json", "model"))


@dataclass(frozen=True, slots=True)
class _Scope:
    """The values that the nodes of a graph can read: its own, and those of the graphs around it."""

    weights: Mapping[str, onnx.TensorProto]
    #: The nodes by the names of their outputs.
    producers: Mapping[str, onnx.NodeProto]
    #: The name of the positions.
    positions: str


def table_rows(graph: onnx.GraphProto, positions: str) -> int:
    """Return the rows of the smallest table of a model that is read by position; 0 if there is none.

    Args:
        graph: The model's graph.
        positions: The name of its positions, if they are an input.
    """
    return min(_rows(graph, _Scope({}, {}, positions)), default=0)


def find_context(model: Path) -> int:
    """Return the context length in the configuration beside a model; 0 if it does not state one.

    Raises:
        ModelError: A file is not JSON.
    """
    for file, name in _CONFIGURATIONS:
        path = find_beside(model, file)
        content = read_configuration(path) if path is not None else {}
        inner = content.get(name)
        for part in (inner if isinstance(inner, dict) else {}, content):
            for key in _KEYS:
                if type(part.get(key)) is int and part[key] > 0:
                    return _scaled(part[key], part)
    return 0


def _scaled(length: int, part: Mapping[str, Any]) -> int:
    """Return a context length with the scaling of rotary positions that it does not include.

    The rules are those of vLLM: ``linear`` and ``dynamic`` extend the stated length by their factor, ``yarn`` extends
    the original one. Other types are included in the stated length, and so is any type in that of Gemma 3.
    """
    scaling: Mapping[str, Any] = next(
        (part[key] for key in ("rope_scaling", "rope_parameters") if isinstance(part.get(key), dict)), {}
    )
    kind, factor = str(scaling.get("rope_type", scaling.get("type"))), scaling.get("factor")
    if kind not in {"dynamic", "linear", "yarn"} or str(part.get("model_type", "")).startswith("gemma3"):
        return length
    if not isinstance(factor, int | float) or not 0 < factor < _MOST_SCALING:
        return length
    original = scaling.get("original_max_position_embeddings")
    if kind == "yarn" and type(original) is int and original > 0:
        length = original
    return int(length * factor)


def read_configuration(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file beside a model; an empty one if there is no such file.

    Raises:
        ModelError: The file is not JSON.
    """
    if not path.is_file():
        return {}
    try:
        content = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: not JSON: {error}") from error
    return content if isinstance(content, dict) else {}


def _rows(graph: onnx.GraphProto, around: _Scope) -> Iterator[int]:
    """Yield the rows of all tables that are read by position, also in the bodies of nodes."""
    weights = {**around.weights, **{tensor.name: tensor for tensor in graph.initializer}}
    producers = {**around.producers, **{name: node for node in graph.node for name in node.output}}
    scope = _Scope(weights, producers, around.positions)
    for node in graph.node:
        for name in _tables(node, scope):
            if name in weights and len(weights[name].dims) > 1:
                yield weights[name].dims[0 if node.op_type in _READING else -2]
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _rows(attribute.g, scope)


def _tables(node: onnx.NodeProto, scope: _Scope) -> list[str]:
    """Return the inputs of a node that are tables with a row for each position, if they are weights."""
    if node.op_type in _READING:
        by_row = int_attribute(node, _READING[node.op_type], 0) == 0
        return [node.input[0]] if by_row and _is_position(node.input[1], scope) else []
    return [node.input[at] for at in _ROTARY.get(node.op_type, ()) if at < len(node.input)]


def _is_position(name: str, scope: _Scope) -> bool:
    """Return whether a value is the positions of the model, or the numbers from one to another."""
    while (node := scope.producers.get(name)) is not None and node.op_type in _SAME_VALUES:
        name = node.input[0]
    return name == scope.positions or (node is not None and node.op_type == "Range")
