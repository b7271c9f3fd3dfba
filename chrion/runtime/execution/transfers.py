"""Transfers: the values of a graph that have to be copied between the memories of the host and the accelerator."""

from __future__ import annotations

from collections.abc import Sequence

from chrion.common.lane_numbers import is_accelerator_lane
from chrion.devices import Device
from chrion.graph.extract import Extractor
from chrion.graph.model import Graph, Tensors
from chrion.profiler.costs import BufferSupport
from chrion.runtime.execution.program import Transfer
from chrion.scheduler.evaluation.frame_buffers import FrameBuffers
from chrion.scheduler.evaluation.packing import BufferPlace


def find_transfers(extractor: Extractor, lanes: Sequence[int], device: Device | None) -> tuple[Transfer, ...]:
    """Find the values to copy.

    Args:
        extractor: Extractor of the graph, which knows the readers of each value.
        lanes: Lane of each operator.
        device: The accelerator, or None. Values of types that it does not hold stay in the host's memory and are not
            transferred.

    Returns:
        Inputs of the request first, then values in the order in which they are computed.
    """
    if device is None:
        return ()
    graph = extractor.graph
    on_device = [is_accelerator_lane(lane) for lane in lanes]
    operator = {node: i for i, nodes in enumerate(graph.nodes) for node in nodes}
    results = {info.name for info in graph.outputs}
    values: list[tuple[str, int | None]] = [(info.name, None) for info in graph.inputs]
    values += [
        (name, i) for node, i in sorted(operator.items()) for name in graph.model.graph.node[node].output if name
    ]
    transfers = []
    for name, producer in values:
        if not is_held(graph, name, device):
            continue
        upload = producer is None or not on_device[producer]
        readers = {operator[node] for node in extractor.readers.get(name, ())}
        remote = tuple(sorted(i for i in readers if on_device[i] == upload))
        if remote or (name in results and not upload):
            transfers.append(Transfer(name, producer, remote, upload))
    return tuple(transfers)


def name_places(graph: Graph, buffers: FrameBuffers) -> dict[str, BufferPlace]:
    """Return the place of each value that frames keep on the accelerator, by the value's name."""
    names = list(dict.fromkeys(name for node in graph.model.graph.node for name in node.output if name))
    inputs = [info.name for info in graph.inputs if info.bytes]
    named = {inputs[at]: place for at, place in buffers.of_input.items()}
    return named | {names[value]: place for value, place in buffers.of_value.items()}


def find_buffer_support(graph: Graph, device: Device) -> BufferSupport:
    """Return what the accelerator's buffers can do, and which of the types of a graph's values they hold."""
    types = {info.type for info in graph.values.values() if info.bytes}
    held = (kind.removeprefix("tensor(").removesuffix(")") for kind in types if device.supports(kind))
    return BufferSupport(frozenset(held), device.has_views)


def is_held(graph: Tensors, name: str, device: Device) -> bool:
    """Return whether the accelerator can hold a value: it has a known size, is not empty, and its type is supported."""
    info = graph.values[name]
    return bool(info.bytes) and device.supports(info.type)
