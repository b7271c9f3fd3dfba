"""The default policy: a portfolio of initial solutions, the best of them improved by local search.

For each sub-machine (see :mod:`chrion.scheduler.search.machines`), from one core to the whole machine, and each variant
of the graph (recurrent operators in chunks of several lengths; tree ensembles as tensors or in parts):

1. Make initial solutions, published policies as they stand among them.
2. Keep those that no known solution dominates in latency and memory, including those of smaller machines.
3. Improve the new ones among them.
4. Give lanes several cores, everywhere or for some operators (see :mod:`chrion.scheduler.search.wide_lanes`).

So a search is never predicted slower than a policy it starts from, nor than itself with fewer resources. All known
solutions form one set; the price of memory, the SLO and the budget only select from it.

If latency alone decides (there is no price and no budget, or the SLO is below a lower bound), and HEFT is within 3 % of
that bound on some sub-machine, there is nothing to gain from a search of seconds: the list schedules of the first such
sub-machine are the only solutions, so that a plan may be slower by up to these 3 %. Small graphs, of which the search
takes a moment, are always searched.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from chrion.common.units import format_ms
from chrion.graph.dag import Dag
from chrion.graph.model import Graph
from chrion.graph.recurrent import chunk_choices, unroll
from chrion.graph.trees import tree_variants
from chrion.profiler.costs import Costs
from chrion.scheduler.evaluation.lower_bound import machine_bound_ms
from chrion.scheduler.evaluation.solution import Problem, Solution, Variant, VariantSolution
from chrion.scheduler.policies.chrion_paper import chrion_paper, depth_first
from chrion.scheduler.policies.core_counts import HUGE
from chrion.scheduler.policies.policy import PlanningTask, ScheduleFunction
from chrion.scheduler.policies.single_device import accelerator_only
from chrion.scheduler.search.initial_solutions import LARGE, GraphFacts, InitialSolutions, preference
from chrion.scheduler.search.local_search import LocalSearch
from chrion.scheduler.search.machines import contains, needed_machines, sub_machines
from chrion.scheduler.search.pareto import descend, paper_figures, pareto_points, resident_figures, sample_evenly
from chrion.scheduler.search.wide_lanes import widen, widen_offloaded

log = logging.getLogger(__name__)

#: Prices of memory, as powers of two times the price at which latency and memory have the same weight: for graphs of at
#: most so many operators. Without, plans within a budget took up to 1.43 times as long (ablation in docs/design.md).
_POWERS = ((200, range(-8, 13)), (2_000, range(-6, 13, 6)), (HUGE, (-2, 2)), (math.inf, range(1)))
#: The fastest initial solutions that are improved (a choice: a plan is 5 % slower with one,
#: no more than the order of trials changes it).
_IMPROVED = 3
#: The fastest points of the frontier that descents start from (a choice, not measured).
_DESCENTS = 3
#: Points of the frontier that are improved: few enough that each has the work of several evaluations in large graphs.
_REFINED = 8
#: Operators evaluated to improve the fastest solutions of one machine, each in each pass; in all descents; and in all
#: refinements together (choices, not measured).
_FASTEST_WORK = 15_000
_DESCENT_WORK = 25_000
_REFINEMENT_WORK = 20_000
#: Graphs of at most so many operators are always searched, and also from the fastest
#: solution for a smaller machine. Without that, a plan was 8 % slower (DeepFM, 8 cores).
_SMALL = 200
#: Solutions that are collected before dominated ones are dropped: it limits memory, and does not change the result.
_MOST_COLLECTED = 4
#: Prices of Equation 4's memory at which the paper's selections join the solutions of graphs that are neither small,
#: whose search has as many prices, nor large: times the price at which latency and memory have the same weight. The
#: search lowers resident memory: without these selections a plan took 1.09 times the memory of Equation 4 (the paper's
#: LSTM within 40 ms).
_PAPER_PRICES = [2.0 ** (step / 4) for step in range(17)]
#: The paper's selections, in the order of Algorithm 1 and depth first.
_PAPER_POLICIES = (chrion_paper, depth_first)
#: Points of the frontier that are kept for huge graphs: the fastest, the smallest, and some between them. A solution of
#: 100 000 operators takes 15 MB.
_POINTS_IF_HUGE = 4
#: Initial solutions slower than this, relative to the fastest known solution, are not improved (a choice, not
#: measured).
_PROMISING = 1.05
#: A latency of at most so many times the lower bound is not improved by search: measurements do not tell them apart.
_NEAR_BOUND = 1.03


class PortfolioSearch:
    """The search of the default policy over all variants of a graph.

    Attributes:
        solutions: The solutions found for each variant: those that none of the variant dominates, in latency and
            resident memory or in latency and memory as the paper counts it.
        initial_ms: The latency of the fastest initial solution.

    Args:
        variants: Each variant's operators and costs; None for the graph as it is.
    """

    def __init__(self, variants: Mapping[Variant, tuple[Dag, Costs]]) -> None:
        self._variants = variants
        self._facts = {name: GraphFacts(dag, costs) for name, (dag, costs) in variants.items()}
        dag, costs = next(iter(variants.values()))
        self._scale = balanced_alpha(costs)
        self.initial_ms = math.inf
        solved: list[tuple[Costs, dict[Variant, list[Solution]]]] = []
        machines = list(sub_machines(costs, len(dag)))
        for at, machine in enumerate(machines):
            smaller = [known for other, known in solved if contains(machine, other)]
            solved.append((machine, self._solve(machine, smaller)))
            if len(dag) > LARGE:  # solutions of large graphs take much memory, and none of them are widened
                needed = needed_machines([other for other, _ in solved], machines[at + 1 :])
                solved = [row for row in solved if row is solved[-1] or any(row[0] is other for other in needed)]
        self.solutions = dict(solved[-1][1])  # wide solutions join these, not the known ones
        for machine, known in solved:
            if machine.widths:
                self._widen(machine, known, solved)

    def _solve(
        self, machine: Costs, smaller: Sequence[Mapping[Variant, list[Solution]]]
    ) -> dict[Variant, list[Solution]]:
        """Return the solutions for one sub-machine, given those for smaller ones."""
        known: dict[Variant, list[Solution]] = {}
        fresh: dict[Variant, list[Solution]] = {}
        searches: dict[Variant, LocalSearch] = {}
        streams = machine.streams if machine.accelerator_ms is not None else 0
        for name, (dag, costs) in self._variants.items():
            facts = self._facts[name]
            limited = costs.limited_to(machine.cores, streams)
            initial = InitialSolutions(facts, limited, by_units_only=isinstance(name, int))
            searches[name] = LocalSearch(initial.problem, facts.groups.members, facts.units)
            inherited = [solution for solutions in smaller for solution in solutions[name]]
            fresh[name] = _useful(initial.make(_alphas(self._scale, len(dag))))
            self.initial_ms = min([self.initial_ms, *(s.timeline.latency_ms for s in fresh[name])])
            known[name] = undominated([*inherited, *fresh[name]])
        most = max(len(dag) for dag, _ in self._variants.values())
        large = most > LARGE
        starts = _fastest(smaller, fresh)[: 1 if large else None]
        if most <= _SMALL:
            starts += _enlarged(machine, smaller, searches)
        for name, solution in starts:
            known[name].append(searches[name].improve(solution, budget=_FASTEST_WORK))
        for name, solutions in known.items():
            fastest = min(solutions, key=partial(preference, 0.0), default=None)
            if fastest is not None and starts:
                solutions.append(searches[name].leave_local_optimum(fastest))
        if machine.accelerator_ms is not None and machine.cores and not large:
            self._spread(known, smaller, searches)
        return {name: undominated(solutions) for name, solutions in known.items()}

    def _widen(
        self,
        machine: Costs,
        known: Mapping[Variant, list[Solution]],
        solved: Sequence[tuple[Costs, Mapping[Variant, list[Solution]]]],
    ) -> None:
        """Add solutions of one sub-machine in which lanes have several cores, if the best variant has any.

        If that has trees in another form, add those of the graph as it is, too: a kernel may be divided better.
        """
        fewer_cores = {
            other.cores: solutions
            for other, solutions in solved
            if contains(machine, other) and other.limited_to(0, other.streams) == machine.limited_to(0, machine.streams)
        }
        fastest = min(known, key=lambda name: min(s.timeline.latency_ms for s in known[name]))
        streams = machine.streams if machine.accelerator_ms is not None else 0
        largest = machine is solved[-1][0]
        for name in [fastest, None] if isinstance(fastest, str) and None in known else [fastest]:
            limited = self._variants[name][1].limited_to(machine.cores, streams)
            smaller = {cores: solutions[name] for cores, solutions in fewer_cores.items()}
            wide = widen(self._facts[name], limited, known[name], smaller)
            narrow = self.solutions[name]
            offloaded = widen_offloaded(self._facts[name], limited, narrow) if largest and name is None else []
            self.solutions[name] = [*narrow, *wide, *undominated(offloaded)]

    def _spread(
        self,
        known: dict[Variant, list[Solution]],
        smaller: Sequence[Mapping[Variant, list[Solution]]],
        searches: Mapping[Variant, LocalSearch],
    ) -> None:
        """Add solutions between the fastest and those without accelerator memory."""
        old = {id(solution) for one in smaller for solutions in one.values() for solution in solutions}
        starts = []
        for name, start in _front(known)[-_DESCENTS:]:
            problem, schedule = searches[name].problem, start.schedule
            if not schedule.cores:  # what leaves the accelerator needs a core
                with_cores = replace(schedule, cores=problem.costs.cores)
                starts.append((name, problem.evaluate(with_cores, start.tiles, start.origin)))
            elif id(start) not in old and not schedule.stages and start.timeline.resident_mb > 0:
                starts.append((name, start))
        descents = [(name, start, units) for name, start in starts for units in searches[name].neighbourhoods]
        for name, start, units in descents:
            known[name] += descend(searches[name], start, units, _DESCENT_WORK // len(descents))
        points = [(name, solution) for name, solution in _front(known) if id(solution) not in old]
        sample = sample_evenly(points, _REFINED)
        for name, solution in sample:
            work = _REFINEMENT_WORK // len(sample) // len(searches[name].neighbourhoods)
            cap_mb = solution.timeline.resident_mb
            better = searches[name].improve(solution, cap_mb=cap_mb, budget=work)
            known[name].append(replace(better, cap_mb=math.inf))


def _fastest(
    smaller: Sequence[Mapping[Variant, list[Solution]]], fresh: Mapping[Variant, list[Solution]]
) -> list[tuple[Variant, Solution]]:
    """Return the new solutions to improve for latency, with their variant; none if a smaller machine is as fast."""
    rows = [(name, solution) for name, solutions in fresh.items() for solution in solutions]
    if not rows:
        return []
    fastest_variant, fastest = min(rows, key=lambda row: row[1].timeline.latency_ms)
    best_ms = fastest.timeline.latency_ms
    if any(solution.timeline.latency_ms <= best_ms for one in smaller for known in one.values() for solution in known):
        return []
    ranked = _different(sorted(fresh[fastest_variant], key=partial(preference, 0.0)))[:_IMPROVED]
    return [(fastest_variant, solution) for solution in ranked if solution.timeline.latency_ms <= _PROMISING * best_ms]


def _enlarged(
    machine: Costs, smaller: Sequence[Mapping[Variant, list[Solution]]], searches: Mapping[Variant, LocalSearch]
) -> list[tuple[Variant, Solution]]:
    """Return the fastest solution for a smaller machine, for a local search that uses the lanes it lacked."""
    rows = [(name, s) for one in smaller for name, solutions in one.items() for s in solutions]
    free = [(name, s) for name, s in rows if not s.schedule.stages and s.schedule.streams == 1]
    if not free or machine.streams > 1:
        return []
    name, best = min(free, key=lambda row: preference(0.0, row[1]))
    schedule = replace(best.schedule, cores=machine.cores)
    return [(name, searches[name].problem.evaluate(schedule, best.tiles, best.origin))]


def _useful(solutions: Iterable[Solution]) -> list[Solution]:
    """Return the solutions that none dominates, and the fastest ones of different latencies.

    The others are not collected, since solutions of large graphs take much memory.
    """
    useful: list[Solution] = []
    for solution in solutions:
        useful.append(solution)
        if len(useful) > _MOST_COLLECTED:
            fastest = _different(sorted(useful, key=partial(preference, 0.0)))[:_IMPROVED]
            kept = {id(s) for s in (*undominated(useful), *fastest)}
            useful = [s for s in useful if id(s) in kept]
    return useful


def undominated(solutions: Iterable[Solution]) -> list[Solution]:
    """Return the solutions that none dominates in resident memory and latency, or in the paper's memory and latency."""
    rows = list(solutions)
    huge = bool(rows) and len(rows[0].schedule.order) > HUGE
    kept = {}
    for figures in (resident_figures, paper_figures):
        points = pareto_points(rows, figures)
        kept.update({id(s): s for s in (sample_evenly(points, _POINTS_IF_HUGE) if huge else points)})
    return list(kept.values())


