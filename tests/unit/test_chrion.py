"""The default policy: quality, determinism, and memory budgets."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from chrion import load
from chrion.graph import Dag
from chrion.profiler import Costs, uniform_costs
from chrion.scheduler import POLICIES, evaluate
from chrion.scheduler.evaluation.lower_bound import machine_bound_ms
from chrion.scheduler.evaluation.solution import Solution, VariantSolution
from chrion.scheduler.limits import Limits
from chrion.scheduler.policies.chrion import PortfolioSearch, published_solutions
from chrion.scheduler.priced_memory import MEMORIES, Memory
from chrion.scheduler.search.alpha import best_within
from chrion.zoo import build
from helpers import smallest_graph
from policy_solutions import solve_policy
from property_tests import examples
from recurrent_stack import stack, two_cores
from solution_checks import check_solution
from strategies import costs_for, dags, problems

BUDGETS = st.floats(0.0, 40.0)
#: The policies that the default policy starts from.
CHEAP = sorted(set(POLICIES) - {"chrion", "exact", "ios"})


def test_an_unfolded_stack_becomes_tiles_of_layers_and_steps() -> None:
    """Segments contain several layers and steps, and two cores take little more than half the serial time.

    The weights of each layer are read by one lane only.
    """
    dag = stack(12, 96)
    solution = solve_policy("chrion", dag, two_cores(dag))
    serial_ms = len(dag) * 0.01
    assert serial_ms / 2 <= solution.timeline.latency_ms < 0.6 * serial_ms
    typical = sorted(solution.segments, key=len)[len(solution.segments) // 2]
    layers, steps = {i // 96 for i in typical}, {i % 96 for i in typical}
    assert len(layers) > 1
    assert len(steps) > 1
    assert len(typical) == len(layers) * len(steps)
    readers = defaultdict(set)
    for i, lane in enumerate(solution.schedule.lanes):
        readers[i // 96].add(lane)
    assert all(len(found) == 1 for found in readers.values())


def test_no_search_where_heft_is_near_the_lower_bound() -> None:
    """Of many independent operators, the solutions are list schedules, and no published policy is faster."""
    dag = Dag.from_edges(240, [])
    costs = uniform_costs(dag, accelerator_ms=0.5, cpu_ms=[1.0, 1.0])
    variants = {None: (dag, costs)}
    found = published_solutions(variants)
    assert found is not None
    assert found == published_solutions(variants)
    fastest_ms = min(map(latency_ms, found[None]))
    assert fastest_ms <= 1.03 * machine_bound_ms(dag, costs)
    for name in CHEAP:
        assert fastest_ms <= latency_ms(solve_policy(name, dag, costs)) + 1e-9, name
    assert found[None][0].origin.startswith("heft")
    assert not any(s.origin.startswith("greedy") for s in found[None])
    bound_ms = machine_bound_ms(dag, costs)
    for fastest_only in (True, False):  # no plan meets this SLO, so that the fastest one is selected
        assert published_solutions(variants, 0.9 * bound_ms, fastest_only=fastest_only) == found
    assert published_solutions(variants, 2 * fastest_ms) == found


def test_a_search_where_it_can_gain() -> None:
    """Graphs whose handoffs keep HEFT far from the bound are searched, and so are small graphs."""
    dag = stack(12, 96)
    assert published_solutions({None: (dag, two_cores(dag))}) is None
    wide = Dag.from_edges(240, [])
    variants = {None: (wide, uniform_costs(wide, accelerator_ms=0.5, cpu_ms=[1.0, 1.0]))}
    assert published_solutions(variants, fastest_only=False) is None  # several limits or prices
    assert published_solutions(variants, 1000.0, fastest_only=False) is None  # the least memory within the SLO
    small = Dag.from_edges(40, [])
    assert published_solutions({None: (small, uniform_costs(small, cpu_ms=[1.0, 1.0]))}) is None


def test_costly_handoffs_keep_everything_on_one_lane() -> None:
    """If a handoff takes longer than all operators together, one lane runs all of them."""
    dag = stack(4, 8)
    solution = solve_policy("chrion", dag, two_cores(dag, handoff_ms=10.0))
    assert len(set(solution.schedule.lanes)) == 1


@examples(60)
@given(data=st.data())
def test_solutions_are_valid_and_as_good_as_every_cheap_policy(data: st.DataObject) -> None:
    """On any graph and machine, solutions are valid, their timeline is the evaluator's; no cheap policy is faster.

    Equal inputs give equal solutions.
    """
    dag = data.draw(dags(7))
    costs = data.draw(costs_for(dag).filter(lambda c: c.cores or c.accelerator_ms))
    costs = replace(costs, streams=data.draw(st.integers(1, 3)))
    solution = solve_policy("chrion", dag, costs)
    for alpha in (0.0, 0.5):
        assert solve_policy("chrion", dag, costs, alpha) == solve_policy("chrion", dag, costs, alpha)
    check_solution(dag, costs, solution)
    assert solution.timeline == evaluate(dag, costs, solution.schedule, solution.segments)
    for name in CHEAP:
        if (name == "accelerator" and costs.accelerator_ms is None) or (name == "cpu" and not costs.cores):
            continue
        other = solve_policy(name, dag, costs)
        assert latency_ms(solution) <= latency_ms(other) + 1e-9, name


@examples(12)
@given(data=st.data())
def test_fewer_resources_never_predict_faster(data: st.DataObject) -> None:
    """A machine is predicted no slower than the same one without accelerator, with one stream, or with a core less."""
    dag = data.draw(dags(7))
    costs = replace(data.draw(costs_for(dag, accelerator=True)), streams=3)
    own = latency_ms(solve_policy("chrion", dag, costs))
    for cores, streams in ((costs.cores, 0), (costs.cores, 1), (costs.cores - 1, 3)):
        if cores > 0 or (streams and not cores):
            fewer = solve_policy("chrion", dag, costs.limited_to(cores, streams))
            assert own <= latency_ms(fewer) + 1e-9, (cores, streams)


def variants(dag: Dag, costs: Costs) -> list[VariantSolution]:
    """Return all solutions of the default policy."""
    solutions = PortfolioSearch({None: (dag, costs)}).solutions[None]
    return [VariantSolution(0.0, solution, None, smallest_graph()) for solution in solutions]


def latency_ms(solution: Solution) -> float:
    """Return the predicted latency."""
    return solution.timeline.latency_ms


@examples(100)
@given(
    problem=problems(),
    alphas=st.tuples(st.floats(0, 5), st.floats(0, 5)),
    budgets=st.tuples(BUDGETS, BUDGETS),
    slo=st.floats(0.5, 30.0),
    memory=st.sampled_from(MEMORIES),
)
def test_limits_are_kept_and_prices_are_weighed(
    problem: tuple[Dag, Costs],
    alphas: tuple[float, float],
    budgets: tuple[float, float],
    slo: float,
    memory: Memory,
) -> None:
    """On any machine with a CPU core, choices from the solutions are valid, within the budget, and monotone."""
    pool = variants(*problem)
    low, high = (best_within(pool, Limits(), alpha, memory)[0] for alpha in sorted(alphas))
    assert latency_ms(low.solution) <= latency_ms(high.solution)
    assert low.memory_mb(memory) >= high.memory_mb(memory)
    for chosen in (low, high):
        assert not any(
            latency_ms(v.solution) < latency_ms(chosen.solution) and v.memory_mb(memory) <= chosen.memory_mb(memory)
            for v in pool
        )
    for alpha in (None, 0.0, 0.7):
        small, large = (best_within(pool, Limits(None, budget), alpha)[0] for budget in sorted(budgets))
        check_solution(*problem, small.solution)
        assert small.solution.timeline.resident_mb <= min(budgets)
        assert small.fits(min(budgets))
        assert latency_ms(large.solution) <= latency_ms(small.solution) + 1e-9
        assert large.solution.cost(alpha or 0.0) <= small.solution.cost(alpha or 0.0) + 1e-9
    small, large = (best_within(pool, Limits(slo, budget), None)[0] for budget in sorted(budgets))
    assert small.fits(min(budgets))  # even if the SLO is then missed
    assert large.fits(max(budgets))
    assert large.meets(slo) or not small.meets(slo)


def test_a_larger_budget_is_used_and_lowers_latency() -> None:
    """For a stack of four layers and budgets from none to all of its memory, most of each budget is used."""
    graph = load(build("lstm", {"layers": 4, "seq": 2, "batch": 1, "io": 64}))
    costs = uniform_costs(graph.dag, accelerator_ms=0.02, cpu_ms=[0.2, 0.2], handoff_ms=0.002)
    pool = variants(graph.dag, costs)
    whole = best_within(pool, Limits(), None)[0].solution.timeline
    assert whole.resident_mb > 0
    budgets = [whole.resident_mb * share for share in (0.0, 0.3, 0.55, 0.8, 1.0)]
    found = [best_within(pool, Limits(None, budget), None)[0] for budget in budgets]
    latencies = [latency_ms(c.solution) for c in found]
    assert latencies == sorted(latencies, reverse=True)
    assert len(set(latencies)) == len(latencies)
    for share, variant in zip((0.3, 0.55, 0.8), found[1:4], strict=True):
        assert variant.solution.timeline.resident_mb >= (share - 0.3) * whole.resident_mb
