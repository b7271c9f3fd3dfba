"""Compare the default policy with list schedulers on random graphs with an accelerator, by predicted latency.

    python scripts/compare_heuristics.py                    # 20 to 800 operators
    python scripts/compare_heuristics.py --sizes 20,80 --seeds 3

Prints a table: the default policy's latency divided by that of the best list scheduler, mean and worst, by size. The
list schedulers are HEFT, CPOP and PEFT at their best number of cores, HEFT with lookahead and lists by critical path.
The graphs are those of ``tests/made_machines.py``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from chrion.scheduler import POLICIES
from chrion.scheduler.evaluation.solution import Problem
from chrion.scheduler.policies.chrion import ChrionPolicy

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from made_machines import FAMILIES, made_problem
from textbook_schedulers import critical_path_list, lookahead_heft

LISTS = ("heft", "cpop", "peft")


def ratio(family: str, n: int, cores: int, seed: int, *, weights: bool) -> float:
    """Return the latency of the default policy over that of the best list scheduler."""
    dag, costs = made_problem(family, n, cores, seed, accelerator=True, weights=weights)
    problem = Problem(dag, costs)
    found = [POLICIES[name].make_solver(dag, costs)(0.0) for name in LISTS]
    for used in sorted({1, 2, 4, cores} & set(range(cores + 1))):
        machine = costs.limited_to(used, 1)
        found += [problem.evaluate(make(dag, machine)) for make in (lookahead_heft, critical_path_list)]
    best_ms = min(solution.timeline.latency_ms for solution in found)
    return ChrionPolicy(dag, costs)(0.0).timeline.latency_ms / best_ms


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="20,60,200,800", help="numbers of operators")
    parser.add_argument("--seeds", type=int, default=2, help="graphs of each family, size and number of cores")
    options = parser.parse_args()
    print(f"{'operators':>9} {'graphs':>6} {'mean':>6} {'best':>6} {'worst':>6} {'above 1.03':>10} {'CPU s':>6}")
    everything: list[float] = []
    for n in map(int, options.sizes.split(",")):
        before = time.process_time()
        ratios = [
            ratio(family, n, cores, seed, weights=bool(seed % 2))
            for family in FAMILIES
            for cores in (2, 8)
            for seed in range(options.seeds)
        ]
        print_row(str(n), ratios, time.process_time() - before)
        everything += ratios
    print_row("all", everything, time.process_time())


def print_row(name: str, ratios: Sequence[float], spent_s: float) -> None:
    """Print a row of the table."""
    above = sum(value > 1.03 for value in ratios)
    row = f"{statistics.mean(ratios):>6.3f} {min(ratios):>6.3f} {max(ratios):>6.3f} {above:>10} {spent_s:>6.0f}"
    print(f"{name:>9} {len(ratios):>6} {row}", flush=True)


if __name__ == "__main__":
    main()
