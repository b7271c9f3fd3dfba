"""The simulation of a scenario in all its patterns."""

from __future__ import annotations

from collections.abc import Callable

from chrion.simulator.engine import Engine
from chrion.simulator.results import PatternResult, collect
from chrion.simulator.scenario import Scenario


def simulate(scenario: Scenario, progress: Callable[[int], None] = lambda _: None) -> tuple[PatternResult, ...]:
    """Simulate every pattern of a scenario with the same requests.

    Args:
        scenario: The scenario.
        progress: Called repeatedly with the number of requests that have arrived, over all patterns.

    Returns:
        One result for each pattern, in the scenario's order.
    """
    results = []
    done = 0
    for pattern in scenario.patterns:
        engine = Engine(scenario.engine_config(pattern))
        engine.run(scenario.workload.chunks(), lambda number, before=done: progress(before + number))  # type: ignore[misc]
        results.append(collect(scenario, pattern, engine))
        done += results[-1].total.arrivals
    return tuple(results)
