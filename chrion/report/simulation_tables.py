"""Tables of simulation results."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Group

from chrion.common.records import read_record
from chrion.common.units import format_count
from chrion.report.figure_table import Column, FigureTable, key
from chrion.serving.simulator.results import PatternResult, RequestSummary
from chrion.serving.simulator.scenario import Scenario
from chrion.serving.simulator.settings import SloSpec
from chrion.serving.simulator.sweep import SweepPoint

#: Models and servers that are listed, so that tables fit a screen; the JSON output has all of them.
_LISTED = 12
_RATES = ("violations", "swapping", "mean ms", "p50 ms", "p95 ms", "p99 ms")
#: The number of models with more than 1 % of their requests in violation.
_MISSING = "late models"

#: The figures of a plan file that may count as a variant's memory, in words.
_PLAN_MEMORY = {
    "summed": "summed, every operator with its own weights (Equation 4)",
    "resident": "resident, what one request holds, with each weight once",
}


def simulation_tables(scenario: Scenario, results: Sequence[PatternResult]) -> Group:
    """Return a table by pattern, one by model and one by server."""
    unit = "server" if len(scenario.gpus) == len(scenario.servers) else "GPU"
    return Group(pattern_table(scenario, results), _model_table(results), _server_table(results, unit))


def definitions(scenario: Scenario) -> str:
    """Return lines that define the figures of tables: which latency is compared with which objective, and others."""
    slo = read_record(SloSpec, scenario.content.get("slo", {}), "slo")
    reference = f"of variant {scenario.reference}" if scenario.reference else "of the model's first variant"
    objective = f"{slo.latency_ms:g} ms" if slo.latency_ms else f"{slo.factor:g} x the latency {reference}"
    has_own = any(model.get("slo_ms") for model in scenario.content.get("models", []))
    own = " or the model's own objective" if has_own else ""
    measure = "response time" if scenario.measure == "response" else "execution time alone"
    violations = f"violations: requests whose {measure} is above {objective}{own}, and those dropped or failed"
    swapping = "loads: times that a model was brought into memory; swapping: loads per request"
    return f"{violations}\n{swapping}; late models: those with more than 1 % violations"


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
    table = FigureTable("", [*keys, "models", *_RATES, _MISSING])
    for point in points:
        values = [str(point.values[name]) for name in swept]
        for result in point.results:
            figures = [str(point.models), *_rates(result.total), str(result.models_missing)]
            table.add_row(*values, result.pattern, *figures)
    return table


def pattern_table(scenario: Scenario, results: Sequence[PatternResult]) -> FigureTable:
    """Return a table by pattern, whose title says which latency is compared with which objective."""
    servers = format_count(len(scenario.servers), "server")
    models = format_count(len(scenario.models), "model")
    title = f"{scenario.name}: {models} on {servers}; latencies are response times, from arrival to end"
    if scenario.estimated_hardware:
        title += f"; {', '.join(scenario.estimated_hardware)}: estimated from datasheets"
    title += f"\n{definitions(scenario)}; cold: requests that waited for a load{_plan_memory(scenario)}"
    columns: list[Column | str] = [
        key("pattern"),
        "requests",
        "dropped",
        *_RATES,
        "cold p95 ms",
        "loads/s",
        _MISSING,
    ]
    failures = any(result.total.failed for result in results)
    if failures:
        columns.insert(3, "failed")
    if scenario.autoscaling:
        columns.append("server hours")
    table = FigureTable(title, columns, sparse=True)
    for result in results:
        total, cold_p95 = result.total, _ms(result.cold_response.p95_ms)
        traffic = _rate(result.loads_per_s), str(result.models_missing)
        failed = [str(total.failed)] if failures else []
        hours = [f"{result.usage.server_hours:.2f}"] if scenario.autoscaling else []
        counts = str(total.arrivals), str(total.dropped), *failed
        table.add_row(result.pattern, *counts, *_rates(total), cold_p95, *traffic, *hours)
    return table


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
    busy_columns = ("GPU busy", "cores busy", "link busy")
    columns: list[Column | str] = [
        key(unit),
        key("pattern"),
        "requests",
        "loads",
        *busy_columns,
        "mean GB",
        "peak GB",
    ]
    table = FigureTable(_title(unit, len(listed), len(servers)), columns)
    for i in listed:
        for result in (result for result in results if i < len(result.servers)):
            server = result.servers[i]
            busy = [f"{share:.1%}" for share in (server.gpu_busy, server.cpu_busy, server.link_busy)]
            memory = [f"{mb / 1000:.2f}" for mb in (server.memory_mean_mb, server.memory_peak_mb)]
            name = str(i) if result is results[0] else ""
            table.add_row(name, result.pattern, str(server.arrivals), str(server.loads), *busy, *memory)
    return table


def _title(kind: str, listed: int, total: int) -> str:
    return f"By {kind}" if listed == total else f"By {kind}, {listed} of {total}"


def _rates(summary: RequestSummary) -> list[str]:
    response = summary.response
    latencies = (response.mean_ms, response.p50_ms, response.p95_ms, response.p99_ms)
    return [f"{summary.violation_rate:.2%}", f"{summary.swapping_rate:.2%}", *map(_ms, latencies)]


def _rate(value: float) -> str:
    """Return a number with three significant digits, and no exponent."""
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _ms(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1f}" if value < 1000 else f"{value:.0f}"
