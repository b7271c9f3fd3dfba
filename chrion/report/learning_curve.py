"""Pictures of trainings: losses by epoch, and what agents reach by their numbers of trials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from chrion.pipelines import FinetuningReport
from chrion.report.categories import COLOURS
from chrion.report.figures import label_axes, new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: The curve of an agent is the median of this many windows, with the quartiles as a band.
_WINDOWS = 40


def plot_learning_curve(report: FinetuningReport, path: Path) -> None:
    """Draw the losses after each epoch, and the epoch whose parameters were chosen.

    Args:
        report: The report of a fine-tuning of level L2 or more.
        path: The picture's file.

    Raises:
        OptionError: matplotlib is not installed, or the file cannot be written.
    """
    figure = new_figure(6, 4)
    axes = figure.subplots()
    epochs = range(1, len(report.curve) + 1)
    for at, name in enumerate(("rows to fit, while training", "rows to choose with")):
        axes.plot(epochs, [losses[at] for losses in report.curve], ".-", color=COLOURS[at], label=name)
    axes.axvline(report.epochs, color=COLOURS[5], linestyle="--", label=f"chosen: {report.epochs}")
    _finish(axes, "epoch", report.measures[1].replace("_", " ") if report.measures[1] == "log_loss" else "loss")
    save_figure(figure, path)


def plot_agents(curves: Mapping[str, Sequence[float]], trial: str, measure: str, path: Path) -> None:
    """Draw what agents reach while they learn: the median of windows of trials, and the quartiles as a band.

    Args:
        curves: The figure of each trial, by the name of the agent; NaN for trials without one.
        trial: What a trial is, for the axis.
        measure: What the figure is, for the axis.
        path: The picture's file.

    Raises:
        OptionError: matplotlib is not installed, or the file cannot be written.
    """
    figure = new_figure(6, 4)
    axes = figure.subplots()
    for colour, (name, values) in zip(COLOURS, curves.items(), strict=False):
        known = [(at, value) for at, value in enumerate(values, 1) if value == value]  # noqa: PLR0124 - not NaN
        parts = [part for part in np.array_split(np.array(known), min(_WINDOWS, len(known)) or 1) if len(part)]
        where = [float(part[:, 0].mean()) for part in parts]
        low, median, high = np.reshape([np.percentile(part[:, 1], (25, 50, 75)) for part in parts], (-1, 3)).T
        axes.plot(where, median, color=colour, label=name)
        axes.fill_between(where, low, high, color=colour, alpha=0.2, linewidth=0)
    _finish(axes, trial, measure)
    save_figure(figure, path)


def _finish(axes: Axes, x: str, y: str) -> None:
    label_axes(axes, "", x, y)
    axes.legend(fontsize=9, frameon=False)
