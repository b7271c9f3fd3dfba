"""Predict plans with lanes of several cores on processors with 8, 16 and 32 cores, from their datasheet.

    python scripts/predict_wide_lanes.py [-o docs/data] [--only REGEX] [--hardware NAME]

Nothing is measured. For every model of ``bench_cpu.py --wide`` and every number of cores, the costs of operators are
estimated as for ``chrion partition --hardware``, and three latencies are predicted: that of the best plain session,
which has one thread or as many as any lane may have cores; of the best plan on lanes of one core each; and of the best
plan. ``-o`` writes the results ``cpu-estimated``.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench_cpu import WIDE_CASES
from command_arguments import add_output
from page_markers import markdown_table
from result_files import read_parts, read_rows, write_results

import chrion
from chrion.graph import Dag, Graph
from chrion.hardware import Hardware, hardware
from chrion.profiler import Costs
from chrion.profiler.hardware_profile import estimate_profile
from chrion.scheduler import Schedule
from chrion.scheduler.evaluation.evaluate import evaluate
from chrion.scheduler.evaluation.solution import Solution
from chrion.scheduler.policies.chrion import search_variants
from chrion.scheduler.policies.policy import PlanningTask

NAME = "cpu-estimated"
CORES = (8, 16, 32)
DEFAULT = "epyc-32"
HEAD = ["model", "cores", "best plain, ms", "threads", "lanes of 1 core, ms", "best plan, ms", "ratio"]
HEAD += ["operators by cores of their lane"]

TEXT = """*Estimated* by `scripts/predict_wide_lanes.py` from the datasheet of {title}, of which 8, 16 or 32 cores are
used; nothing was measured. *Best plain* is a plain session with the best of 1, 2, 4, ... threads, *lanes of 1 core*
the best plan without wide segments, *best plan* the best of all plans, and *ratio* its latency over that of the plain
session.

{table}"""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Predictions for one model on a number of cores."""

    model: str
    cores: int
    plain_ms: float
    #: The number of threads of the best plain session.
    threads: int
    narrow_ms: float
    best: Solution

    def row(self) -> list[str]:
        """Return the line of the table."""
        best_ms = self.best.timeline.latency_ms
        row = [self.model, str(self.cores), f"{self.plain_ms:.3g}", str(self.threads), f"{self.narrow_ms:.3g}"]
        return [*row, f"{best_ms:.3g}", f"{best_ms / self.plain_ms:.2f}", describe_widths(self.best.schedule)]


def describe_widths(schedule: Schedule) -> str:
    """Return the share of operators on lanes of each number of cores, as text."""
    counts = Counter(schedule.width(i) for i in range(len(schedule.lanes)))
    return ", ".join(f"{width}: {count / counts.total():.0%}" for width, count in sorted(counts.items()))


def best_plain(dag: Dag, costs: Costs) -> tuple[float, int]:
    """Return the latency in ms of the best plain session, and its number of threads.

    A plain session runs one operator after another. Its threads spin between requests, so that none is woken.
    """
    awake = replace(costs, wake_ms=0.0)
    order = dag.topological_order
    lanes = (1,) * len(order)
    latencies = []
    for threads in (1, *costs.widths):
        widths = (threads,) * len(order) if threads > 1 else ()
        schedule = Schedule(order, lanes, threads, widths=widths)
        latencies.append((evaluate(dag, awake, schedule, [order]).latency_ms, threads))
    return min(latencies)


def predict(name: str, graph: Graph, machine: Hardware, cores: int) -> Estimate:
    """Return the predictions for one model on some cores of a machine."""
    profile = estimate_profile(graph, machine, cores)
    plain_ms, threads = best_plain(graph.dag, profile.costs(graph.dag))
    found = search_variants(PlanningTask(graph, profile.costs))
    narrow_ms = min(variant.solution.timeline.latency_ms for variant in found if not variant.wide)
    best = min((variant.solution for variant in found), key=lambda solution: solution.timeline.latency_ms)
    return Estimate(name, cores, plain_ms, threads, narrow_ms, best)


def format_results(folder: Path | None, machine: Hardware, found: Sequence[Estimate]) -> str:
    """Return the results, with the stored rows of other models on the same processor."""
    about = f"the datasheet of {machine.title}, of which"
    known = read_rows(folder, NAME) if any(about in part.get("text", "") for part in read_parts(folder, NAME)) else []
    rows = {(row[0], row[1]): row for row in known}
    rows |= {(estimate.model, str(estimate.cores)): estimate.row() for estimate in found}
    keys = [(case.name, str(cores)) for case in WIDE_CASES for cores in CORES]
    return TEXT.format(title=machine.title, table=markdown_table([HEAD, *(rows[key] for key in keys if key in rows)]))


def main() -> None:
    """Predict all models, print their lines, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_output(parser)
    parser.add_argument("--only", default="", help="a regular expression that names of models must match")
    parser.add_argument("--hardware", default=DEFAULT, help=f"a processor of 32 cores or more (default: {DEFAULT})")
    arguments = parser.parse_args()
    machine = hardware(arguments.hardware)
    cases = [case for case in WIDE_CASES if re.search(arguments.only, case.name)]
    if not cases:
        parser.error(f"--only: no model matches {arguments.only!r}")
    print(" | ".join(HEAD))
    for case in cases:
        graph = chrion.load(case.build())
        found: list[Estimate] = []
        for cores in CORES:
            found.append(predict(case.name, graph, machine, cores))
            print(" | ".join(found[-1].row()), flush=True)
        write_results(arguments.output, {NAME: format_results(arguments.output, machine, found)})


if __name__ == "__main__":
    main()
