"""Every scheduler on six models of different kinds, beside plain onnxruntime, on this machine.

``python scripts/bench_schedulers.py -o docs/schedulers.md`` takes about eight minutes on two quiet cores and replaces
what stands between the page's two markers; the rest of the page is written by hand. ``--only`` picks models by part of
their name, ``--policies`` schedulers, ``--accelerator`` another device than the CPU cores, ``--streams`` how many
of its lanes they use at most.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnxruntime as ort
from page_markers import markdown_table, replace_section

import chrion
from chrion import zoo
from chrion.benchmark.comparison import Comparison, PolicyResult, plan_policies, time_plans
from chrion.files import write_atomically
from chrion.profiler import this_machine
from chrion.profiler.measure import synthetic_inputs
from chrion.scheduler import POLICIES
from chrion.scheduler.policies.ios_merging import merged_variants
from chrion.units import format_ms

MEASURED = "measured"


@dataclass(frozen=True)
class Case:
    """A model of the set."""

    name: str
    builder: str
    parameters: Mapping[str, int | float | bool]


CASES = [
    Case("LSTM", "lstm", {"layers": 12, "batch": 1, "io": 128, "chunk": 16}),
    Case("LSTM both ways", "lstm", {"layers": 6, "batch": 1, "io": 128, "chunk": 96, "bidirectional": True}),
    Case("GoogLeNet", "googlenet", {}),
    Case("NASNet-A, reduced", "nasnet-a", {"resolution": 128, "channels": 32, "stem": 32, "cells": 2}),
    Case("DeepFM", "deepfm", {"batch": 64}),
    Case("seq2seq", "seq2seq", {"hidden": 256, "vocabulary": 4000}),
]


def compare(
    case: Case, policies: Sequence[str], accelerator: str | None, streams: int | None, cycles: int
) -> Comparison:
    """Plan and measure one model by all policies."""
    graph = chrion.load(zoo.build(case.builder, case.parameters))
    costs = chrion.profile(graph, accelerator=accelerator, variants=merged_variants(graph))
    planned = plan_policies(
        graph,
        costs,
        policies,
        streams=streams,
        progress=lambda done, _, policy: print(f"  {done} {policy}", flush=True),
    )
    return time_plans(planned, synthetic_inputs(graph), rounds=cycles, trial_s=0.25)


def ratio(entry: PolicyResult, comparison: Comparison) -> float:
    """Measured time over the best plain session's; not a number where it was not measured."""
    best = comparison.best_plain
    return entry.timing.median_ms / best.median_ms if entry.timing and best else math.nan


def shown_ratio(value: float) -> str:
    """Two digits, bold where it is a gain beyond noise."""
    if math.isnan(value):
        return ""
    return f"**{value:.2f}**" if value <= 0.97 else f"{value:.2f}"


def overview(results: Mapping[str, Comparison], policies: Sequence[str]) -> str:
    """Models down, policies across; those that no model could be planned by are left out."""
    usable = [p for p in policies if any(e.plan for c in results.values() for e in c.results if e.policy == p)]
    rows = [["model", "best plain, ms", *usable]]
    for name, comparison in results.items():
        best = comparison.best_plain
        ratios = {e.policy: shown_ratio(ratio(e, comparison)) for e in comparison.results}
        rows.append([name, f"{best.median_ms:.3g}" if best else "", *(ratios[p] for p in usable)])
    return markdown_table(rows)


def detail(comparison: Comparison) -> str:
    """One model: what each policy planned, what that was to take, and what it took."""
    rows = [["policy", "predicted", "measured", "error", "ratio", "lanes", "waits", "segments", "planning"]]
    for entry in comparison.results:
        if entry.plan is None or entry.timing is None:
            continue
        predicted, measured = entry.plan.predicted.latency_ms, entry.timing.median_ms
        error, counts = (
            f"{predicted / measured - 1:+.0%}",
            [entry.lanes, entry.synchronisations, len(entry.plan.segments)],
        )
        times = [format_ms(predicted), format_ms(measured), error, shown_ratio(ratio(entry, comparison))]
        rows.append([entry.policy, *times, *map(str, counts), format_ms(entry.planning_ms)])
    rows += [[t.name, "", format_ms(t.median_ms), *[""] * 6] for t in comparison.plain]
    missing = "".join(f"\n- {e.reason}" for e in comparison.results if e.reason)
    return markdown_table(rows) + (f"\n\nNot measured:\n{missing}" if missing else "")


def section(results: Mapping[str, Comparison], policies: Sequence[str]) -> str:
    """What is written between the markers."""
    machine = next(iter(results.values())).profile.machine if results else this_machine()
    head = (
        f"Measured by `scripts/bench_schedulers.py` on {machine}, onnxruntime {ort.get_version_string()}: medians of "
        "alternating turns, each rival with the machine to itself, over the best of plain onnxruntime's sessions "
        "(1 thread, all cores, default). Below 1 is a gain."
    )
    parts = [head, overview(results, policies)]
    for case in CASES:
        if case.name in results:
            comparison = results[case.name]
            given = ", ".join(f"{name} {value}" for name, value in case.parameters.items()) or "as published"
            heading = f"### {case.name}\n\n`{case.builder}` ({given}), {len(comparison.graph.dag)} operators"
            parts += [heading, detail(comparison)]
    return "\n\n".join(parts)


def main() -> None:
    """Run the set, print each model's table as it comes, write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--accelerator")
    parser.add_argument("--streams", type=int)
    parser.add_argument("--cycles", type=int, default=3)
    arguments = parser.parse_args()
    page = arguments.output.read_text(encoding="utf-8") if arguments.output else ""
    if page:
        replace_section(page, MEASURED, "")  # refuses the page before anything is measured
    policies = arguments.policies.split(",")
    results = {}
    for case in CASES:
        if arguments.only.lower() in case.name.lower():
            print(case.name, flush=True)
            results[case.name] = compare(case, policies, arguments.accelerator, arguments.streams, arguments.cycles)
            print(detail(results[case.name]), flush=True)
    if arguments.output:
        write_atomically(arguments.output, replace_section(page, MEASURED, section(results, policies)))


if __name__ == "__main__":
    main()
