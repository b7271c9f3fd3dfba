"""Profiling of a graph on this machine: every distinct signature is measured once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from chrion.devices import Device, usable_provider
from chrion.devices.probe import probe_provider
from chrion.devices.single_provider import find_cpu_nodes
from chrion.errors import ModelError
from chrion.graph.extract import Extractor
from chrion.graph.model import Graph
from chrion.graph.native_operators import may_be_native
from chrion.graph.ort_sessions import first_line, weights_folder_option
from chrion.graph.recurrent import chunk_choices, unroll
from chrion.graph.trees import tree_variants
from chrion.machine.allocator import trim
from chrion.machine.cores import check_cores, physical_cores, private_cache_bytes
from chrion.native import operators_available
from chrion.profiler.cache import MeasurementCache
from chrion.profiler.chunk_costs import interpolate, measured_chunks, representatives
from chrion.profiler.interference import UsageMonitor
from chrion.profiler.machine import this_machine
from chrion.profiler.operator_bench import OperatorBench, OperatorSample, time_in_rounds
from chrion.profiler.overheads import TYPICAL, Overheads
from chrion.profiler.plain_latency import measure_plain_latency
from chrion.profiler.precision import Precision, check_precision, missing_bfloat16
from chrion.profiler.profiles import OperatorCost, Profile
from chrion.profiler.roofline import operator_bytes
from chrion.profiler.synthetic_inputs import synthetic_array
from chrion.profiler.transfer import CopyCosts, measure_copies
from chrion.profiler.widths import measured_widths

log = logging.getLogger(__name__)

#: Maximum operators that are measured together, and maximum bytes of their weights, inputs and outputs: rounds over
#: them last longer than short interference, and their sessions, which take many times these bytes, are open at the same
#: time (SqueezeNet: a peak of 260 MB with 16 operators, of 225 MB with 8).
_TOGETHER, _TOGETHER_BYTES = 8, 8e6

#: A function that is called after each operator with the number done, the total number, and the type of the last one.
Progress = Callable[[int, int, str], None]
#: Measures operators by their indices: :func:`measure_operators` for some cores and devices.
Measure = Callable[[Extractor, Sequence[int], Mapping[str, np.ndarray[Any, Any]]], dict[int, OperatorCost]]
#: A graph and the index of an operator.
Operator = tuple[Graph, int]


def profile(  # noqa: PLR0913 - optional arguments are keyword-only
    graph: Graph,
    cores: int | None = None,
    accelerator: str | None = None,
    *,
    progress: Progress | None = None,
    fresh: bool = False,
    brief: bool = False,
    variants: Sequence[Graph] = (),
    plain: bool = True,
    precision: str = "float32",
) -> Profile:
    """Measure the costs of a graph's operators on this machine.

    Recurrent operators are also measured in some of the chunks that a plan may cut them into, and interpolated for
    chunks of other lengths. Tree ensembles are also measured in their other forms. A measurement is
    cached unless other processes used the cores meanwhile.

    Args:
        graph: The graph; all of its shapes must be known.
        cores: The number of CPU cores to measure (k); all physical cores that this process may use if None.
        accelerator: An execution provider by its full or short name (``cuda``), or ``auto`` for the first one that
            works on this machine; None to measure CPU cores only.
        progress: A function that is called after each measured signature.
        fresh: Measure all operators, even those in the cache of measurements.
        brief: Measure in a fraction of the time, and beside other work: the CPU time of operators in one thread, which
            other processes hardly change. No slowdown between cores and no width is measured, overheads are typical
            ones, and nothing is cached.
        variants: Further graphs to measure, such as the graph with merged operators.
        plain: Measure the plain session of the whole model, too, which plans are compared with.
        precision: The precision of products in native kernels, ``float32`` or ``bf16``; it stays float32 on a machine
            that cannot multiply bfloat16.

    Returns:
        The profile. Operators that onnxruntime cannot run alone are logged and left out; their costs are then
        estimated.

    Raises:
        ShapeError: An input has a free dimension.
        OptionError: The number of cores is not available, or there is no such precision.
        ProviderError: The accelerator does not work on this machine.
        ModelError: No operator could be measured.
    """
    graph.require_shapes()
    check_cores(cores)
    asked = check_precision(precision)
    other = missing_bfloat16() if asked == "bf16" else ""
    used: Precision = "float32" if other else asked
    lanes = physical_cores()[:cores]
    provider = usable_provider(accelerator)
    device = Device(provider) if provider else None
    machine = this_machine(provider)
    cache = MeasurementCache(machine.fingerprint, len(lanes), used)
    choices = chunk_choices(graph)
    forms = tree_variants(graph, 0 if device else len(lanes)).values()
    first = representatives(graph, measured_chunks(graph), [*variants, *forms])
    known = {} if fresh else {s: cost for s in first if (cost := cache.get(s)) is not None}
    unknown = [operator for signature, operator in first.items() if signature not in known]
    measure = partial(measure_operators, cores=lanes, device=device, brief=brief, precision=used)
    monitor = UsageMonitor(lanes) if unknown and not brief else None
    measured, interference = _measure(cache, unknown, measure, monitor, progress)
    known |= measured
    if not known and len(graph.dag):
        raise ModelError(f"model {graph.name}: none of its operators could be measured")
    known |= interpolate((unroll(graph, chunk).dag for chunk in choices), known)
    cache_bytes = min(map(private_cache_bytes, lanes))
    overheads = TYPICAL if brief else Overheads.measure(lanes, cache_bytes, python_lanes=device is not None)
    copies = measure_copies(device, overheads.handoff_ms) if device else CopyCosts()
    latency = measure_plain_latency(graph, len(lanes)) if plain and not brief else None
    return Profile(
        machine=machine,
        cores=len(lanes),
        accelerator=provider,
        operators=_without_cpu_operators(graph, known, device) if device else known,
        cache_bytes=cache_bytes,
        **copies._asdict(),
        **overheads._asdict(),
        base_memory_mb=(probe_provider(provider).memory_mb or 0.0) if provider else 0.0,
        plain={graph.digest: latency} if latency else {},
        interference=interference,
        precision=used,
        other_precision=other,
    )


def _without_cpu_operators(graph: Graph, known: Mapping[str, OperatorCost], device: Device) -> dict[str, OperatorCost]:
    """Return the costs without accelerator times for operators that onnxruntime assigns to the CPU in the whole model.

    The accelerator can run some of these operators alone, but onnxruntime prefers the CPU for those that compute
    shapes.
    """
    nodes = graph.model.graph.node
    signatures = {nodes[n].name: graph.dag.signatures[i] for i, group in enumerate(graph.nodes) for n in group}
    names = find_cpu_nodes(graph.model, weights_folder_option(graph.weights_folder), device)
    on_cpu = {signatures[name] for name in names if name in signatures}
    return {s: replace(cost, accelerator_ms=None) if s in on_cpu else cost for s, cost in known.items()}


def _measure(
    cache: MeasurementCache,
    operators: Sequence[Operator],
    measure: Measure,
    monitor: UsageMonitor | None,
    progress: Progress | None,
) -> tuple[dict[str, OperatorCost], bool]:
    """Return the costs of operators by signature, and whether other processes used the cores.

    The cache keeps the costs of which it is known that no other process disturbed them.
    """
    by_graph: dict[Graph, list[int]] = {}
    for graph, i in operators:
        by_graph.setdefault(graph, []).append(i)
    found: dict[str, OperatorCost] = {}
    count, undisturbed, interference = 0, True, False
    for graph, indices in by_graph.items():
        extractor = Extractor(graph)
        feeds = captured_inputs(graph, extractor, indices)
        for batch in batches(graph, indices):
            costs = {graph.dag.signatures[i]: cost for i, cost in measure(extractor, batch, feeds).items()}
            found |= costs
            trim()
            before, undisturbed = undisturbed, monitor is not None and not monitor.has_interference()
            if before and undisturbed:
                for signature, cost in costs.items():
                    cache.put(signature, cost)
            elif costs:
                interference = True
            for i in batch:
                count += 1
                if progress:
                    progress(count, len(operators), graph.dag.op_types[i])
    return found, interference


def batches(
    graph: Graph, operators: Sequence[int], max_count: int = _TOGETHER, max_bytes: float = _TOGETHER_BYTES
) -> Iterator[list[int]]:
    """Yield groups of operators that are measured together: a limited number, and size of their sessions."""
    batch, size = list[int](), 0.0
    for i in operators:
        own = operator_bytes(graph.dag, i)
        if batch and (len(batch) >= max_count or size + own > max_bytes):
            yield batch
            batch, size = [], 0.0
        batch.append(i)
        size += own
    if batch:
        yield batch


def measure_operators(  # noqa: PLR0913 - optional arguments are keyword-only
    extractor: Extractor,
    operators: Sequence[int],
    feeds: Mapping[str, np.ndarray[Any, Any]],
    cores: Sequence[int],
    device: Device | None,
    *,
    brief: bool = False,
    precision: Precision = "float32",
) -> dict[int, OperatorCost]:
    """Measure operators for 1 to k busy cores, on several cores together, and on the accelerator.

    Args:
        extractor: An extractor of operators from the graph.
        operators: The indices of the operators.
        feeds: The arrays of :func:`captured_inputs`.
        cores: The k cores.
        device: The accelerator, or None.
        brief: Whether to measure in one round, and in one thread on any core.
        precision: The precision of products in native kernels.

    Returns:
        The costs by index. Operators that onnxruntime cannot run alone are logged and left out.
    """
    dag = extractor.graph.dag
    benches: dict[int, OperatorBench] = {}
    for i in operators:
        try:
            benches[i] = OperatorBench(extractor, i, feeds)
        except Exception as error:  # noqa: BLE001 - any error of a kernel; the operator's costs are then estimated
            log.warning("operator %s is not measured: %s", dag.names[i], first_line(error))
    native = {i: bench for i in benches if (bench := _native_bench(extractor, i, feeds, precision))}
    busy = [1] if brief else _busy_counts(len(cores))
    if brief:
        samples = [[bench.time_briefly()] for bench in (*benches.values(), *native.values())]
    else:
        wide = [cores[:width] for width in measured_widths(len(cores))]
        sets = [cores[:count] for count in busy]
        samples = time_in_rounds([*benches.values(), *native.values()], sets, wide)
    of_native = dict(zip(native, samples[len(benches) :], strict=True))
    costs = {}
    for i, operator_samples in zip(benches, samples[: len(benches)], strict=True):
        accelerator_ms, scratch = _on_accelerator(extractor, i, feeds, device) if device else (None, 0)
        costs[i] = OperatorCost(
            op_type=dag.op_types[i],
            cpu_ms=_times_ms(operator_samples, busy, len(cores)),
            accelerator_ms=accelerator_ms,
            ephemeral_bytes=scratch,
            spread=operator_samples[0].spread,
            flops=dag.flops[i],
            bytes=operator_bytes(dag, i),
            wide_ms=tuple(sample.time_ms for sample in operator_samples[len(busy) :]),
            native_ms=_times_ms(of_native[i], busy, len(cores)) if i in native else (),
            native_wide_ms=tuple(sample.time_ms for sample in of_native.get(i, ())[len(busy) :]),
            native_error=native[i].error_against(benches[i]) if i in native and precision != "float32" else 0.0,
        )
    return costs


def _times_ms(samples: Sequence[OperatorSample], busy: Sequence[int], cores: int) -> tuple[float, ...]:
    """Return the times for 1 to k busy cores, interpolated between the measured numbers."""
    measured = [sample.time_ms for sample in samples[: len(busy)]]
    return tuple(map(float, np.interp(range(1, cores + 1), busy, measured)))


def _native_bench(
    extractor: Extractor, i: int, feeds: Mapping[str, np.ndarray[Any, Any]], precision: Precision
) -> OperatorBench | None:
    """Return the measurement of the native kernel of an operator, or None if there is none."""
    nodes, all_nodes = extractor.graph.nodes[i], extractor.graph.model.graph.node
    if (
        not operators_available()
        or len(nodes) > 1
        or not may_be_native(all_nodes[nodes[0]], bfloat16=precision == "bf16")
    ):
        return None
    try:
        return OperatorBench(extractor, i, feeds, native=precision)
    except Exception as error:  # noqa: BLE001 - the native kernel refuses it; onnxruntime's runs it
        log.info("operator %s has no native kernel: %s", extractor.graph.dag.names[i], first_line(error))
        return None


def _busy_counts(cores: int) -> list[int]:
    """Return the numbers of busy cores to measure: 1, 2, 3, 4, 8, 16, ... and all; times between are interpolated."""
    return [count for count in range(1, cores + 1) if count <= 4 or count & (count - 1) == 0 or count == cores]


def _on_accelerator(
    extractor: Extractor, i: int, feeds: Mapping[str, np.ndarray[Any, Any]], device: Device
) -> tuple[float | None, int]:
    """Return an operator's time on the accelerator and its scratch memory; None and 0 if it cannot run there."""
    try:
        bench = OperatorBench(extractor, i, feeds, device)
        [[sample]] = time_in_rounds([bench], [()])
        return sample.time_ms, bench.scratch_bytes()
    except Exception as error:  # noqa: BLE001 - the provider cannot run it
        log.info("operator %s stays on the CPU: %s", extractor.graph.dag.names[i], first_line(error))
        return None, 0


