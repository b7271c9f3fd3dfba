"""The simulation of a scenario in all its patterns."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from chrion.simulator.engine import Engine
from chrion.simulator.histograms import Floats
from chrion.simulator.results import PatternResult, collect
from chrion.simulator.scenario import Scenario

#: ``keep(pattern, rows)`` receives the records of requests; see :data:`chrion.simulator.metrics.COLUMNS`.
Keep = Callable[[str, Floats], None]


def simulate(
    scenario: Scenario, progress: Callable[[int], None] = lambda _: None, keep: Keep = lambda _, __: None
) -> tuple[PatternResult, ...]:
    """Simulate every pattern of a scenario with the same requests.

    Args:
        scenario: The scenario.
        progress: Called repeatedly with the number of requests that have arrived, over all patterns.
        keep: Called with the records of requests, in the order in which they started or were dropped.

    Returns:
        One result for each pattern, in the scenario's order.
    """
    results = []
    done = 0
    for pattern in scenario.patterns:
        engine = Engine(scenario.engine_config(pattern))
        engine.run(scenario.workload.chunks(), partial(_add, progress, done), partial(keep, pattern))
        results.append(collect(scenario, pattern, engine))
        done += results[-1].total.arrivals
    return tuple(results)


def _add(progress: Callable[[int], None], before: int, number: int) -> None:
    progress(before + number)
