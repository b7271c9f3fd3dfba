"""Costs of a graph's operators on a machine: the matrices of the paper's Table 3."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from chrion.common.lane_numbers import is_accelerator_lane
from chrion.graph.dag import Dag


@dataclass(frozen=True, slots=True)
class CopyCost:
    """The time of a copy between two memories: ``latency_ms + bytes * ms_per_byte``."""

    latency_ms: float
    ms_per_byte: float

    def ms(self, size: int) -> float:
        """Return the time to copy ``size`` bytes."""
        return self.latency_ms + size * self.ms_per_byte


#: A copy that takes no time.
FREE = CopyCost(0.0, 0.0)
#: The default number of lanes (streams) of an accelerator: a choice, not measured; each lane
#: needs a stream and memory of its own.
STREAMS = 4


@dataclass(frozen=True, slots=True)
class BufferSupport:
    """What onnxruntime's buffers in an accelerator's memory can hold and do."""

    #: Types of elements that they hold; None if they hold all. Values of other types stay in the host's memory.
    held_types: frozenset[str] | None = None
    #: Whether a part of a buffer can be bound. It cannot if the provider gives handles in place of addresses.
    views: bool = True

    @classmethod
    def of(cls, provider: str | None) -> BufferSupport:
        """Return what is known of an execution provider."""
        return _BUFFERS.get(provider or "", cls())


_BUFFERS = {
    "WebGpuExecutionProvider": BufferSupport(frozenset({"float", "float16", "int32", "uint32", "bool"}), views=False),
    "DmlExecutionProvider": BufferSupport(views=False),
}


@dataclass(frozen=True, slots=True)
class OperatorMemory:
    """The memory of one operator on the accelerator: a row of M."""

    inputs_mb: float = 0.0
    outputs_mb: float = 0.0
    ephemeral_mb: float = 0.0
    weights_mb: float = 0.0

    @property
    def own_mb(self) -> float:
        """The memory of the operator without its inputs: M_i,1 + M_i,2 + M_i,3 of Equation 4."""
        return self.outputs_mb + self.ephemeral_mb + self.weights_mb


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of a graph's ``n`` operators on a machine with ``k`` CPU cores and at most one accelerator."""

    #: W[i, 0]: ms on the accelerator, infinite if it cannot run the operator; None without an accelerator.
    accelerator_ms: tuple[float, ...] | None
    #: ``cpu_ms[j - 1][i]`` is W[i, j]: ms on one core while ``j`` cores are busy.
    cpu_ms: tuple[tuple[float, ...], ...]
    #: M, one row per operator.
    memory: tuple[OperatorMemory, ...]
    #: Copies from the host to the accelerator.
    upload: CopyCost = FREE
    #: Copies from the accelerator to the host.
    download: CopyCost = FREE
    #: Handoff latency: from the end of an operator to the start of its successor on another lane of the same device.
    handoff_ms: float = 0.0
    #: Time to start a segment on a lane.
    dispatch_ms: float = 0.0
    #: The size of a core's private cache, and the time to reload a byte of weights into it (see
    #: :mod:`chrion.scheduler.evaluation.weight_cache`); zero if unknown.
    cache_bytes: int = 0
    reload_ms_per_byte: float = 0.0
    #: The share of the accelerator that each operator occupies when it runs alone, 0 to 1; if empty, all are 1.
    accelerator_share: tuple[float, ...] = ()
    #: The number of lanes (streams) of the accelerator that a scheduler may use.
    streams: int = STREAMS
    #: Memory that the accelerator takes as soon as any model runs on it (context, libraries).
    base_memory_mb: float = 0.0
    #: What buffers on the accelerator can hold and do.
    buffers: BufferSupport = BufferSupport()
    #: Widths of 2 or more that CPU lanes may have, ascending; and for each of them the ms of every operator on so many
    #: cores while no other core is busy.
    widths: tuple[int, ...] = ()
    wide_ms: tuple[tuple[float, ...], ...] = ()
    #: Time to wake a thread that does not spin: those of a wide segment at its start, and lanes whose cores it used.
    wake_ms: float = 0.0

    @property
    def cores(self) -> int:
        """The number of CPU cores, k."""
        return len(self.cpu_ms)

    def lane_ms(self, lane: int, cores: int) -> Sequence[float]:
        """Return the operators' times on a lane while ``cores`` CPU lanes are busy (a column of W).

        On a lane of the accelerator they are the times of operators that run alone.
        """
        if not is_accelerator_lane(lane):
            return self.cpu_ms[cores - 1]
        return self.accelerator_ms if self.accelerator_ms is not None else (math.inf,) * len(self.memory)

    def core_ms(self, i: int, width: int, busy: int) -> float:
        """Return the time of operator ``i`` on ``width`` cores while ``busy`` cores are busy, in ms.

        Contention slows a wide operator as much as it slows as many operators of one core each.
        """
        if width == 1:
            return self.cpu_ms[busy - 1][i]
        alone_ms = self.wide_ms[self.widths.index(width)][i]
        reference = self.cpu_ms[width - 1][i]
        return alone_ms * max(1.0, self.cpu_ms[busy - 1][i] / reference) if reference else alone_ms

    def transfer_ms(self, source: int, target: int, size: int) -> float:
        """Return the time from the end of an operator to the start of its successor on another lane.

        Lanes of one device share its memory, so the time is the handoff latency. Between the host and the accelerator
        it is the time of a copy of ``size`` bytes.
        """
        if is_accelerator_lane(source) == is_accelerator_lane(target):
            return self.handoff_ms
        return (self.upload if is_accelerator_lane(target) else self.download).ms(size)

    def share(self, i: int) -> float:
        """Return the share of the accelerator that operator ``i`` occupies."""
        return self.accelerator_share[i] if self.accelerator_share else 1.0

    def without_widths(self) -> Costs:
        """Return the costs of the same machine with CPU lanes of one core only."""
        return replace(self, widths=(), wide_ms=())

    def without_accelerator(self) -> Costs:
        """Return the costs of the same machine without its accelerator."""
        return replace(self, accelerator_ms=None)

    def limited_to(self, cores: int, streams: int) -> Costs:
        """Return the costs of the same machine with at most so many cores and accelerator lanes; 0 for none."""
        return replace(
            self,
            accelerator_ms=self.accelerator_ms if streams else None,
            cpu_ms=self.cpu_ms[:cores],
            streams=min(max(streams, 1), self.streams),
            widths=tuple(width for width in self.widths if width <= cores),
            wide_ms=self.wide_ms[: sum(width <= cores for width in self.widths)],
        )

    def mean_ms(self, i: int) -> float:
        """Return the mean execution time of operator ``i`` in ms: the mean of the finite entries of its row of W."""
        row = [times[i] for times in self.cpu_ms]
        if self.accelerator_ms is not None and math.isfinite(self.accelerator_ms[i]):
            row.append(self.accelerator_ms[i])
        return sum(row) / len(row) if row else 0.0


def uniform_costs(
    dag: Dag, *, accelerator_ms: float | None = None, cpu_ms: Sequence[float] = (1.0,), **machine: float | CopyCost
) -> Costs:
    """Return costs in which all operators take the same time, for graphs without a model.

    Args:
        dag: The graph.
        accelerator_ms: The time of each operator on the accelerator; None without an accelerator.
        cpu_ms: The time of each operator on one core while 1, 2, ... cores are busy.
        machine: The fields of :class:`Costs` that are not per operator.
    """
    n = len(dag)
    return Costs(
        accelerator_ms=None if accelerator_ms is None else (accelerator_ms,) * n,
        cpu_ms=tuple((ms,) * n for ms in cpu_ms),
        memory=tuple(
            OperatorMemory(dag.input_bytes[i] / 1e6, dag.output_bytes[i] / 1e6, 0.0, dag.weight_total(i) / 1e6)
            for i in range(n)
        ),
        **machine,  # type: ignore[arg-type] # the fields' own types
    )
