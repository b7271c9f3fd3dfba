"""The picture of what agents reach by their numbers of trials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path

import numpy as np

from chrion.report.categories import COLOURS
from chrion.report.figures import label_axes, new_figure, save_figure

#: The curve of an agent is the median of this many windows, with the quartiles as a band.
_WINDOWS = 40
#: Dashes of the curves, which tell them apart without colour.
_LINES = ("-", "--", ":", "-.")


def plot_agents(title: str, curves: Mapping[str, Sequence[float]], trial: str, measure: str, path: Path) -> None:
    """Draw what agents reach while they learn: the median of windows of trials, and the quartiles as a band.

    Args:
        title: What is learned.
        curves: The figure of each trial, by the name of the agent; NaN for trials without one.
        trial: What a trial is, for the axis.
        measure: What the figure is, for the axis.
        path: The picture's file.

    Raises:
        OptionError: matplotlib is not installed, or the file cannot be written.
    """
    figure = new_figure(6, 4)
    axes = figure.subplots()
    for colour, line, (name, values) in zip(COLOURS, cycle(_LINES), curves.items(), strict=False):
        known = [(at, value) for at, value in enumerate(values, 1) if value == value]  # noqa: PLR0124 - not NaN
        parts = [part for part in np.array_split(np.array(known), min(_WINDOWS, len(known)) or 1) if len(part)]
        where = [float(part[:, 0].mean()) for part in parts]
        low, median, high = np.reshape([np.percentile(part[:, 1], (25, 50, 75)) for part in parts], (-1, 3)).T
        axes.plot(where, median, color=colour, linestyle=line, label=name)
        axes.fill_between(where, low, high, color=colour, alpha=0.2, linewidth=0)
    label_axes(axes, title, trial, measure)
    axes.legend(fontsize=9, frameon=False)
    save_figure(figure, path)
