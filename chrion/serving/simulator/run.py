"""The simulation of a scenario in all its patterns."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

from chrion.serving.simulator.engine import ClusterEngine
from chrion.serving.simulator.histograms import Floats
from chrion.serving.simulator.results import PatternResult, collect
from chrion.serving.simulator.scenario import Scenario

#: Requests of a run from which the compiled kernel is used if numba is installed; its first use takes half a minute.
WORTHWHILE = 1_000_000
#: ``keep(pattern, rows)`` receives the records of requests; see :data:`chrion.serving.simulator.metrics.COLUMNS`.
Keep = Callable[[str, Floats], None]


def simulate(
    scenario: Scenario,
    progress: Callable[[int], None] = lambda _: None,
    keep: Keep | None = None,
    *,
    compiled: bool | None = None,
) -> tuple[PatternResult, ...]:
    """Simulate every pattern of a scenario with the same requests.

    Args:
        scenario: The scenario.
        progress: Called repeatedly with the number of requests that have arrived, over all patterns.
        keep: Called with the records of requests and their outcomes, in the order in which they started or were
            dropped.
        compiled: True to use the compiled kernel for the patterns that it covers; the results are the same. Default: if
            numba is installed and the run is long.

    Returns:
        One result for each pattern, in the scenario's order.
    """
    if compiled is None:
        compiled = find_spec("numba") is not None and scenario.workload.requests >= WORTHWHILE
    if compiled:
        from chrion.serving.simulator import fast  # noqa: PLC0415 # numba takes a second and 100 MB to import
    results = []
    done = 0
    for pattern in scenario.patterns:
        engine = ClusterEngine(scenario.engine_config(pattern))
        report = partial(lambda before, number: progress(before + number), done)
        callbacks = report, partial(keep, pattern) if keep else None
        if compiled and fast.covers(scenario, pattern):
            fast.run_compiled(engine, scenario, scenario.workload.chunks(), *callbacks)
        else:
            engine.run(scenario.workload.chunks(), *callbacks)
        results.append(collect(scenario, pattern, engine))
        done += results[-1].total.arrivals
    return tuple(results)
