"""Compare searches of TOP's plans under the same budgets of evaluations, on estimated machines.

    python scripts/bench_top.py [-o docs/data] [--cases 50] [--only stages]

Stages: combined blocks of one to four modules of GoogLeNet, Inception-v3, ResNet-50 and SqueezeNet, on four streams of
an accelerator and on four cores. An evaluation is a request for the latency of a stage. A plan is judged by the latency
that the evaluator predicts for it, compared with that of IOS's dynamic programme with its usual cap.

Launcher settings: three of the models at random rates on two and four cores. An evaluation is a trial of a plan on the
virtual clock; 0 is the plan that combines nothing. The last table has problems that are small enough to try all plans.

``-o`` writes the results ``top-stages`` and ``top-launcher``. Takes about ten minutes on two idle cores.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from random import Random

from command_arguments import add_output, positive
from page_markers import markdown_table
from result_files import write_results

import chrion
from chrion.graph import Dag, Graph
from chrion.graph.blocks import ModuleChain, combine, cut_modules, cut_pieces
from chrion.hardware import hardware
from chrion.profiler import Costs
from chrion.profiler.costs import combine_costs
from chrion.profiler.hardware_profile import estimate_profile
from chrion.scheduler.evaluation.solution import Problem
from chrion.scheduler.policies.heft import heft
from chrion.scheduler.policies.ios_search import search_stages
from chrion.scheduler.policies.stages import DeviceLanes, Stage, schedule_stages
from chrion.scheduler.search.stages import SEARCHES, CountedCost, Search, generation_stages
from chrion.serving.multi.combined import StageTable, TopPlan, separate
from chrion.serving.multi.dispatcher import ModelRules
from chrion.serving.multi.top_search import SEARCHES as LAUNCHER_SEARCHES
from chrion.serving.multi.top_search import TopProblem, exhaust
from chrion.zoo import build

MODELS = ("googlenet", "inception-v3", "resnet-50", "squeezenet")
#: Name, hardware and cores of the machines.
MACHINES = (("A100, 4 streams", "a100-40+epyc-16", 1), ("4 cores", "epyc-16", 4))
STAGE_BUDGETS = (100, 400)
PLAN_BUDGETS = (32,)
#: Modules of the small problems, each of two models.
SMALL = 3


@dataclass(frozen=True)
class Case:
    """A combined block and what it costs."""

    dag: Dag
    costs: Costs


def combined_blocks(graphs: Mapping[str, Graph], costs: Mapping[str, Costs], count: int, seed: int) -> list[Case]:
    """Return random combined blocks of one to four modules."""
    pick = Random(seed)  # noqa: S311 - not a secret
    modules = [(name, tuple(module)) for name, graph in graphs.items() for module in cut_modules(graph.dag)]
    cases = []
    for at in range(count):
        chosen = pick.sample(modules, 1 + at % 4)
        dag = combine([(graphs[name].dag, own) for name, own in chosen])
        joined = combine_costs([(costs[name], own) for name, own in chosen])
        cases.append(Case(dag, joined))
    return cases


def latency_ms(case: Case, device: DeviceLanes, stages: Sequence[Stage]) -> float:
    """Return the latency that the evaluator predicts for stages."""
    schedule = schedule_stages(case.dag, device, stages)
    return Problem(case.dag, case.costs).evaluate(schedule).timeline.latency_ms


def heft_ms(case: Case) -> float:
    """Return the latency that the evaluator predicts for HEFT's schedule, which has no stages."""
    return Problem(case.dag, case.costs).evaluate(heft(case.dag, case.costs, 0.0)).timeline.latency_ms


#: Returns the latency of a case by some method, which asks for the latencies of stages.
Method = Callable[[Case, DeviceLanes, CountedCost], float]


