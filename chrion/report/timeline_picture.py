"""Lanes over time as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from chrion.lane_numbers import display_order, lane_name
from chrion.report.figures import new_figure, save_figure
from chrion.report.lane_chart import LaneChart


def plot_timelines(title: str, charts: Sequence[LaneChart], path: Path) -> None:
    """Each chart's lanes over one common axis of time, a colour for each layer.

    Raises:
        OptionError: matplotlib is missing.
    """
    figure = new_figure(9, 1 + 1.1 * len(charts))
    from matplotlib import colormaps  # noqa: PLC0415 - it is there, since the figure is

    keys = list(dict.fromkeys(span.key for chart in charts for span in chart.spans))
    palette = colormaps["tab20"]
    colours = {key: palette(at % 20) for at, key in enumerate(keys)}
    axes = figure.subplots(len(charts), 1, sharex=True, squeeze=False)[:, 0]
    for axis, chart in zip(axes, charts, strict=True):
        lanes = display_order(span.lane for span in chart.spans)
        for at, lane in enumerate(lanes):
            bars = [span for span in chart.spans if span.lane == lane]
            spans = [(span.start_ms, span.end_ms - span.start_ms) for span in bars]
            faces = [colours[span.key] for span in bars]
            axis.broken_barh(spans, (-at - 0.4, 0.8), facecolors=faces, edgecolor="white", linewidth=0.3)
        axis.set_yticks([-at for at in range(len(lanes))], [lane_name(lane) for lane in lanes])
        axis.set_title(f"{chart.title}: {chart.latency_ms:.2f} ms, {chart.overlap:.2f} lanes busy", fontsize=9)
    axes[-1].set_xlabel("ms")
    figure.suptitle(title, fontsize=10)
    save_figure(figure, path)
