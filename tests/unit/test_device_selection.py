"""Algorithm 2: device selection, compared with worked examples and with the literal algorithm."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chrion.errors import ScheduleError
from chrion.graph import Dag
from chrion.profiler import CopyCost, Costs, OperatorMemory, uniform_costs
from chrion.scheduler.evaluation.evaluate import evaluate
from chrion.scheduler.policies.core_counts import selection_counts
from chrion.scheduler.policies.device_selection import select_devices
from chrion.scheduler.policies.single_device import cpu_only
from strategies import costs_for, dags, topological_orders

INFINITE = float("inf")


def naive_selection(
    dag: Dag, costs: Costs, order: tuple[int, ...], alpha: float
) -> tuple[tuple[int, ...], int, float, float]:
    """Return lanes, k*, L and M of Algorithm 2, line by line."""
    best: tuple[float, tuple[int, ...], int, float, float] | None = None
    for k in range(costs.cores + 1):
        selected: dict[int, int] = {}
        avail = [0.0] * (k + 1)
        aft: dict[int, float] = {}
        memory = 0.0
        for i in order:
            choices = []
            for j in range(k + 1):
                # Equation 2.
                est = avail[j]
                for m, size in zip(dag.predecessors[i], dag.edge_bytes[i], strict=True):
                    copy = 0.0
                    if j == 0 and selected[m] != 0:
                        copy = costs.upload.latency_ms + size * costs.upload.ms_per_byte
                    elif j != 0 and selected[m] == 0:
                        copy = costs.download.latency_ms + size * costs.download.ms_per_byte
                    est = max(est, aft[m] + copy)
                # Equation 3.
                if j:
                    eft, needed = costs.cpu_ms[k - 1][i] + est, 0.0
                else:
                    eft = INFINITE if costs.accelerator_ms is None else costs.accelerator_ms[i] + est
                    # Equation 4.
                    row = costs.memory[i]
                    needed = row.outputs_mb + row.ephemeral_mb + row.weights_mb
                    needed += sum(costs.memory[m].outputs_mb for m in dag.predecessors[i] if selected[m] != 0)
                choices.append((eft + alpha * needed, j, eft, needed))
            _, lane, eft, needed = min(choices)
            selected[i], avail[lane], aft[i] = lane, eft, eft
            memory += needed
        latency = max(aft.values(), default=0.0)
        total = latency + alpha * memory
        if total < INFINITE and (best is None or total < best[0]):
            best = (total, tuple(selected[i] for i in range(len(dag))), k, latency, memory)
    assert best is not None
    return best[1:]


@given(st.data())
def test_the_selection_is_that_of_the_literal_algorithm(data: st.DataObject) -> None:
    """Lanes, k*, L and M equal those of a transcription that compares every lane for every operator and k'."""
    dag = data.draw(dags())
    costs = data.draw(costs_for(dag))
    order = data.draw(topological_orders(dag))
    alpha = float(data.draw(st.integers(0, 3)))
    found = select_devices(dag, costs, order, alpha)
    expected = naive_selection(dag, costs, order, alpha)
    assert (found.schedule.lanes, found.schedule.cores, found.latency_ms, found.memory_mb) == expected
    assert found.schedule.order == order


@given(st.data())
def test_the_selection_agrees_with_the_cost_definition(data: st.DataObject) -> None:
    """Without handoff, dispatch, copies and base memory, L and M are those of the evaluator.

    With copies M is still equal; L then follows Equation 2, in which every edge has a copy of its own that waits for no
    other.
    """
    dag = data.draw(dags())
    drawn = data.draw(costs_for(dag))
    order = data.draw(topological_orders(dag))
    costs = Costs(drawn.accelerator_ms, drawn.cpu_ms, drawn.memory)
    found = select_devices(dag, costs, order, 1.0)
    timeline = evaluate(dag, costs, found.schedule)
    assert (found.latency_ms, found.memory_mb) == (timeline.latency_ms, timeline.memory_mb)
    assert found.cost(2.0) == timeline.cost(2.0)
    costs = replace(costs, upload=drawn.upload, download=drawn.download)
    found = select_devices(dag, costs, order, 1.0)
    assert found.memory_mb == evaluate(dag, costs, found.schedule).memory_mb


