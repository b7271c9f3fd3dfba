"""Tables of simulation results."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Group

from chrion.common.records import read_record
from chrion.common.units import format_count
from chrion.report.figure_table import FigureTable, key
from chrion.serving.simulator.confidence import Interval
from chrion.serving.simulator.results import COST, SHARES, PatternResult, RequestSummary
from chrion.serving.simulator.scenario import Scenario
from chrion.serving.simulator.settings import SloSpec
from chrion.serving.simulator.sweep import SweepPoint

#: Models and servers that are listed, so that tables fit a screen; the JSON output has all of them.
_LISTED = 12
_RATES = ("violations", "swapping", "mean ms", "p50 ms", "p95 ms", "p99 ms")
#: The number of models with more than 1 % of their requests in violation.
_MISSING = "late models"
#: What follows the name of an interval in legends.
WIDE = "±?: wider than the figure itself"
_BATCH_MEANS = f"±: half the width of the 95 % confidence interval (batch means); {WIDE}"

#: The figures of a plan file that may count as a variant's memory, in words.
_PLAN_MEMORY = {
    "summed": "summed, every operator with its own weights (Equation 4)",
    "resident": "resident, what one request holds, with each weight once",
}


def simulation_tables(scenario: Scenario, results: Sequence[PatternResult]) -> Group:
    """Return a table by pattern, one by model and one by server."""
    unit = "server" if len(scenario.gpus) == len(scenario.servers) else "GPU"
    tables = [pattern_table(scenario, results), _model_table(results), _server_table(results, unit)]
    if len(scenario.groups) > 1 or any(result.usage.cost for result in results):
        tables.append(_group_table(results))
    return Group(*tables)


def definitions(scenario: Scenario) -> str:
    """Return lines that define the figures of tables: which latency is compared with which objective, and others."""
    slo = read_record(SloSpec, scenario.content.get("slo", {}), "slo")
    reference = f"of variant {scenario.reference}" if scenario.reference else "of the model's first variant"
    objective = f"{slo.latency_ms:g} ms" if slo.latency_ms else f"{slo.factor:g} x the latency {reference}"
    has_own = any(model.get("slo_ms") for model in scenario.content.get("models", []))
    own = " or the model's own objective" if has_own else ""
    own += " or the class's" if any(entry.get("slo_ms") for entry in scenario.content.get("classes", [])) else ""
    measure = "response time" if scenario.measure == "response" else "execution time alone"
    violations = f"violations: requests whose {measure} is above {objective}{own}, and those dropped or failed"
    swapping = "loads: times that a model was brought into memory; swapping: loads per request"
    return f"{violations}\n{swapping}; late models: those with more than 1 % violations"


def datasheet_lines(scenarios: Iterable[Scenario]) -> list[str]:
    """Return lines that say which figures of servers are estimated, and which ones the scenarios give instead."""
    lines = []
    for sheet in (sheet for scenario in scenarios for sheet in scenario.datasheets):
        if sheet.used:
            figures = ", ".join(f"{key} = {figure:.4g}" for key, figure in sheet.used.items())
            lines.append(f"{sheet.hardware}: estimated from datasheets: {figures}")
        if sheet.replaced:
            figures = ", ".join(f"{key} (datasheet: {figure:.4g})" for key, figure in sheet.replaced.items())
            lines.append(f"{sheet.hardware}: as the scenario gives them: {figures}")
    return list(dict.fromkeys(lines))


def _plan_memory(scenario: Scenario) -> str:
    """Return a line that says which figure of plan files counts as memory; empty without plan files."""
    variants = [v for model in scenario.content.get("models", []) for v in model.get("variants", {}).values()]
    kinds = {v.get("memory") or "summed" for v in variants if v.get("plan")}
    if kinds == {"summed"}:
        return f'\nmemory of plans: {_PLAN_MEMORY["summed"]}; memory = "resident" counts each weight once'
    named = [text for kind, text in _PLAN_MEMORY.items() if kind in kinds]
    return f"\nmemory of plans: {'; of other variants: '.join(named)}" if named else ""


def sweep_table(points: Sequence[SweepPoint]) -> FigureTable:
    """Return a table with one row for each point and pattern."""
    swept = list(points[0].values) if points else []
    keys = [*(key(name, is_text=False) for name in swept), key("pattern")]
    priced = any(result.usage.cost for point in points for result in point.results)
    table = FigureTable(
        _legend([result for point in points for result in point.results]),
        [*keys, "models", *_RATES, _MISSING, *(["cost per hour"] if priced else [])],
    )
    for point in points:
        values = [str(point.values[name]) for name in swept]
        for result in point.results:
            rates = _rates(result.total, result.intervals)
            cost = [f"{result.cost_per_hour:.2f}"] if priced else []
            figures = [str(point.models), *rates, str(result.models_missing), *cost]
            table.add_row(*values, result.pattern, *figures)
    return table


def pattern_table(scenario: Scenario, results: Sequence[PatternResult]) -> FigureTable:
    """Return a table by pattern, whose title says which latency is compared with which objective."""
    servers = format_count(len(scenario.servers), "server")
    models = format_count(len(scenario.models), "model")
    title = f"{scenario.name}: {models} on {servers}; latencies are response times, from arrival to end"
    title += f"\n{definitions(scenario)}; cold: requests that waited for a load{_plan_memory(scenario)}"
    title += "".join(f"\n{line}" for line in datasheet_lines([scenario]))
    title = f"{title}\n{_legend(results)}".rstrip()
    hours = ["server hours"] if scenario.autoscaling else []
    columns = ["requests", "dropped", "failed", *_RATES, "cold p95 ms", "loads/s", _MISSING, *hours]
    table = FigureTable(title, [key("pattern"), *columns, "cost", "cost per hour"], sparse=True)
    for result in results:
        total, usage = result.total, result.usage
        counts = str(total.arrivals), str(total.dropped), str(total.failed)
        loads = ms_text(result.cold_response.p95_ms), _rate(result.loads_per_s), str(result.models_missing)
        on = [f"{usage.server_hours:.2f}"] if scenario.autoscaling else []
        cost = f"{usage.cost:.2f}", f"{result.cost_per_hour:.2f}"
        table.add_row(result.pattern, *counts, *_rates(total, result.intervals), *loads, *on, *cost)
    return table


def _legend(results: Sequence[PatternResult]) -> str:
    """Return the legend of the intervals of results; empty if none is known."""
    half_widths = [entry.half_width for result in results for entry in result.intervals.values()]
    return _BATCH_MEANS if any(half_width > 0 for half_width in half_widths) else ""


def _model_table(results: Sequence[PatternResult]) -> FigureTable:
    """Return a table of the busiest models, with all patterns of a model in adjacent rows."""
    models = results[0].models
    listed = sorted(range(len(models)), key=lambda i: -models[i].arrivals)[:_LISTED]
    title = _title("model", len(listed), len(models))
    table = FigureTable(title, [key("model"), key("pattern"), "requests", "loads", *_RATES])
    for i in listed:
        for result in results:
            model = result.models[i]
            name = model.name if result is results[0] else ""
            table.add_row(name, result.pattern, str(model.arrivals), str(model.loads), *_rates(model))
    return table


def _server_table(results: Sequence[PatternResult], unit: str) -> FigureTable:
    servers = results[0].servers
    listed = range(min(_LISTED, len(servers)))
    columns = ["requests", "loads", "GPU busy", "cores busy", "link busy", "mean GB", "peak GB"]
    table = FigureTable(_title(unit, len(listed), len(servers)), [key(unit), key("pattern"), *columns])
    for i in listed:
        for result in (result for result in results if i < len(result.servers)):
            server = result.servers[i]
            busy = [f"{share:.1%}" for share in (server.gpu_busy, server.cpu_busy, server.link_busy)]
            memory = [f"{mb / 1000:.2f}" for mb in (server.memory_mean_mb, server.memory_peak_mb)]
            name = str(i) if result is results[0] else ""
            table.add_row(name, result.pattern, str(server.arrivals), str(server.loads), *busy, *memory)
    return table


def class_table(results: Sequence[PatternResult]) -> FigureTable:
    """Return a table of the classes of requests."""
    table = FigureTable("By class", [key("class"), key("pattern"), "requests", "violations", *_RATES[3:]])
    for at, first in enumerate(results[0].classes):
        for result in results:
            own = result.classes[at]
            name = first.name if result is results[0] else ""
            latencies = map(ms_text, (own.p50_ms, own.p95_ms, own.p99_ms))
            table.add_row(name, result.pattern, str(own.arrivals), f"{own.violation_rate:.2%}", *latencies)
    return table


def _group_table(results: Sequence[PatternResult]) -> FigureTable:
    """Return a table of the use and the price of each ``[[servers]]`` table."""
    keys = key("servers"), key("pattern")
    table = FigureTable("By group of servers", [*keys, "number", "server hours", "cost"], sparse=True)
    for i in range(max(len(result.usage.groups) for result in results)):
        for result in (result for result in results if i < len(result.usage.groups)):
            group = result.usage.groups[i]
            name = group.hardware or f"group {i}" if result is results[0] else ""
            table.add_row(name, result.pattern, str(group.servers), f"{group.server_hours:.2f}", f"{group.cost:.2f}")
    return table


def _title(kind: str, listed: int, total: int) -> str:
    return f"By {kind}" if listed == total else f"By {kind}, {listed} of {total}"


def _rates(summary: RequestSummary, intervals: Mapping[str, Interval] | None = None) -> list[str]:
    """Return violations, swapping and response times, with half the widths of intervals that are known."""
    response = summary.response
    figures = {"violations": summary.violation_rate, "swapping": summary.swapping_rate, "mean": response.mean_ms}
    figures |= {"p50": response.p50_ms, "p95": response.p95_ms, "p99": response.p99_ms}
    widths = {name: entry.half_width or math.nan for name, entry in (intervals or {}).items()}
    return [figure_text(name, value, widths.get(name, math.nan)) for name, value in figures.items()]


def figure_text(name: str, value: float, half_width: float) -> str:
    """Return a figure of a run with half the width of its interval, if that is not NaN, as :data:`WIDE` says."""
    if math.isnan(value):
        return "-"
    if name in SHARES:
        text, width = f"{value:.2%}", f"{100 * half_width:.2f}"
    elif name == COST:
        text, width = f"{value:.2f}", f"{half_width:.2f}"
    else:
        text, width = ms_text(value), ms_text(half_width)
    return text if math.isnan(half_width) else f"{text} ±{'?' if half_width > value else width}"


def _rate(value: float) -> str:
    """Return a number with three significant digits, and no exponent."""
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def ms_text(value: float) -> str:
    """Return a latency without its unit; large ones have no decimals."""
    return "-" if math.isnan(value) else f"{value:.1f}" if value < 1000 else f"{value:.0f}"
