"""``chrion plan``: the content of a plan file."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import typer

from chrion.cli.commands import Command, Group
from chrion.cli.console import show, show_json
from chrion.cli.options import JsonOption, PlanArgument
from chrion.common.lane_numbers import display_order, lane_name
from chrion.common.units import format_mb, format_ms, format_shapes
from chrion.profiler.machine import machine_to_json
from chrion.report.figure_table import Column, FigureTable, key, text
from chrion.report.tables import estimated_lines, verdict
from chrion.scheduler import Plan

app = typer.Typer(help="Inspect a plan.", no_args_is_help=False, rich_markup_mode="rich", cls=Group)


@app.callback(invoke_without_command=True)
def _options(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())  # noqa: T201 - this is what stdout is for


@app.command("show", cls=Command, epilog="[bold]Example[/bold]\n  chrion plan show lstm.plan.json")
def show_plan(plan: PlanArgument, as_json: JsonOption = False) -> None:
    """Show a plan: its model and machine, its placement by lane, and its predicted latency and memory."""
    loaded = Plan.load(plan)
    if as_json:
        shapes = {name: list(shape) for name, shape in loaded.shapes.items()}
        show_json(
            {
                **plan_summary(loaded),
                "shapes": shapes,
                "machine": machine_to_json(loaded.machine),
                "lanes": _lanes(loaded),
            }
        )
    else:
        estimated = estimated_lines(loaded.estimated, len(loaded.operators), loaded.machine)
        show(_fact_table(loaded), _lane_table(loaded), verdict(loaded), *loaded.remarks, *estimated)


def plan_summary(plan: Plan) -> dict[str, Any]:
    """Return the main figures of a plan as plain data."""
    only = plan.accelerator_only
    return {
        "model": plan.model,
        "operators": len(plan.operators),
        "machine": str(plan.machine),
        "estimated": plan.estimated,
        "precision": plan.precision,
        "expected_error": plan.expected_error,
        "policy": plan.policy,
        "cores": plan.schedule.cores,
        "alpha": plan.alpha,
        "priced": plan.priced,
        "memory": plan.memory,
        "slo_ms": plan.slo_ms,
        "meets_slo": plan.meets_slo,
        "budget_mb": plan.budget_mb,
        "meets_budget": plan.meets_budget,
        **asdict(plan.predicted),
        "on_accelerator": plan.on_accelerator,
        "on_cpu": plan.on_cpu,
        "accelerator_only": {"latency_ms": only.latency_ms, "memory_mb": only.memory_mb} if only else None,
        "cpu_only": {"latency_ms": plan.cpu_only.latency_ms} if plan.cpu_only else None,
    }


def _fact_table(plan: Plan) -> FigureTable:
    predicted = plan.predicted
    origin = "estimated" if plan.machine.hardware else "predicted"
    memory = f"{format_mb(predicted.memory_mb)} by Equation 4, {format_mb(predicted.resident_mb)} resident"
    if predicted.frame_mb:
        memory += f" ({format_mb(predicted.frame_mb)} of it for each request in flight)"
    facts = {
        "shapes": format_shapes(plan.shapes),
        "machine": str(plan.machine),
        "accelerator": plan.accelerator or "none",
        "policy": plan.policy,
        **({"precision": plan.precision_line} if plan.precision_line else {}),
        "latency": f"{format_ms(predicted.latency_ms)}, {origin}",
    }
    if plan.accelerator:
        facts["memory"] = f"{memory}, {origin}"
    table = FigureTable(f"{plan.model}: {plan.operator_counts}", [key(""), text("")])
    for name, fact in facts.items():
        table.add_row(name, fact)
    return table


def _lanes(plan: Plan) -> list[dict[str, Any]]:
    """Return the operators, segments and predicted busy time of each lane.

    Operators on several cores at once count for the lane of each core; ``shared_operators`` is their number.
    """
    schedule = plan.schedule
    segments = [schedule.occupied(segment[0]) for segment in plan.segments]
    operators = {i: schedule.occupied(i) for i in schedule.order}
    return [
        {
            "lane": lane_name(lane),
            "operators": sum(lane in occupied for occupied in operators.values()),
            "shared_operators": sum(lane in occupied for occupied in operators.values() if len(occupied) > 1),
            "segments": sum(lane in occupied for occupied in segments),
            "busy_ms": plan.busy_ms[lane],
            "operator_names": [plan.operators[i] for i, occupied in operators.items() if lane in occupied],
        }
        for lane in display_order(lane for occupied in operators.values() for lane in occupied)
    ]


def _lane_table(plan: Plan) -> FigureTable:
    shared = ["with other cores"] if plan.schedule.widths else []
    columns: list[Column | str] = [key("lane"), "operators", *shared, "segments", "busy"]
    table = FigureTable("Placement", [*columns, text("first operator"), text("last operator")])
    for lane in _lanes(plan):
        names = lane["operator_names"]
        counts = [str(lane["operators"]), *([str(lane["shared_operators"])] if shared else [])]
        counts += [str(lane["segments"]), format_ms(lane["busy_ms"])]
        table.add_row(lane["lane"], *counts, names[0], names[-1])
    return table
