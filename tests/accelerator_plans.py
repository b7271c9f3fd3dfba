"""Plans that put operators on an accelerator, and what it can run."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence

from chrion import Graph, HybridSession
from chrion.devices import Device
from chrion.devices.single_provider import find_cpu_nodes
from chrion.graph.extract import Extractor
from chrion.graph.ort_sessions import weights_folder_option
from chrion.profiler.measure import OperatorBench
from chrion.profiler.measure_graph import captured_inputs
from chrion.runtime.execution.engine import CutEngine
from chrion.scheduler import Plan, fixed_plan

WEBGPU = "WebGpuExecutionProvider"


def able(graph: Graph, device: Device) -> set[int]:
    """Operators that the device runs by themselves, and that onnxruntime leaves there in the whole model."""
    extractor = Extractor(graph)
    left = find_cpu_nodes(graph.model, weights_folder_option(graph.weights_folder), device)
    kept = [i for i, nodes in enumerate(graph.nodes) if not {graph.model.graph.node[n].name for n in nodes} & left]
    feeds = captured_inputs(graph, extractor, kept)
    found = set()
    for i in kept:
        with contextlib.suppress(Exception):  # it cannot
            OperatorBench(extractor, i, feeds, device)
            found.add(i)
    return found


def mixed_plan(graph: Graph, there: set[int], seed: int, streams: int = 1) -> Plan:
    """A random placement of a random order over two cores and the accelerator, which gets about half of what it can."""
    pick = random.Random(seed)
    lanes = [
        -pick.randrange(streams) if i in there and pick.random() < 0.6 else pick.randint(1, 2)
        for i in range(len(graph.dag))
    ]
    return placed(graph, lanes)


def placed(graph: Graph, lanes: Sequence[int]) -> Plan:
    """A plan with these lanes; those of the accelerator are WebGPU's."""
    return fixed_plan(graph, lanes, accelerator=WEBGPU if any(lane <= 0 for lane in lanes) else None)


def engine_of(session: HybridSession) -> CutEngine:
    """The engine that carries the session's plan out."""
    assert isinstance(session._engine, CutEngine)
    return session._engine
