"""Plans that place operators on an accelerator, and the operators that it supports."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence

from chrion import Graph
from chrion.devices import Device
from chrion.devices.single_provider import find_cpu_nodes
from chrion.graph.extract import Extractor
from chrion.graph.ort_sessions import weights_folder_option
from chrion.profiler.measure_graph import captured_inputs
from chrion.profiler.operator_bench import OperatorBench
from chrion.scheduler import Plan, fixed_plan

WEBGPU = "WebGpuExecutionProvider"


def find_supported_operators(graph: Graph, device: Device) -> set[int]:
    """Return the operators that the device runs individually and that onnxruntime assigns to it in the whole model."""
    extractor = Extractor(graph)
    left = find_cpu_nodes(graph.model, weights_folder_option(graph.weights_folder), device)
    kept = [i for i, nodes in enumerate(graph.nodes) if not {graph.model.graph.node[n].name for n in nodes} & left]
    feeds = captured_inputs(graph, extractor, kept)
    found = set()
    for i in kept:
        with contextlib.suppress(Exception):  # the device does not support the operator
            OperatorBench(extractor, i, feeds, device)
            found.add(i)
    return found


def draw_mixed_plan(graph: Graph, supported: set[int], seed: int, streams: int = 1) -> Plan:
    """Return a random plan over two cores and the accelerator, which gets about 60 % of the supported operators."""
    pick = random.Random(seed)
    lanes = [
        -pick.randrange(streams) if i in supported and pick.random() < 0.6 else pick.randint(1, 2)
        for i in range(len(graph.dag))
    ]
    return fixed_webgpu_plan(graph, lanes)


def fixed_webgpu_plan(graph: Graph, lanes: Sequence[int]) -> Plan:
    """Return a plan of the given lanes; the accelerator's lanes are WebGPU's."""
    return fixed_plan(graph, lanes, accelerator=WEBGPU if any(lane <= 0 for lane in lanes) else None)
