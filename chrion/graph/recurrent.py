"""Unrolling of recurrent operators along time, into chunks of several steps.

A folded LSTM, GRU or RNN is one operator: it runs on one lane, and the next layer waits for all of it. Unrolled, it is
a sequence of recurrent operators over c steps each, which pass on their states. Layers can then follow each other
chunk by chunk, and the two directions of a bidirectional layer can run in parallel, while onnxruntime's kernel still
processes sequences. Operators between two layers that treat all steps alike (Squeeze, Relu, ...) are copied for each
chunk, too, so that no layer waits for all of the previous one.

Operators that are not unrolled: those with ``sequence_lens`` or with weights that are not constant; those with
``layout`` 1, which onnxruntime does not run on sequences; and bidirectional ones with ``activation_alpha`` or
``activation_beta``. These lists have entries only for activation functions with parameters, so the boundary between the
entries of the two directions depends on the defaults of every function.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from chrion.graph.assemble import node_reads
from chrion.graph.chains import INITIAL, SEQUENCE_LENS, STATES
from chrion.graph.folding import POINTWISE, fold
from chrion.graph.model import Graph
from chrion.graph.rewrite import STANDARD, Rewriter, has_bodies, int_attribute, text_attribute, with_inputs
from chrion.graph.variants import rewritten
from chrion.graph.views import constant_integers

_PARAMETERS = frozenset({"activation_alpha", "activation_beta"})
#: The numbers of chunks to try.
_PARTS = (2, 3, 4, 6, 8, 12)


def unrollable(graph: Graph) -> tuple[int, ...]:
    """Return the sequence lengths of the recurrent operators of a graph that can be cut, all above one step."""
    weights = {t.name for t in graph.model.graph.initializer}
    lengths = (_length(graph, node, weights) for node in graph.model.graph.node)
    return tuple(length for length in lengths if length > 1)


def unroll(graph: Graph, chunk: int) -> Graph:
    """Return the graph with every recurrent operator cut into chunks of ``chunk`` steps.

    Chains of recurrent operators are folded before (:mod:`chrion.graph.folding`).

    Args:
        graph: A graph of known shapes.
        chunk: The steps of each chunk; the last one may have fewer. For a sequence that is not longer than this, only
            the two directions are separated.

    Returns:
        A graph with the same results, or the graph itself if no operator can be folded or cut.
    """
    folded = fold(graph)
    lengths = unrollable(folded)
    if not lengths or (chunk >= max(lengths) and not _has_bidirectional(folded)):
        return folded
    return rewritten(folded, ("unrolled", chunk), lambda: _Unroller(folded, chunk).run())


def chunk_choices(graph: Graph) -> tuple[int, ...]:
    """Return the chunk lengths to try: the longest sequence divided by 2, 3, 4, 6, 8 and 12, rounded up.

    The first one is the whole sequence if the graph has chains, which are only folded then, or bidirectional operators,
    whose directions are only separated.
    """
    folded, longest = fold(graph), longest_sequence(graph)
    whole = [longest] if longest and (folded is not graph or _has_bidirectional(folded)) else []
    return tuple(dict.fromkeys([*whole, *(-(-longest // parts) for parts in _PARTS if parts <= longest)]))


def longest_sequence(graph: Graph) -> int:
    """Return the length of the longest sequence that can be cut, after chains are folded; 0 if there is none."""
    return max(unrollable(fold(graph)), default=0)


def _has_bidirectional(graph: Graph) -> bool:
    return any(text_attribute(node, "direction", "") == "bidirectional" for node in graph.model.graph.node)


def _length(graph: Graph, node: onnx.NodeProto, weights: Iterable[str]) -> int:
    """Return the number of steps of a recurrent node that can be cut, or 0 for any other node."""
    inputs = list(node.input)
    if node.op_type not in STATES or node.domain not in STANDARD or int_attribute(node, "layout", 0):
        return 0
    if text_attribute(node, "direction", "") == "bidirectional" and any(
        a.name in _PARAMETERS and a.floats for a in node.attribute
    ):
        return 0
    constant = all(name in weights for at, name in enumerate(inputs) if name and at in {1, 2, 3, 7})
    if not constant or (len(inputs) > SEQUENCE_LENS and inputs[SEQUENCE_LENS]):
        return 0
    shape = graph.values[inputs[0]].shape or ()
    return shape[0] if len(shape) == 3 and isinstance(shape[0], int) else 0


class _Unroller(Rewriter):
    """A rewriter that unrolls a model node by node and records which values exist in chunks."""

    def __init__(self, graph: Graph, chunk: int) -> None:
        super().__init__(graph.model)
        self.graph, self.chunk = graph, chunk
        #: The chunks of each value along its first axis, in order of time.
        self.parts: dict[str, list[str]] = {}
        #: The values in ``parts`` that also exist as a whole.
        self.whole: set[str] = set()

    def run(self) -> onnx.ModelProto:
        """Return the unrolled model."""
        self.weights = {t.name: t for t in self.graph.model.graph.initializer}
        results = {o.name for o in self.graph.model.graph.output}
        self.read = results.union(*map(set, node_reads(self.graph.model)))
        for node in self.graph.model.graph.node:
            length = _length(self.graph, node, self.weights)
            if length > 1:
                self._unroll_node(node, length)
            elif not self._apply_by_chunk(node):
                self._keep(node)
        for name in results:
            self._join(name)
        return self.finish()

    def _keep(self, node: onnx.NodeProto) -> None:
        for name in node.input:
            self._join(name)
        if has_bodies([node]):  # its body may read any value of the graph
            for name in list(self.parts):
                self._join(name)
        self.nodes.append(node)

    def _join(self, name: str) -> None:
        """Concatenate a value that exists only in chunks."""
        if name in self.parts and name not in self.whole:
            self.whole.add(name)
            parts = self.parts[name]
            self.nodes.append(_concat_node(parts, name, f"{name}/join", axis=0))

    def _split(self, name: str, sizes: Sequence[int]) -> list[str]:
        """Return the chunks of a value; a value that exists only as a whole is split once for all of its readers."""
        if name not in self.parts:
            self.whole.add(name)
            self.parts[name] = [name]
            if len(sizes) > 1:
                self.parts[name] = [f"{name}/t{t}" for t in range(len(sizes))]
                self.split(name, self.parts[name], sizes, 0, f"{name}/split")
        return self.parts[name]

    def _unroll_node(self, node: onnx.NodeProto, length: int) -> None:
        sizes = [min(self.chunk, length - t) for t in range(0, length, self.chunk)]
        sources = self._split(node.input[0], sizes)
        directions = {"bidirectional": ("forward", "reverse")}
        direction = text_attribute(node, "direction", "forward")
        results = [
            self._direction(node, at, name, sources) for at, name in enumerate(directions.get(direction, (direction,)))
        ]
        outputs = [*node.output, "", "", ""]
        if outputs[0] in self.read:
            rows = [list(pair) for pair in zip(*(chunks for chunks, _ in results), strict=True)]
            self.parts[outputs[0]] = [
                self._concatenated(row, f"{outputs[0]}/t{t}", axis=1) for t, row in enumerate(rows)
            ]
        for state, name in enumerate(outputs[1 : 1 + STATES[node.op_type]]):
            if name in self.read:
                self.nodes.append(_concat_node([states[state] for _, states in results], name, f"{name}/state", axis=0))

    def _direction(
        self, node: onnx.NodeProto, at: int, direction: str, sources: Sequence[str]
    ) -> tuple[list[str], list[str]]:
        """Add one direction of a recurrent node; return its chunks of Y, and its final states."""
        count = 2 if text_attribute(node, "direction", "forward") == "bidirectional" else 1
        inputs = [*node.input, *[""] * 8][:8]
        constants = [self._slice(name, at, count) for name in inputs[1:4]]
        peepholes = self._slice(inputs[7], at, count)
        given = inputs[INITIAL : INITIAL + STATES[node.op_type]]
        states = [self._state(node, k, at, count) for k in range(len(given))]
        results = [""] * len(sources)
        order = list(range(len(sources)))
        for t in order if direction == "forward" else reversed(order):
            tag = f"{node.name}/{direction[0]}{t}"
            sequence = f"{tag}/Y" if node.output[0] in self.read else ""
            after = [f"{tag}/{name}" for name in ("h", "c")[: len(states)]]
            arguments = [sources[t], *constants, "", *states, *([peepholes] if peepholes else [])]
            while not arguments[-1]:
                arguments.pop()
            self.nodes.append(_chunk_node(node, direction, at, count, tag, arguments, [sequence, *after]))
            results[t], states = sequence, after
        return results, states

    def _apply_by_chunk(self, node: onnx.NodeProto) -> bool:
        """Apply a node chunk by chunk if possible; return whether it was possible.

        The node's input must exist in chunks, and the node must treat all steps alike.
        """
        if not node.input or node.input[0] not in self.parts or len(node.output) != 1:
            return False
        parts = self.parts[node.input[0]]
        if not self._treats_steps_alike(node):
            return False
        name = node.output[0]
        self.parts[name] = [f"{name}/t{t}" for t in range(len(parts))]
        for t, (source, target) in enumerate(zip(parts, self.parts[name], strict=True)):
            copy = with_inputs(node, {0: source})
            copy.name, copy.output[0] = f"{node.name}/t{t}", target
            self.nodes.append(copy)
        return True

    def _treats_steps_alike(self, node: onnx.NodeProto) -> bool:
        if node.op_type in POINTWISE:
            return len(node.input) == 1
        if node.op_type == "Squeeze":
            axes = constant_integers(self.graph, node, "axes", 1)
            rank = len(self.graph.values[node.input[0]].shape or ())
            return axes is not None and all(axis % rank != 0 for axis in axes)
        if node.op_type == "Transpose":
            return (constant_integers(self.graph, node, "perm", None) or [1])[0] == 0
        if node.op_type == "Reshape":
            shape = constant_integers(self.graph, node, "", 1)
            return shape is not None and len(shape) > 0 and shape[0] == 0
        return False

    def _slice(self, name: str, at: int, count: int) -> str:
        """Return the name of one direction's slice of a constant; an external slice refers to the same file."""
        if count == 1 or not name:
            return name
        target = f"{name}/{'fr'[at]}"
        if target not in self.added:
            self.added[target] = _weight_slice(self.weights[name], at, count, target)
        return target

    def _state(self, node: onnx.NodeProto, k: int, at: int, count: int) -> str:
        """Return the name of the initial value of state ``k`` of one direction.

        A constant initial value is copied for each operator, even if several operators start from the same one, so that
        the first chunk of an operator has the same edges as later ones.
        """
        name = node.input[INITIAL + k] if len(node.input) > INITIAL + k else ""
        own = f"{node.name}/{'fr'[at]}/{'hc'[k]}"
        if not name:
            return self.weight(own, self._zero(node))
        if name in self.weights:
            self.added[own] = _weight_slice(self.weights[name], at, count, own)
            return own
        if count == 1:
            self._join(name)
            return name
        targets = [f"{name}/{d}" for d in "fr"]
        if not any(targets[0] in other.output for other in self.nodes):
            self._join(name)
            self.split(name, targets, [1, 1], 0, f"{name}/directions")
        return targets[at]

    def _zero(self, node: onnx.NodeProto) -> np.ndarray[Any, Any]:
        """Return the default initial state: zeros of shape [1, batch, hidden]."""
        info = self.graph.values[node.input[0]]
        batch, hidden = (info.shape or ())[1], (self.graph.values[node.input[2]].shape or ())[-1]
        dtype = {"tensor(double)": np.float64, "tensor(float16)": np.float16}.get(info.type, np.float32)
        return np.zeros((1, int(batch or 0), int(hidden or 0)), dtype)

    def _concatenated(self, parts: list[str], name: str, axis: int) -> str:
        if len(parts) == 1:
            return parts[0]
        self.nodes.append(_concat_node(parts, name, f"{name}/directions", axis))
        return name


