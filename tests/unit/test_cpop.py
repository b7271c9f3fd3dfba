"""CPOP: the published example, and the algorithm line by line on random graphs."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chrion.graph import Dag
from chrion.profiler import Costs, uniform_costs
from chrion.scheduler.evaluation.solution import Problem
from chrion.scheduler.policies.cpop import cpop, critical_path
from chrion.scheduler.policies.list_scheduling import Lanes, downward_ranks, upward_ranks
from policy_solutions import solve_policy
from solution_checks import check_solution
from strategies import costs_for, dags
from topcuoglu_example import COSTS, CPOP_MAKESPAN, DAG, DOWNWARD_RANKS, UPWARD_RANKS, makespan


def test_the_ranks_of_the_published_example() -> None:
    """The ranks equal those in Table 2 of the paper, to its three decimals."""
    assert upward_ranks(Lanes(DAG, COSTS.limited_to(2, 1))) == pytest.approx(UPWARD_RANKS, abs=2e-3)
    assert downward_ranks(Lanes(DAG, COSTS.limited_to(2, 1))) == pytest.approx(DOWNWARD_RANKS, abs=2e-3)


def test_the_published_example_takes_86() -> None:
    """Tasks 1, 2, 9 and 10 are the critical path, on the second processor; the makespan is the published one."""
    priority = [up + down for up, down in zip(UPWARD_RANKS, DOWNWARD_RANKS, strict=True)]
    assert critical_path(DAG, priority) == [0, 1, 8, 9]
    schedule = cpop(DAG, COSTS.limited_to(2, 1), 0.0)
    assert [schedule.lanes[i] for i in (0, 1, 8, 9)] == [1, 1, 1, 1]
    assert makespan(schedule) == CPOP_MAKESPAN


def naive_cpop(dag: Dag, costs: Costs, cores: int) -> tuple[list[int], list[float]]:
    """Return lanes and start times by Figure 4 of the paper, literally, with this machine's overheads in EST."""
    n = len(dag)

    lanes = range(0 if costs.accelerator_ms is not None else 1, cores + 1)
    pairs = list(itertools.permutations(lanes, 2))

    def transfer(m: int, i: int) -> float:
        size = dag.edge_bytes[i][dag.predecessors[i].index(m)]
        return sum(costs.transfer_ms(a, b, size) for a, b in pairs) / max(1, len(pairs))

    def mean(i: int) -> float:
        return sum(costs.lane_ms(lane, cores)[i] for lane in lanes) / len(lanes)

    def up(i: int) -> float:
        return mean(i) + max((transfer(i, s) + up(s) for s in dag.successors[i]), default=0.0)

    def down(i: int) -> float:
        return max((down(m) + mean(m) + transfer(m, i) for m in dag.predecessors[i]), default=0.0)

    priority = [up(i) + down(i) for i in range(n)]
    path = [max((i for i in range(n) if not dag.predecessors[i]), key=lambda i: (priority[i], -i))]
    while dag.successors[path[-1]]:
        path.append(max(dag.successors[path[-1]], key=lambda i: (priority[i], -i)))
    path_lane = min(lanes, key=lambda lane: (sum(costs.lane_ms(lane, cores)[i] for i in path), lane))
    lane_of: dict[int, int] = {}
    start: dict[int, float] = {}
    finish: dict[int, float] = {}
    while len(lane_of) < n:
        ready = [i for i in range(n) if i not in lane_of and all(m in lane_of for m in dag.predecessors[i])]
        i = min(ready, key=lambda i: (-priority[i], i))
        choices = []
        for lane in [path_lane] if i in path else lanes:
            before = dag.predecessors[i]
            length = costs.lane_ms(lane, cores)[i]
            length += 0.0 if any(lane_of[m] == lane for m in before) else costs.dispatch_ms
            arrivals = [0.0]
            for m, size in zip(before, dag.edge_bytes[i], strict=True):
                same = lane_of[m] == lane
                arrivals.append(finish[m] + (0.0 if same else costs.transfer_ms(lane_of[m], lane, size)))
            # It starts when its inputs have arrived, or when an operator on the lane ends: the first that fits.
            others = [m for m in lane_of if lane_of[m] == lane]
            begins = sorted({max(arrivals), *(finish[m] for m in others if finish[m] >= max(arrivals))})
            begin = next(b for b in begins if all(finish[m] <= b or b + length <= start[m] for m in others))
            choices.append((begin + length, lane, begin))
        end, lane, begin = min(choices)
        lane_of[i], start[i], finish[i] = lane, begin, end
    return [lane_of[i] for i in range(n)], [start[i] for i in range(n)]


@given(data=st.data())
def test_the_schedule_is_that_of_the_literal_algorithm(data: st.DataObject) -> None:
    """Schedules are valid, with the literal algorithm's lanes and an order by start times, for every number of cores.

    Every operator takes some time, since one that takes none fits between any two others.
    """
    dag = data.draw(dags())
    drawn = data.draw(costs_for(dag))
    longer = None if drawn.accelerator_ms is None else tuple(ms + 1 for ms in drawn.accelerator_ms)
    costs = replace(drawn, accelerator_ms=longer, cpu_ms=tuple(tuple(ms + 1 for ms in row) for row in drawn.cpu_ms))
    for cores in range(0 if costs.accelerator_ms is not None else 1, costs.cores + 1):
        schedule = cpop(dag, costs.limited_to(cores, 1), 0.0)
        lanes, starts = naive_cpop(dag, costs, cores)
        assert list(schedule.lanes) == lanes
        along = [starts[i] for i in schedule.order]
        assert along == sorted(along)
        check_solution(dag, costs, Problem(dag, costs).evaluate(schedule))


def test_the_number_of_cores_is_the_best() -> None:
    """Two chains use two cores, but one core if a second one makes both chains three times as slow."""
    dag = Dag.from_edges(4, [(0, 1), (2, 3)])
    fast, slow = (uniform_costs(dag, cpu_ms=times) for times in ([1.0, 1.0], [1.0, 3.0]))
    assert solve_policy("cpop", dag, fast).timeline.latency_ms == 2.0
    assert solve_policy("cpop", dag, slow).schedule.cores == 1
