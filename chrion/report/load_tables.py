"""Tables of several models under a load: predicted beside measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from chrion.common.units import format_ms
from chrion.report.figure_table import FigureTable, key
from chrion.report.lane_chart import LaneChart, LaneSpan
from chrion.serving.multi.dispatcher import BlockSpan
from chrion.serving.multi.load import LoadResult

_LEGEND = "missed: late, dropped or failed; backlog: tasks that were not over when the last one arrived"

#: A share of the lanes' time above which a load leaves no reserve (a choice, not measured).
_RESERVE = 0.95


def load_table(rates: Mapping[str, float], results: Mapping[str, LoadResult]) -> FigureTable:
    """Return a table with a row for each model and result, such as ``predicted`` and ``measured``."""
    columns = ["per second", "", "p50", "p99", "missed", "dropped", "backlog"]
    table = FigureTable(_LEGEND, [key("model"), *columns])
    for name, rate in rates.items():
        for title, result in results.items():
            own = result.models[name]
            share = f"{own.missed / own.tasks:.1%}"
            latencies = [_latency(own.p50_ms), _latency(own.p99_ms)]
            table.add_row(name, f"{rate:g}", title, *latencies, share, str(own.dropped), str(own.backlog))
    return table


def load_line(title: str, result: LoadResult) -> str:
    """Return one line with the verdict of a result and the share of the lanes' time that was used."""
    verdict = "sustained" if result.sustained else "not sustained"
    if result.sustained and result.utilisation > _RESERVE:
        verdict = "sustained, without reserve"
    return f"{title}: {verdict}; lanes busy {result.utilisation:.0%} of the time"


def block_chart(title: str, spans: Sequence[BlockSpan], cpu_lanes: int) -> LaneChart:
    """Return the chart of the blocks that ran; a viewer of traces gives those of one model one colour.

    Args:
        title: Its title.
        spans: The blocks; the first lanes are those of the CPU.
        cpu_lanes: How many these are.
    """
    models = {name: at for at, name in enumerate(dict.fromkeys(span.model for span in spans))}

    def number(lane: int) -> int:
        return lane + 1 if lane < cpu_lanes else cpu_lanes - lane

    return LaneChart(
        title, tuple(LaneSpan(number(s.lane), s.start_ms, s.end_ms, s.model, models[s.model]) for s in spans)
    )


def _latency(ms: float) -> str:
    return "" if math.isnan(ms) else format_ms(ms)
