"""Profiles of machines that are known from datasheets only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from chrion.errors import HardwareError
from chrion.graph.model import Graph
from chrion.graph.recurrent import chunk_choices, unroll
from chrion.graph.work import NodeWork, node_work
from chrion.hardware import Accelerator, Hardware, Processor
from chrion.profiler.costs import FREE, CopyCost
from chrion.profiler.datasheet import KERNELS, accelerator_ms, cached_bytes_per_ms, processor_ms
from chrion.profiler.machine import Machine
from chrion.profiler.profiles import OperatorCost, Profile
from chrion.profiler.roofline import operator_bytes
from chrion.profiler.widths import LEAST_WIDE_MS, measured_widths

#: Operators that onnxruntime leaves on the CPU, beside those with text, sequences or maps, and those of ``ai.onnx.ml``.
_ON_CPU = {"Shape", "Size", "StringNormalizer", "TfIdfVectorizer", "Unique", "Multinomial"}


def estimate_profile(
    graph: Graph, machine: Hardware, cores: int | None = None, *, variants: Sequence[Graph] = ()
) -> Profile:
    """Return the profile of a graph's operators on a machine, estimated by :mod:`chrion.profiler.datasheet`.

    Scratch memory of operators on the accelerator is not estimated and counts as zero.

    Args:
        graph: The graph; all of its shapes must be known.
        machine: The machine.
        cores: The number of CPU cores to use; all of them if None.
        variants: Further graphs whose operators are estimated, such as the graph with merged operators. Recurrent
            operators are always estimated in all chunks that a plan may cut them into.

    Raises:
        HardwareError: The machine has no processor, or fewer cores than ``cores``.
    """
    processor, accelerator = require_processor(machine), machine.accelerator
    count = processor.cores if cores is None else cores
    if not 1 <= count <= processor.cores:
        raise HardwareError(f"cores: {count} requested, but {processor.name} has 1 to {processor.cores}")
    estimator = _OperatorEstimator(processor, accelerator, count)
    operators: dict[str, OperatorCost] = {}
    for other in (graph, *(unroll(graph, chunk) for chunk in chunk_choices(graph)), *variants):
        for i, signature in enumerate(other.dag.signatures):
            if signature not in operators:
                operators[signature] = estimator.cost(other, i)
    copy = CopyCost(machine.link.latency_us / 1e3, 1e-6 / machine.link.copy_gb_per_s) if machine.link else FREE
    cycle_ms = 1e-6 / processor.clock_ghz
    native = accelerator is None
    return Profile(
        machine=Machine(
            cpu=processor.title,
            cores=processor.cores,
            memory_mb=processor.memory_gb * 1e3,
            system="unknown",
            onnxruntime="unknown",
            accelerator=accelerator.title if accelerator else None,
            hardware=machine.name,
        ),
        cores=count,
        accelerator=accelerator.provider if accelerator else None,
        operators=operators,
        upload=copy,
        download=copy,
        handoff_ms=cycle_ms * (KERNELS.native_handoff_cycles if native else KERNELS.thread_handoff_cycles),
        dispatch_ms=cycle_ms * (KERNELS.native_dispatch_cycles if native else KERNELS.thread_dispatch_cycles),
        wake_ms=cycle_ms * KERNELS.wake_cycles,
        base_memory_mb=accelerator.base_memory_mb if accelerator else 0.0,
        cache_bytes=_private_cache_bytes(processor),
        reload_ms_per_byte=_reload_ms_per_byte(processor),
        notes=tuple(f"estimated from the datasheet of {part.title}" for part in (processor, accelerator) if part),
    )


def require_processor(machine: Hardware) -> Processor:
    """Return the processor of a machine.

    Raises:
        HardwareError: It has none.
    """
    if machine.processor is None:
        raise HardwareError(
            f"hardware {machine.name!r}: a processor is missing", hint=f"add one, for example {machine.name}+epyc-16"
        )
    return machine.processor


class _OperatorEstimator:
    """An estimator of operators on one machine with a number of busy cores."""

    def __init__(self, processor: Processor, accelerator: Accelerator | None, cores: int) -> None:
        self._processor, self._accelerator, self._cores = processor, accelerator, cores

    def cost(self, graph: Graph, i: int) -> OperatorCost:
        """Return the estimated costs of operator ``i``."""
        works = list(_works(graph, i))
        processor, accelerator = self._processor, self._accelerator
        cpu_ms = tuple(self._sum(works, busy=busy) for busy in range(1, self._cores + 1))
        on_accelerator = accelerator is not None and runs_on_accelerator(graph, i)
        wide_ms: tuple[float, ...] = ()
        if cpu_ms[0] >= LEAST_WIDE_MS:
            wide_ms = tuple(self._sum(works, width=width) for width in measured_widths(self._cores))
        launches = KERNELS.node_cycles * len(works) / processor.clock_ghz / 1e6
        return OperatorCost(
            op_type=graph.dag.op_types[i],
            cpu_ms=cpu_ms,
            accelerator_ms=(
                launches + sum(accelerator_ms(work, accelerator) for work in works)
                if accelerator is not None and on_accelerator
                else None
            ),
            flops=graph.dag.flops[i],
            bytes=operator_bytes(graph.dag, i),
            wide_ms=wide_ms,
        )

    def _sum(self, works: Iterable[NodeWork], *, busy: int = 1, width: int = 1) -> float:
        return sum(processor_ms(work, self._processor, busy, width) for work in works)


def _works(graph: Graph, i: int) -> Iterator[NodeWork]:
    """Yield the work of each node of an operator."""
    for node in graph.nodes[i]:
        yield node_work(graph.model.graph.node[node], graph.values)


def runs_on_accelerator(graph: Graph, i: int) -> bool:
    """Return whether an operator is taken to run on an accelerator: all of its values are tensors of numbers."""
    for at in graph.nodes[i]:
        node = graph.model.graph.node[at]
        infos = (graph.values.get(name) for name in (*node.input, *node.output) if name)
        types = [info.type for info in infos if info is not None]
        numbers = all(kind.startswith("tensor(") and kind != "tensor(string)" for kind in types)
        if node.op_type in _ON_CPU or node.domain == "ai.onnx.ml" or not numbers:
            return False
    return True


def _private_cache_bytes(processor: Processor) -> int:
    """Return the size of the largest cache of one core alone; zero if there is none."""
    return int(max((cache.bytes for cache in processor.caches if cache.cores == 1), default=0))


def _reload_ms_per_byte(processor: Processor) -> float:
    """Return the time to bring a byte into a core's private cache, beyond reading it from there."""
    private = _private_cache_bytes(processor)
    if not private:
        return 0.0
    outside = cached_bytes_per_ms(processor, private + 1.0)
    return max(0.0, 1 / outside - 1 / cached_bytes_per_ms(processor, private))
