"""The simulation of a scenario in all its patterns."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from chrion.serving.simulator.engine import ClusterEngine
from chrion.serving.simulator.histograms import Floats
from chrion.serving.simulator.results import PatternResult, collect
from chrion.serving.simulator.scenario import Scenario

#: ``keep(pattern, rows)`` receives the records of requests; see :data:`chrion.serving.simulator.metrics.COLUMNS`.
Keep = Callable[[str, Floats], None]


def simulate(
    scenario: Scenario,
    progress: Callable[[int], None] = lambda _: None,
    keep: Keep | None = None,
) -> tuple[PatternResult, ...]:
    """Simulate every pattern of a scenario with the same requests.

    Args:
        scenario: The scenario.
        progress: Called repeatedly with the number of requests that have arrived, over all patterns.
        keep: Called with the records of requests and their outcomes, in the order in which they started or were
            dropped.

    Returns:
        One result for each pattern, in the scenario's order.
    """
    results = []
    done = 0
    for pattern in scenario.patterns:
        engine = ClusterEngine(scenario.engine_config(pattern))
        report = partial(lambda before, number: progress(before + number), done)
        engine.run(scenario.workload.chunks(), report, partial(keep, pattern) if keep else None)
        results.append(collect(scenario, pattern, engine))
        done += results[-1].total.arrivals
    return tuple(results)