def _chunk_node(  # noqa: PLR0913, PLR0917 - all properties of a recurrent operator
    node: onnx.NodeProto, direction: str, at: int, count: int, name: str, inputs: Sequence[str], outputs: Sequence[str]
) -> onnx.NodeProto:
    chunk = helper.make_node(node.op_type, inputs, outputs, name=name)
    for attribute in node.attribute:
        if attribute.name == "direction":
            continue
        copied = chunk.attribute.add()
        copied.CopyFrom(attribute)
        if attribute.name == "activations":
            share = len(attribute.strings) // count
            del copied.strings[:]
            copied.strings.extend(attribute.strings[at * share : (at + 1) * share])
    chunk.attribute.append(helper.make_attribute("direction", direction))
    return chunk


def _concat_node(parts: Sequence[str], target: str, name: str, axis: int) -> onnx.NodeProto:
    if len(parts) == 1:
        return helper.make_node("Identity", parts, [target], name=name)
    return helper.make_node("Concat", parts, [target], name=name, axis=axis)


def _weight_slice(tensor: onnx.TensorProto, at: int, count: int, name: str) -> onnx.TensorProto:
    """Return slice ``at`` of ``count`` along the first axis of a weight."""
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        return numpy_helper.from_array(np.split(numpy_helper.to_array(tensor), count)[at], name)
    part = onnx.TensorProto()
    part.CopyFrom(tensor)
    part.name = name
    part.dims[0] = tensor.dims[0] // count
    entries = {e.key: e.value for e in tensor.external_data}
    length = int(entries["length"]) // count
    entries |= {"offset": str(int(entries.get("offset", 0)) + at * length), "length": str(length)}
    entries.pop("checksum", None)
    del part.external_data[:]
    for key, value in entries.items():
        part.external_data.add(key=key, value=value)
    return part
