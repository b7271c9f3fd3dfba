"""The limit of a scenario: the fewest servers or the least memory, or the most models or the highest rate.

The search doubles its step until the condition changes and then halves the interval, so it simulates about 2 log2(n)
values. A figure need not change in one direction with the searched value: with another number of servers, requests are
routed otherwise. So the search goes on beyond the limit until several values in a row do not meet the condition.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from chrion.common.records import read_record
from chrion.common.wrong_values import wrong_value
from chrion.errors import ScenarioError
from chrion.serving.simulator.results import PatternResult
from chrion.serving.simulator.run import simulate
from chrion.serving.simulator.scenario import Scenario, ScenarioSource
from chrion.serving.simulator.scenario_models import PLANNED, SHRINK
from chrion.serving.simulator.settings import MAX_MODELS, SYNTHETIC, WorkloadSpec

FIND_SCHEMA = "chrion.simulation-find/1"

#: Figures of a condition, as a share or in ms.
METRICS: dict[str, Callable[[PatternResult], float]] = {
    "violations": lambda result: result.total.violation_rate,
    "swapping": lambda result: result.total.swapping_rate,
    "mean": lambda result: result.total.response.mean_ms,
    "p50": lambda result: result.total.response.p50_ms,
    "p95": lambda result: result.total.response.p95_ms,
    "p99": lambda result: result.total.response.p99_ms,
}
_SHARES = ("violations", "swapping")
#: Values in a row beyond a limit that must not meet the condition (a choice, not measured).
BEYOND = 8


@dataclass(frozen=True, slots=True)
class Condition:
    """An upper limit of a figure."""

    #: A key of :data:`METRICS`.
    metric: str
    #: The limit: a share, or ms.
    limit: float

    def figure(self, result: PatternResult) -> float:
        """Return the figure of a result."""
        return METRICS[self.metric](result)

    def text(self, figure: float) -> str:
        """Return a figure with its unit."""
        return f"{figure:.2%}" if self.metric in _SHARES else f"{figure:.1f} ms"


@dataclass(frozen=True, slots=True)
class Searched:
    """A quantity that can be searched. Its values are numbered, and grow with the number."""

    #: True to find the smallest value that meets the condition, false to find the largest.
    smallest: bool
    #: The permitted numbers, and the one to begin with.
    numbers: range
    begin: int
    #: The change of the scenario for a number.
    sets: Callable[[int], dict[str, Any]]
    #: The quantity of a scenario, as it is reported.
    amount: Callable[[Scenario], float]


@dataclass(frozen=True, slots=True)
class Probe:
    """One simulated value."""

    #: The quantity: servers, models, GB for each server, or requests per second (traces: scale).
    amount: float
    #: The figure of the condition.
    figure: float
    cost_per_hour: float
    #: As in :class:`chrion.serving.simulator.results.Usage`; from 1 on, queues grow as long as requests arrive, so that
    #: the figure depends on their number.
    offered_load: float = 0.0


@dataclass(frozen=True, slots=True)
class Limit:
    """The limit of one pattern."""

    pattern: str
    #: The last value that meets the condition; None if no permitted value does.
    found: Probe | None
    #: The first value that does not; None if all permitted values do, or the models do not fit on it.
    beyond: Probe | None
    #: Whether the models fit on the next value.
    fits: bool = True
    #: The worst of the values tried that have more servers or memory, fewer models or a lower rate, if its figure is
    #: above that of the limit: then the figure does not change in one direction.
    worse: Probe | None = None


def parse_until(text: str) -> Condition:
    """Return the condition of ``violations<=1%`` or ``p99<=250ms``.

    Raises:
        OptionError: The text has another form.
    """
    match = re.fullmatch(r"\s*([a-z0-9]+)\s*<=\s*([0-9.]+)\s*(%|ms)?\s*", text)
    hint = f"for example violations<=1% or p99<=250ms; figures: {', '.join(METRICS)}"
    if not match or match[1] not in METRICS or match[2].count(".") > 1 or match[2] == ".":
        raise wrong_value("--until", "figure<=limit", text, hint=hint)
    unit = "%" if match[1] in _SHARES else "ms"
    if match[3] != unit:
        raise wrong_value("--until", f"a limit in {unit}", text, hint=hint)
    return Condition(match[1], float(match[2]) / (100 if unit == "%" else 1))


def searched(name: str, scenario: Scenario) -> Searched:
    """Return a quantity by its name: ``servers``, ``memory``, ``models`` or ``rate``.

    Raises:
        OptionError: There is no such quantity.
    """
    workload = read_record(WorkloadSpec, scenario.content.get("workload", {}), "workload")
    rate_key = "rate_per_s" if workload.kind in SYNTHETIC else "rate_scale"
    rate: float = getattr(workload, rate_key)
    known: dict[str, Searched] = {
        "servers": Searched(
            smallest=True,
            numbers=range(1, 10_001),
            begin=1,
            sets=lambda n: {"servers.count": n},
            amount=lambda s: len(s.servers),
        ),
        "memory": Searched(
            smallest=True,
            numbers=range(1, 100_001),
            begin=10,
            sets=lambda n: {"servers.gpu_memory_gb": n / 10},
            amount=lambda s: s.servers[0].gpu_memory_gb,
        ),
        "models": Searched(
            smallest=False,
            numbers=range(1, MAX_MODELS + 1),
            begin=1,
            sets=lambda n: {"total_models": n},
            amount=lambda s: len(s.models),
        ),
        "rate": Searched(
            smallest=False,
            numbers=range(-900, 901),
            begin=0,
            sets=lambda n: {f"workload.{rate_key}": rate * 1.01**n},
            amount=lambda s: float(s.content["workload"][rate_key]),
        ),
    }
    if name not in known:
        raise wrong_value("--find", f"one of {', '.join(known)}", name)
    return known[name]


def find_limits(source: ScenarioSource, name: str, condition: Condition) -> tuple[Limit, ...]:
    """Return the limit of every pattern of a scenario.

    Args:
        source: The scenario.
        name: The quantity; see :func:`searched`.
        condition: What has to hold.

    Raises:
        InputError: The scenario is invalid.
    """
    scenario = source.build()
    quantity = searched(name, scenario)
    return tuple(_limit(source, quantity, condition, p, scenario.reference) for p in scenario.patterns)


def _limit(source: ScenarioSource, quantity: Searched, condition: Condition, pattern: str, reference: str) -> Limit:
    probes: dict[int, Probe | None] = {}
    #: The minimum number with which no request waits, so that more servers or memory cannot help.
    enough = quantity.numbers[-1]
    ends_early = quantity.smallest and pattern not in (PLANNED, SHRINK)  # with more memory these use faster variants

    def probe(number: int) -> Probe | None:
        nonlocal enough
        if number not in probes:
            sets: Mapping[str, Any] = {**quantity.sets(number), "patterns": [pattern], "slo.of": reference}
            probes[number], waited = _probe(source.changed(sets), quantity, condition)
            if ends_early and not waited:
                enough = min(enough, number)
        return probes[number]

    def meets(number: int) -> bool:
        probed = probe(min(number, enough))
        return probed is not None and probed.figure <= condition.limit and probed.offered_load < 1

    # The condition holds on one side: from `edge` on for the smallest value, before `edge` for the largest.
    numbers = quantity.numbers
    edge = first_true(lambda n: meets(n) == quantity.smallest, quantity.begin, numbers[0], numbers[-1])
    last, step = (edge, -1) if quantity.smallest else (edge - 1, 1)
    has_limit = last in numbers and meets(last)
    at = last
    while has_limit and abs(at - last) < BEYOND and at + step in numbers:
        at += step
        if meets(at):
            last = at
    beyond = last + step
    found = probe(last) if has_limit else None
    after = probe(min(beyond, enough)) if beyond in numbers else None
    easier = [tried for n, tried in probes.items() if tried and (n - last) * step < 0]
    worst = max(easier, key=lambda tried: tried.figure, default=None)
    worse = worst if worst and found and worst.figure > found.figure else None
    return Limit(pattern, found, after, after is not None or beyond not in numbers, worse)


def _probe(source: ScenarioSource, quantity: Searched, condition: Condition) -> tuple[Probe | None, bool]:
    """Return the simulated value, or None if the models do not fit, and whether a request waited or did not run."""
    try:
        scenario = source.build()
    except ScenarioError:
        return None, True
    (result,) = simulate(scenario)
    waited = result.total.completed < result.total.arrivals or result.total.loads > 0 or result.total.mean_wait_ms > 0
    figure = condition.figure(result)
    cost = sum(spec.cost_per_hour for spec in scenario.servers)
    figure = figure if figure == figure else float("inf")  # noqa: PLR0124 # NaN: all were dropped
    probe = Probe(quantity.amount(scenario), figure, cost, result.usage.offered_load)
    return probe, waited


def first_true(holds: Callable[[int], bool], begin: int, low: int, high: int) -> int:
    """Return the minimum number from ``low`` to ``high`` for which ``holds`` is true, or ``high + 1`` if there is none.

    Args:
        holds: A condition that is false up to some number and true from then on.
        begin: The number to begin with; the search is fast if the result is near it.
        low: The minimum number.
        high: The greatest number.
    """
    step = 1
    if holds(begin):
        after = begin
        while after > low and holds(max(low, after - step)):
            after, step = max(low, after - step), 2 * step
        before = max(low - 1, after - step)
    else:
        before = begin
        while before < high and not holds(min(high, before + step)):
            before, step = min(high, before + step), 2 * step
        after = min(high + 1, before + step)
    while after - before > 1:
        middle = (before + after) // 2
        before, after = (before, middle) if holds(middle) else (middle, after)
    return after
