"""Tables, pictures and pages of plans, measurements and simulations."""

from chrion.report.alpha_sweep import alpha_sweep_hints, alpha_sweep_json, alpha_sweep_table, plot_alpha_sweep
from chrion.report.chrome_trace import chrome_trace
from chrion.report.comparison import (
    comparison_json,
    comparison_remarks,
    comparison_table,
    comparison_verdict,
    plot_comparison,
)
from chrion.report.figures import check_picture
from chrion.report.lane_chart import chart_summary, measured_chart, predicted_chart
from chrion.report.tables import (
    bench_table,
    bench_verdict,
    estimated_lines,
    machine_table,
    memory_line,
    plan_table,
    reference_lines,
    verdict,
)
from chrion.report.timeline_html import timeline_html
from chrion.report.timeline_picture import plot_timelines

__all__ = [
    "alpha_sweep_hints",
    "alpha_sweep_json",
    "alpha_sweep_table",
    "bench_table",
    "bench_verdict",
    "chart_summary",
    "check_picture",
    "chrome_trace",
    "comparison_json",
    "comparison_remarks",
    "comparison_table",
    "comparison_verdict",
    "estimated_lines",
    "machine_table",
    "measured_chart",
    "memory_line",
    "plan_table",
    "plot_alpha_sweep",
    "plot_comparison",
    "plot_timelines",
    "predicted_chart",
    "reference_lines",
    "timeline_html",
    "verdict",
]
