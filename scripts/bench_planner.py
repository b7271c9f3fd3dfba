"""Measure the CPU time and the memory that planning takes, on models and on random layered graphs.

    python scripts/bench_planner.py            # the paper's algorithms, then the default policy
    python scripts/bench_planner.py --only 10000

Prints two tables and writes no file; takes about five minutes. Each line is measured in a process of its own, whose
peak memory includes the libraries and the graph. Times are CPU times, which other work on the machine changes little.
Those of the default policy are of whole plans, with exact memory; with an SLO, of a plan without limits and of one
whose latency is at most 1.2 times that of the first.
The last column is the growth of the time from the line above, divided by the growth of n log n: planning grows no
faster than n log n where it is about 1 or below.
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import random
import resource
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace

from chrion.graph import Dag, Graph, load
from chrion.profiler import CopyCost, Costs, OperatorMemory, Profile, uniform_costs
from chrion.profiler.machine import this_machine
from chrion.profiler.profiles import OperatorCost
from chrion.scheduler.limits import Limits
from chrion.scheduler.planner import Planner
from chrion.scheduler.policies.device_selection import select_devices
from chrion.scheduler.policies.orders import hybrid_order
from chrion.zoo import build


@dataclass(frozen=True, slots=True)
class Case:
    """A graph and a machine to plan for."""

    name: str
    #: Number of operators; 0 for the paper's LSTM.
    operators: int
    cores: int
    accelerator: bool = True
    #: True if operators were measured on several cores.
    widths: bool = False
    #: True to plan for an SLO as well.
    slo: bool = False

    def problem(self) -> tuple[Graph, Costs]:
        """Return the graph and its costs."""
        if self.operators:
            dag, costs = layered_graph(self.operators, self.cores)
            graph = replace(load(build("squeezenet")), name=self.name, dag=dag)
        else:
            graph = load(build("lstm-baseline"))
            dag = graph.dag
            costs = uniform_costs(dag, accelerator_ms=0.05, cpu_ms=[0.3 * (1 + 0.1 * j) for j in range(self.cores)])
            costs = replace(costs, upload=CopyCost(0.01, 1e-7), download=CopyCost(0.01, 1e-7), handoff_ms=0.002)
        if self.widths:
            widths = tuple(2**power for power in range(1, self.cores.bit_length()))
            wide_ms = tuple(tuple(ms / width**0.7 for ms in costs.cpu_ms[0]) for width in widths)
            costs = replace(costs, widths=widths, wide_ms=wide_ms, wake_ms=0.005)
        return graph, costs if self.accelerator else costs.without_accelerator()


@dataclass(frozen=True)
class FixedProfile(Profile):
    """A profile for one graph, with given costs."""

    fixed: Costs = field(kw_only=True)

    @classmethod
    def of(cls, dag: Dag, costs: Costs) -> FixedProfile:
        """Return a profile with these costs, which has the operators of the graph and not those of its variants."""
        accelerator = None if costs.accelerator_ms is None else "CUDAExecutionProvider"
        operators = dict.fromkeys(dag.signatures, OperatorCost("", cpu_ms=(1.0,) * costs.cores))
        return cls(this_machine(accelerator), costs.cores, accelerator, operators, fixed=costs)

    def costs(self, *_: object, **_options: object) -> Costs:
        """Return the costs, whatever is asked for."""
        return self.fixed


PAPER = (
    Case("paper's LSTM, uniform costs", 0, 16),
    *(Case("layered", n, 16) for n in (1_000, 10_000, 30_000, 100_000)),
)
DEFAULT = (
    Case("paper's LSTM, uniform costs", 0, 12),
    *(Case("layered", n, 16) for n in (1_000, 2_000, 2_100, 5_000, 10_000, 19_980, 20_020, 50_000, 100_000)),
    Case("layered, cores only", 100_000, 2, accelerator=False),
    Case("layered, widths", 1_000, 16, widths=True),
    Case("layered, widths, SLO", 10_000, 16, widths=True, slo=True),
)


def layered_graph(n: int, cores: int, layers: int = 100, fan_in: int = 3, seed: int = 0) -> tuple[Dag, Costs]:
    """Return a random layered graph and random costs.

    Every operator reads ``fan_in`` operators of the preceding layer and one of any earlier layer.
    """
    rng = random.Random(seed)  # noqa: S311 - input of a benchmark
    bounds = list(itertools.pairwise(n * layer // layers for layer in range(layers + 1)))
    after = [(before, i) for before, own in itertools.pairwise(bounds) for i in range(*own)]
    edges = [(rng.randrange(*before), i) for before, i in after for _ in range(fan_in)]
    edges += [(rng.randrange(end), i) for (_, end), i in after]
    dag = Dag.from_edges(n, edges, [rng.randrange(1 << 10, 1 << 16) for _ in edges])
    one_core = [rng.uniform(0.1, 3.0) for _ in range(n)]
    costs = Costs(
        accelerator_ms=tuple(rng.uniform(0.1, 1.0) for _ in range(n)),
        cpu_ms=tuple(tuple(ms * (1 + 0.1 * j) for ms in one_core) for j in range(cores)),
        memory=tuple(OperatorMemory(outputs_mb=size / 1e6) for size in dag.output_bytes),
        upload=CopyCost(0.01, 1e-7),
        download=CopyCost(0.01, 1e-7),
        handoff_ms=0.002,
        dispatch_ms=0.005,
    )
    return dag, costs


def measure_paper(case: Case) -> tuple[float, float, str]:
    """Return the CPU time of Algorithms 1 and 2 in seconds, the median of three runs, and the peak memory in MB."""
    graph, costs = case.problem()
    dag = graph.dag
    runs = [_cpu_s(lambda: select_devices(dag, costs, hybrid_order(dag, costs), 0.1)) for _ in range(3)]
    return statistics.median(runs), _peak_mb(), ""


def measure_default(case: Case) -> tuple[float, float, str]:
    """Return the CPU time of the default policy in seconds, the peak memory in MB, and the latency it predicts."""
    graph, costs = case.problem()
    profile = FixedProfile.of(graph.dag, costs)
    planned_ms: list[float] = []

    def plan() -> None:
        planner = Planner(graph, profile)
        planned_ms.append(planner.plan(Limits()).predicted.latency_ms)
        if case.slo:
            planner.plan(Limits(slo_ms=1.2 * planned_ms[0]))

    seconds = _cpu_s(plan)
    return seconds, _peak_mb(), f"{planned_ms[0]:.1f} ms"


def _cpu_s(action: Callable[[], object]) -> float:
    before = time.process_time()
    action()
    return time.process_time() - before


def _peak_mb() -> float:
    scale = 1e6 if sys.platform == "darwin" else 1e3
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / scale


def print_table(title: str, cases: tuple[Case, ...], measure: Callable[[Case], tuple[float, float, str]]) -> None:
    """Measure cases, each in a new process, and print them."""
    print(f"{title}\n{'graph':<20} {'operators':>9} {'cores':>5} {'CPU s':>7} {'MB':>6} {'growth':>7}  predicted")
    before: tuple[int, float] | None = None
    for case in cases:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            seconds, peak_mb, predicted = pool.submit(measure, case).result()
        n = case.operators
        growth = ""
        if before and n > before[0] and case.accelerator and not case.widths:
            growth = f"{seconds / before[1] / (n * math.log(n) / (before[0] * math.log(before[0]))):.2f}"
        print(f"{case.name:<20} {n or '':>9} {case.cores:>5} {seconds:>7.2f} {peak_mb:>6.0f} {growth:>7}  {predicted}")
        before = (n, seconds) if n else None


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, metavar="N", help="measure the default policy at this number of operators")
    only = parser.parse_args().only
    if only is None:
        print_table("Algorithms 1 and 2", PAPER, measure_paper)
        print()
    print_table("Default policy", tuple(c for c in DEFAULT if only in {None, c.operators}), measure_default)


if __name__ == "__main__":
    main()
