"""Choice of the number of CPU cores: W[i, j] depends on it, so policies plan for every number and compare."""

from __future__ import annotations

import math
from collections.abc import Sequence

from chrion.errors import ScheduleError
from chrion.profiler.costs import Costs

#: For graphs of more operators, the default policy and ``cpu`` make device selections for a sample of core counts.
HUGE = 20_000
_POWERS_OF_TWO = frozenset(2**power for power in range(10))
#: Sampled numbers of cores for graphs of at most so many operators; see :func:`sampled_counts`.
_SAMPLES = (
    (1_000, frozenset({0, 3, 6, 12, 24, 48, 96}) | _POWERS_OF_TWO),
    (HUGE, frozenset({0}) | _POWERS_OF_TWO),
    (math.inf, frozenset({0, 1, 4, 16, 64, 256})),
)


def usable_counts(costs: Costs, _n: int = 0) -> range:
    """Return the numbers of CPU cores k' to plan for: 0 to k, without 0 unless the accelerator runs every operator.

    Args:
        costs: The machine's costs of its operators.
        _n: Number of operators, which makes no difference.

    Raises:
        ScheduleError: There is neither such an accelerator nor a CPU core.
    """
    accelerator_suffices = costs.accelerator_ms is not None and math.inf not in costs.accelerator_ms
    counts = range(0 if accelerator_suffices else 1, costs.cores + 1)
    if not counts:
        raise ScheduleError("schedule: there is neither an accelerator that runs every operator nor a CPU core")
    return counts


def sampled_counts(costs: Costs, n: int) -> list[int]:
    """Return the numbers of CPU cores to plan for where each takes a schedule of its own: all of a few, then fewer.

    The sample of a machine contains those of all smaller numbers of cores in the sample. So the best plan over it never
    gets slower with more cores.

    Args:
        costs: The machine's costs of its operators.
        n: Number of operators. The sample is sparser for large graphs, where each number takes seconds.

    Raises:
        ScheduleError: As for :func:`usable_counts`.
    """
    usable = usable_counts(costs)
    steps = next(steps for most, steps in _SAMPLES if n <= most)
    return [cores for cores in usable if cores in steps or cores == costs.cores]


def selection_counts(costs: Costs, n: int) -> Sequence[int]:
    """Return the numbers of CPU cores to make device selections for: all of them, or a sample for huge graphs.

    The default policy and ``cpu`` use it; ``chrion-paper`` tries all numbers.

    Args:
        costs: The machine's costs of its operators.
        n: Number of operators.

    Raises:
        ScheduleError: As for :func:`usable_counts`.
    """
    return usable_counts(costs) if n <= HUGE else sampled_counts(costs, n)
