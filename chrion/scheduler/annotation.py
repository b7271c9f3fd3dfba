"""Placement in the model: a plan as annotations of an ONNX model, for other tools to read.

The annotated model is the original one, with

- a device configuration of ONNX (IR version 11, *multi-device annotations*) that names the plan's lanes, and for each
  node the lane that computes its outputs; this needs version 1.18 of the ONNX library;
- node metadata: ``chrion-lane`` and ``chrion-segment``, which viewers such as Netron show;
- model metadata: the whole plan as JSON, from which :meth:`chrion.scheduler.plan.Plan.load` reads it back.

A plan is for the operators of the optimised model. A node that the optimisation has merged into others has the
placement of the node that its results go to, and the nodes of a control-flow body that of the node with the body.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx

from chrion.common.files import write_atomically
from chrion.common.lane_numbers import display_order, lane_name
from chrion.errors import OptionError
from chrion.graph.assemble import node_reads
from chrion.graph.external import tensors_of
from chrion.graph.model import Graph
from chrion.graph.reading import read_model, serialise
from chrion.graph.rewrite import bodies_of
from chrion.scheduler.plan import PLAN_KEY, Plan

#: The name of the device configuration.
CONFIGURATION = "chrion"
LANE_KEY, SEGMENT_KEY = "chrion-lane", "chrion-segment"
#: A lane, and a segment of the plan.
Place = tuple[int, int]
#: The versions of ONNX's format with node metadata, with device configurations, and without weights among the inputs.
_METADATA, _CONFIGURATIONS, _SEPARATE_WEIGHTS = 10, 11, 4
#: True if the ONNX library has device configurations.
_CONFIGURED = "configuration" in onnx.ModelProto.DESCRIPTOR.fields_by_name


def write_annotated(graph: Graph, plan: Plan, path: Path) -> None:
    """Write the original model of a graph, annotated with a plan.

    Args:
        graph: The graph as it was loaded, to which the plan applies.
        plan: The plan.
        path: The file to write. If the model has external weights, it must be in the model's folder.

    Raises:
        OptionError: The file cannot be written, or is in another folder than external weights.
        PlanError: The plan is not for this graph.
    """
    model, source = graph.source.use(read_model)
    external = any(tensor.external_data for tensor in tensors_of(model))
    if external and source is not None and path.resolve().parent != source.parent.resolve():
        raise OptionError(
            f"{path}: the model's external weights are in another folder", hint=f"write to a file in {source.parent}"
        )
    annotate(model, graph, plan)
    write_atomically(path, serialise(model, str(path)))


def annotate(model: onnx.ModelProto, graph: Graph, plan: Plan) -> None:
    """Annotate a model with a plan, in place.

    Args:
        model: The original model of the graph.
        graph: The graph.
        plan: A plan of the graph.
    """
    places = _placed_values(plan.apply(graph), plan)
    _raise_version(model)
    _set(model.metadata_props, PLAN_KEY, json.dumps(plan.to_json()))
    node_places = _node_places(model, places)
    placed = list(_with_bodies(zip(model.graph.node, node_places, strict=True)))
    for node, (lane, segment) in placed:
        _set(node.metadata_props, LANE_KEY, lane_name(lane))
        _set(node.metadata_props, SEGMENT_KEY, str(segment))
    if _CONFIGURED:
        _configure(model, display_order(plan.schedule.lanes), [(node, lane) for node, (lane, _) in placed])


def _configure(model: onnx.ModelProto, lanes: Sequence[int], placed: Sequence[tuple[onnx.NodeProto, int]]) -> None:
    """Add the device configuration, in place; ``placed`` has each node with its lane."""
    _remove(model.configuration, "name", CONFIGURATION)
    model.configuration.add(name=CONFIGURATION, num_devices=len(lanes), device=[lane_name(lane) for lane in lanes])
    for node, lane in placed:
        _remove(node.device_configurations, "configuration_id", CONFIGURATION)
        own = node.device_configurations.add(configuration_id=CONFIGURATION)
        for name in filter(None, node.output):
            own.sharding_spec.add(tensor_name=name, device=[lanes.index(lane)])


def _with_bodies(placed: Iterable[tuple[onnx.NodeProto, Place]]) -> Iterator[tuple[onnx.NodeProto, Place]]:
    """Yield each node with its place, and the nodes of its bodies with the same place."""
    for node, place in placed:
        yield node, place
        for body in bodies_of(node):
            yield from _with_bodies((inner, place) for inner in body.node)


def _placed_values(graph: Graph, plan: Plan) -> dict[str, Place]:
    """Return the lane and the segment that compute each value of the plan's graph, by name."""
    segment_of = {i: at for at, segment in enumerate(plan.segments) for i in segment}
    return {
        name: (plan.schedule.lanes[i], segment_of[i])
        for i, nodes in enumerate(graph.nodes)
        for node in nodes
        for name in graph.model.graph.node[node].output
        if name
    }


def _node_places(model: onnx.ModelProto, places: Mapping[str, Place]) -> list[Place]:
    """Return the lane and the segment of each node of the original model."""
    nodes, reads = model.graph.node, node_reads(model)
    located: list[Place | None] = [
        next((places[name] for name in node.output if name in places), None) for node in nodes
    ]
    reader: dict[str, Place] = {}
    for at in reversed(range(len(nodes))):  # nodes are in topological order
        place = located[at] or next((reader[name] for name in nodes[at].output if name in reader), None)
        located[at] = place
        if place is not None:
            reader.update(dict.fromkeys(reads[at], place))
    default = next(iter(places.values()), (1, 0))  # of nodes that nothing reads
    return [place or default for place in located]


def _raise_version(model: onnx.ModelProto) -> None:
    if model.ir_version < _SEPARATE_WEIGHTS:  # a weight that is also an input would become replaceable
        weights = {tensor.name for tensor in model.graph.initializer}
        inputs = [value for value in model.graph.input if value.name not in weights]
        del model.graph.input[:]
        model.graph.input.extend(inputs)
    model.ir_version = max(model.ir_version, _CONFIGURATIONS if _CONFIGURED else _METADATA)


def _set(entries: Any, key: str, value: str) -> None:
    """Set an entry of metadata, in place."""
    _remove(entries, "key", key)
    entries.add(key=key, value=value)


def _remove(entries: Any, field: str, value: str) -> None:
    """Remove the entries of a repeated field whose own field has a value, in place."""
    kept = [entry for entry in entries if getattr(entry, field) != value]
    if len(kept) < len(entries):
        del entries[:]
        entries.extend(kept)
