"""Idle gaps of the list scheduler, compared with a search over all operators of a lane."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from chrion.graph import Dag
from chrion.profiler import uniform_costs
from chrion.scheduler.policies.list_scheduling import Lanes, ListScheduler
from property_tests import examples

#: Ready times and lengths; whole numbers, so that operators often touch.
OPERATORS = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 4)), min_size=4, max_size=14)


def first_start(busy: list[tuple[float, float]], ready: float, length: float) -> float:
    """Return the first time from ``ready`` on at which a lane is idle for a length."""
    times = [ready, *(end for _, end in busy if end >= ready)]
    return min(t for t in times if all(end <= t or t + length <= start for start, end in busy))


@examples(300)
@given(operators=OPERATORS)
def test_operators_are_inserted_in_the_first_gap(operators: list[tuple[int, int]]) -> None:
    """Each operator starts in the first gap that is long enough, whatever the gaps were filled with before."""
    dag = Dag.from_edges(len(operators), [])
    scheduler = ListScheduler(Lanes(dag, uniform_costs(dag)))
    busy: list[tuple[float, float]] = []
    for i, (ready, length) in enumerate(operators):
        slot = scheduler.first_slot((1,), ready, length)
        assert slot.start == first_start(busy, ready, length)
        scheduler.place(i, slot)
        busy.append((slot.start, slot.end))
