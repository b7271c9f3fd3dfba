"""Compare the default policy with list schedulers on random graphs with an accelerator, by predicted latency.

    python scripts/compare_heuristics.py [-o docs/data]      # 20 to 800 operators
    python scripts/compare_heuristics.py --sizes 20,80 --seeds 3

Prints a line for each graph: the default policy's latency divided by that of the best list scheduler, which one that
is, and the processor time of both. Then a table by size, which ``-o`` writes as the results ``heuristics``. The list
schedulers are HEFT, CPOP and PEFT at their best number of cores, HEFT with lookahead and lists by critical path. The
graphs are those of ``tests/made_machines.py``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from command_arguments import add_output
from page_markers import markdown_table
from result_files import write_results

from chrion.scheduler.evaluation.solution import Problem

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from made_machines import FAMILIES, made_problem
from policy_solutions import solve_policy
from textbook_schedulers import critical_path_list, lookahead_heft

LISTS = ("heft", "cpop", "peft")
MADE = {"lookahead": lookahead_heft, "critical path": critical_path_list}
CORES = (2, 8)
#: The largest ratio that the default policy should have.
LIMIT = 1.03
HEAD = ["operators", "graphs", "mean", "best", "worst", f"above {LIMIT}"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The default policy beside the best list scheduler on one graph."""

    family: str
    n: int
    cores: int
    seed: int
    latency_ms: float
    best_ms: float
    #: The best list scheduler, and the number of cores that it may use if they are not its own choice.
    best: str
    lists_s: float
    policy_s: float

    @property
    def ratio(self) -> float:
        """The latency of the default policy over that of the best list scheduler."""
        return self.latency_ms / self.best_ms

    def line(self) -> str:
        """Return the comparison as text."""
        graph = f"{self.n} operators, {self.family}, {self.cores} cores, seed {self.seed}"
        spent = f"CPU s: {self.lists_s:.1f} lists, {self.policy_s:.1f} chrion"
        return f"{graph}: {self.ratio:.4f} ({self.latency_ms:.4f} ms, {self.best} {self.best_ms:.4f} ms); {spent}"


def compare(family: str, n: int, cores: int, seed: int) -> Comparison:
    """Compare the default policy with the list schedulers on one graph; those with odd seeds have weights."""
    dag, costs = made_problem(family, n, cores, seed, accelerator=True, weights=bool(seed % 2))
    problem = Problem(dag, costs)
    before = time.process_time()
    found = [(solve_policy(name, dag, costs), name) for name in LISTS]
    for used in sorted({1, 2, 4, cores} & set(range(cores + 1))):
        machine = costs.limited_to(used, 1)
        found += [(problem.evaluate(make(dag, machine)), f"{name}, {used} cores") for name, make in MADE.items()]
    best_ms, best = min((solution.timeline.latency_ms, name) for solution, name in found)
    between = time.process_time()
    latency_ms = solve_policy("chrion", dag, costs).timeline.latency_ms
    after = time.process_time()
    return Comparison(family, n, cores, seed, latency_ms, best_ms, best, between - before, after - between)


def comparisons(n: int, seeds: int) -> Iterator[Comparison]:
    """Yield the comparisons on graphs of ``n`` operators: of each family, for each number of cores."""
    for family in FAMILIES:
        for cores in CORES:
            for seed in range(seeds):
                yield compare(family, n, cores, seed)


def row(name: str, ratios: Sequence[float]) -> list[str]:
    """Return a row of the table."""
    shown = [f"{value:.3f}" for value in (statistics.mean(ratios), min(ratios), max(ratios))]
    return [name, str(len(ratios)), *shown, str(sum(value > LIMIT for value in ratios))]


def main() -> None:
    """Print the line of each graph and the table, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_output(parser)
    parser.add_argument("--sizes", default="20,60,200,800", help="numbers of operators")
    parser.add_argument("--seeds", type=int, default=4, help="graphs of each family, size and number of cores")
    arguments = parser.parse_args()
    ratios: dict[str, list[float]] = {}
    for n in map(int, arguments.sizes.split(",")):
        for comparison in comparisons(n, arguments.seeds):
            print(comparison.line(), flush=True)
            ratios.setdefault(str(n), []).append(comparison.ratio)
    ratios["all"] = [ratio for found in ratios.values() for ratio in found]
    table = markdown_table([HEAD, *(row(name, found) for name, found in ratios.items())])
    print(table)
    write_results(arguments.output, {"heuristics": table})


if __name__ == "__main__":
    main()
