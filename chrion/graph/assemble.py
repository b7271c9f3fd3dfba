"""Structure of a Graph, from its ONNX model and the types of its values: operators, edges, weights, signatures."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import onnx

from chrion.common.imports import import_late
from chrion.graph.dag import Dag, invert
from chrion.graph.model import ModelMetadata, TensorInfo
from chrion.graph.rewrite import bodies_of, defined_names
from chrion.graph.usage import read_usage, usage_of
from chrion.graph.work import node_flops

#: The values of integer constants of at most this many elements (shapes, axes, indices) are part of a signature.
_SHOWN_ELEMENTS = 64
#: Fields of nodes that annotate them; the older releases of the ONNX library lack the second.
_ANNOTATIONS = {"metadata_props", "device_configurations"}.intersection(onnx.NodeProto.DESCRIPTOR.fields_by_name)
#: Bits per element of the types whose elements are packed without padding to whole bytes.
_PACKED_BITS = {"UINT4": 4, "INT4": 4, "FLOAT4E2M1": 4, "UINT2": 2, "INT2": 2, "FLOAT6E2M3": 6, "FLOAT6E3M2": 6}


def assemble(model: onnx.ModelProto, types: Mapping[str, TensorInfo], metadata: ModelMetadata) -> dict[str, Any]:
    """Return the fields of a Graph that follow from its model: its operators, and the types of its values.

    Args:
        model: The model; its nodes have unique names.
        types: The types of its inputs and node outputs, by name.
        metadata: Its metadata, which may state how often operators are used.
    """
    weights = {t.name: weight_info(t) for t in model.graph.initializer}
    values = {**types, **weights}
    reads = node_reads(model)
    operators = _operators(model, reads, values)
    return {
        "model": model,
        "dag": replace(_dag(model, operators, reads, values, weights), usage=_usage(model, operators, metadata)),
        "nodes": operators,
        "values": values,
        "inputs": tuple(values[i.name] for i in model.graph.input),
        "outputs": tuple(values[o.name] for o in model.graph.output),
    }


def _usage(model: onnx.ModelProto, operators: Sequence[Sequence[int]], metadata: ModelMetadata) -> tuple[float, ...]:
    """Return the probability that a request uses each operator, as the metadata states it."""
    names = ([model.graph.node[node].name for node in group] for group in operators)
    return usage_of(names, read_usage(metadata.custom_metadata_map))


def weight_info(tensor: onnx.TensorProto) -> TensorInfo:
    """Return the type of an initialiser, as onnxruntime writes it."""
    kind = onnx.TensorProto.DataType.Name(tensor.data_type).lower()
    return TensorInfo(tensor.name, f"tensor({kind})", tuple(tensor.dims))


def node_reads(model: onnx.ModelProto) -> list[tuple[str, ...]]:
    """Return the names that each node reads: its inputs in order, then the names that its bodies capture, sorted."""
    return [
        tuple(dict.fromkeys([*filter(None, node.input), *sorted(captured_names(node))])) for node in model.graph.node
    ]


def captured_names(node: onnx.NodeProto) -> set[str]:
    """Return the names of outer values that the bodies of a node (If, Loop, Scan) read."""
    return set().union(*(_outer_names(body) for body in bodies_of(node)))


def _outer_names(body: onnx.GraphProto) -> set[str]:
    """Return the names that a body reads and does not define; ONNX allows no redefinition of outer names."""
    read = {name for node in body.node for name in (*node.input, *captured_names(node)) if name}
    return read.union(o.name for o in body.output) - defined_names(body)


def _operators(
    model: onnx.ModelProto, reads: Sequence[tuple[str, ...]], values: Mapping[str, TensorInfo]
) -> tuple[tuple[int, ...], ...]:
    """Group the nodes into operators: one node each, except for nodes that share a value that must not be cut.

    Such values are those whose size is unknown in advance because it depends on the data, those that are not plain
    tensors (sequences, maps, optionals, strings), and those between a node and its quantisation (see
    :func:`_quantised_values`). The nodes that share one form one operator. Nodes on a path between two nodes of an
    operator join it, too; otherwise the operators would wait for each other. The operators are therefore the strongly
    connected components of the graph in which every edge that must not be cut also runs backwards.
    """
    nodes = range(len(model.graph.node))
    producer = {name: i for i, node in enumerate(model.graph.node) for name in node.output if name}
    quantised = _quantised_values(model, reads, producer)
    edges = [(producer[name], i, name) for i, names in enumerate(reads) for name in names if name in producer]
    backwards = [(i, before) for before, i, name in edges if values[name].bytes is None or name in quantised]
    if not backwards:
        return tuple((i,) for i in nodes)
    nx = import_late("networkx")  # takes a tenth of a second
    links = nx.DiGraph()
    links.add_nodes_from(nodes)
    links.add_edges_from((before, i) for before, i, _ in edges)
    links.add_edges_from(backwards)
    return tuple(sorted(tuple(sorted(group)) for group in nx.strongly_connected_components(links)))


def _quantised_values(
    model: onnx.ModelProto, reads: Sequence[tuple[str, ...]], producer: Mapping[str, int]
) -> set[str]:
    """Return the values between a node, its DequantizeLinear and QuantizeLinear nodes, and its activation.

    These are the values of a DequantizeLinear that only this node reads, the value of this node if only a Relu or Clip
    reads it, and the values of either that a QuantizeLinear reads. onnxruntime replaces these nodes by one node of
    integer arithmetic, or leaves all of them in floating point, as a Gemm whose Relu is not implied by the quantisation
    after it. If the model were cut between them, the node would compute in the other arithmetic: slower, or with other
    rounding than in the whole model, and on x86 processors without VNNI with sums of products that overflow.
    """
    nodes = model.graph.node
    readers = Counter(name for names in reads for name in names)
    readers.update(o.name for o in model.graph.output)
    own = {name for name in producer if readers[name] == 1}
    restored = {name for name in own if nodes[producer[name]].op_type == "DequantizeLinear"}
    units = {i for i, names in enumerate(reads) if restored.intersection(names)}
    activated = {
        name
        for i, names in enumerate(reads)
        if nodes[i].op_type in {"Relu", "Clip"}
        for name in own.intersection(names[:1])
        if producer[name] in units
    }
    units |= {i for i, names in enumerate(reads) if activated.intersection(names)}
    requantised = {name for node in nodes if node.op_type == "QuantizeLinear" for name in node.input[:1]}
    return restored | activated | {name for name in requantised & producer.keys() if producer[name] in units}


def _dag(
    model: onnx.ModelProto,
    operators: Sequence[tuple[int, ...]],
    reads: Sequence[tuple[str, ...]],
    values: Mapping[str, TensorInfo],
    weights: Mapping[str, TensorInfo],
) -> Dag:
    nodes = model.graph.node
    operator_of = {node: i for i, group in enumerate(operators) for node in group}
    producer = {name: operator_of[i] for i, node in enumerate(nodes) for name in node.output if name}
    weight_index = {name: i for i, name in enumerate(weights)}
    inputs = [dict.fromkeys(name for node in group for name in reads[node]) for group in operators]
    value_index = {name: at for at, name in enumerate(producer)}
    incoming = _received_values(inputs, producer)
    constants = {t.name: t for t in model.graph.initializer}
    request_inputs = [values[info.name] for info in model.graph.input if values[info.name].bytes]
    kept = {*itertools.chain(*reads), *(o.name for o in model.graph.output)}
    signatures = [[_signature(nodes[node], reads[node], values, constants) for node in group] for group in operators]
    return Dag(
        names=tuple(nodes[group[0]].name for group in operators),
        op_types=tuple(nodes[g[0]].op_type + (f"+{len(g) - 1}" if len(g) > 1 else "") for g in operators),
        signatures=tuple(_joined_signature(parts) for parts in signatures),
        predecessors=tuple(tuple(received) for received in incoming),
        successors=invert([tuple(received) for received in incoming]),
        edge_bytes=tuple(tuple(sum(values[n].bytes or 0 for n in ns) for ns in r.values()) for r in incoming),
        edge_values=tuple(tuple(tuple(value_index[n] for n in ns) for ns in r.values()) for r in incoming),
        value_bytes=tuple(values[name].bytes or 0 for name in producer),
        input_bytes=tuple(
            sum(values[n].bytes or 0 for n in names if n not in weights and producer.get(n) != i)
            for i, names in enumerate(inputs)
        ),
        output_bytes=tuple(
            sum(values[name].bytes or 0 for node in group for name in nodes[node].output if name) for group in operators
        ),
        weights=tuple(tuple(weight_index[n] for n in names if n in weights) for names in inputs),
        weight_bytes=tuple(weight_size(t) for t in model.graph.initializer),
        flops=tuple(sum(node_flops(nodes[node], values) for node in group) for group in operators),
        request_inputs=tuple(
            (info.bytes or 0, tuple(i for i, names in enumerate(inputs) if info.name in names))
            for info in request_inputs
        ),
        request_outputs=tuple(
            (producer[o.name], value_index[o.name])
            for o in model.graph.output
            if o.name in producer and values[o.name].bytes
        ),
        unread_results=tuple(
            (producer[name], value_index[name])
            for name in final_states(model)
            if name not in kept and values[name].bytes
        ),
        value_kinds=tuple(str(values[name]) for name in producer),
        input_kinds=tuple(map(str, request_inputs)),
    )


def final_states(model: onnx.ModelProto) -> list[str]:
    """Return the final states of recurrent nodes, which segments return even if nothing reads them.

    The chunks of a layer are equal sub-models only if the last one returns its state as well.
    """
    recurrent = (node for node in model.graph.node if node.op_type in {"LSTM", "GRU", "RNN"})
    return [name for node in recurrent for name in list(node.output)[1:] if name]


def _received_values(inputs: Sequence[Iterable[str]], producer: Mapping[str, int]) -> list[dict[int, list[str]]]:
    """Return, for each operator, the values that it reads from each predecessor."""
    incoming: list[dict[int, list[str]]] = []
    for i, names in enumerate(inputs):
        received: dict[int, list[str]] = {}
        for name in names:
            if producer.get(name, i) != i:
                received.setdefault(producer[name], []).append(name)
        incoming.append(received)
    return incoming


def weight_size(tensor: onnx.TensorProto) -> int:
    """Return the bytes of an initialiser; a string counts as a pointer, since its length is not known."""
    packed = _PACKED_BITS.get(onnx.TensorProto.DataType.Name(tensor.data_type))
    bits = packed or 8 * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    return (math.prod(tensor.dims) * bits + 7) // 8


def _signature(
    node: onnx.NodeProto,
    reads: tuple[str, ...],
    values: Mapping[str, TensorInfo],
    constants: Mapping[str, onnx.TensorProto],
) -> str:
    """Return a text that is equal for nodes of equal cost.

    For example ``LSTM(float[1x8x64], w float[1x256x64], ...) -> y {hidden_size=64}``.
    """
    slots = [_slot(name, values, constants) for name in node.input]
    slots += [_slot(name, values, constants) for name in reads if name not in set(node.input)]
    while slots and not slots[-1]:
        slots.pop()
    outputs = " ".join(_repeats(["y" if name else "_" for name in node.output]))
    attributes = ", ".join(f"{a.name}={_attribute(a)}" for a in sorted(node.attribute, key=lambda a: a.name))
    domain = f"{node.domain}." if node.domain not in {"", "ai.onnx"} else ""
    return f"{domain}{node.op_type}({', '.join(_repeats(slots))}) -> {outputs} {{{attributes}}}"


def _repeats(slots: Sequence[str]) -> Iterator[str]:
    """Yield each run of equal slots once, with its length: ``96*float[1x8x64]``."""
    for slot, run in itertools.groupby(slots):
        count = len(list(run))
        yield f"{count}*{slot}" if count > 1 else slot


def _slot(name: str, values: Mapping[str, TensorInfo], constants: Mapping[str, onnx.TensorProto]) -> str:
    if not name:
        return ""
    tensor = constants.get(name)
    if tensor is None:
        return str(values[name]) if name in values else "?"
    integer = tensor.data_type in {onnx.TensorProto.INT32, onnx.TensorProto.INT64}
    inline = tensor.data_location != onnx.TensorProto.EXTERNAL
    if integer and inline and len(onnx.numpy_helper.to_array(tensor).ravel()) <= _SHOWN_ELEMENTS:
        return f"w {values[name]}={onnx.numpy_helper.to_array(tensor).tolist()}".replace(" ", "")
    return f"w {values[name]}"


def _attribute(attribute: onnx.AttributeProto) -> str:
    value = onnx.helper.get_attribute_value(attribute)
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    text = str(value) if isinstance(value, int | float | list) else ""
    if attribute.type in {onnx.AttributeProto.STRINGS, onnx.AttributeProto.GRAPHS, onnx.AttributeProto.TENSORS} or not (
        0 < len(text) <= 200
    ):
        content = _without_annotations(attribute).SerializeToString(deterministic=True)
        return "#" + hashlib.sha256(content).hexdigest()[:16]
    return text.replace(" ", "")


def _without_annotations(attribute: onnx.AttributeProto) -> onnx.AttributeProto:
    """Return an attribute without the annotations of nodes in bodies, which do not change what they compute."""
    if attribute.type not in {onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS}:
        return attribute
    copy = onnx.AttributeProto()
    copy.CopyFrom(attribute)
    bodies = [copy.g] if copy.HasField("g") else [*copy.graphs]
    while bodies:
        for node in bodies.pop().node:
            for field in _ANNOTATIONS:
                node.ClearField(field)
            bodies += bodies_of(node)
    return copy


def _joined_signature(parts: Sequence[str]) -> str:
    if len(parts) == 1:
        return parts[0]
    return f"{len(parts)} nodes #" + hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
