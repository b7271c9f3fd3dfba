"""Groups of operators, tiles and units."""

from __future__ import annotations

import pytest

from chrion.graph import Dag
from chrion.profiler import Costs, OperatorMemory
from chrion.scheduler.search.grouping import group_operators, tile_order, unit_order
from recurrent_stack import stack, two_cores


def test_a_layer_is_a_group_and_its_steps_are_counted() -> None:
    """The operators that read one weight form a group, with steps in topological order."""
    dag = stack(3, 5)
    groups = group_operators(dag, two_cores(dag))
    assert groups.members == tuple(tuple(range(la * 5, la * 5 + 5)) for la in range(3))
    assert groups.step == tuple(i % 5 for i in range(15))
    assert groups.steps == 5


def test_a_small_operator_joins_its_predecessor() -> None:
    """An operator that takes no longer than a handoff is in the group of its predecessor, a large one is not."""
    dag = Dag.from_edges(4, [(0, 1), (1, 2), (2, 3)])
    costs = Costs(None, ((5.0, 0.01, 5.0, 0.01),), (OperatorMemory(),) * 4, dispatch_ms=0.05, handoff_ms=0.05)
    assert group_operators(dag, costs).members == ((0, 1), (2, 3))


@pytest.mark.parametrize("steps", [1, 2, 4, 8])
def test_a_tile_order_is_topological_and_labels_do_not_decrease(steps: int) -> None:
    """Tiles can be run one after another."""
    dag = stack(4, 8)
    order, labels = tile_order(dag, group_operators(dag, two_cores(dag)), steps)
    position = {i: at for at, i in enumerate(order)}
    for i in range(len(dag)):
        for m in dag.predecessors[i]:
            assert position[m] < position[i]
            assert labels[m] <= labels[i]


def test_the_operators_of_a_unit_are_consecutive() -> None:
    """The order is None if two units depend on each other in both directions."""
    dag = Dag.from_edges(4, [(0, 1), (2, 3)])
    assert unit_order(dag, [(0, 1), (2, 3)], [0, 2, 1, 3]) == [0, 1, 2, 3]
    crossed = Dag.from_edges(4, [(0, 3), (2, 1)])
    assert unit_order(crossed, [(0, 1), (2, 3)], [0, 2, 1, 3]) is None
