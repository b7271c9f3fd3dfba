"""Replications: a scenario simulated with several seeds, and confidence intervals of its figures."""

from __future__ import annotations

from collections.abc import Sequence

from chrion.common.wrong_values import wrong_value
from chrion.serving.simulator.confidence import Interval, interval
from chrion.serving.simulator.find import METRICS
from chrion.serving.simulator.sweep import SweepPoint

REPLICATIONS_SCHEMA = "chrion.simulation-replications/1"
#: The price of an hour, which is not searched.
COST = "cost_per_hour"


def seeds(first: int, number: int) -> list[dict[str, int]]:
    """Return the points of a sweep over seeds.

    Raises:
        OptionError: There are fewer than two replications, from which no interval follows.
    """
    if number < 2:
        raise wrong_value("--replications", "2 or more", number)
    return [{"seed": first + i} for i in range(number)]


def intervals(points: Sequence[SweepPoint]) -> dict[str, dict[str, Interval]]:
    """Return the interval of each figure by pattern and name: :data:`chrion.serving.simulator.find.METRICS`, and cost.

    The cost of an hour is among them if servers have a price.
    """
    figures = dict(METRICS)
    if any(result.usage.cost for point in points for result in point.results):
        figures[COST] = lambda result: result.cost_per_hour
    return {
        first.pattern: {name: interval([figure(p.results[i]) for p in points]) for name, figure in figures.items()}
        for i, first in enumerate(points[0].results)
    }
