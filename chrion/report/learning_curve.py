"""The picture of a training: losses by epoch."""

from __future__ import annotations

from pathlib import Path

from chrion.pipelines import FinetuningReport
from chrion.report.categories import COLOURS
from chrion.report.figures import label_axes, new_figure, save_figure
from chrion.report.simulation_plots import line_style


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
        axes.plot(epochs, [losses[at] for losses in report.curve], label=name, **line_style(at, at))
    axes.axvline(report.epochs, color=COLOURS[5], linestyle="--", label=f"chosen: {report.epochs}")
    label_axes(
        axes, f"Training of level {report.level}", "epoch", "log loss" if report.measures[1] == "log_loss" else "loss"
    )
    axes.legend(fontsize=9, frameon=False)
    save_figure(figure, path)
