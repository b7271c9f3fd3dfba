"""Accelerator memory by both definitions."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from chrion.graph import Dag
from chrion.profiler import Costs, OperatorMemory
from chrion.scheduler.evaluation.memory import paper_mb, resident_mb
from strategies import costs_for, dags, schedules


def chain(*, shared: bool) -> tuple[Dag, Costs]:
    """Return a chain of three operators: results of 1, 2 and 4 MB, and a weight of 8 MB each, or one for all."""
    dag = Dag.from_edges(3, [(0, 1), (1, 2)])
    weights = ((0,), (0,), (0,)) if shared else ((0,), (1,), (2,))
    dag = replace(dag, weights=weights, weight_bytes=(8_000_000,) * 3)
    memory = tuple(OperatorMemory(outputs_mb=mb, weights_mb=8.0) for mb in (1.0, 2.0, 4.0))
    return dag, Costs((1.0,) * 3, ((1.0,) * 3,), memory, base_memory_mb=100.0)


def test_a_shared_weight_is_resident_once() -> None:
    """Equation 4 counts a shared weight for each operator, 24 MB; an arena holds 8 MB."""
    dag, costs = chain(shared=True)
    assert paper_mb(dag, costs, (0, 0, 0)) == 100 + 24 + 7
    assert resident_mb(dag, costs, (0, 1, 2), (0, 0, 0)) == 100 + 8 + 6


def test_an_activation_lives_until_its_last_reader() -> None:
    """The first result is released before the third is made; the peak is the second and third together."""
    dag, costs = chain(shared=False)
    assert resident_mb(dag, costs, (0, 1, 2), (0, 0, 0)) == 100 + 24 + 6


def test_inputs_from_the_cpu_are_held_while_they_are_read() -> None:
    """If only the last operator is on the accelerator, its weight, its input and its result count."""
    dag, costs = chain(shared=False)
    assert resident_mb(dag, costs, (0, 1, 2), (1, 1, 0)) == 100 + 8 + 6
    assert resident_mb(dag, costs, (0, 1, 2), (1, 1, 1)) == 0.0


def test_every_lane_of_the_accelerator_counts() -> None:
    """Weights and results on all lanes count, and the ephemeral memory of one operator on each lane."""
    dag = Dag.from_edges(2, [])
    costs = Costs((1.0, 1.0), ((1.0, 1.0),), (OperatorMemory(0.0, 1.0, 2.0), OperatorMemory(0.0, 4.0, 8.0)))
    assert paper_mb(dag, costs, (0, -1)) == 15.0
    assert resident_mb(dag, costs, (0, 1), (0, 0)) == 12.0  # the first result is never read, and released
    assert resident_mb(dag, costs, (0, 1), (0, -1)) == 14.0
    assert resident_mb(dag, costs, (0, 1), (-1, 1)) == 3.0


@given(data=st.data())
def test_the_peak_is_that_of_the_naive_definition(data: st.DataObject) -> None:
    """The peak is the largest sum, over all operators, of the values that exist already and are read later."""
    dag = data.draw(dags())
    costs = data.draw(costs_for(dag, accelerator=True))
    schedule = data.draw(schedules(dag, costs))
    on_device = [i for i in schedule.order if schedule.lanes[i] == 0]
    peak = 0.0
    for at, i in enumerate(on_device):
        live = set()
        for m in {m for j in on_device for m in (j, *dag.predecessors[j])}:
            uses = [position for position, j in enumerate(on_device) if m == j or m in dag.predecessors[j]]
            if uses[0] <= at <= uses[-1]:
                live.add(m)
        peak = max(peak, sum(costs.memory[m].outputs_mb for m in live) + costs.memory[i].ephemeral_mb)
    expected = peak + costs.base_memory_mb if on_device else 0.0
    assert resident_mb(dag, costs, schedule.order, schedule.lanes) == expected
