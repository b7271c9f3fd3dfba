"""Profiles of machines that are known from datasheets only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from chrion.common.wrong_values import wrong_value
from chrion.errors import HardwareError, ProfileError
from chrion.graph.model import Graph
from chrion.graph.recurrent import chunk_choices
from chrion.graph.trees import tree_variants
from chrion.graph.work import NodeWork, node_work
from chrion.hardware import Accelerator, Hardware, Processor
from chrion.profiler.chunk_costs import representatives
from chrion.profiler.corrections import CorrectionSample, Factors, fit_factors
from chrion.profiler.costs import FREE, CopyCost
from chrion.profiler.datasheet import KERNELS, Parts, accelerator_parts, cached_bytes_per_ms, processor_parts
from chrion.profiler.machine import Machine
from chrion.profiler.profiles import OperatorCost, Profile
from chrion.profiler.roofline import operator_bytes
from chrion.profiler.widths import MIN_WIDE_MS, measured_widths

#: Operators that onnxruntime leaves on the CPU, beside those with text, sequences or maps, and those of ``ai.onnx.ml``.
_ON_CPU = {"Shape", "Size", "StringNormalizer", "TfIdfVectorizer", "Unique", "Multinomial"}


def estimate_profile(
    graph: Graph,
    machine: Hardware,
    cores: int | None = None,
    *,
    variants: Sequence[Graph] = (),
    corrections: Profile | None = None,
) -> Profile:
    """Return the profile of a graph's operators on a machine, estimated by :mod:`chrion.profiler.datasheet`.

    Scratch memory of operators on the accelerator is not estimated and counts as zero.

    Args:
        graph: The graph; all of its shapes must be known.
        machine: The machine.
        cores: The number of CPU cores to use; all of them if None.
        variants: Further graphs whose operators are estimated, such as the graph with merged operators. Recurrent
            operators are always estimated in all chunks that a plan may cut them into.
        corrections: A profile of some of the operators, measured on the machine. They have their measured times, and
            the estimates of all others are corrected by :mod:`chrion.profiler.corrections`.

    Raises:
        HardwareError: The machine has no processor, or fewer cores than ``cores``.
        ProfileError: The profile of ``corrections`` has none of the operators, or is an estimate itself.
    """
    processor, accelerator = require_processor(machine), machine.accelerator
    count = processor.cores if cores is None else cores
    if not 1 <= count <= processor.cores:
        expected = f"1 to {processor.cores}, the cores of {processor.name}"
        raise wrong_value("cores", expected, count, failure=HardwareError)
    chunks = chunk_choices(graph)
    forms = tree_variants(graph, 0 if accelerator else count).values()
    operators = representatives(graph, chunks, [*variants, *forms])
    first = {s: _Operator.of(*operator) for s, operator in operators.items()}
    estimator = _Estimator(processor, accelerator, count)
    name = machine.name
    if corrections is not None:
        common = estimator.correct(first, corrections)
        name = f"{name}, corrected by {common} measured operator{'s' * (common != 1)}"
    copy = CopyCost(machine.link.latency_us / 1e3, 1e-6 / machine.link.copy_gb_per_s) if machine.link else FREE
    cycle_ms = 1e-6 / processor.clock_ghz
    native = accelerator is None
    return Profile(
        machine=_described(processor, accelerator, name),
        cores=count,
        accelerator=accelerator.provider if accelerator else None,
        operators={signature: estimator.cost(signature, operator) for signature, operator in first.items()},
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


def _described(processor: Processor, accelerator: Accelerator | None, name: str) -> Machine:
    """Return the description of a machine of these parts."""
    return Machine(
        cpu=processor.title,
        cores=processor.cores,
        memory_mb=processor.memory_gb * 1e3,
        system="unknown",
        onnxruntime="unknown",
        accelerator=accelerator.title if accelerator else None,
        hardware=name,
    )


@dataclass(frozen=True, slots=True)
class _Operator:
    """An operator of a graph."""

    op_type: str
    #: The work of each of its nodes.
    works: tuple[NodeWork, ...]
    on_accelerator: bool
    flops: float
    bytes: int

    @classmethod
    def of(cls, graph: Graph, i: int) -> _Operator:
        """Return operator ``i`` of a graph."""
        nodes = (graph.model.graph.node[at] for at in graph.nodes[i])
        return cls(
            op_type=graph.dag.op_types[i],
            works=tuple(node_work(node, graph.values) for node in nodes),
            on_accelerator=runs_on_accelerator(graph, i),
            flops=graph.dag.flops[i],
            bytes=operator_bytes(graph.dag, i),
        )


class _Estimator:
    """An estimator of operators on one machine with a number of busy cores."""

    def __init__(self, processor: Processor, accelerator: Accelerator | None, cores: int) -> None:
        self._processor, self._accelerator, self._cores = processor, accelerator, cores
        self._on_cpu, self._on_accelerator = Factors(), Factors()
        #: Measured operators, by signature.
        self._measured: Mapping[str, OperatorCost] = {}

    def correct(self, operators: Mapping[str, _Operator], profile: Profile) -> int:
        """Correct all later estimates by a measured profile; return the number of its operators that are used.

        Raises:
            ProfileError: The profile has none of the operators, or is an estimate itself.
        """
        if profile.machine.hardware is not None:
            raise ProfileError(
                f"corrections: the profile of {profile.machine.hardware} is estimated, not measured",
                hint="run chrion profile without --hardware on that machine",
            )
        common = sorted(operators.keys() & profile.operators.keys())
        if not common:
            raise ProfileError(
                f"the profile of {profile.machine} has none of the model's operators",
                hint="measure the model, or a smaller one with layers of the same sizes, on that machine",
            )
        self._measured = {signature: profile.operators[signature] for signature in common}
        pairs = [(operators[signature], cost) for signature, cost in self._measured.items()]
        self._on_cpu = fit_factors(
            [CorrectionSample(o.op_type, self._cpu_parts(o), cost.cpu_ms[0]) for o, cost in pairs]
        )
        self._on_accelerator = fit_factors(
            [CorrectionSample(o.op_type, self._accelerator_parts(o), cost.accelerator_ms or 0.0) for o, cost in pairs]
        )
        return len(common)

    def cost(self, signature: str, operator: _Operator) -> OperatorCost:
        """Return the estimated costs of an operator."""
        measured = self._measured.get(signature)
        alone_ms = self._cpu_ms(operator)
        scale = measured.cpu_ms[0] / alone_ms if measured and alone_ms else 1.0
        wide_ms: tuple[float, ...] = ()
        if scale * alone_ms >= MIN_WIDE_MS:
            wide_ms = tuple(scale * self._cpu_ms(operator, width=width) for width in measured_widths(self._cores))
        return OperatorCost(
            op_type=operator.op_type,
            cpu_ms=tuple(scale * self._cpu_ms(operator, busy=busy) for busy in range(1, self._cores + 1)),
            accelerator_ms=self._accelerator_ms(operator, measured),
            flops=operator.flops,
            bytes=operator.bytes,
            wide_ms=wide_ms,
        )

    def _cpu_parts(self, operator: _Operator, busy: int = 1, width: int = 1) -> tuple[Parts, ...]:
        return tuple(processor_parts(work, self._processor, busy, width) for work in operator.works)

    def _cpu_ms(self, operator: _Operator, *, busy: int = 1, width: int = 1) -> float:
        return self._on_cpu.time_ms(operator.op_type, self._cpu_parts(operator, busy, width))

    def _accelerator_parts(self, operator: _Operator) -> tuple[Parts, ...]:
        """Return the parts of the time on the accelerator; none if it cannot run the operator."""
        accelerator = self._accelerator
        if accelerator is None or not operator.on_accelerator:
            return ()
        calls = KERNELS.node_cycles * len(operator.works) / self._processor.clock_ghz / 1e6
        return (*(accelerator_parts(work, accelerator) for work in operator.works), Parts(overhead_ms=calls))

    def _accelerator_ms(self, operator: _Operator, measured: OperatorCost | None) -> float | None:
        parts = self._accelerator_parts(operator)
        if not parts:
            return None
        if measured is not None and measured.accelerator_ms:
            return measured.accelerator_ms
        return self._on_accelerator.time_ms(operator.op_type, parts)


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
