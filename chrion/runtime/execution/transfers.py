"""Which values cross between the memories of the CPU and the accelerator, and have to be copied."""

from __future__ import annotations

from collections.abc import Sequence

from chrion.devices import Device
from chrion.graph.extract import Extractor
from chrion.graph.model import Graph
from chrion.lane_numbers import is_accelerator_lane
from chrion.runtime.execution.program import Transfer


def find_transfers(extractor: Extractor, lanes: Sequence[int], device: Device | None) -> tuple[Transfer, ...]:
    """The values to copy, inputs of the request first, then in the order in which they are made.

    Args:
        extractor: Knows the graph and who reads what.
        lanes: Lane of each operator.
        device: The accelerator; None where there is none. Values of types that it does not hold stay in the host's
            memory and do not cross.
    """
    if device is None:
        return ()
    graph = extractor.graph
    there = [is_accelerator_lane(lane) for lane in lanes]
    operator = {node: i for i, nodes in enumerate(graph.nodes) for node in nodes}
    results = {info.name for info in graph.outputs}
    made: list[tuple[str, int | None]] = [(info.name, None) for info in graph.inputs]
    made += [(name, i) for node, i in sorted(operator.items()) for name in graph.model.graph.node[node].output if name]
    found = []
    for name, producer in made:
        if not held(graph, name, device):
            continue
        upload = producer is None or not there[producer]
        readers = {operator[node] for node in extractor.readers.get(name, ())}
        elsewhere = tuple(sorted(i for i in readers if there[i] == upload))
        if elsewhere or (name in results and not upload):
            found.append(Transfer(name, producer, elsewhere, upload))
    return tuple(found)


def held(graph: Graph, name: str, device: Device | None) -> bool:
    """Whether a value can be in the accelerator's memory: of known size, not empty, and of a type that it holds."""
    info = graph.values[name]
    return device is not None and bool(info.bytes) and device.supports(info.type)
