"""The output of ``chrion simulate --find``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from chrion.cli.console import show, show_json
from chrion.report import capacity_tables, simulation_plots
from chrion.serving.simulator.export import write_curve
from chrion.serving.simulator.find import FIND_SCHEMA, Condition, Limit, Searched
from chrion.serving.simulator.results import plain


def show_limits(
    scenario: str,
    name: str,
    quantity: Searched,
    condition: Condition,
    found: Sequence[Limit],
    *,
    export: Path | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Print limits, and write or draw the values that were tried.

    Args:
        scenario: The name of the scenario.
        name: The name of the quantity.
        quantity: What was searched.
        condition: The condition.
        found: The limits.
        export: The file, or None.
        plot: The picture's file, or None.
        as_json: Print JSON.

    Raises:
        OptionError: A file cannot be written.
    """
    if export:
        write_curve(export, quantity.unit, condition.metric, found)
    if plot:
        simulation_plots.plot_search(quantity, condition, found, plot)
    if as_json:
        until = {"figure": condition.metric, "limit": condition.limit}
        head = {"schema": FIND_SCHEMA, "scenario": scenario, "find": name, "unit": quantity.unit}
        show_json({**head, "until": until, "limits": [plain(limit) for limit in found]})
        return
    if any(limit.curve for limit in found):
        show(capacity_tables.curve_table(quantity, condition, found))
    show(*capacity_tables.limit_lines(quantity, condition, found))
