"""Contention of several lanes on one accelerator."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chrion.errors import ScheduleError
from chrion.graph import Dag
from chrion.profiler import Costs, OperatorMemory
from chrion.scheduler import Schedule, evaluate


def device(times: list[float], shares: list[float], **machine: float) -> Costs:
    """Return costs with the given times and shares on an accelerator, without cores."""
    return Costs(tuple(times), (), (OperatorMemory(),) * len(times), accelerator_share=tuple(shares), **machine)  # type: ignore[arg-type]


def test_two_operators_that_fill_the_device_share_it_evenly() -> None:
    """Of 2 and 6 ms of work that start together, the first ends at 4 ms, and the other then has 4 ms left."""
    dag = Dag.from_edges(2, [])
    timeline = evaluate(dag, device([2.0, 6.0], [1.0, 1.0]), Schedule((0, 1), (0, -1), 0, 2))
    assert timeline.finish_ms == pytest.approx((4.0, 8.0))
    assert timeline.busy_ms == pytest.approx((4.0, 8.0))


def test_operators_that_fit_together_do_not_slow_each_other() -> None:
    """Two shares of one half fill the device; with a third operator, all take half as long again."""
    dag = Dag.from_edges(3, [])
    costs = device([2.0, 2.0, 2.0], [0.5, 0.5, 0.5])
    assert evaluate(dag, costs, Schedule((0, 1, 2), (0, -1, 0), 0, 2)).finish_ms == pytest.approx((2.0, 2.0, 4.0))
    assert evaluate(dag, costs, Schedule((0, 1, 2), (0, -1, -2), 0, 3)).finish_ms == pytest.approx((3.0, 3.0, 3.0))


def test_between_lanes_of_one_device_nothing_is_copied() -> None:
    """A result is visible to another lane a handoff later, whatever its size."""
    dag = Dag.from_edges(2, [(0, 1)], [1_000_000])
    costs = device([1.0, 1.0], [1.0, 1.0], handoff_ms=0.5)
    assert evaluate(dag, costs, Schedule((0, 1), (0, -1), 0, 2)).start_ms == pytest.approx((0.0, 1.5))


def test_a_finished_operator_leaves_its_share_to_the_others() -> None:
    """CPU lanes are not slowed, and a dispatch occupies no share of the device."""
    dag = Dag.from_edges(3, [])
    costs = Costs(
        (4.0, 2.0, 9.0), ((9.0, 9.0, 5.0),), (OperatorMemory(),) * 3, dispatch_ms=1.0, accelerator_share=(1.0, 1.0, 1.0)
    )
    timeline = evaluate(dag, costs, Schedule((0, 1, 2), (0, -1, 1), 1, 2))
    assert timeline.start_ms == pytest.approx((1.0, 1.0, 1.0))
    assert timeline.finish_ms == pytest.approx((7.0, 5.0, 6.0))


@given(st.data())
def test_a_full_device_is_neither_shared_twice_nor_idle(data: st.DataObject) -> None:
    """Independent operators that each fill the device take as long on any lanes as in sequence."""
    times = data.draw(st.lists(st.integers(0, 9).map(float), min_size=1, max_size=8))
    lanes = tuple(data.draw(st.integers(-2, 0)) for _ in times)
    dag = Dag.from_edges(len(times), [])
    timeline = evaluate(dag, device(times, [1.0] * len(times)), Schedule(tuple(range(len(times))), lanes, 0, 3))
    assert timeline.latency_ms == pytest.approx(sum(times))


@given(st.data())
def test_shares_bound_the_latency(data: st.DataObject) -> None:
    """The most loaded lane and the work on the whole device are lower bounds of latency.

    The sequence of all operators is an upper bound.
    """
    n = data.draw(st.integers(1, 8))
    times = [float(data.draw(st.integers(0, 9))) for _ in range(n)]
    shares = [data.draw(st.integers(0, 4)) / 4 for _ in range(n)]
    lanes = tuple(data.draw(st.integers(-2, 0)) for _ in range(n))
    latency = evaluate(Dag.from_edges(n, []), device(times, shares), Schedule(tuple(range(n)), lanes, 0, 3)).latency_ms
    fullest = max(sum(t for t, at in zip(times, lanes, strict=True) if at == lane) for lane in set(lanes))
    work = sum(t * share for t, share in zip(times, shares, strict=True))
    assert max(fullest, work) - 1e-9 <= latency <= sum(times) + 1e-9


def test_a_schedule_in_which_no_lane_can_continue_is_refused() -> None:
    """If every lane waits for the other one, the evaluator raises; an unchecked schedule has no latency of 0 ms."""
    dag = Dag.from_edges(4, [])
    falling_stages = Schedule((2, 3, 0, 1), (0, -1, 0, -1), 0, 2, (0, 0, 1, 1))
    with pytest.raises(ScheduleError, match="gpu0 before operator '2', gpu1 before operator '3'"):
        evaluate(dag, device([1.0] * 4, [1.0] * 4), falling_stages, check=False)


@pytest.mark.parametrize("lanes", [(1, 2), (1, 0), (0, 1)])
def test_a_segment_before_one_that_it_reads_from_is_refused(lanes: tuple[int, int]) -> None:
    """The evaluator does not take the result of an operator that has not run as one available at 0 ms."""
    dag = Dag.from_edges(2, [(0, 1)])
    costs = Costs((1.0, 1.0), ((1.0, 1.0),) * 2, (OperatorMemory(),) * 2)
    with pytest.raises(ScheduleError, match="before operator '1'"):
        evaluate(dag, costs, Schedule((1, 0), lanes, 2), check=False)
