"""Tables for people: a plan beside the plain ways, timings beside each other, the machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from chrion.benchmark.latency import Timing
from chrion.lane_numbers import lane_name
from chrion.profiler.machine import Machine
from chrion.scheduler.plan import Plan, Prediction
from chrion.units import format_mb, format_ms


def plan_table(plan: Plan) -> Table:
    """A plan beside everything on the accelerator and everything on the CPU cores, as predicted.

    ``memory`` is Equation 4; ``resident`` what an arena must hold.
    """
    table = Table(title=f"{plan.model}: {len(plan.operators)} operators, predicted for {plan.machine}")
    table.add_column("")
    for name in ("latency", "against acc.", "memory", "against acc.", "resident", "on acc.", "on CPU", "cores"):
        table.add_column(name, justify="right")
    rows: list[tuple[str, Prediction | None, Sequence[str]]] = [
        ("accelerator only", plan.accelerator_only, (str(len(plan.operators)), "0", "0")),
        ("CPU only", plan.cpu_only, ("0", str(len(plan.operators)), "")),
        (plan.policy, plan.predicted, (str(plan.on_accelerator), str(plan.on_cpu), str(plan.schedule.cores))),
    ]
    for name, prediction, counts in rows:
        if prediction is not None:
            table.add_row(name, *_figures(prediction, plan.accelerator_only), *counts)
    return table


def verdict(plan: Plan) -> str:
    """One line: SLO and GPU budget, and whether the plan is predicted to keep to them."""
    told = "no SLO given"
    if plan.slo_ms is not None:
        verb = "meets" if plan.meets_slo else "misses"
        told = f"{verb} the SLO of {format_ms(plan.slo_ms)} with {format_ms(plan.predicted.latency_ms)}"
    if plan.budget_mb is not None:
        verb = "fits" if plan.meets_budget else "exceeds"
        resident = format_mb(plan.predicted.resident_mb)
        told += f"; {verb} the GPU budget of {format_mb(plan.budget_mb)} with {resident} resident"
    return f"{told}; alpha {plan.alpha:.4g} ms/MB"


def estimated_lines(estimated: int, operators: int) -> list[str]:
    """How many operators' costs are no measurements; no line where all are."""
    if not estimated:
        return []
    return [f"{estimated} of {operators} operators are not in the profile; their costs are estimated"]


def memory_line(predicted: Prediction, measured_mb: float | None) -> str:
    """Predicted accelerator memory, counted both ways, beside what was measured."""
    line = f"accelerator memory: Equation 4 {format_mb(predicted.memory_mb)}, "
    line += f"resident {format_mb(predicted.resident_mb)} predicted; "
    if measured_mb is None:
        return line + "measured: not known (needs NVML and an NVIDIA GPU: pip install 'chrion[nvml]')"
    return line + f"measured at most {format_mb(measured_mb)}"


def bench_table(timings: Sequence[Timing], hybrid: str, predicted_ms: float | None = None) -> Table:
    """Timings beside the best of the rivals of ``hybrid``."""
    best = best_baseline(timings, hybrid)
    table = Table(title="latency, each with the machine to itself, in alternating turns")
    table.add_column("")
    for name in ("median", "quartiles", "runs", f"against {best.name}"):
        table.add_column(name, justify="right")
    for t in timings:
        quartiles = f"{format_ms(t.low_ms)} to {format_ms(t.high_ms)}"
        table.add_row(t.name, format_ms(t.median_ms), quartiles, str(t.runs), f"{t.median_ms / best.median_ms:.2f}")
    if predicted_ms is not None:
        table.add_row(
            f"{hybrid}, as predicted", format_ms(predicted_ms), "", "", f"{predicted_ms / best.median_ms:.2f}"
        )
    return table


def best_baseline(timings: Sequence[Timing], hybrid: str) -> Timing:
    """The fastest of the others."""
    return min((t for t in timings if t.name != hybrid), key=lambda t: t.median_ms)


def bench_verdict(timings: Sequence[Timing], hybrid: str) -> str:
    """One honest line: does the hybrid win?"""
    best = best_baseline(timings, hybrid)
    ratio = next(t for t in timings if t.name == hybrid).median_ms / best.median_ms
    if ratio < 0.97:
        return f"{hybrid} wins: {ratio:.2f} of the time of the best plain session ({best.name})"
    if ratio <= 1.03:
        return f"{hybrid} and the best plain session ({best.name}) are level: {ratio:.2f}"
    return f"{hybrid} does not win here: {ratio:.2f} times the best plain session ({best.name}); run that one instead"


def machine_table(
    machine: Machine, cores: Sequence[int], providers: Sequence[Mapping[str, Any]], gpus: Sequence[Mapping[str, Any]]
) -> Table:
    """What this machine offers, and which providers work.

    Args:
        machine: The machine.
        cores: The logical CPU of each CPU lane.
        providers: Each with ``name``, ``reason`` (None where it works), ``remedy`` and ``base_memory_mb`` (None where
            that is not known).
        gpus: Each with ``name``, ``memory_mb`` and ``used_mb``.
    """
    table = Table(title=str(machine), show_header=False)
    table.add_row("cores", ", ".join(f"{lane_name(j)} on CPU {core}" for j, core in enumerate(cores, start=1)))
    table.add_row("memory", f"{machine.memory_mb / 1000:.1f} GB")
    table.add_row("system", machine.system)
    table.add_row("onnxruntime", machine.onnxruntime)
    table.add_row("fingerprint", machine.fingerprint)
    for gpu in gpus:
        table.add_row(
            "GPU", f"{gpu['name']}, {gpu['memory_mb'] / 1000:.1f} GB, of which {format_mb(gpu['used_mb'])} used"
        )
    for provider in providers:
        table.add_row(provider["name"], escape(_working(provider)))
    return table


def _working(provider: Mapping[str, Any]) -> str:
    if provider["reason"] is None:
        held = provider["base_memory_mb"]
        return "works" + (f", holds {format_mb(held)} as soon as anything runs" if held else "")
    return f"does not work: {provider['reason']}" + (f" ({provider['remedy']})" if provider["remedy"] else "")


def _figures(found: Prediction, reference: Prediction | None) -> tuple[str, ...]:
    against = ("", "")
    if reference is not None:
        against = (
            _change(found.latency_ms, reference.latency_ms),
            _change(found.memory_mb, reference.memory_mb),
        )
    memory, resident = format_mb(found.memory_mb), format_mb(found.resident_mb)
    return format_ms(found.latency_ms), against[0], memory, against[1], resident


def _change(value: float, reference: float) -> str:
    return f"{(value / reference - 1) * 100:+.1f} %" if reference else ""
