"""Lanes over time as a picture."""

from __future__ import annotations

from collections.abc import Sequence

from chrion.lane_numbers import display_order, lane_name
from chrion.report.figures import new_figure, png_of
from chrion.report.timeline_html import Lanes


def timeline_png(title: str, sections: Sequence[Lanes]) -> bytes:
    """Each section's lanes over one common axis of time, a colour for each layer.

    Raises:
        OptionError: matplotlib is missing.
    """
    figure = new_figure("--png", 9, 1 + 1.1 * len(sections))
    from matplotlib import colormaps  # noqa: PLC0415 - it is there, since the figure is

    keys = list(dict.fromkeys(bar.key for section in sections for bar in section.bars))
    palette = colormaps["tab20"]
    colours = {key: palette(at % 20) for at, key in enumerate(keys)}
    axes = figure.subplots(len(sections), 1, sharex=True, squeeze=False)[:, 0]
    for axis, section in zip(axes, sections, strict=True):
        lanes = display_order(bar.lane for bar in section.bars)
        for at, lane in enumerate(lanes):
            bars = [bar for bar in section.bars if bar.lane == lane]
            spans = [(bar.start_ms, bar.end_ms - bar.start_ms) for bar in bars]
            faces = [colours[bar.key] for bar in bars]
            axis.broken_barh(spans, (-at - 0.4, 0.8), facecolors=faces, edgecolor="white", linewidth=0.3)
        axis.set_yticks([-at for at in range(len(lanes))], [lane_name(lane) for lane in lanes])
        axis.set_title(f"{section.title}: {section.latency_ms:.2f} ms, {section.overlap:.2f} lanes busy", fontsize=9)
    axes[-1].set_xlabel("ms")
    figure.suptitle(title, fontsize=10)
    return png_of(figure)
