"""Tables and lines of text about plans, benchmarks and machines."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from chrion.common.installation import install_hint
from chrion.common.lane_numbers import is_accelerator_lane, lane_name
from chrion.common.units import format_count, format_mb, format_ms, format_range_ms
from chrion.profiler.interference import TOO_BUSY
from chrion.profiler.machine import Machine
from chrion.report.benchmark.latency import Timing
from chrion.report.figure_table import Column, FigureTable, key, text
from chrion.scheduler.plan import Plan, Prediction
from chrion.scheduler.policies.registry import find_policy
from chrion.scheduler.priced_memory import MEMORIES, MEMORY_NAMES, Memory

#: Range of latency ratios that count as equal: measurements of one session differ by as much.
_LEVEL = (0.97, 1.03)
_VS_ACCELERATOR = "vs. accelerator"
#: What the table compares with, unless the plain session was measured.
_PAPERS_CPU_ONLY = "CPU only: predicted by the Chrion paper's algorithm, with one core for each operator"
#: Verdict on timings with interference.
BUSY_VERDICT = f"{TOO_BUSY}: repeat it when no other process or virtual machine uses the cores"


def plan_table(plan: Plan) -> FigureTable:
    """Return a table of a plan's predictions beside those of the accelerator alone and of the CPU cores alone.

    The memory that alpha prices comes first, the other definition beside it. Without an accelerator, the table compares
    with the CPU cores alone and has no columns of accelerator memory.
    """
    title = f"{plan.model}: {plan.operator_counts}, predicted for {plan.machine}"
    first, second = sorted(MEMORIES, key=lambda memory: memory != plan.memory)
    n, on_cpu_alone = plan.model_operators or len(plan.operators), _is_on_cpu_alone(plan)
    columns = ["latency", "vs. CPU only", "operators", "cores"]
    if not on_cpu_alone:
        columns = ["latency", _VS_ACCELERATOR, MEMORY_NAMES[first], _VS_ACCELERATOR, MEMORY_NAMES[second]]
        columns += ["operators on accelerator", "on CPU", "cores"]
    table = FigureTable(title, [key(""), *columns], sparse=True)
    rows: list[tuple[str, Prediction | None, int, int, int]] = [
        ("accelerator only", plan.accelerator_only, n - (off := plan.off_accelerator), off, int(off > 0)),
        ("CPU only, measured" if plan.cpu_only_measured else "CPU only", plan.cpu_only, 0, n, plan.cpu_only_cores),
        (plan.policy, plan.predicted, plan.on_accelerator, plan.on_cpu, plan.schedule.cores),
    ]
    for name, predicted, on_accelerator, on_cpu, cores in rows:
        if predicted is None:
            continue
        used = str(cores) if cores or on_accelerator else ""
        if on_cpu_alone:
            change = _change(predicted.latency_ms, plan.cpu_only.latency_ms if plan.cpu_only else 0.0)
            table.add_row(name, format_ms(predicted.latency_ms), change, str(on_accelerator + on_cpu), used)
        else:
            figures = _figures(predicted, plan.accelerator_only, first, second)
            table.add_row(name, *figures, str(on_accelerator), str(on_cpu), used)
    return table


def _is_on_cpu_alone(plan: Plan) -> bool:
    return plan.accelerator_only is None and plan.accelerator is None


def reference_lines(plan: Plan) -> list[str]:
    """Return lines on streams, native operators and what the table compares a plan with, if a plan needs them."""
    streams = len(set(filter(is_accelerator_lane, plan.schedule.lanes)))
    lines = [f"streams of the accelerator: {streams}"] if streams > 1 else []
    if plan.native:
        lines.append(f"native operators in place of onnxruntime's: {len(plan.native)} of {len(plan.operators)}")
    if plan.cpu_only is None:
        return lines
    if plan.cpu_only_measured:
        lines.append(f"CPU only: plain onnxruntime with {format_count(plan.cpu_only_cores, 'thread')}, measured")
        if plan.is_plain and not plan.on_accelerator:
            lines.append("the plan is the model as one segment without changes, which sessions run plain: no gain")
        return lines
    plain = "; chrion bench compares with plain onnxruntime" if _is_on_cpu_alone(plan) else ""
    return [*lines, f"{_PAPERS_CPU_ONLY}{plain}"]


def verdict(plan: Plan) -> str:
    """Return one line on the SLO and the GPU budget, if they are kept, and on the objective.

    The plan's remarks name those that no plan keeps.
    """
    parts = []
    if plan.slo_ms is not None and plan.meets_slo:
        parts.append(f"meets the SLO of {format_ms(plan.slo_ms)} with {format_ms(plan.predicted.latency_ms)}")
    if plan.budget_mb is not None and plan.meets_budget:
        resident = format_mb(plan.predicted.resident_mb)
        parts.append(f"fits the GPU budget of {format_mb(plan.budget_mb)} with {resident} resident")
    return "; ".join([*parts, f"objective: {objective(plan)}"])


def objective(plan: Plan) -> str:
    """Return what was minimised, and within which limits; alpha is a part of it only if it was given."""
    memory = MEMORY_NAMES[plan.memory]
    if plan.priced or plan.accelerator_only is None:
        is_weighed = plan.alpha and plan.accelerator_only and plan.meets_slo
        return "minimum latency" + (f" + {plan.alpha:.4g} ms/MB * {memory}" if is_weighed else "")
    within = " within the GPU budget" if plan.budget_mb is not None else ""
    weighed = find_policy(plan.policy).weighs_memory
    if plan.slo_ms is None or not (weighed and plan.meets_slo and plan.meets_budget):
        return f"minimum latency{within}"
    return f"minimum {memory}{within}{' and' if within else ' within'} the SLO"


def estimated_lines(estimated: int, operators: int, machine: Machine) -> list[str]:
    """Return a line with the number of operators whose costs are estimated, or no line if all were measured."""
    if machine.hardware:
        return [f"all times are estimated from datasheets: {machine.hardware}"]
    if not estimated:
        return []
    return [f"{estimated} of {operators} operators are not in the profile; their costs are estimated"]


def memory_line(predicted: Prediction, measured_mb: float | None) -> str:
    """Return one line with the predicted accelerator memory, counted both ways, and the measured peak if known."""
    line = f"accelerator memory: Equation 4 {format_mb(predicted.memory_mb)}, "
    line += f"resident {format_mb(predicted.resident_mb)} predicted; "
    if measured_mb is None:
        return line + f"measured: not known (needs NVML and an NVIDIA GPU: {install_hint('nvml')})"
    return line + f"measured at most {format_mb(measured_mb)}"


def bench_table(timings: Sequence[Timing], hybrid: str, predicted_ms: float | None = None) -> FigureTable:
    """Return a table of timings and their ratios to the fastest baseline.

    Args:
        timings: The timings of the hybrid session and of its baselines.
        hybrid: Name of the hybrid session's timing.
        predicted_ms: The plan's predicted latency; adds a row.
    """
    best = best_baseline(timings, hybrid)
    columns: list[Column | str] = [key(""), "median", "quartiles", "runs", "vs. plain"]
    table = FigureTable("Latency; sessions take turns in each round; ratios are to the fastest plain session", columns)
    for t in timings:
        quartiles = format_range_ms(t.low_ms, t.high_ms)
        table.add_row(t.name, format_ms(t.median_ms), quartiles, str(t.runs), f"{t.median_ms / best.median_ms:.2f}")
    if predicted_ms is not None:
        ratio = f"{predicted_ms / best.median_ms:.2f}"
        table.add_row(f"{hybrid}, predicted", format_ms(predicted_ms), "", "", ratio)
    return table


def best_baseline(timings: Sequence[Timing], hybrid: str) -> Timing:
    """Return the fastest timing apart from the hybrid session's."""
    return min((t for t in timings if t.name != hybrid), key=lambda t: t.median_ms)