@given(st.data())
def test_operators_not_supported_on_the_accelerator_stay_on_cores(data: st.DataObject) -> None:
    """An operator of infinite time is not placed on the accelerator, as in the literal algorithm."""
    dag = data.draw(dags())
    drawn = data.draw(costs_for(dag, accelerator=True))
    unsupported = data.draw(st.sets(st.integers(0, len(dag) - 1), min_size=1))
    times = tuple(INFINITE if i in unsupported else ms for i, ms in enumerate(drawn.accelerator_ms or ()))
    costs = Costs(times, drawn.cpu_ms, drawn.memory, drawn.upload, drawn.download)
    order = data.draw(topological_orders(dag))
    if costs.cores == 0:
        with pytest.raises(ScheduleError, match="neither an accelerator"):
            select_devices(dag, costs, order, 0.0)
        return
    found = select_devices(dag, costs, order, 1.0)
    assert all(found.schedule.lanes[i] for i in unsupported)
    assert math.isfinite(found.latency_ms)
    assert found.schedule.lanes == naive_selection(dag, costs, order, 1.0)[0]


# A chain 0 -> 1 -> 2: 10 ms on the accelerator, 14 ms on one core; 4 MB an operator, 1 MB of it outputs.
CHAIN = Dag.from_edges(3, [(0, 1), (1, 2)], [1, 1])
CHAIN_COSTS = Costs(
    (10.0,) * 3, ((14.0,) * 3,), (OperatorMemory(1.0, 1.0, 0.0, 3.0),) * 3, CopyCost(0.0, 3.0), CopyCost(0.0, 3.0)
)


@pytest.mark.parametrize(
    ("alpha", "lanes", "cores", "latency_ms", "memory_mb"),
    [
        (0.0, (0, 0, 0), 0, 30.0, 12.0),  # 10 < 14, and then 20 < 10 + 3 + 14
        (1.0, (0, 0, 0), 0, 30.0, 12.0),  # 10 + 4 = 14 ties with 14: the accelerator has the lower index
        (1.5, (1, 1, 1), 1, 42.0, 0.0),  # 10 + 6 > 14; then 14 + 3 + 10 + 1.5 * 5 > 28; total 42 < 30 + 18
    ],
)
def test_a_chain_by_hand(alpha: float, lanes: tuple[int, ...], cores: int, latency_ms: float, memory_mb: float) -> None:
    """The whole chain moves to the core if a megabyte costs more than a millisecond."""
    found = select_devices(CHAIN, CHAIN_COSTS, (0, 1, 2), alpha)
    assert (found.schedule.lanes, found.schedule.cores) == (lanes, cores)
    assert (found.latency_ms, found.memory_mb) == (latency_ms, memory_mb)


def test_independent_operators_by_hand() -> None:
    """For four operators of 2 ms on the accelerator and 3 ms on cores, two lanes take 6 ms, and three lanes 4 ms."""
    dag = Dag.from_edges(4, [])
    costs = Costs((2.0,) * 4, ((3.0,) * 4, (3.0,) * 4), (OperatorMemory(),) * 4)
    found = select_devices(dag, costs, (0, 1, 2, 3), 0.0)
    # 0: 2 < 3 on lane 0. 1: 4 > 3 on lane 1. 2: 4 > 3 on lane 2. 3: 4 on lane 0 < 6.
    assert found.schedule.lanes == (0, 1, 2, 0)
    assert (found.latency_ms, found.schedule.cores) == (4.0, 2)


def test_contention_can_make_fewer_cores_better() -> None:
    """One core is used if two busy cores are three times as slow."""
    dag = Dag.from_edges(2, [])
    costs = Costs(None, ((2.0, 2.0), (6.0, 6.0)), (OperatorMemory(),) * 2)
    found = select_devices(dag, costs, (0, 1), 0.0)
    assert (found.schedule.cores, found.latency_ms) == (1, 4.0)


def test_a_tie_between_core_counts_takes_the_fewest() -> None:
    """A chain, which does not gain from a second core, uses one core."""
    costs = Costs(None, ((2.0,) * 3, (2.0,) * 3), (OperatorMemory(),) * 3)
    assert select_devices(CHAIN, costs, (0, 1, 2), 0.0).schedule.cores == 1


def test_costs_without_a_device_are_refused() -> None:
    """Costs with neither an accelerator nor a core are refused."""
    with pytest.raises(ScheduleError):
        select_devices(CHAIN, Costs(None, (), (OperatorMemory(),) * 3), (0, 1, 2), 0.0)


def test_large_graphs_have_a_sample_of_core_counts() -> None:
    """Up to 20 000 operators, selections are made for every number of cores; beyond, for some and all of them."""
    costs = uniform_costs(CHAIN, cpu_ms=[1.0] * 6)
    assert [*selection_counts(costs, 20_000)] == [1, 2, 3, 4, 5, 6]
    assert [*selection_counts(costs, 20_001)] == [1, 4, 6]


def test_the_cpu_alone_has_all_core_counts() -> None:
    """If a busy seventh core doubles all times, six are best."""
    dag = Dag.from_edges(6, [])
    assert cpu_only(dag, uniform_costs(dag, cpu_ms=[1.0] * 6 + [2.0]), 0.0).cores == 6
