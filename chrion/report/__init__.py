"""Floor 5: plans and measurements for people to look at."""

from chrion.report.alpha_sweep import curve_json, curve_png, curve_table
from chrion.report.comparison import comparison_json, comparison_png, comparison_table, comparison_verdict
from chrion.report.figures import check_picture
from chrion.report.tables import (
    bench_table,
    bench_verdict,
    estimated_lines,
    machine_table,
    memory_line,
    plan_table,
    verdict,
)
from chrion.report.timeline_html import chrome_trace, lanes_summary, measured_lanes, predicted_lanes, timeline_html
from chrion.report.timeline_png import timeline_png

__all__ = [
    "bench_table",
    "bench_verdict",
    "check_picture",
    "chrome_trace",
    "comparison_json",
    "comparison_png",
    "comparison_table",
    "comparison_verdict",
    "curve_json",
    "curve_png",
    "curve_table",
    "estimated_lines",
    "lanes_summary",
    "machine_table",
    "measured_lanes",
    "memory_line",
    "plan_table",
    "predicted_lanes",
    "timeline_html",
    "timeline_png",
    "verdict",
]
