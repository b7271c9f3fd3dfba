"""Sub-machines: the smaller machines within a machine, which the default policy plans for first.

A plan for a smaller machine is also a plan for a larger one, and predicted the same. The default policy passes the
solutions of each sub-machine on to those that contain it. So it never predicts a slower plan with an accelerator than
without, with several streams than with one, or with more cores than with fewer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from chrion.profiler.costs import Costs
from chrion.scheduler.policies.core_counts import sampled_counts

#: Graphs of more operators are planned for a single stream (a choice, not measured).
_MOST_FOR_STREAMS = 2_000


def sub_machines(costs: Costs, n: int) -> Iterator[Costs]:
    """Yield the costs on each sub-machine and on the machine itself, each after all that it contains.

    They have a sampled number of cores; and no accelerator, one stream of it, or all its streams.

    Args:
        costs: The machine's costs.
        n: Number of operators.
    """
    streams = [0]
    if costs.accelerator_ms is not None:
        streams += [1, costs.streams] if costs.streams > 1 and n <= _MOST_FOR_STREAMS else [1]
    sampled = sampled_counts(costs, n)
    for used in streams:
        for cores in sampled:
            if cores or (used and math.inf not in (costs.accelerator_ms or ())):
                yield costs.limited_to(cores, used)


def needed_machines(solved: Sequence[Costs], later: Sequence[Costs]) -> list[Costs]:
    """Return the solved machines whose solutions later ones need, because no larger solved machine passes them on."""
    return [
        machine
        for machine in solved
        if any(
            contains(larger, machine)
            and not any(o is not machine and contains(larger, o) and contains(o, machine) for o in solved)
            for larger in later
        )
    ]


def contains(large: Costs, small: Costs) -> bool:
    """Return True if a machine contains another one, both given by costs of the same operators."""
    if small.accelerator_ms is not None and (large.accelerator_ms is None or large.streams < small.streams):
        return False
    return large.cores >= small.cores
