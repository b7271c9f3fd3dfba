"""How much of a device an operator occupies: a roofline through the best that any operator of the graph achieves.

The device's rates are the most floating point operations and the most bytes a millisecond that any operator of the
graph reaches there. An operator's share is the larger of its own rates over those: one that starts and ends within
microseconds leaves most of the device idle, one that streams through memory or computes as fast as any fills it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from chrion.graph.dag import Dag


def operator_bytes(dag: Dag, i: int) -> int:
    """Bytes an operator reads and writes: inputs, weights, outputs."""
    return dag.input_bytes[i] + dag.output_bytes[i] + dag.weight_total(i)


@dataclass(frozen=True, slots=True)
class Roofline:
    """A device's best rates on one graph, and what each operator makes of them."""

    flops: tuple[float, ...]
    #: Read and written: inputs, weights, outputs.
    bytes: tuple[int, ...]
    times_ms: tuple[float, ...]
    best_flops_per_ms: float
    best_bytes_per_ms: float

    @classmethod
    def of(cls, dag: Dag, times_ms: Sequence[float]) -> Roofline:
        """From the time of each operator by itself; infinite ones are left out."""
        moved = tuple(operator_bytes(dag, i) for i in range(len(dag)))
        timed = [i for i, ms in enumerate(times_ms) if 0 < ms < math.inf]
        return cls(
            dag.flops,
            moved,
            tuple(times_ms),
            max((dag.flops[i] / times_ms[i] for i in timed), default=0.0),
            max((moved[i] / times_ms[i] for i in timed), default=0.0),
        )

    @property
    def shares(self) -> tuple[float, ...]:
        """The share of every operator."""
        return tuple(self.share(i) for i in range(len(self.times_ms)))

    def share(self, i: int) -> float:
        """The part of the device that operator ``i`` occupies, 0 to 1; 1 where nothing is known of it."""
        ms = self.times_ms[i]
        if not 0 < ms < math.inf or not (self.flops[i] or self.bytes[i]):
            return 1.0
        return max(
            self.flops[i] / ms / self.best_flops_per_ms if self.best_flops_per_ms else 0.0,
            self.bytes[i] / ms / self.best_bytes_per_ms if self.best_bytes_per_ms else 0.0,
        )

    def memory_bound(self, i: int) -> bool:
        """Whether moving its bytes takes longer than its arithmetic, both at the best rates."""
        computing = self.flops[i] / self.best_flops_per_ms if self.best_flops_per_ms else 0.0
        moving = self.bytes[i] / self.best_bytes_per_ms if self.best_bytes_per_ms else 0.0
        return moving > computing
