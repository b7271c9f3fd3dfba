"""Compare searches of TOP's plans under the same budgets of evaluations, on estimated machines.

    python scripts/bench_top.py [-o docs/data] [--cases 50] [--only stages] [--agents FOLDER]

Stages: combined blocks of one to four modules of GoogLeNet, Inception-v3, ResNet-50 and SqueezeNet, on four streams of
an accelerator and on four cores. An evaluation is a request for the latency of a stage. A plan is judged by the latency
that the evaluator predicts for it, compared with that of IOS's dynamic programme with its usual cap. GPG learns from
as many other blocks, with 400 evaluations for each case, and is then applied to the cases: with evaluations of single
operators only, or with a budget for walks by its probabilities. Small blocks, of at most ten operators from the
beginnings of the modules, are searched exhaustively, too; GPG does not take part.

Launcher settings: three of the models at random rates on two and four cores. An evaluation is a trial of a plan on the
virtual clock; 0 is the plan that combines nothing. MADDPG learns from the trials of its budget; times are CPU times.
The last table has problems that are small enough to try all plans.

``-o`` writes the results ``top-stages``, ``top-small`` and ``top-launcher``; ``--agents`` writes checkpoints and
learning curves of GPG and of MADDPG on the first small problem, and applies GPG's checkpoints that are there already
without training.
Needs the extras evolve and learn. Takes about an hour on two idle cores.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random

from agent_curves import plot_agents
from combined_costs import combine_costs
from command_arguments import add_output, existing_folder, one_line_errors, positive
from launcher_searches import SEARCHES as LAUNCHER_SEARCHES
from launcher_searches import exhaust
from page_markers import markdown_table
from result_files import write_results
from stage_searches import SEARCHES, Search, exhaust_stages

import chrion
from chrion.graph import Dag, Graph
from chrion.graph.blocks import ModuleChain, cut_modules
from chrion.hardware import hardware
from chrion.learning import gpg, maddpg
from chrion.learning.networks import load_networks, save_networks
from chrion.learning.operators import BlockGraph, read_block
from chrion.learning.walks import TrainingBlock
from chrion.profiler import Costs
from chrion.profiler.hardware_profile import estimate_profile
from chrion.scheduler.evaluation.solution import Problem
from chrion.scheduler.policies.heft import heft
from chrion.scheduler.policies.ios_search import search_stages
from chrion.scheduler.policies.stages import DeviceLanes, Stage, schedule_stages
from chrion.scheduler.search.stages import CountedCost
from chrion.serving.multi.combined import StageTable, TopPlan, separate
from chrion.serving.multi.dispatcher import ModelRules
from chrion.serving.multi.estimated_models import estimate_blocks
from chrion.serving.multi.top_search import TopProblem
from chrion.zoo import build

MODELS = ("googlenet", "inception-v3", "resnet-50", "squeezenet")
#: Name, hardware and cores of the machines.
MACHINES = (("A100, 4 streams", "a100-40+epyc-16", 1), ("4 cores", "epyc-16", 4))
STAGE_BUDGETS = (100, 400)
#: Evaluations of GPG's training for each case, and the most walks of it in both forms (the printed one is slow).
TRAINING_BUDGET = 400
TRAINING_WALKS: Mapping[gpg.Form, int] = {"corrected": 2000, "printed": 500}
PLAN_BUDGETS = (32,)
#: Operators of the small blocks.
SMALL_OPERATORS = 10
#: Modules of the small problems, each of two models.
SMALL = 3
#: Steps of MADDPG's learning curve, and the transitions from which it learns.
LEARNING_STEPS, LEARNING_REPLAY = 2000, 500


@dataclass(frozen=True)
class Case:
    """A combined block and what it costs."""

    block: BlockGraph
    costs: Costs

    @property
    def dag(self) -> Dag:
        """Its operators."""
        return self.block.dag

    @functools.cached_property
    def device(self) -> DeviceLanes:
        """The lanes that it runs on."""
        return DeviceLanes(self.dag, self.costs)


def combined_blocks(
    graphs: Mapping[str, Graph], costs: Mapping[str, Costs], count: int, seed: int, most: int | None = None
) -> list[Case]:
    """Return random combined blocks of one to four modules, or of their first operators, ``most`` in all."""
    pick = Random(seed)  # noqa: S311 - not a secret
    modules = [(name, tuple(module)) for name, graph in graphs.items() for module in cut_modules(graph.dag)]
    cases = []
    for at in range(count):
        chosen = pick.sample(modules, 1 + at % 4)
        chosen = [(name, own[: most // len(chosen)] if most else own) for name, own in chosen]
        joined = combine_costs([(costs[name], own) for name, own in chosen])
        cases.append(Case(read_block([(graphs[name], own) for name, own in chosen]), joined))
    return cases


def latency_ms(case: Case, stages: Sequence[Stage]) -> float:
    """Return the latency that the evaluator predicts for stages."""
    schedule = schedule_stages(case.dag, case.device, stages)
    return Problem(case.dag, case.costs).evaluate(schedule).timeline.latency_ms


def heft_ms(case: Case) -> float:
    """Return the latency that the evaluator predicts for HEFT's schedule, which has no stages."""
    return Problem(case.dag, case.costs).evaluate(heft(case.dag, case.costs, 0.0)).timeline.latency_ms