def balanced_alpha(costs: Costs) -> float:
    """Return an alpha at which latency and memory have about the same weight, in ms per MB."""
    if costs.accelerator_ms is None:
        return 1.0
    times = [min(ms, 1e6) for ms in costs.accelerator_ms]
    memory_mb = sum(memory.own_mb for memory in costs.memory) + costs.base_memory_mb
    return sum(times) / memory_mb if memory_mb else 1.0


def variants_of(task: PlanningTask) -> dict[Variant, Graph]:
    """Return the graph as it is, with every promising chunk length and tree ensembles in their other forms.

    A variant that adds operators whose costs are estimates does not compete with the graph: a profile of the cells of
    an unfolded network does not have the costs of the folded one. If all costs of the graph are estimates, it does.
    """
    graph = task.graph
    variants: dict[Variant, Graph] = {chunk: unroll(graph, chunk) for chunk in chunk_choices(graph)}
    costs = task.costs_of(graph.dag)
    variants.update(tree_variants(graph, costs.cores if costs.accelerator_ms is None else 0))
    known = task.unmeasured(graph.dag)
    if known < {s for s, flops in zip(graph.dag.signatures, graph.dag.flops, strict=True) if flops}:
        variants = {name: variant for name, variant in variants.items() if task.unmeasured(variant.dag) <= known}
    return {None: graph, **variants}


