"""A roofline model of the share of a device that an operator occupies.

The device's rates are the largest numbers of floating point operations and of bytes per millisecond that any operator
of the graph reaches. An operator's share is the larger of its own rates divided by those of the device: an operator of
a few microseconds leaves most of the device idle, and the one with the best rate occupies all of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from chrion.graph.dag import Dag


def operator_bytes(dag: Dag, i: int) -> int:
    """Return the bytes that an operator reads and writes: inputs, weights and outputs."""
    return dag.input_bytes[i] + dag.output_bytes[i] + dag.weight_total(i)


@dataclass(frozen=True, slots=True)
class Roofline:
    """The best rates of a device on one graph, and the work and time of each operator."""

    flops: tuple[float, ...]
    #: Bytes read and written: inputs, weights and outputs.
    bytes: tuple[int, ...]
    times_ms: tuple[float, ...]
    best_flops_per_ms: float
    best_bytes_per_ms: float

    @classmethod
    def of(cls, dag: Dag, times_ms: Sequence[float]) -> Roofline:
        """Return the roofline for the times of operators that run alone; infinite times are ignored."""
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
        """The shares of all operators."""
        return tuple(self.share(i) for i in range(len(self.times_ms)))

    def share(self, i: int) -> float:
        """Return the share of the device that operator ``i`` occupies, 0 to 1; 1 if its time or work is unknown."""
        ms = self.times_ms[i]
        if not 0 < ms < math.inf or not (self.flops[i] or self.bytes[i]):
            return 1.0
        return max(
            self.flops[i] / ms / self.best_flops_per_ms if self.best_flops_per_ms else 0.0,
            self.bytes[i] / ms / self.best_bytes_per_ms if self.best_bytes_per_ms else 0.0,
        )

    def memory_bound(self, i: int) -> bool:
        """Return whether an operator's memory traffic takes longer than its arithmetic, both at the best rates."""
        computing = self.flops[i] / self.best_flops_per_ms if self.best_flops_per_ms else 0.0
        moving = self.bytes[i] / self.best_bytes_per_ms if self.best_bytes_per_ms else 0.0
        return moving > computing
