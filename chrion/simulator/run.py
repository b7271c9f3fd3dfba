"""One scenario, every pattern: the whole simulation in a call."""

from __future__ import annotations

from collections.abc import Callable

from chrion.simulator.engine import Engine
from chrion.simulator.results import PatternResult, collect
from chrion.simulator.scenario import Scenario


def simulate(scenario: Scenario, progress: Callable[[int], None] = lambda _: None) -> tuple[PatternResult, ...]:
    """Run every pattern of a scenario over the same requests.

    Args:
        scenario: What to simulate.
        progress: Hears now and then how many requests have arrived, all patterns together.

    Returns:
        One result a pattern, in the scenario's order.
    """
    results = []
    done = 0
    for pattern in scenario.patterns:
        engine = Engine(scenario.engine_config(pattern))
        engine.run(scenario.workload.chunks(), lambda number, before=done: progress(before + number))  # type: ignore[misc]
        results.append(collect(scenario, pattern, engine))
        done += results[-1].total.arrivals
    return tuple(results)
