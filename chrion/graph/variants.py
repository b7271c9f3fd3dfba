"""Variants of graphs with rewritten operators, which their graphs keep."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

from chrion.graph.model import Graph

if TYPE_CHECKING:
    import onnx


def rewritten(graph: Graph, key: Hashable, rewrite: Callable[[], onnx.ModelProto | None]) -> Graph:
    """Return the graph of a rewritten model.

    Args:
        graph: The graph before.
        key: The rewrite and its arguments.
        rewrite: Returns the model, or None if nothing changes; the result is then the graph itself.
    """
    if key not in graph.variants:
        from chrion.graph.loader import reassemble  # noqa: PLC0415 - imports onnxruntime, which planning does not need

        model = rewrite()
        graph.variants[key] = None if model is None else reassemble(graph, model)
    return graph.variants[key] or graph