def promising(variants: Mapping[Variant, tuple[Dag, Costs]]) -> dict[Variant, tuple[Dag, Costs]]:
    """Return the variants that may have the fastest solution: their lower bound is not above HEFT for another one."""
    bounds_ms = {name: machine_bound_ms(dag, costs) for name, (dag, costs) in variants.items()}
    nearest = min(bounds_ms, key=lambda name: bounds_ms[name])
    dag, costs = variants[nearest]
    heft = InitialSolutions(GraphFacts(dag, costs), costs, by_units_only=isinstance(nearest, int)).by_finish([0.0])
    fastest_ms = min((s.timeline.latency_ms for s in heft), default=math.inf)
    return {name: variant for name, variant in variants.items() if bounds_ms[name] <= fastest_ms}


def search_variants(task: PlanningTask) -> list[VariantSolution]:
    """Return all solutions of the default policy; after a search also selections of the paper if its memory decides."""
    graph, graphs = task.graph, variants_of(task)
    costs = {name: task.costs_of(variant.dag) for name, variant in graphs.items()}
    variants = {name: (variant.dag, costs[name]) for name, variant in graphs.items()}
    if task.fastest_only and len(variants) > 1:
        variants = promising(variants)
    published = published_solutions(variants, task.slo_ms, fastest_only=task.fastest_only)
    if published:
        log.info("model %s: no search, since HEFT is near the lower bound of the latency", graph.name)
    known = published or _search(graph.name, variants)
    pool = [
        VariantSolution(0.0, solution, name, graphs[name])
        for name, solutions in known.items()
        for solution in solutions
    ]
    problem = Problem(graph.dag, costs[None])
    policies: list[tuple[float, ScheduleFunction]] = []
    if not published:
        policies += [(alpha, policy) for alpha in _paper_prices(task, costs[None]) for policy in _PAPER_POLICIES]
    if costs[None].accelerator_ms is not None:  # printed beside each plan; that on the cores is an initial solution
        policies.append((0.0, accelerator_only))
    for alpha, policy in policies:
        origin = "greedy" if policy in _PAPER_POLICIES else "accelerator alone"
        solution = problem.evaluate(policy(graph.dag, costs[None], alpha), origin=origin)
        pool.append(VariantSolution(alpha, solution, None, graph))
    return pool


