"""What a schedule costs on a machine, operator by operator: the matrices of the paper's Table 3."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from chrion.graph.dag import Dag
from chrion.lane_numbers import is_accelerator_lane


@dataclass(frozen=True, slots=True)
class CopyCost:
    """A copy between the memories of two devices: ``latency_ms + bytes * ms_per_byte``."""

    latency_ms: float = 0.0
    ms_per_byte: float = 0.0

    def ms(self, size: int) -> float:
        """Time to copy ``size`` bytes."""
        return self.latency_ms + size * self.ms_per_byte


FREE = CopyCost()
#: Lanes of an accelerator that are worth trying where nothing else is said.
STREAMS = 4


@dataclass(frozen=True, slots=True)
class OperatorMemory:
    """Megabytes one operator needs on the accelerator: a row of M."""

    inputs_mb: float = 0.0
    outputs_mb: float = 0.0
    ephemeral_mb: float = 0.0
    weights_mb: float = 0.0

    @property
    def own_mb(self) -> float:
        """What placing the operator there takes by itself: M_i,1 + M_i,2 + M_i,3 of Equation 4."""
        return self.outputs_mb + self.ephemeral_mb + self.weights_mb


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of a graph's ``n`` operators on a machine with ``k`` CPU cores and at most one accelerator."""

    #: W[i, 0]: ms on the accelerator, infinite where it cannot run the operator; None without an accelerator.
    accelerator_ms: tuple[float, ...] | None
    #: ``cpu_ms[j - 1][i]`` is W[i, j]: ms on one core while ``j`` cores are busy.
    cpu_ms: tuple[tuple[float, ...], ...]
    #: M, one row an operator.
    memory: tuple[OperatorMemory, ...]
    #: CPU to accelerator.
    upload: CopyCost = FREE
    #: Accelerator to CPU.
    download: CopyCost = FREE
    #: From the end of an operator on one lane to the start of one on another of the same side that waits for it.
    handoff_ms: float = 0.0
    #: Starting a segment on a lane.
    dispatch_ms: float = 0.0
    #: What a core's own cache holds, and what it takes to bring a byte of weights there again (see
    #: :mod:`chrion.scheduler.evaluation.weight_cache`); zero where not known.
    cache_bytes: int = 0
    reload_ms_per_byte: float = 0.0
    #: Share of the accelerator that an operator occupies while it runs there alone, 0 to 1; empty: each fills it.
    accelerator_share: tuple[float, ...] = ()
    #: Lanes (streams) of the accelerator that a scheduler may use.
    streams: int = STREAMS
    #: Memory the accelerator takes as soon as anything runs there (context, libraries).
    base_memory_mb: float = 0.0

    @property
    def cores(self) -> int:
        """k: how many CPU cores there are."""
        return len(self.cpu_ms)

    def lane_ms(self, lane: int, cores: int) -> Sequence[float]:
        """W of one lane when ``cores`` CPU lanes are in use; on the accelerator's lanes, of an operator by itself."""
        if not is_accelerator_lane(lane):
            return self.cpu_ms[cores - 1]
        return self.accelerator_ms if self.accelerator_ms is not None else (math.inf,) * len(self.memory)

    def transfer_ms(self, source: int, target: int, size: int) -> float:
        """From the end of an operator on one lane until an operator on another may start on its result.

        Lanes of one side share its memory: a handoff. Between the sides, a copy of ``size`` bytes.
        """
        if is_accelerator_lane(source) == is_accelerator_lane(target):
            return self.handoff_ms
        return (self.upload if is_accelerator_lane(target) else self.download).ms(size)

    def share(self, i: int) -> float:
        """Share of the accelerator that operator ``i`` occupies."""
        return self.accelerator_share[i] if self.accelerator_share else 1.0

    def without_accelerator(self) -> Costs:
        """The same machine with its CPU cores alone."""
        return replace(self, accelerator_ms=None)

    def mean_ms(self, i: int) -> float:
        """Mean execution time of operator ``i`` over the devices: the mean of its row of W."""
        row = [times[i] for times in self.cpu_ms]
        if self.accelerator_ms is not None and math.isfinite(self.accelerator_ms[i]):
            row.append(self.accelerator_ms[i])
        return sum(row) / len(row) if row else 0.0


def uniform_costs(
    dag: Dag, *, accelerator_ms: float | None = None, cpu_ms: Sequence[float] = (1.0,), **machine: float | CopyCost
) -> Costs:
    """Costs under which all operators are alike: for studies and tests of graphs that have no model.

    Args:
        dag: The graph.
        accelerator_ms: Time of any operator there; None without an accelerator.
        cpu_ms: Time of any operator on one core while 1, 2, ... cores are busy.
        machine: Fields of :class:`Costs` that are not per operator.
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