def bench_verdict(timings: Sequence[Timing], hybrid: str, *, plain: bool = False, interference: bool = False) -> str:
    """Return one line that says whether the hybrid session is faster than the fastest baseline.

    Args:
        timings: The timings of the hybrid session and of its baselines.
        hybrid: Name of the hybrid session's timing.
        plain: Whether the hybrid session runs plain onnxruntime.
        interference: Whether other processes used the cores meanwhile.
    """
    if interference:
        return BUSY_VERDICT
    if plain:
        return f"{hybrid} runs plain onnxruntime; a difference from a session of the same configuration is noise"
    best = best_baseline(timings, hybrid)
    ratio = next(t for t in timings if t.name == hybrid).median_ms / best.median_ms
    advice = "; use that session instead" if ratio > _LEVEL[1] else ""
    return f"{hybrid} is {compare_latency(ratio)} the fastest plain session ({best.name}){advice}"


def compare_latency(ratio: float) -> str:
    """Return a ratio of latencies in words, to be followed by the name of the reference."""
    if ratio < _LEVEL[0]:
        return f"{1 / ratio:.2f} times faster than"
    if ratio <= _LEVEL[1]:
        return "as fast as"
    return f"{(ratio - 1) * 100:.0f} % slower than" if ratio < 2 else f"{ratio:.1f} times slower than"


