"""Plan six models of different kinds with every scheduler, and measure the plans and plain onnxruntime.

    python scripts/bench_schedulers.py [-o docs/data] [--only NAME] [--policies P,Q] [--accelerator NAME]

Takes about eight minutes on two idle cores. Prints a table for each model when it is measured; ``-o`` writes the
results ``schedulers``.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnxruntime as ort
from command_arguments import add_output
from page_markers import markdown_table
from result_files import write_results

import chrion
from chrion import zoo
from chrion.common.units import format_ms
from chrion.profiler import this_machine
from chrion.profiler.synthetic_inputs import synthetic_inputs
from chrion.report.benchmark.comparison import PolicyComparison, PolicyResult, plan_policies, time_plans
from chrion.scheduler import POLICIES
from chrion.scheduler.plan_options import PlanOptions
from chrion.scheduler.policies.ios_merging import merged_variants

#: The name of the results.
NAME = "schedulers"


@dataclass(frozen=True)
class Case:
    """A model of the benchmark."""

    name: str
    builder: str
    parameters: Mapping[str, int | float | bool]


CASES = [
    Case("LSTM", "lstm", {"layers": 12, "batch": 1, "io": 128, "chunk": 16}),
    Case("LSTM, bidirectional", "lstm", {"layers": 6, "batch": 1, "io": 128, "chunk": 96, "bidirectional": True}),
    Case("GoogLeNet", "googlenet", {}),
    Case("NASNet-A, reduced", "nasnet-a", {"resolution": 128, "channels": 32, "stem": 32, "cells": 2}),
    Case("DeepFM", "deepfm", {"batch": 64}),
    Case("seq2seq", "seq2seq", {"hidden": 256, "vocabulary": 4000}),
]


def compare(
    case: Case, policies: Sequence[str], accelerator: str | None, streams: int | None, rounds: int
) -> PolicyComparison:
    """Plan a model by all policies and measure the plans."""
    graph = chrion.load(zoo.build(case.builder, case.parameters))
    costs = chrion.profile(graph, accelerator=accelerator, variants=merged_variants(graph))
    planned = plan_policies(
        graph,
        costs,
        [PlanOptions(policy=policy, streams=streams) for policy in policies],
        progress=lambda done, _, policy: print(f"  {done} {policy}", flush=True),
    )
    return time_plans(planned, synthetic_inputs(graph), rounds=rounds, trial_s=0.25)


def ratio_to_plain(entry: PolicyResult, comparison: PolicyComparison) -> float:
    """Return the measured time over the best plain session's; NaN if the plan was not measured."""
    best = comparison.best_plain
    return entry.timing.median_ms / best.median_ms if entry.timing and best else math.nan


def format_ratio(value: float) -> str:
    """Format a ratio with two digits, bold if it is a gain beyond noise."""
    if math.isnan(value):
        return ""
    return f"**{value:.2f}**" if value <= 0.97 else f"{value:.2f}"


def format_overview(results: Mapping[str, PolicyComparison], policies: Sequence[str]) -> str:
    """Return a table with a row for each model and a column for each policy that planned any of them."""
    usable = [p for p in policies if any(e.plan for c in results.values() for e in c.results if e.policy == p)]
    rows = [["model", "best plain, ms", *usable]]
    for name, comparison in results.items():
        best = comparison.best_plain
        ratios = {e.policy: format_ratio(ratio_to_plain(e, comparison)) for e in comparison.results}
        rows.append([name, f"{best.median_ms:.3g}" if best else "", *(ratios[p] for p in usable)])
    return markdown_table(rows)


def format_model(comparison: PolicyComparison) -> str:
    """Return the table of one model: the plan of each policy, its predicted and its measured time."""
    rows = [["policy", "predicted", "measured", "error", "ratio", "lanes", "waits", "segments", "planning"]]
    for entry in comparison.results:
        if entry.plan is None or entry.timing is None:
            continue
        predicted, measured = entry.plan.predicted.latency_ms, entry.timing.median_ms
        error = f"{predicted / measured - 1:+.0%}"
        times = [format_ms(predicted), format_ms(measured), error, format_ratio(ratio_to_plain(entry, comparison))]
        counts = [entry.lanes, entry.synchronisations, len(entry.plan.segments)]
        rows.append([entry.policy, *times, *map(str, counts), format_ms(entry.planning_ms)])
    rows += [[t.name, "", format_ms(t.median_ms), *[""] * 6] for t in comparison.plain]
    return markdown_table(rows)


def format_results(results: Mapping[str, PolicyComparison], policies: Sequence[str]) -> str:
    """Return the results in Markdown."""
    machine = next(iter(results.values())).profile.machine if results else this_machine()
    head = (
        f"Measured by `scripts/bench_schedulers.py` on {machine}, onnxruntime {ort.get_version_string()}: medians of "
        "alternating rounds, in which each candidate runs alone, over the best plain onnxruntime session (1 thread, "
        "all cores, default). Below 1 is a gain. `exact` plans graphs of at most 40 operators."
    )
    parts = [head, format_overview(results, policies)]
    for case in CASES:
        if case.name in results:
            comparison = results[case.name]
            given = ", ".join(f"{name} {value}" for name, value in case.parameters.items()) or "as published"
            heading = f"**{case.name}.** `{case.builder}` ({given}), {len(comparison.graph.dag)} operators"
            parts += [heading, format_model(comparison)]
    return "\n\n".join(parts)


def main() -> None:
    """Measure all models, print the table of each, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_output(parser)
    parser.add_argument("--only", default="", help="only models whose names contain this text")
    parser.add_argument("--policies", default=",".join(POLICIES), help="schedulers, separated by commas (default: all)")
    parser.add_argument("--accelerator", help="provider to use in addition to the CPU cores (default: none)")
    parser.add_argument("--streams", type=int, help="most lanes of the accelerator")
    parser.add_argument("--rounds", type=int, default=3, help="alternating rounds")
    arguments = parser.parse_args()
    policies = arguments.policies.split(",")
    results = {}
    for case in CASES:
        if arguments.only.lower() in case.name.lower():
            print(case.name, flush=True)
            results[case.name] = compare(case, policies, arguments.accelerator, arguments.streams, arguments.rounds)
            print(format_model(results[case.name]), flush=True)
            print(*(f"not measured: {entry.reason}" for entry in results[case.name].results if entry.reason), sep="\n")
    write_results(arguments.output, {NAME: format_results(results, policies)})


if __name__ == "__main__":
    main()
