"""Tables of simulation results."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table

from chrion.simulator.results import PatternResult, RequestSummary
from chrion.simulator.scenario import Scenario
from chrion.simulator.sweep import SweepPoint

#: Models and servers shown; the JSON has them all.
_ROWS = 12
_RATES = ("violations", "swapping", "mean ms", "p50 ms", "p95 ms", "p99 ms")
#: Models with more than 1 % of their requests violating.
_MISSING = "models over 1 %"
_TEXT = ("pattern", "model", "server")


def simulation_tables(scenario: Scenario, results: Sequence[PatternResult]) -> RenderableType:
    """Tables by pattern, by model and by server."""
    return Group(_patterns(scenario, results), _models(results), _servers(results))


def sweep_table(points: Sequence[SweepPoint]) -> RenderableType:
    """One row for each point and pattern."""
    keys = list(points[0].values) if points else []
    table = _table("", [*keys, "models", "pattern", *_RATES, _MISSING])
    for point in points:
        for result in point.results:
            swept = [str(point.values[key]) for key in keys]
            table.add_row(*swept, str(point.models), result.pattern, *_rates(result.total), str(result.models_missing))
    return table


def _patterns(scenario: Scenario, results: Sequence[PatternResult]) -> Table:
    servers = "1 server" if len(scenario.servers) == 1 else f"{len(scenario.servers)} servers"
    title = f"{scenario.name}: {len(scenario.models)} models on {servers}; latencies are times since arrival"
    table = _table(title, ["pattern", "requests", "dropped", *_RATES, "cold p95", "loads/s", "MB/s", _MISSING])
    for result in results:
        total, cold_p95 = result.total, _ms(result.cold_response.p95_ms)
        traffic = f"{result.loads_per_s:.3g}", f"{result.loaded_mb_per_s:.3g}", str(result.models_missing)
        table.add_row(result.pattern, str(total.arrivals), str(total.dropped), *_rates(total), cold_p95, *traffic)
    return table


def _models(results: Sequence[PatternResult]) -> Table:
    """Patterns of one model beside each other, the busiest models first."""
    models = results[0].models
    shown = sorted(range(len(models)), key=lambda i: -models[i].arrivals)[:_ROWS]
    table = _table(_title("model", len(shown), len(models)), ["model", "pattern", "requests", "loads", *_RATES])
    for i in shown:
        for result in results:
            model = result.models[i]
            first = model.name if result is results[0] else ""
            table.add_row(first, result.pattern, str(model.arrivals), str(model.loads), *_rates(model))
    return table


def _servers(results: Sequence[PatternResult]) -> Table:
    servers = results[0].servers
    shown = range(min(_ROWS, len(servers)))
    columns = ["server", "pattern", "requests", "loads", "GPU busy", "cores busy", "link busy", "mean GB", "peak GB"]
    table = _table(_title("server", len(shown), len(servers)), columns)
    for i in shown:
        for result in results:
            server = result.servers[i]
            busy = [f"{share:.1%}" for share in (server.gpu_busy, server.cpu_busy, server.link_busy)]
            memory = [f"{mb / 1000:.2f}" for mb in (server.memory_mean_mb, server.memory_peak_mb)]
            first = str(i) if result is results[0] else ""
            table.add_row(first, result.pattern, str(server.arrivals), str(server.loads), *busy, *memory)
    return table


def _title(what: str, shown: int, known: int) -> str:
    return f"By {what}" if shown == known else f"By {what}, {shown} of {known}"


def _rates(counted: RequestSummary) -> list[str]:
    response = counted.response
    quantiles = (response.mean_ms, response.p50_ms, response.p95_ms, response.p99_ms)
    return [f"{counted.violation_rate:.2%}", f"{counted.swapping_rate:.2%}", *map(_ms, quantiles)]


def _ms(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title or None, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column in _TEXT else "right", no_wrap=True)
    return table
