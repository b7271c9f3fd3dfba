"""HEFT: its published example, ranks, gaps and overheads."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from chrion.graph import Dag
from chrion.profiler import Costs, OperatorMemory, uniform_costs
from chrion.scheduler import evaluate
from chrion.scheduler.evaluation.solution import Problem
from chrion.scheduler.policies.heft import heft
from chrion.scheduler.policies.list_scheduling import Lanes, upward_ranks
from solution_checks import check_solution
from strategies import costs_for, dags
from topcuoglu_example import COSTS, DAG, HEFT_MAKESPAN, makespan


def test_the_published_example_takes_80() -> None:
    """Ten tasks on three processors have the makespan of the paper's Figure 3."""
    assert makespan(heft(DAG, COSTS.limited_to(2, 1), 0.0)) == HEFT_MAKESPAN


def test_upward_ranks_are_the_longest_paths_to_an_exit() -> None:
    """In a diamond of unit times with handoffs of two, the ranks are 1, then 1 + 2 + 1, then 1 + 2 + 4."""
    dag = Dag.from_edges(4, [(0, 1), (0, 2), (1, 3), (2, 3)])
    costs = uniform_costs(dag, cpu_ms=[1.0, 1.0], handoff_ms=2.0)
    assert upward_ranks(Lanes(dag, costs)) == [7.0, 4.0, 4.0, 1.0]


def test_independent_operators_are_spread() -> None:
    """Four equal operators on two cores take as long as two of them."""
    dag = Dag.from_edges(4, [])
    costs = uniform_costs(dag, cpu_ms=[1.0, 1.0])
    assert evaluate(dag, costs, heft(dag, costs.limited_to(2, 1), 0.0)).latency_ms == 2.0


def test_costly_handoffs_keep_everything_on_one_lane() -> None:
    """If a handoff takes longer than all operators together, one lane runs all of them."""
    dag = Dag.from_edges(3, [(0, 1), (0, 2)])
    costs = uniform_costs(dag, cpu_ms=[1.0, 1.0], handoff_ms=10.0)
    assert len(set(heft(dag, costs.limited_to(2, 1), 0.0).lanes)) == 1


def test_idle_gaps_are_filled() -> None:
    """The operator of least rank, placed last, fills the gap in which the core waits for the accelerator.

    Operator 0 runs on the core until 1 ms, operator 1 on the accelerator until 11 ms, then 2 on the core; copies take
    no time. Operator 3, without edges, fits between.
    """
    dag = Dag.from_edges(4, [(0, 1), (1, 2)])
    costs = Costs(
        accelerator_ms=(100.0, 10.0, 100.0, 100.0),
        cpu_ms=((1.0, 100.0, 1.0, 5.0),),
        memory=(OperatorMemory(),) * 4,
    )
    schedule = heft(dag, costs.limited_to(1, 1), 0.0)
    timeline = evaluate(dag, costs, schedule)
    assert schedule.lanes == (1, 0, 1, 1)
    assert (timeline.start_ms[3], timeline.latency_ms) == (1.0, 12.0)


def test_operators_of_no_duration_follow_their_predecessors() -> None:
    """Equal ranks do not put an operator before its predecessor of a higher index."""
    dag = Dag.from_edges(3, [(2, 1), (1, 0)])
    costs = uniform_costs(dag, cpu_ms=[0.0], dispatch_ms=1.0)
    schedule = heft(dag, costs.limited_to(1, 1), 0.0)
    check_solution(dag, costs, Problem(dag, costs).evaluate(schedule))
    assert schedule.order == (2, 1, 0)


@given(data=st.data())
def test_schedules_are_valid(data: st.DataObject) -> None:
    """Schedules are valid on any graph and machine, for every number of cores."""
    dag = data.draw(dags())
    costs = data.draw(costs_for(dag))
    for cores in range(0 if costs.accelerator_ms is not None else 1, costs.cores + 1):
        check_solution(dag, costs, Problem(dag, costs).evaluate(heft(dag, costs.limited_to(cores, 1), 0.0)))
