"""The policies ``first-fit`` and ``layers``: parts of the model in a fixed order, as much as fits."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chrion.graph import Dag
from chrion.graph.segments import cut
from chrion.profiler.costs import Costs, OperatorMemory, uniform_costs
from chrion.scheduler.evaluation.memory import device_memory
from chrion.scheduler.policies.partial_offload import (
    fill,
    first_fit,
    last_layers,
    layer_units,
)
from chrion.scheduler.policies.policy import PlanningTask
from chrion.scheduler.schedule import Schedule, validate
from helpers import smallest_graph
from policy_solutions import solve_policy
from strategies import costs_for, dags

#: An embedding, three layers of two operators, and a head; every operator has a weight of 1 MB.
NAMES = ("words", *(f"MatMul:block{at // 2}/{'ab'[at % 2]}" for at in range(6)), "head")
CHAIN = replace(
    Dag.from_edges(8, [(i, i + 1) for i in range(7)]),
    names=NAMES,
    weights=tuple((i,) for i in range(8)),
    weight_bytes=(1_000_000,) * 8,
)
COSTS = uniform_costs(CHAIN, accelerator_ms=0.1)


def placed(schedule: Schedule) -> list[int]:
    return [i for i, lane in enumerate(schedule.lanes) if lane <= 0]


def needed_mb(dag: Dag, costs: Costs, schedule: Schedule) -> float:
    return device_memory(dag, costs, schedule, cut(dag, schedule.order, schedule.lanes)).resident_mb


def test_first_fit_stops_where_the_memory_is_full() -> None:
    """Operators are placed in order, and none after the first that does not fit, even if it would."""
    units = [[i] for i in range(8)]
    assert [len(placed(fill(CHAIN, COSTS, units, mb))) for mb in (0.5, 1, 3.5, 8, 100)] == [0, 1, 3, 8, 8]
    assert placed(fill(CHAIN, COSTS, units, 3.5)) == [0, 1, 2]
    large = replace(CHAIN, weight_bytes=(1_000_000, 5_000_000, *(1_000_000,) * 6))
    assert placed(fill(large, COSTS, units, 4)) == [0]


def test_the_whole_model_is_placed_if_it_fits_and_all_but_its_end_does_not() -> None:
    """A part of a chain holds two values and a third that it passes to the CPU; the whole passes none."""
    chain = Dag.from_edges(8, [(i, i + 1) for i in range(7)], [10_000_000] * 7)
    memory = (OperatorMemory(outputs_mb=10),) * 7 + (OperatorMemory(),)
    costs = replace(uniform_costs(chain, accelerator_ms=0.1), memory=memory)
    units = [[i] for i in range(8)]
    needed = [needed_mb(chain, costs, fill(chain, costs, units[:count], math.inf)) for count in (3, 6, 8)]
    assert needed == pytest.approx([30, 30, 20], rel=1e-4)  # a frame is rounded up to 256 bytes
    assert placed(fill(chain, costs, units, 20)) == list(range(8))
    assert placed(fill(chain, costs, units, 19)) == [0]


def test_the_last_layers_are_placed_first() -> None:
    """Layers are placed as wholes from the last one, then the head; the embedding stays on the CPU."""
    units = layer_units(CHAIN)
    assert units == [[5, 6], [3, 4], [1, 2], [7]]
    assert placed(fill(CHAIN, COSTS, units, 5)) == [3, 4, 5, 6]
    assert placed(fill(CHAIN, COSTS, units, 6.5)) == [1, 2, 3, 4, 5, 6]
    assert placed(fill(CHAIN, COSTS, units, math.inf)) == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    "names",
    [
        ("/model/layers.0/a", "/model/layers.0/b", "/model/layers.11/a"),
        ("encoder/layer.0/a", "encoder/layer.0/b", "decoder/layer.0/a"),
        ("transformer.h.0.a", "transformer.h.0.b", "transformer.h.1"),
        ("Add:t5/block0/a", "MatMul:t5/block0/b", "Add:t5/block1/a"),
    ],
)
def test_layers_are_recognised_by_usual_names(names: tuple[str, ...]) -> None:
    """Names of common exporters give layers; numbers that repeat in another part of the model are other layers."""
    dag = replace(Dag.from_edges(3, [(0, 1), (1, 2)]), names=names)
    assert layer_units(dag) == [[2], [0, 1]]


def test_without_layer_names_every_operator_is_a_layer() -> None:
    """Numbers of other kinds are not layers."""
    dag = replace(Dag.from_edges(3, [(0, 1), (1, 2)]), names=("gather.1", "bottom0/matmul", "blocked2x/add"))
    assert layer_units(dag) == [[2], [1], [0]]


@given(data=st.data())
def test_as_many_operators_as_fit_are_placed(data: st.DataObject) -> None:
    """The schedule is valid and within the budget, and one more operator would exceed it."""
    dag = data.draw(dags())
    costs: Costs = data.draw(costs_for(dag, accelerator=True).filter(lambda c: c.cores > 0))
    whole = Schedule(dag.topological_order, (0,) * len(dag), 0)
    budget = data.draw(st.floats(0, 2 * needed_mb(dag, costs, whole) + 1))
    units = [[i] for i in range(len(dag))]
    schedule = fill(dag, costs, units, budget)
    validate(dag, costs, schedule)
    assert needed_mb(dag, costs, schedule) <= budget
    possible = [ms < math.inf for ms in costs.accelerator_ms or ()]
    placed = next((i for i, lane in enumerate(schedule.lanes) if lane and possible[i]), len(dag))
    assert schedule.lanes == tuple(int(i >= placed or not possible[i]) for i in range(len(dag)))
    if placed < len(dag):
        more = tuple(int(i > placed or not possible[i]) for i in range(len(dag)))
        assert needed_mb(dag, costs, Schedule(schedule.order, more, max(more))) > budget


def test_without_an_accelerator_everything_runs_on_a_core() -> None:
    """Both policies have a plan for a machine without an accelerator, and for one without cores."""
    for policy in ("first-fit", "layers"):
        assert set(solve_policy(policy, CHAIN, COSTS.without_accelerator()).schedule.lanes) == {1}
        assert set(solve_policy(policy, CHAIN, COSTS.limited_to(0, 1)).schedule.lanes) == {0}


@pytest.mark.parametrize(("wide_ms", "width"), [(0.6, 2), (1.2, 1)])
def test_operators_on_the_cpu_have_as_many_cores_as_is_best(wide_ms: float, width: int) -> None:
    """All operators run on two cores if that is faster, and on one otherwise."""
    graph = smallest_graph()
    n = len(graph.dag)
    costs = replace(uniform_costs(graph.dag, cpu_ms=[1.0, 1.0]), widths=(2,), wide_ms=((wide_ms,) * n,))
    for policy in (first_fit, last_layers):
        (found,) = policy(PlanningTask(graph, lambda _: costs))
        assert [found.solution.schedule.width(i) for i in range(n)] == [width] * n
        assert found.solution.timeline.latency_ms == pytest.approx(n * min(1.0, wide_ms))
