"""A trace of lanes for chrome://tracing and Perfetto."""

from __future__ import annotations

import json
from collections.abc import Sequence

from chrion.common.lane_numbers import lane_name
from chrion.report.lane_chart import LaneChart


def chrome_trace(charts: Sequence[LaneChart]) -> str:
    """Return charts as JSON in Chrome's trace event format: a process per chart, a thread per lane, times in us."""
    events: list[dict[str, object]] = []
    for process, chart in enumerate(charts):
        events.append(_meta("process_name", process, 0, chart.title))
        events += [_meta("thread_name", process, lane, lane_name(lane)) for lane in chart.lanes]
        for span in chart.spans:
            start, length = span.start_ms * 1e3, (span.end_ms - span.start_ms) * 1e3
            events.append(
                {
                    "ph": "X",
                    "name": span.label,
                    "pid": process,
                    "tid": span.lane,
                    "ts": start,
                    "dur": length,
                    "cat": "copy" if span.segment < 0 else "segment",
                }
            )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _meta(kind: str, process: int, lane: int, name: str) -> dict[str, object]:
    return {"ph": "M", "name": kind, "pid": process, "tid": lane, "args": {"name": name}}