def _paper_prices(task: PlanningTask, costs: Costs) -> list[float]:
    """Return the prices at which the paper's selections are made; none unless the memory of Equation 4 decides."""
    if task.memory != "paper" or task.fastest_only or costs.accelerator_ms is None or not costs.cores:
        return []
    prices = _PAPER_PRICES if _SMALL < len(task.graph.dag) <= LARGE else []
    return [*task.alphas, *(balanced_alpha(costs) * price for price in prices)]


def published_solutions(
    variants: Mapping[Variant, tuple[Dag, Costs]], slo_ms: float | None = None, *, fastest_only: bool = True
) -> Mapping[Variant, Sequence[Solution]] | None:
    """Return the list schedules of one sub-machine if HEFT is so fast there that a search can gain little.

    Args:
        variants: As for :class:`PortfolioSearch`.
        slo_ms: The SLO. If none can meet it, the fastest solution is selected.
        fastest_only: Whether latency alone decides between the solutions that meet the SLO.

    Returns:
        Solutions by variant; None if HEFT is not near the lower bound, if it misses an SLO that a search might
        meet, if memory may decide, or if the graph is small.
    """
    small = max(len(dag) for dag, _ in variants.values()) <= _SMALL
    if small or (slo_ms is None and not fastest_only):
        return None
    starts: list[tuple[float, int, Variant, InitialSolutions]] = []
    for name, (dag, costs) in variants.items():
        facts = GraphFacts(dag, costs)
        for machine in sub_machines(costs, len(dag)):
            initial = InitialSolutions(facts, machine, by_units_only=isinstance(name, int))
            starts.append((machine_bound_ms(dag, machine), len(starts), name, initial))
    starts.sort()
    bound_ms = starts[0][0]
    limit_ms = math.inf if slo_ms is None or bound_ms > slo_ms else slo_ms
    if limit_ms < math.inf and not fastest_only:
        return None
    for machine_ms, _, name, initial in starts:
        if machine_ms > _NEAR_BOUND * bound_ms:
            break
        solutions = list(initial.by_finish([0.0]))
        fastest_ms = min((s.timeline.latency_ms for s in solutions), default=math.inf)
        if fastest_ms <= min(_NEAR_BOUND * bound_ms, limit_ms):
            return {name: [*solutions, *initial.of_other_policies()]}
    return None


