"""Declaration of test models in ONNX's text format, which reads like the graph and needs no exporter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from cases import Feed, case
from numpy.typing import ArrayLike, NDArray
from onnx import GraphProto, ModelProto, TensorProto, helper, numpy_helper, parser, save

#: An initialiser: an array as it is, a tensor, or the shape of random weights.
Weight = NDArray[Any] | TensorProto | tuple[int, ...]


def noise(*shape: int, seed: int = 0, scale: float = 1.0) -> NDArray[np.float32]:
    """Draw normally distributed numbers."""
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def integers(*shape: int, high: int, low: int = 0, seed: int = 0, dtype: type = np.int64) -> NDArray[Any]:
    """Draw whole numbers from ``[low, high)``."""
    return np.random.default_rng(seed).integers(low, high, size=shape).astype(dtype)


def text(*words: str) -> NDArray[Any]:
    """Build a vector of strings."""
    return np.array(words, dtype=object)


def scalar(value: Any, dtype: Any = np.int64) -> NDArray[Any]:
    """Build a tensor of rank 0."""
    return np.array(value, dtype=dtype)


def vector(*values: Any, dtype: Any = np.int64) -> NDArray[Any]:
    """Build a tensor of rank 1."""
    return np.array(values, dtype=dtype)


def shaped(name: str, *shapes: Sequence[int]) -> list[Feed]:
    """Draw one request of one input for each shape."""
    return [{name: noise(*shape, seed=at + 1)} for at, shape in enumerate(shapes)]


def flags(name: str, flag: str) -> list[Feed]:
    """Draw requests of N rows of eight with a flag."""
    drawn = ((1, 1), (4, 0), (7, 1))
    return [{name: noise(rows, 8, seed=rows), flag: scalar(on, bool)} for rows, on in drawn]


def trips(name: str, count: str) -> list[Feed]:
    """Draw requests of N rows of eight with a number of trips, once none."""
    drawn = ((1, 3), (4, 0), (2, 7))
    return [{name: noise(rows, 8, seed=rows), count: scalar(number)} for rows, number in drawn]


def tensor(name: str, kind: int, shape: Sequence[int], values: ArrayLike) -> TensorProto:
    """Build a tensor of a type that numpy lacks, such as ``TensorProto.INT4``."""
    return helper.make_tensor(name, kind, list(shape), np.asarray(values).ravel().tolist())


def parse(
    body: str,
    weights: Mapping[str, Weight] | None = None,
    *,
    opset: int = 17,
    domains: Mapping[str, int] | None = None,
    names: str | None = "{op}_{at}",
) -> ModelProto:
    """Build a model from its text.

    Args:
        body: A graph in ONNX's text format, without header, and functions after it.
        weights: Initialisers of the main graph.
        opset: Of the default domain.
        domains: Versions of other domains.
        names: Pattern of node names; None keeps those in the text, which are empty if not written.
    """
    imports = {"": opset, **(domains or {})}
    listed = ", ".join(f'"{domain}": {version}' for domain, version in imports.items())
    model = parser.parse_model(f"<ir_version: {_version(body, opset)}, opset_import: [{listed}]>\n{body}")
    model.graph.initializer.extend(
        _tensor(name, weight, at) for at, (name, weight) in enumerate((weights or {}).items())
    )
    if names is not None:
        _name(model.graph, names, "")
    return model


def declare(
    name: str,
    body: str,
    feeds: Sequence[Feed],
    weights: Mapping[str, Weight] | None = None,
    *,
    change: Callable[[ModelProto], None] | None = None,
    rtol: float = 1e-3,
    atol: float = 1e-4,
    **arguments: Any,
) -> None:
    """Declare a case whose model is given as text.

    Args:
        name: Of the case.
        body: As for :func:`parse`.
        feeds: Requests.
        weights: Initialisers.
        change: Edits the model before it is written.
        rtol: Relative tolerance for outputs.
        atol: Absolute tolerance for outputs.
        arguments: The other arguments of :func:`parse`.
    """

    @case(name, exporter="onnx.parser", package="onnx", rtol=rtol, atol=atol)
    def make(path: Path) -> Sequence[Feed]:
        model = parse(body, weights, **arguments)
        if change is not None:
            change(model)
        save(model, path)
        return feeds


def _version(body: str, opset: int) -> int:
    """Choose the oldest version of the format that has the opset, and functions if the text has any."""
    lowest = helper.find_min_ir_version_for([helper.make_opsetid("", opset)])
    return max(lowest, 8 if "<domain:" in body else 4)


def _tensor(name: str, weight: Weight, seed: int) -> TensorProto:
    if isinstance(weight, TensorProto):
        return weight
    if isinstance(weight, tuple):
        weight = noise(*weight, seed=100 + seed, scale=max(1, weight[0]) ** -0.5 if weight else 1.0)
    return numpy_helper.from_array(weight, name)


def _name(graph: GraphProto, pattern: str, prefix: str) -> None:
    """Name nodes by pattern, and those of subgraphs after the node that holds them."""
    for at, node in enumerate(graph.node):
        if not node.name:
            node.name = prefix + pattern.format(op=node.op_type, at=at)
        for attribute in node.attribute:
            if attribute.HasField("g"):
                _name(attribute.g, pattern, f"{node.name}/{attribute.name}/")