def train(form: gpg.Form, blocks: Sequence[Case], budget: int) -> tuple[gpg.Gpg, list[float]]:
    """Return an agent that has learned from blocks under a budget of evaluations, and its learning curve."""
    tasks = [TrainingBlock(case.block, CountedCost(case.device.stage_ms)) for case in blocks]
    agent, curve = gpg.Gpg(form), list[float]()
    while len(curve) < TRAINING_WALKS[form] and sum(task.cost.evaluations for task in tasks) < budget:
        curve += agent.train(tasks, gpg.WALKS)
    return agent, curve


#: Returns the latency of a case by some method, which asks for the latencies of stages.
Method = Callable[[Case, CountedCost], float]


def stage_methods(agents: Mapping[gpg.Form, gpg.Gpg]) -> dict[tuple[str, str], tuple[float, Method]]:
    """Return the methods by name and budget, with the most evaluations of each."""
    found: dict[tuple[str, str], tuple[float, Method]] = {
        ("IOS, usual cap", ""): (math.inf, lambda case, cost: latency_ms(case, search_stages(case.dag, cost))),
        ("HEFT, no stages", ""): (math.inf, lambda case, cost: heft_ms(case)),  # noqa: ARG005 - as the others
    }
    for form, agent in agents.items():
        name = "GPG" if form == "corrected" else "GPG, printed form"
        found[name, ""] = math.inf, _chosen(agent)
    for budget in STAGE_BUDGETS:
        for name, search in SEARCHES.items():
            once = name == "generations"
            found[name, "" if once else str(budget)] = math.inf, _within(search, budget)
        if agents:
            found["GPG", str(budget)] = budget, _walked(agents["corrected"])
    return found


def _within(search: Search, budget: int) -> Method:
    return lambda case, cost: latency_ms(case, search(case.dag, cost, budget, 0))


def _exhausted(case: Case, cost: CountedCost) -> float:
    return latency_ms(case, exhaust_stages(case.dag, cost))


def _chosen(agent: gpg.Gpg) -> Method:
    return lambda case, cost: latency_ms(case, agent.stages(TrainingBlock(case.block, cost)))


def _walked(agent: gpg.Gpg) -> Method:
    return lambda case, cost: latency_ms(case, agent.search(TrainingBlock(case.block, cost)))


#: A row of the table of stages, and learning curves by agent.
Stages = tuple[list[list[str]], dict[str, list[float]]]


def compare_stages(machine: str, cases: Sequence[Case], others: Sequence[Case], folder: Path | None) -> Stages:
    """Return the rows of a machine in the table of stage searches, and the learning curves of its agents."""
    agents: dict[gpg.Form, gpg.Gpg] = {}
    curves: dict[str, list[float]] = {}
    for form in TRAINING_WALKS:
        path = folder and folder / f"gpg-{form}-{machine.replace(', ', '-').replace(' ', '-')}.safetensors"
        if path and path.exists():
            agents[form] = gpg.Gpg(form)
            agents[form].networks = load_networks(path, agents[form].networks)
            continue
        agents[form], curves[f"{machine}, {form}"] = train(form, others, TRAINING_BUDGET * len(cases))
        if path:
            save_networks(path, agents[form].networks)
    return stage_rows(machine, cases, stage_methods(agents)), curves


def compare_small(machine: str, cases: Sequence[Case]) -> list[list[str]]:
    """Return the rows of a machine in the table of small blocks."""
    return stage_rows(machine, cases, {("exhaustive", ""): (math.inf, _exhausted), **stage_methods({})})