def stage_methods() -> dict[tuple[str, str], Method]:
    """Return the methods by name and budget; the first one is the reference."""
    found: dict[tuple[str, str], Method] = {
        ("IOS, usual cap", ""): lambda case, device, cost: latency_ms(case, device, search_stages(case.dag, cost)),
        ("HEFT, no stages", ""): lambda case, device, cost: heft_ms(case),  # noqa: ARG005 - as the others
    }
    for budget in STAGE_BUDGETS:
        for name, search in SEARCHES.items():
            found[name, "" if search is generation_stages else str(budget)] = _within(search, budget)
    return found


def _within(search: Search, budget: int) -> Method:
    return lambda case, device, cost: latency_ms(case, device, search(case.dag, cost, budget, 0))


def stage_table(cases: Mapping[str, Sequence[Case]], methods: Mapping[tuple[str, str], Method]) -> str:
    """Return the table of stage searches."""
    head = ["machine", "search", "budget", "latency / IOS", "worst", "best of all", "evaluations", "ms", "most ms"]
    rows: list[list[str]] = []
    for machine, own in cases.items():
        #: For each case: latency, evaluations and seconds.
        found: dict[tuple[str, str], list[tuple[float, int, float]]] = {key: [] for key in methods}
        for case in own:
            device = DeviceLanes(case.dag, case.costs)
            for key, method in methods.items():
                begin = time.perf_counter()
                counted = CountedCost(device.stage_ms)
                ms = method(case, device, counted)
                found[key].append((ms, counted.evaluations, time.perf_counter() - begin))
        reference = [ms for ms, _, _ in next(iter(found.values()))]
        best = [min(results[at][0] for results in found.values()) for at in range(len(own))]
        for (name, budget), results in found.items():
            ratios = [ms / first for (ms, _, _), first in zip(results, reference, strict=True)]
            wins = sum(ms <= least * 1.0001 for (ms, _, _), least in zip(results, best, strict=True))
            cells = [f"{statistics.geometric_mean(ratios):.3f}", f"{max(ratios):.3f}", f"{wins} of {len(own)}"]
            seconds = [passed for _, _, passed in results]
            cells += [f"{statistics.median(count for _, count, _ in results):.0f}"]
            cells += [f"{1e3 * statistics.median(seconds):.1f}", f"{1e3 * max(seconds):.0f}"]
            rows.append([machine, name, budget, *cells])
    return markdown_table([head, *rows])


def chains_and_times(
    graphs: Mapping[str, Graph], costs: Mapping[str, Costs]
) -> tuple[dict[str, ModuleChain], dict[str, tuple[tuple[float, ...], tuple[float, ...]]]]:
    """Return the modules of models, and the estimated times of their pieces alone and with all cores busy."""
    chains, times = {}, {}
    for name, graph in graphs.items():
        cut = cut_pieces(graph.dag)
        chains[name] = ModuleChain.of(graph.dag, cut)
        rows = costs[name].cpu_ms
        sums = [tuple(sum(row[i] for i in piece) for own in cut for piece in own) for row in (rows[0], rows[-1])]
        times[name] = sums[0], sums[1]
    return chains, times


def problem(
    chains: Mapping[str, ModuleChain],
    times: Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]],
    lanes: int,
    seed: int,
) -> TopProblem:
    """Return a problem with random rates, at 0.4 to 0.9 of what the lanes could serve."""
    pick = Random(seed)  # noqa: S311 - not a secret
    rules = {name: ModelRules(times[name][0]) for name in chains}
    shares = {name: pick.uniform(0.5, 2.0) for name in chains}
    load = pick.uniform(0.4, 0.9)
    rates = {
        name: load * lanes * 1e3 * share / sum(shares.values()) / rules[name].total_ms for name, share in shares.items()
    }
    return TopProblem(rules, lanes, chains, times, rates, StageTable(chains, times, lanes), seed=seed)


@dataclass(frozen=True)
class Found:
    """A plan that a search has found."""

    search: str
    evaluations: str
    objective: float
    seconds: float