def captured_inputs(graph: Graph, extractor: Extractor, operators: list[int]) -> dict[str, np.ndarray[Any, Any]]:
    """Return the values of the operators' integer, boolean and text inputs in one run of the model on synthetic inputs.

    Such values control an operator (indices, lengths, conditions), so they must be consistent with each other. If the
    model rejects synthetic inputs, return only the inputs of the model itself.
    """
    names = {
        name
        for i in operators
        for name in extractor.extract([i]).inputs
        if "float" not in graph.values[name].type and "double" not in graph.values[name].type
    }
    feeds = {info.name: synthetic_array(info) for info in graph.inputs}
    inner = sorted(names - set(feeds))
    if not inner:
        return {name: feeds[name] for name in names}
    model = onnx.ModelProto()
    model.CopyFrom(graph.model)
    del model.graph.output[:]
    for name in inner:
        model.graph.output.add().name = name
    options = ort.SessionOptions()
    options.log_severity_level = 4
    for key, value in weights_folder_option(graph.weights_folder).items():
        options.add_session_config_entry(key, value)
    try:
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        used = {i.name for i in session.get_inputs()}
        values = session.run(inner, {name: array for name, array in feeds.items() if name in used})
    except Exception as error:  # noqa: BLE001 - the model may reject synthetic inputs; its operators then get zeros
        log.info("cannot run the model on synthetic inputs, so operators get synthetic values: %s", first_line(error))
        return {name: feeds[name] for name in names if name in feeds}
    return {name: feeds[name] for name in names if name in feeds} | dict(zip(inner, values, strict=True))
