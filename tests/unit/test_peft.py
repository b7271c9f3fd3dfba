"""PEFT: the algorithm line by line on random graphs, and what its table is for."""

from __future__ import annotations

import functools

from hypothesis import given
from hypothesis import strategies as st

from chrion.graph import Dag
from chrion.profiler import CopyCost, Costs, OperatorMemory
from chrion.scheduler.evaluation.solution import Problem
from chrion.scheduler.policies.list_scheduling import Lanes
from chrion.scheduler.policies.peft import optimistic_costs, peft
from solution_checks import check_solution
from strategies import costs_for, dags


def naive_costs(dag: Dag, costs: Costs, cores: int) -> list[dict[int, float]]:
    """Return the optimistic cost table by Equation 5 of the paper, literally: one column for each lane."""
    lanes = range(0 if costs.accelerator_ms is not None else 1, cores + 1)
    pairs = [(a, b) for a in lanes for b in lanes if a != b]

    def transfer(m: int, i: int) -> float:
        size = dag.edge_bytes[i][dag.predecessors[i].index(m)]
        return sum(costs.transfer_ms(a, b, size) for a, b in pairs) / max(1, len(pairs))

    @functools.cache
    def cost(i: int, lane: int) -> float:
        return max(
            (
                min(
                    cost(s, other) + costs.lane_ms(other, cores)[s] + (transfer(i, s) if other != lane else 0.0)
                    for other in lanes
                )
                for s in dag.successors[i]
            ),
            default=0.0,
        )

    return [{lane: cost(i, lane) for lane in lanes} for i in range(len(dag))]


@given(data=st.data())
def test_the_table_is_that_of_the_literal_equation(data: st.DataObject) -> None:
    """Two columns are as good as one for each lane; the schedule is valid for every number of cores."""
    dag = data.draw(dags())
    costs = data.draw(costs_for(dag))
    for cores in range(0 if costs.accelerator_ms is not None else 1, costs.cores + 1):
        host, device = optimistic_costs(Lanes(dag, costs.limited_to(cores, 1)))
        for i, row in enumerate(naive_costs(dag, costs, cores)):
            for lane, cost in row.items():
                assert abs((host if lane > 0 else device)[i] - cost) < 1e-9
        check_solution(dag, costs, Problem(dag, costs).evaluate(peft(dag, costs.limited_to(cores, 1), 0.0)))


def test_a_lane_that_is_slow_for_what_follows_is_avoided() -> None:
    """The core is faster for operator 0, but a copy then costs more than it gains; HEFT would choose the core."""
    dag = Dag.from_edges(2, [(0, 1)], [1])
    costs = Costs(
        accelerator_ms=(3.0, 1.0),
        cpu_ms=((2.0, 20.0),),
        memory=(OperatorMemory(),) * 2,
        upload=CopyCost(10.0, 0.0),
        download=CopyCost(10.0, 0.0),
    )
    assert peft(dag, costs.limited_to(1, 1), 0.0).lanes == (0, 0)
