"""Tables of limits and of replications of simulations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from chrion.report.figure_table import Column, FigureTable, key
from chrion.report.simulation_tables import WIDE, figure_text
from chrion.serving.simulator import find
from chrion.serving.simulator.confidence import Interval
from chrion.serving.simulator.decoder_scenario import DecoderScenario
from chrion.serving.simulator.find import Condition, Limit, Probe, Searched
from chrion.serving.simulator.results import COST, SHARES
from chrion.serving.simulator.scenario import Scenario
from chrion.serving.simulator.scenario_models import PLANNED, SHRINK

#: What an interval of cells does not contain.
CELLS_LINE = "cells: requests are not routed to servers of other cells; fewer, larger ones show the effect"
#: Patterns that choose variants by themselves, so that more memory may change which ones serve.
_OWN_VARIANTS = (PLANNED, SHRINK)
_CURVE = ("95 % interval", "utilisation", "runs", "meets it")


def limit_lines(quantity: Searched, condition: Condition, limits: Sequence[Limit]) -> list[str]:
    """Return the limit of each pattern as a line, and lines about what is unusual.

    Args:
        quantity: What was searched.
        condition: The condition.
        limits: The limits.
    """
    lines = []
    for limit in limits:
        lines.append(f"{limit.pattern}: {_bracket(quantity, condition, limit)}")
        lines += [f"{limit.pattern}: {note}" for note in _notes(quantity, condition, limit)]
    return lines


def curve_table(quantity: Searched, condition: Condition, limits: Sequence[Limit]) -> FigureTable:
    """Return a table of the values that decide the limits; neighbours of equal figures are one row."""
    priced = any(probe.cost_per_hour for limit in limits for probe in limit.curve)
    columns: list[Column | str] = [key("pattern"), key(quantity.unit, is_text=False), condition.metric, *_CURVE]
    table = FigureTable(
        "values around the limits; --export writes all that were tried",
        [*columns, *(["cost per hour"] if priced else [])],
    )

    def cells(probe: Probe) -> tuple[str, ...]:
        figure = probe.figure
        about = f"{probe.offered_load:.0%}", f"{probe.replications}", probe.met
        return (
            condition.text(figure.mean),
            condition.interval_text(figure),
            *about,
            *([f"{probe.cost_per_hour:.2f}"] if priced else []),
        )

    for limit in limits:
        for row, equal in groupby(_deciding(limit), cells):
            table.add_row(limit.pattern, _amounts(list(equal)), *row)
    return table


def search_lines(
    name: str,
    quantity: Searched,
    scenario: Scenario | DecoderScenario,
    limits: Sequence[Limit],
    *,
    keep_warm_up: bool,
) -> list[str]:
    """Return lines that say what the figures of a search of a quantity, by its name, are."""
    smallest, largest = "a may meet the condition, b clearly does", "a clearly meets the condition, b may"
    which = smallest if quantity.smallest else largest
    ranges = any(a and b and a.amount != b.amount for a, b in ((limit.possible, limit.certain) for limit in limits))
    legend = "[low to high]: 95 % confidence interval"
    lines = [f"a to b: {which}; {legend}" if ranges else legend]
    cut = max((probe.warm_up_requests for limit in limits for probe in limit.curve), default=0)
    never = "loads are" if isinstance(scenario, Scenario) else "single times between tokens (gap_p99) are"
    if scenario.is_steady and not keep_warm_up:
        lines.append(f"warm-up: left out by MSER-5, up to {cut} requests of a run; {never} never left out")
    elif not scenario.is_steady:
        lines.append("warm-up: counted, as the rate of arrivals changes over time")
    if name == "memory" and isinstance(scenario, Scenario):
        reserved = ", ".join(dict.fromkeys(f"{spec.reserved_gb:g}" for spec in scenario.servers))
        lines.append(f"memory: gpu_memory_gb, of which {reserved} GB (reserved_gb) are for contexts and scratch space")
    return lines


def _bracket(quantity: Searched, condition: Condition, limit: Limit) -> str:
    """Return the bracket of a limit and the figure at the value within it that meets the condition first."""
    if limit.possible is None:
        unmet = f"no value meets {condition.metric} <= {condition.text(condition.limit)}"
        if not limit.curve:
            return f"{unmet}: the models do not fit"
        tried = f"{unmet}; tried: {_with_unit(_amounts((limit.curve[0], limit.curve[-1])), quantity)}"
        return f"{tried}; more changes nothing" if limit.exhausted else tried
    ends = [probe for probe in (limit.possible, limit.certain) if probe]
    shown = limit.best or limit.possible
    figure, cost = shown.figure, shown.cost_per_hour
    interval = f"{condition.text(figure.mean)} [{condition.interval_text(figure)}]"
    priced = f", {cost:.2f} an hour" if cost else ""
    amounts = _with_unit(_amounts(sorted(ends, key=lambda probe: probe.amount)), quantity)
    return f"{amounts}; {amount_text(shown)}: {condition.metric} {interval}{priced}"


def _notes(quantity: Searched, condition: Condition, limit: Limit) -> Iterator[str]:
    most = "fewest" if quantity.smallest else "most"
    if limit.possible and not limit.certain:
        clear = any(probe.met == find.MET for probe in limit.curve)
        beyond_all = f"{'above' if quantity.smallest else 'below'} every value that clearly meets it, others do not"
        yield (
            beyond_all if clear else "no value that was tried clearly meets it; more --replications narrow the interval"
        )
    if limit.possible and limit.pattern in _OWN_VARIANTS and quantity.smallest and not limit.exhausted:
        yield f"not tried above {amount_text(limit.curve[-1])}, where other variants may be chosen"
    beyond = limit.beyond
    if limit.possible and beyond is None:
        side = "below" if quantity.smallest else "above"
        yield f"no value {side} {amount_text(limit.possible)} is tried; it is the {most} that is permitted"
    elif limit.possible and beyond and beyond.met == find.UNFIT:
        yield f"{'below' if quantity.smallest else 'above'} {amount_text(limit.possible)} the models do not fit"
    growing = [probe for probe in limit.curve if probe.met == find.GROWS and probe.figure.mean <= condition.limit]
    if growing:
        nearest = max(growing, key=lambda probe: probe.amount) if quantity.smallest else growing[0]
        yield (
            f"{_with_unit(amount_text(nearest), quantity)}: meets it only in runs of this length; at a utilisation of "
            f"{nearest.offered_load:.0%}, queues grow with the number of requests"
        )
    if limit.exception:
        yield (
            f"not monotone: {condition.metric} is {condition.text(limit.exception.figure.mean)} at "
            f"{amount_text(limit.exception)}, although a harder value meets the condition"
        )


def _deciding(limit: Limit) -> Sequence[Probe]:
    """Return the values from the last one before a limit to the first that clearly meets its condition, and exceptions.

    If no value meets it, these are the first and the last; if none clearly does, all that were tried.
    """
    if limit.possible is None:
        return limit.curve[:1] + limit.curve[1:][-1:]
    if limit.certain is None:
        return limit.curve
    named = (limit.beyond, limit.possible, limit.best, limit.certain)
    amounts = [probe.amount for probe in named if probe and probe.met != find.UNFIT]
    return [p for p in limit.curve if min(amounts) <= p.amount <= max(amounts) or p is limit.exception]


def _amounts(probes: Sequence[Probe]) -> str:
    """Return the quantities from the first to the last value."""
    return " to ".join(dict.fromkeys(amount_text(probe) for probe in (probes[0], probes[-1])))


def _with_unit(amounts: str, quantity: Searched) -> str:
    """Return quantities with their unit, which is singular for one."""
    noun, *rest = quantity.unit.split(" ")
    is_one = amounts == "1" and noun.isalpha()
    return " ".join([amounts, noun.removesuffix("s") if is_one else noun, *rest])


def amount_text(probe: Probe) -> str:
    """Return the quantity of a value."""
    return f"{probe.amount:.4g}" if probe.amount % 1 else f"{probe.amount:.0f}"


def intervals_table(sample: str, by_pattern: Mapping[str, Mapping[str, Interval]]) -> FigureTable:
    """Return a table with the mean of each figure and its 95 % confidence interval, given the sample in words."""
    names = list(next(iter(by_pattern.values())))
    title = f"{sample}, and half the width of their 95 % confidence intervals; {WIDE}"
    columns = [f"{name.replace('_', ' ')}{'' if name in (*SHARES, COST) else ' ms'}" for name in names]
    table = FigureTable(title, [key("pattern"), *columns])
    for pattern, intervals in by_pattern.items():
        table.add_row(pattern, *(figure_text(name, entry.mean, entry.half_width) for name, entry in intervals.items()))
    return table
