"""Functions for rewriting models: attributes, bodies of nodes, weights, and splitting of values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import onnx
from onnx import helper, numpy_helper

#: The names of the domain of ONNX's own operators.
STANDARD = frozenset({"", "ai.onnx"})
#: The domain of onnxruntime's own operators.
MICROSOFT = "com.microsoft"


def replace_nodes(
    model: onnx.ModelProto, nodes: Iterable[onnx.NodeProto], added: Mapping[str, onnx.TensorProto]
) -> onnx.ModelProto:
    """Return a model with its nodes replaced.

    Args:
        model: The model whose inputs, outputs and weights to keep.
        nodes: All nodes, in topological order.
        added: New weights by name.

    Returns:
        A model with the weights that its nodes read, or with all weights if a node has a body that may read any.
    """
    rewritten = onnx.ModelProto()
    rewritten.CopyFrom(model)
    del rewritten.graph.node[:]
    rewritten.graph.node.extend(nodes)
    used = {name for node in rewritten.graph.node for name in node.input} | {o.name for o in rewritten.graph.output}
    captured = has_bodies(rewritten.graph.node)
    weights = [*model.graph.initializer, *added.values()]
    del rewritten.graph.initializer[:]
    rewritten.graph.initializer.extend(t for t in weights if captured or t.name in used)
    return rewritten


def needed_nodes(nodes: Sequence[onnx.NodeProto], outputs: Iterable[str]) -> list[onnx.NodeProto]:
    """Return the nodes that outputs depend on, in their order.

    Args:
        nodes: Nodes without bodies, in topological order.
        outputs: The names of the outputs.
    """
    wanted, found = {*outputs}, []
    for node in reversed(nodes):
        if not wanted.isdisjoint(node.output):
            wanted.update(filter(None, node.input))
            found.append(node)
    return found[::-1]


def make_dense(model: onnx.ModelProto) -> None:
    """Convert the sparse initialisers of a model's graph to dense ones, in place, as onnxruntime does."""
    for sparse in model.graph.sparse_initializer:
        values, indices = numpy_helper.to_array(sparse.values), numpy_helper.to_array(sparse.indices)
        dense = np.zeros(tuple(sparse.dims), values.dtype)
        dense[tuple(indices.T) if indices.ndim > 1 else np.unravel_index(indices, dense.shape)] = values
        model.graph.initializer.append(numpy_helper.from_array(dense, sparse.values.name))
    del model.graph.sparse_initializer[:]


def rename_weights(model: onnx.ModelProto, prefix: str) -> None:
    """Prefix the names of all initialisers of a model, in place, including their uses in the bodies of nodes.

    Initialisers that the model returns keep their names, since callers request outputs by name.

    Args:
        model: The model.
        prefix: A prefix that no name in the model has.
    """
    returned = {o.name for o in model.graph.output}
    names = {t.name: prefix + t.name for t in model.graph.initializer if t.name not in returned}
    for tensor in model.graph.initializer:
        tensor.name = names.get(tensor.name, tensor.name)
    for value in (*model.graph.input, *model.graph.value_info):
        value.name = names.get(value.name, value.name)
    rename_reads(model.graph.node, names)


def rename_reads(nodes: Iterable[onnx.NodeProto], names: Mapping[str, str]) -> None:
    """Rename the values that nodes and their bodies read, in place."""
    for node in nodes:
        for at, name in enumerate(node.input):
            if name in names:
                node.input[at] = names[name]
        for body in bodies_of(node):
            own = defined_names(body)
            outer = {name: new for name, new in names.items() if name not in own}
            rename_reads(body.node, outer)
            for result in body.output:
                result.name = outer.get(result.name, result.name)


def bodies_of(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Yield the graphs that a node has as attributes: the bodies of If, Loop and Scan."""
    for attribute in node.attribute:
        yield from [attribute.g] if attribute.HasField("g") else attribute.graphs


def defined_names(graph: onnx.GraphProto) -> set[str]:
    """Return the names of the values that a graph defines itself: inputs, weights and node outputs."""
    names = {v.name for v in graph.input} | {t.name for t in graph.initializer}
    names |= {t.values.name for t in graph.sparse_initializer}
    return names.union(*(node.output for node in graph.node))


def split_node(  # noqa: PLR0913, PLR0917 - all properties of a Split
    source: str, outputs: Sequence[str], name: str, opset: int, sizes: Sequence[int], axis: int
) -> tuple[onnx.NodeProto, dict[str, onnx.TensorProto]]:
    """Return a Split node and the weight with its sizes; before opset 13 the sizes are an attribute."""
    if opset < 13:
        return helper.make_node("Split", [source], outputs, name=name, axis=axis, split=list(sizes)), {}
    counts = numpy_helper.from_array(np.array(sizes, np.int64), f"{name}/sizes")
    return helper.make_node("Split", [source, counts.name], outputs, name=name, axis=axis), {counts.name: counts}


def standard_opset(model: onnx.ModelProto) -> int:
    """Return the version of ONNX's own operators that a model uses."""
    return next(o.version for o in model.opset_import if o.domain in STANDARD)


def has_bodies(nodes: Iterable[onnx.NodeProto]) -> bool:
    """Return whether any of the nodes has a body, as If, Loop and Scan have; a body may read any value of the graph."""
    kinds = {onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS}
    return any(a.type in kinds for node in nodes for a in node.attribute)


def int_attribute(node: onnx.NodeProto, name: str, default: int) -> int:
    """Return the value of an integer attribute, or ``default`` if the node lacks it."""
    return next((int(a.i) for a in node.attribute if a.name == name), default)


def float_attribute(node: onnx.NodeProto, name: str, default: float) -> float:
    """Return the value of an attribute that is a number, or ``default`` if the node lacks it."""
    return next((float(a.f) for a in node.attribute if a.name == name), default)


def set_int_attribute(node: onnx.NodeProto, name: str, value: int) -> None:
    """Set an integer attribute, in place."""
    for attribute in [a for a in node.attribute if a.name == name]:
        node.attribute.remove(attribute)
    node.attribute.append(helper.make_attribute(name, value))


def ints_attribute(node: onnx.NodeProto, name: str, default: Sequence[int]) -> tuple[int, ...]:
    """Return the value of an attribute that is a list of integers, or ``default`` if the node lacks it."""
    return next((tuple(a.ints) for a in node.attribute if a.name == name), tuple(default))


def text_attribute(node: onnx.NodeProto, name: str, default: str) -> str:
    """Return the value of a text attribute, or ``default`` if the node lacks it."""
    return next((a.s.decode() for a in node.attribute if a.name == name), default)