def stage_rows(
    machine: str, cases: Sequence[Case], methods: Mapping[tuple[str, str], tuple[float, Method]]
) -> list[list[str]]:
    """Return the rows of a machine in a table of stage searches; the first method is the reference."""
    #: For each case: latency, evaluations and seconds.
    found: dict[tuple[str, str], list[tuple[float, int, float]]] = {key: [] for key in methods}
    for case, (key, (budget, method)) in itertools.product(cases, methods.items()):
        begin = time.perf_counter()
        counted = CountedCost(case.device.stage_ms, budget)
        ms = method(case, counted)
        found[key].append((ms, counted.evaluations, time.perf_counter() - begin))
    reference = [ms for ms, _, _ in next(iter(found.values()))]
    best = [min(results[at][0] for results in found.values()) for at in range(len(cases))]
    rows = []
    for (name, text), results in found.items():
        ratios = [ms / first for (ms, _, _), first in zip(results, reference, strict=True)]
        wins = sum(ms <= least * 1.0001 for (ms, _, _), least in zip(results, best, strict=True))
        cells = [f"{statistics.geometric_mean(ratios):.3f}", f"{max(ratios):.3f}", f"{wins} of {len(cases)}"]
        seconds = [passed for _, _, passed in results]
        cells += [f"{statistics.median(count for _, count, _ in results):.0f}"]
        cells += [f"{1e3 * statistics.median(seconds):.1f}", f"{1e3 * max(seconds):.0f}"]
        rows.append([machine, name, text, *cells])
    return rows


def new_pool() -> ProcessPoolExecutor:
    """Return new processes, one a core; threads of JAX do not outlive a fork."""
    return ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn"))


def chains_and_times(
    graphs: Mapping[str, Graph], costs: Mapping[str, Costs]
) -> tuple[dict[str, ModuleChain], dict[str, tuple[tuple[float, ...], tuple[float, ...]]]]:
    """Return the modules of models, and the estimated times of their pieces alone and with all cores busy."""
    cut = {name: estimate_blocks(graph.dag, costs[name], modules=True) for name, graph in graphs.items()}
    times = {name: (own.block_ms, own.busy_ms) for name, own in cut.items()}
    return {name: own.modules for name, own in cut.items()}, times


def problem(
    chains: Mapping[str, ModuleChain],
    times: Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]],
    table: StageTable,
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
    return TopProblem(rules, lanes, chains, times, rates, table, seed=seed)


PLAN_SEARCHES: Mapping[str, Callable[[TopProblem, int, int], TopPlan]] = {
    **LAUNCHER_SEARCHES,
    "MADDPG": maddpg.search,
    "MADDPG, printed form": functools.partial(maddpg.search, form="printed"),
}


@dataclass(frozen=True)
class Found:
    """A plan that a search has found."""

    search: str
    evaluations: str
    objective: float
    seconds: float


def solve(task: TopProblem, budgets: Sequence[int], *, exhaustive: bool) -> list[Found]:
    """Return the plans of all searches for a problem."""
    found = [Found("nothing combined", "", task.score(separate(task.chains)), 0.0)]
    methods: list[tuple[str, str, Callable[[], TopPlan]]] = [
        (name, str(budget), functools.partial(search, task, budget, 0))
        for budget in budgets
        for name, search in PLAN_SEARCHES.items()
    ]
    if exhaustive:
        methods.append(("exhaustive", "all", functools.partial(exhaust, task)))
    for name, evaluations, method in methods:
        begin = time.process_time()
        plan = method()
        seconds = time.process_time() - begin
        found.append(Found(name, evaluations, task.score(plan), seconds))
    return found


