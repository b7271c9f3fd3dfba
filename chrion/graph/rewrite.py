"""Rewrites of models: their contract, and what they share: attributes, bodies of nodes, and weights.

A rewrite takes a model (a :class:`chrion.graph.model.Graph`, or a decoder with what is known of it) and returns another
one with the same results except for rounding: the model itself if there is nothing to rewrite. A model to which it does
not apply is refused by :class:`RewriteError`, which names the operator that is in the way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from chrion.errors import ModelError

#: The names of the domain of ONNX's own operators.
STANDARD = frozenset({"", "ai.onnx"})
#: The domain of onnxruntime's own operators.
MICROSOFT = "com.microsoft"
#: The domain of Chrion's native operators.
NATIVE = "chrion"
#: What a node may have as a constant input.
Constant = float | Sequence[int] | np.ndarray[Any, Any]


class RewriteError(ModelError):
    """A rewrite does not apply to a model.

    Args:
        reason: Why it does not.
        node: The operator that is in the way, if it is a single one; the message begins with it.
        hint: What to do about it.

    Attributes:
        operator: The type and the name of this operator; may be empty.
    """

    def __init__(self, reason: str, node: onnx.NodeProto | None = None, *, hint: str = "") -> None:
        self.operator = "" if node is None else describe(node)
        super().__init__(f"{self.operator} {reason}".lstrip(), hint=hint)


@contextmanager
def refusals_of(where: str) -> Iterator[None]:
    """Begin the messages of refusals with the model, and what cannot be done with it."""
    try:
        yield
    except RewriteError as refusal:
        refusal.message = f"{where}: {refusal.message}"
        raise


class Rewriter:
    """A model that is being rewritten.

    The rewritten model has unique names of nodes and values, its nodes are in topological order, and it has the inputs
    and outputs of the model before unless others are given. Tests check that of every rewrite.

    Args:
        model: The model before.

    Attributes:
        nodes: All nodes of the rewritten model.
        added: Weights beside those of the model, by name.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model = model
        self.nodes: list[onnx.NodeProto] = []
        self.added: dict[str, onnx.TensorProto] = {}

    def add(self, kind: str, inputs: Sequence[str | Constant], output: str, **attributes: Any) -> str:
        """Add a node of one output, and return this; inputs that are no names become constants."""
        names = [value if isinstance(value, str) else self.constant(value) for value in inputs]
        self.nodes.append(helper.make_node(kind, names, [output], name=f"{kind}:{output}", **attributes))
        return output

    def split(self, source: str, outputs: Sequence[str], sizes: Sequence[int], axis: int, name: str) -> None:
        """Add a node that splits a value; before opset 13 the sizes are an attribute."""
        given: dict[str, Any] = {"split": [*sizes]} if standard_opset(self.model) < 13 else {}
        inputs = [source] if given else [source, self.weight(f"{name}/sizes", np.array(sizes, np.int64))]
        self.nodes.append(helper.make_node("Split", inputs, outputs, name=name, axis=axis, **given))

    def constant(self, value: Constant) -> str:
        """Add a constant, of float32 for a ``float`` and of int64 for an ``int``, and return its name."""
        array = np.asarray(value, {float: np.float32, int: np.int64}.get(type(value)))
        return self.weight(f"constant/{array.dtype}/{array.shape}/{array.ravel().tolist()}", array)

    def weight(self, name: str, value: np.ndarray[Any, Any]) -> str:
        """Add a weight, and return its name."""
        self.added[name] = numpy_helper.from_array(value, name)
        return name

    def finish(
        self, inputs: Iterable[onnx.ValueInfoProto] | None = None, outputs: Iterable[onnx.ValueInfoProto] | None = None
    ) -> onnx.ModelProto:
        """Return the rewritten model.

        It has the weights that its nodes read, or all weights if a node has a body that may read any.

        Args:
            inputs: Its inputs; by default those of the model before.
            outputs: Its outputs; by default those of the model before.
        """
        rewritten = onnx.ModelProto()
        rewritten.CopyFrom(self.model)
        graph = rewritten.graph
        for values, given in ((graph.input, inputs), (graph.output, outputs)):
            if given is not None:
                del values[:]
                values.extend(given)
        del graph.node[:]
        graph.node.extend(self.nodes)
        used = {name for node in graph.node for name in node.input} | {o.name for o in graph.output}
        captured = has_bodies(graph.node)
        del graph.initializer[:]
        weights = {tensor.name: tensor for tensor in self.model.graph.initializer} | self.added
        graph.initializer.extend(tensor for name, tensor in weights.items() if captured or name in used)
        return rewritten


def describe(node: onnx.NodeProto) -> str:
    """Return the type and the name of a node, for messages."""
    return f"{node.op_type} {node.name!r}"


def with_inputs(node: onnx.NodeProto, inputs: Mapping[int, str]) -> onnx.NodeProto:
    """Return a copy of a node with other inputs at some places."""
    changed = onnx.NodeProto()
    changed.CopyFrom(node)
    for at, name in inputs.items():
        changed.input[at] = name
    return changed


def producers(nodes: Iterable[onnx.NodeProto]) -> dict[str, onnx.NodeProto]:
    """Return the nodes by the values that they compute."""
    return {name: node for node in nodes for name in node.output if name}


def readers(nodes: Iterable[onnx.NodeProto]) -> dict[str, list[onnx.NodeProto]]:
    """Return the nodes by the values that they read as inputs."""
    reading: dict[str, list[onnx.NodeProto]] = {}
    for node in nodes:
        for name in {*node.input} - {""}:
            reading.setdefault(name, []).append(node)
    return reading


def nodes_before(names: Iterable[str], producer: Mapping[str, int], reads: Sequence[Iterable[str]]) -> set[int]:
    """Return the nodes that compute some values, and all nodes before them.

    Args:
        names: The values.
        producer: The numbers of the nodes by the values that they compute; others are not followed.
        reads: The values that each node reads.
    """
    before: set[int] = set()
    waiting = [*names]
    while waiting:
        at = producer.get(waiting.pop())
        if at is not None and at not in before:
            before.add(at)
            waiting += reads[at]
    return before


def needed_nodes(nodes: Sequence[onnx.NodeProto], outputs: Iterable[str]) -> list[onnx.NodeProto]:
    """Return the nodes without bodies that outputs depend on, in their order."""
    producer = {name: at for at, node in enumerate(nodes) for name in node.output if name}
    return [nodes[at] for at in sorted(nodes_before(outputs, producer, [node.input for node in nodes]))]


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