#: What a missing native library costs, and what to do.
_WITHOUT = {
    "lanes": "plans for CPU cores run on Python threads and are slower",
    "operators": "plans and decoders run on onnxruntime's operators and are slower",
}
_COMPILER = "install a wheel for this system, or a C compiler and Chrion again; see the page on installation"


def machine_table(
    machine: Machine,
    cores: Sequence[int],
    native: Mapping[str, bool],
    providers: Sequence[Mapping[str, Any]],
    gpus: Sequence[Mapping[str, Any]],
) -> FigureTable:
    """Return a table of a machine's cores, memory, native libraries, GPUs and execution providers.

    Args:
        machine: The machine.
        cores: The logical CPU of each CPU lane.
        native: Whether the native libraries ``lanes`` and ``operators`` are in use.
        providers: Each with ``name``, ``reason`` (None if it works), ``remedy`` and ``base_memory_mb`` (None if not
            known).
        gpus: Each with ``name``, ``memory_mb`` and ``used_mb``.
    """
    table = FigureTable(str(machine), [key(""), text("")])
    table.add_row("cores", ", ".join(f"{lane_name(j)} on CPU {core}" for j, core in enumerate(cores, start=1)))
    table.add_row("memory", f"{machine.memory_mb / 1000:.1f} GB")
    table.add_row("system", machine.system)
    table.add_row("onnxruntime", machine.onnxruntime)
    table.add_row("key of its profiles", machine.fingerprint)
    for name, in_use in native.items():
        remedy = f" ({_COMPILER})" if sys.platform == "linux" else ""
        table.add_row(f"native {name}", "in use" if in_use else f"missing: {_WITHOUT[name]}{remedy}")
    for gpu in gpus:
        total_gb, used = gpu["memory_mb"] / 1000, format_mb(gpu["used_mb"])
        table.add_row("GPU", f"{gpu['name']}, {total_gb:.1f} GB, of which {used} used")
    for provider in providers:
        table.add_row(provider["name"], _provider_state(provider))
    return table


def _provider_state(provider: Mapping[str, Any]) -> str:
    if provider["reason"] is None:
        base_mb = provider["base_memory_mb"]
        return "works" + (f", takes {format_mb(base_mb)} on first use" if base_mb else "")
    return f"does not work: {provider['reason']}" + (f" ({provider['remedy']})" if provider["remedy"] else "")


def _figures(predicted: Prediction, reference: Prediction | None, first: Memory, second: Memory) -> tuple[str, ...]:
    change = ("", "")
    if reference is not None:
        change = (
            _change(predicted.latency_ms, reference.latency_ms),
            _change(predicted.accelerator_mb(first), reference.accelerator_mb(first)),
        )
    memory, other = format_mb(predicted.accelerator_mb(first)), format_mb(predicted.accelerator_mb(second))
    return format_ms(predicted.latency_ms), change[0], memory, change[1], other


def _change(value: float, reference: float) -> str:
    return f"{(value / reference - 1) * 100:+.1f} %" if reference else ""