def solve(task: TopProblem, *, exhaustive: bool) -> list[Found]:
    """Return the plans of all searches for a problem."""
    found = [Found("nothing combined", "", task.score(separate(task.chains)), 0.0)]
    methods: list[tuple[str, str, Callable[[], TopPlan]]] = [
        (name, str(budget), functools.partial(search, task, budget, 0))
        for budget in PLAN_BUDGETS
        for name, search in LAUNCHER_SEARCHES.items()
    ]
    if exhaustive:
        methods.append(("exhaustive", "all", functools.partial(exhaust, task)))
    for name, evaluations, method in methods:
        begin = time.perf_counter()
        plan = method()
        seconds = time.perf_counter() - begin
        found.append(Found(name, evaluations, task.score(plan), seconds))
    return found


def launcher_table(problems: Sequence[TopProblem], *, exhaustive: bool) -> str:
    """Return the table of searches of launcher settings and combined blocks."""
    head = ["search", "evaluations", "objective", "worst", "best of all", "s"]
    with ProcessPoolExecutor() as pool:
        found = list(pool.map(functools.partial(solve, exhaustive=exhaustive), problems))
    best = [max(own.objective for own in results) for results in found]
    rows = []
    for results in zip(*found, strict=True):
        scores = [own.objective for own in results]
        wins = sum(score >= most - 1e-9 for score, most in zip(scores, best, strict=True))
        seconds = statistics.median(own.seconds for own in results)
        cells = [f"{statistics.mean(scores):+.3f}", f"{min(scores):+.3f}", f"{wins} of {len(scores)}", f"{seconds:.2f}"]
        rows.append([results[0].search, results[0].evaluations, *cells])
    return markdown_table([head, *rows])


def truncated(chain: ModuleChain, count: int) -> ModuleChain:
    """Return the first modules of a chain."""
    modules = chain.modules[:count]
    return ModuleChain(modules, chain.before[: modules[-1][-1] + 1])


def main() -> None:
    """Print and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_output(parser)
    parser.add_argument("--cases", type=positive, default=50, help="combined blocks, and launcher settings")
    parser.add_argument("--only", choices=("stages", "launcher"), help="one of the two tables")
    arguments = parser.parse_args()
    graphs = {name: chrion.load(build(name)) for name in MODELS}
    profiles = {
        title: {name: estimate_profile(graph, hardware(parts), cores) for name, graph in graphs.items()}
        for title, parts, cores in MACHINES
    }
    costs = {title: {name: own[name].costs(graphs[name].dag) for name in graphs} for title, own in profiles.items()}
    cases = {title: combined_blocks(graphs, own, arguments.cases, 0) for title, own in costs.items()}
    if arguments.only != "launcher":
        stages = stage_table(cases, stage_methods())
        print(stages, flush=True)
        write_results(arguments.output, {"top-stages": stages})
    if arguments.only == "stages":
        return
    chains, times = chains_and_times(graphs, costs[MACHINES[1][0]])
    pick = Random(0)  # noqa: S311 - not a secret
    problems, small = [], []
    for seed in range(arguments.cases):
        names = pick.sample(MODELS, 3)
        lanes = (2, 4)[seed % 2]
        problems.append(problem({name: chains[name] for name in names}, times, lanes, seed))
        if seed % 5 == 0:
            few = {name: truncated(chains[name], SMALL) for name in names[:2]}
            short = {name: tuple(row[: len(few[name].before)] for row in times[name]) for name in few}
            small.append(problem(few, short, 2, seed))  # type: ignore[arg-type] # two rows each
    table = launcher_table(problems, exhaustive=False)
    print(f"\n{table}", flush=True)
    tiny = launcher_table(small, exhaustive=True)
    print(f"\n{tiny}", flush=True)
    texts = (
        f"{len(problems)} problems of three models.",
        f"{len(small)} problems of two models with {SMALL} modules each.",
    )
    write_results(arguments.output, {"top-launcher": f"{texts[0]}\n\n{table}\n\n{texts[1]}\n\n{tiny}"})


if __name__ == "__main__":
    main()
