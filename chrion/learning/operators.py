"""The raw state of operators: what GPG knows of a combined block (section V-C of the paper)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from chrion.graph.blocks import combine
from chrion.graph.dag import Dag
from chrion.graph.model import Graph

#: Numbers for each operator. The paper projects nothing between the raw state and its 32 hidden units, so that there
#: have to be as many: a type (7), two shapes (4 each), stride and kernel (2 each), padding (4), groups, activation and
#: pooling (4 each).
NUMBERS = 32
_TYPES = (
    ("Conv", "FusedConv"),
    ("Gemm", "MatMul"),
    ("Pool",),
    ("Concat",),
    ("Add", "Sum", "Mul"),
    ("Relu", "Sigmoid", "Tanh"),
)
_ACTIVATIONS = ("Relu", "Sigmoid", "Tanh")
_POOLS = ("MaxPool", "AveragePool", "GlobalMaxPool", "GlobalAveragePool")


@dataclass(frozen=True, eq=False)
class BlockGraph:
    """A combined block with the state of its operators, which are in topological order."""

    dag: Dag
    #: s_v of Equation 5: a row for each operator.
    state: np.ndarray[Any, np.dtype[np.float32]]


def read_block(parts: Sequence[tuple[Graph, Sequence[int]]]) -> BlockGraph:
    """Return the combined block of modules: the graph of each, and its operators in topological order."""
    dag = combine([(graph.dag, own) for graph, own in parts])
    rows = [operator_state(graph, i) for graph, own in parts for i in own]
    return BlockGraph(dag, np.array(rows, np.float32))


def operator_state(graph: Graph, i: int) -> list[float]:
    """Return the raw state of an operator, each number about 0 to 1; sizes by their logarithms."""
    nodes = [graph.model.graph.node[n] for n in graph.nodes[i]]
    node, last = nodes[0], nodes[-1]
    kind = node.op_type
    types = [float(any(name in kind for name in names)) for names in _TYPES]
    own = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    strides, kernel, pads = (list(own.get(name, ())) for name in ("strides", "kernel_shape", "pads"))
    fused = own.get("activation", b"")
    activation = fused.decode() if isinstance(fused, bytes) and fused else kind
    activations = [float(activation == name) for name in _ACTIVATIONS]
    return [
        *types,
        float(not any(types)),
        *_shape(graph, node.input[0] if node.input else ""),
        *_shape(graph, last.output[0] if last.output else ""),
        *_sizes(strides, 2, 4),
        *_sizes(kernel, 2, 8),
        *_sizes(pads, 4, 4),
        math.log2(max(1, own.get("group", 1))) / 10,
        *activations,
        float(not any(activations)),
        *(float(kind == name) for name in _POOLS),
    ]


def _shape(graph: Graph, name: str) -> list[float]:
    info = graph.values.get(name)
    known = [d for d in (info.shape if info and info.shape else ()) if isinstance(d, int)]
    return [math.log2(1 + size) / 12 for size in [*known[-4:], 0, 0, 0, 0][:4]]


def _sizes(values: Sequence[int], count: int, scale: float) -> list[float]:
    return [value / scale for value in [*values[:count], *[0] * count][:count]]