def _search(name: str, variants: Mapping[Variant, tuple[Dag, Costs]]) -> Mapping[Variant, Sequence[Solution]]:
    """Return the solutions of a search, by variant, and log what it gained for the model of a name."""
    before_s = time.perf_counter()
    search = PortfolioSearch(variants)
    fastest_ms = min(s.timeline.latency_ms for solutions in search.solutions.values() for s in solutions)
    taken = format_ms((time.perf_counter() - before_s) * 1e3)
    found = format_ms(search.initial_ms), format_ms(fastest_ms)
    log.info("model %s: search changed the predicted latency from %s to %s in %s", name, *found, taken)
    return search.solutions


def _alphas(scale: float, n: int) -> list[float]:
    """Return the prices of memory to make initial solutions with."""
    powers = next(powers for most, powers in _POWERS if n <= most)
    return [0.0, *(scale * 2.0**power for power in powers)]


def _front(known: Mapping[Variant, list[Solution]]) -> list[tuple[Variant, Solution]]:
    """Return the solutions on the frontier of all variants, by increasing memory."""
    rows = [(name, solution) for name, solutions in known.items() for solution in solutions]
    return pareto_points(rows, lambda row: resident_figures(row[1]))


def _different(solutions: Sequence[Solution]) -> list[Solution]:
    """Return the first of the solutions that have equal latencies, from sorted ones."""
    return [
        s for at, s in enumerate(solutions) if not at or s.timeline.latency_ms != solutions[at - 1].timeline.latency_ms
    ]
