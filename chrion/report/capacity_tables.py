"""Tables of limits and of replications of simulations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from chrion.report.figure_table import Column, FigureTable, key
from chrion.serving.simulator.find import Condition, Limit, Probe
from chrion.serving.simulator.replications import Interval

_UNITS = {"memory": "GB a server", "rate": "rate"}


def limits_table(name: str, condition: Condition, limits: Sequence[Limit]) -> FigureTable:
    """Return a table with the limit of each pattern that has one, its figure, and that of the next value beyond it."""
    priced = any(limit.found and limit.found.cost_per_hour for limit in limits)
    unit = _UNITS.get(name, name)
    columns: list[Column | str] = [key("pattern"), unit, condition.metric, "next value", f"its {condition.metric}"]
    table = FigureTable("", [*columns, *(["cost per hour"] if priced else [])])
    for limit in limits:
        if limit.found is None:
            continue
        cells = [limit.pattern, *_probe(limit.found, condition), *_probe(limit.beyond, condition)]
        cost = [f"{limit.found.cost_per_hour:.2f}"] if priced else []
        table.add_row(*cells, *cost)
    return table


def limit_lines(name: str, condition: Condition, limits: Sequence[Limit], *, smallest: bool) -> list[str]:
    """Return lines on patterns without a value that meets the condition, without a next value, or with worse ones.

    Args:
        name: The quantity that was searched.
        condition: The condition.
        limits: The limits.
        smallest: Whether the smallest value that meets the condition was searched, else the largest.
    """
    lines = []
    for limit in limits:
        if limit.found and limit.beyond is None:
            amount = _probe(limit.found, condition)[0]
            reason = f"no limit found up to {amount}, the greatest value that is tried"
            if smallest:
                reason = f"no value below {amount}" if limit.fits else f"below {amount} the models do not fit"
            lines.append(f"{limit.pattern}: {reason}")
        if limit.found and limit.worse:
            (amount, figure), worse = _probe(limit.found, condition), _probe(limit.worse, condition)
            lines.append(
                f"{limit.pattern}: not monotone in {name}: {condition.metric} {figure} at {amount}, but {worse[1]} at "
                f"{worse[0]}; --sweep shows the values between"
            )
        beyond = limit.beyond
        if beyond and beyond.figure <= condition.limit:
            amount = _probe(beyond, condition)[0]
            lines.append(
                f"{limit.pattern}: {amount} meets it in this run, but the work is {beyond.offered_load:.1%} of what "
                "the cluster can do: queues would grow with the number of requests"
            )
    patterns = [limit.pattern for limit in limits if limit.found is None]
    if patterns:
        quantity = {"servers": "number of servers", "models": "number of models"}.get(name, name)
        wanted = f"{condition.metric} <= {condition.text(condition.limit)}"
        lines.append(f"{', '.join(patterns)}: no {quantity} meets {wanted}")
    return lines


def _probe(probe: Probe | None, condition: Condition) -> tuple[str, str]:
    if probe is None:
        return "", ""
    return f"{probe.amount:.4g}" if probe.amount % 1 else f"{probe.amount:.0f}", condition.text(probe.figure)


def replications_table(number: int, by_pattern: Mapping[str, Mapping[str, Interval]]) -> FigureTable:
    """Return a table with the mean of each figure and its 95 % confidence interval."""
    names = list(next(iter(by_pattern.values())))
    title = f"means of {number} replications, and half the width of their 95 % confidence intervals"
    table = FigureTable(title, [key("pattern"), *(name if _is_share(name) else f"{name} ms" for name in names)])
    for pattern, intervals in by_pattern.items():
        table.add_row(pattern, *(_interval(name, entry) for name, entry in intervals.items()))
    return table


def _is_share(name: str) -> bool:
    return name in {"violations", "swapping"}


def _interval(name: str, interval: Interval) -> str:
    if interval.mean != interval.mean:  # NaN: no request was completed
        return "-"
    if _is_share(name):
        return f"{interval.mean:.2%} ±{100 * interval.half_width:.2f}"
    return f"{interval.mean:.1f} ±{interval.half_width:.1f}"
