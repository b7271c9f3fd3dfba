"""Extraction of operators from a graph as a separate model that onnxruntime can open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx
from onnx import helper

from chrion.graph.assemble import final_states, node_reads
from chrion.graph.model import Graph, element_code
from chrion.graph.ort_sessions import weights_folder_option


@dataclass(frozen=True)
class SubModel:
    """A model of some operators of a graph.

    Values keep their names in the whole graph, so that the ``outputs`` of one sub-model are ``inputs`` of another.
    """

    model: onnx.ModelProto
    #: Values that its operators read from outside, without weights, in the order of first use.
    inputs: tuple[str, ...]
    #: Values that operators outside read or that the graph returns, in the order in which they are computed.
    outputs: tuple[str, ...]
    #: A text that is equal for sub-models with equal operators, attributes, weights and edges, which are therefore the
    #: same function of their inputs.
    key: str
    #: The session options with which onnxruntime finds its weights.
    options: dict[str, str]


class Extractor:
    """An extractor of sub-models from one graph, with an index of the graph that all extractions share.

    The chunks of a recurrent layer have to be equal sub-models, so that they share one session and its packed weights.
    Therefore a constant initial state is an input, as the state of a later chunk is, and the final state of the last
    chunk is an output even if no operator reads it.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._reads = node_reads(graph.model)
        self._weights = {t.name: t for t in graph.model.graph.initializer}
        self._states = _initial_states(graph.model) & self._weights.keys()
        self._final = set(final_states(graph.model))
        #: The nodes that read a value, by its name.
        self.readers: dict[str, set[int]] = {}
        for i, names in enumerate(self._reads):
            for name in names:
                self.readers.setdefault(name, set()).add(i)
        self._declared: dict[str, onnx.ValueInfoProto] = {i.name: i for i in graph.model.graph.input}
        self._results = {o.name for o in graph.outputs}

    def extract(self, operators: Sequence[int], copies: int = 1) -> SubModel:
        """Return the sub-model of some operators.

        Args:
            operators: Indices into the graph's Dag. No other operator may be on a path between two of them.
            copies: The number of independent copies of the operators in the sub-model, all on the same inputs;
                measurements use more than one.
        """
        nodes = sorted(node for i in operators for node in self.graph.nodes[i])
        inside = set(nodes)
        computed = [name for node in nodes for name in self.graph.model.graph.node[node].output if name]
        reads = list(dict.fromkeys(name for node in nodes for name in self._reads[node]))
        own = set(computed)
        inputs = tuple(n for n in reads if n not in own and (n not in self._weights or n in self._states))
        outputs = tuple(n for n in computed if self._leaves(n, inside))
        if not outputs:  # no operator outside reads a value, but a model must have an output
            outputs = tuple(computed[:1])
        weights = [n for n in reads if n in self._weights and n not in self._states]
        protos = [self.graph.model.graph.node[node] for node in nodes]
        results = [*outputs]
        for copy in range(1, copies):
            protos += [_renamed(self.graph.model.graph.node[node], own, copy) for node in nodes]
            results += [_copied(name, copy) for name in outputs]
        return SubModel(
            model=self._model(protos, inputs, results, weights),
            inputs=inputs,
            outputs=tuple(results),
            key=self._key(nodes, inputs, outputs),
            options=weights_folder_option(self.graph.weights_folder),
        )

    def _leaves(self, name: str, inside: set[int]) -> bool:
        """Return whether a value that is computed inside is an output of the sub-model."""
        readers = self.readers.get(name, set())
        return name in self._results or bool(readers - inside) or (not readers and name in self._final)

    def _model(
        self, nodes: list[onnx.NodeProto], inputs: Sequence[str], outputs: Sequence[str], weights: Sequence[str]
    ) -> onnx.ModelProto:
        source = self.graph.model
        model = onnx.ModelProto(ir_version=source.ir_version, producer_name="chrion")
        model.opset_import.extend(source.opset_import)
        model.functions.extend(source.functions)
        model.graph.name = self.graph.name or "segment"
        model.graph.node.extend(nodes)
        model.graph.initializer.extend(self._weights[name] for name in weights)
        model.graph.input.extend(self._value_info(name) for name in inputs)
        for name in outputs:
            model.graph.output.add().name = name  # onnxruntime infers the type
        return model

    def _value_info(self, name: str) -> onnx.ValueInfoProto:
        if name in self._declared:
            return self._declared[name]
        info = self.graph.values[name]
        return helper.make_tensor_value_info(name, element_code(info.type), info.shape)

    def _key(self, nodes: Sequence[int], inputs: Sequence[str], outputs: Sequence[str]) -> str:
        """Return the operators as text in which every value is identified by its origin instead of its name."""
        origin = {name: f"i{at}:{self.graph.values[name]}" for at, name in enumerate(inputs)}
        lines = []
        for at, index in enumerate(nodes):
            node = self.graph.model.graph.node[index]
            attributes = sorted(a.SerializeToString(deterministic=True).hex() for a in node.attribute)
            slots = [origin.get(name, name) for name in node.input]
            captured = [name for name in self._reads[index] if name not in set(node.input)]
            lines.append(
                f"{node.domain}.{node.op_type}|{slots}|{captured}|{attributes}|{[bool(o) for o in node.output]}"
            )
            origin |= {name: f"n{at}.{slot}" for slot, name in enumerate(node.output) if name}
        return "\n".join([*lines, *(origin[name] for name in outputs)])


def _initial_states(model: onnx.ModelProto) -> set[str]:
    """Return the names of the initial states of recurrent nodes."""
    recurrent = (node for node in model.graph.node if node.op_type in {"LSTM", "GRU", "RNN"})
    return {name for node in recurrent for name in list(node.input)[5:7]}


def _copied(name: str, copy: int) -> str:
    return f"{name}/copy{copy}"


def _renamed(node: onnx.NodeProto, own: set[str], copy: int) -> onnx.NodeProto:
    renamed = onnx.NodeProto()
    renamed.CopyFrom(node)
    renamed.name = _copied(node.name, copy)
    for slots in (renamed.input, renamed.output):
        slots[:] = [_copied(name, copy) if name in own else name for name in slots]
    return renamed