def launcher_table(problems: Sequence[TopProblem], budgets: Sequence[int], *, exhaustive: bool) -> str:
    """Return the table of searches of launcher settings and combined blocks."""
    head = ["search", "evaluations", "objective", "worst", "best of all", "s"]
    chunk = -(-len(problems) // (os.cpu_count() or 1))  # the problems of a chunk share their tables of stages
    with new_pool() as pool:
        solved = functools.partial(solve, budgets=budgets, exhaustive=exhaustive)
        found = list(pool.map(solved, problems, chunksize=chunk))
    best = [max(own.objective for own in results) for results in found]
    rows = []
    for results in zip(*found, strict=True):
        scores = [own.objective for own in results]
        wins = sum(score >= most - 1e-9 for score, most in zip(scores, best, strict=True))
        seconds = statistics.median(own.seconds for own in results)
        cells = [f"{statistics.mean(scores):+.3f}", f"{min(scores):+.3f}", f"{wins} of {len(scores)}", f"{seconds:.2f}"]
        rows.append([results[0].search, results[0].evaluations, *cells])
    return markdown_table([head, *rows])


def learn_launcher(form: maddpg.Form, task: TopProblem, folder: Path) -> list[float]:
    """Let agents learn one problem, and write their networks; return the objective of each step."""
    environment = maddpg.TopEnvironment(task, divide=form == "corrected")
    agents = maddpg.Maddpg(environment, maddpg.Settings(form, replay=LEARNING_REPLAY))
    curve = agents.train(LEARNING_STEPS)
    save_networks(folder / f"maddpg-{form}.safetensors", agents.networks)
    return curve


def truncated(chain: ModuleChain, count: int) -> ModuleChain:
    """Return the first modules of a chain."""
    modules = chain.modules[:count]
    return ModuleChain(modules, chain.before[: modules[-1][-1] + 1])


def main() -> None:
    """Print and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_output(parser)
    parser.add_argument("--cases", type=positive, default=50, help="combined blocks, and launcher settings")
    parser.add_argument("--only", choices=("stages", "small", "launcher"), help="one of the tables")
    parser.add_argument("--agents", type=existing_folder, help="folder of checkpoints and learning curves")
    arguments = parser.parse_args()
    graphs = {name: chrion.load(build(name)) for name in MODELS}
    profiles = {
        title: {name: estimate_profile(graph, hardware(parts), cores) for name, graph in graphs.items()}
        for title, parts, cores in MACHINES
    }
    costs = {title: {name: own[name].costs(graphs[name].dag) for name in graphs} for title, own in profiles.items()}
    head = ["machine", "search", "budget", "latency / IOS", "worst", "best of all", "evaluations", "ms", "most ms"]
    if arguments.only in {None, "stages"}:
        cases, others = (
            [combined_blocks(graphs, own, arguments.cases, seed) for own in costs.values()] for seed in (0, 1)
        )
        with new_pool() as pool:
            found = list(pool.map(compare_stages, costs, cases, others, itertools.repeat(arguments.agents)))
        stages = markdown_table([head, *(row for rows, _ in found for row in rows)])
        print(stages, flush=True)
        write_results(arguments.output, {"top-stages": stages})
        curves = {name: curve for _, own in found for name, curve in own.items()}
        if arguments.agents and curves:
            plot_agents(
                "GPG learns the stages of 50 blocks",
                curves,
                "walk",
                "latency / one after another",
                arguments.agents / "top-gpg.png",
            )
    if arguments.only in {None, "small"}:
        cases = [combined_blocks(graphs, own, arguments.cases, 2, SMALL_OPERATORS) for own in costs.values()]
        rows = itertools.chain.from_iterable(map(compare_small, costs, cases))
        small_stages = markdown_table([[*head[:3], "latency / exhaustive", *head[4:]], *rows])
        print(f"\n{small_stages}", flush=True)
        write_results(arguments.output, {"top-small": small_stages})
    if arguments.only in {"stages", "small"}:
        return
    chains, times = chains_and_times(graphs, costs[MACHINES[1][0]])
    pick = Random(0)  # noqa: S311 - not a secret
    few = {name: truncated(chain, SMALL) for name, chain in chains.items()}
    short = {name: tuple(row[: len(few[name].before)] for row in times[name]) for name in few}
    tables = {lanes: StageTable(chains, times, lanes) for lanes in (2, 4)}
    small_table = StageTable(few, short, 2)  # type: ignore[arg-type] # two rows each
    problems, small = [], []
    for seed in range(arguments.cases):
        names = pick.sample(MODELS, 3)
        lanes = (2, 4)[seed % 2]
        problems.append(problem({name: chains[name] for name in names}, times, tables[lanes], lanes, seed))
        if seed % 5 == 0:
            pair = {name: few[name] for name in names[:2]}
            small.append(problem(pair, short, small_table, 2, seed))  # type: ignore[arg-type] # two rows each
    table = launcher_table(problems, PLAN_BUDGETS, exhaustive=False)
    print(f"\n{table}", flush=True)
    tiny = launcher_table(small, PLAN_BUDGETS, exhaustive=True)
    print(f"\n{tiny}", flush=True)
    texts = (
        f"{len(problems)} problems of three models.",
        f"{len(small)} problems of two models with {SMALL} modules each.",
    )
    write_results(arguments.output, {"top-launcher": f"{texts[0]}\n\n{table}\n\n{texts[1]}\n\n{tiny}"})
    if arguments.agents:
        curves = {form: learn_launcher(form, small[0], arguments.agents) for form in TRAINING_WALKS}
        plot_agents(
            "MADDPG learns blocks and dequeue intervals",
            curves,
            "step",
            "objective",
            arguments.agents / "top-maddpg.png",
        )


if __name__ == "__main__":
    with one_line_errors():
        main()
