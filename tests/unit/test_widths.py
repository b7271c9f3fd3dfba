"""Times of operators on several cores: Amdahl's law, its fit, and the costs of wide lanes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chrion.errors import ScheduleError
from chrion.graph import Dag
from chrion.profiler import Costs, OperatorCost, OperatorMemory, Profile
from chrion.profiler.widths import (
    amdahl_ms,
    describe_fit,
    fit_errors,
    measured_widths,
    planned_widths,
    serial_share,
    times_at,
)
from chrion.scheduler import Schedule, evaluate
from helpers import MACHINE


def test_widths_are_powers_of_two_and_all_cores() -> None:
    """One core has no width to measure; plans may use half of the cores as well."""
    assert [measured_widths(cores) for cores in (1, 2, 3, 6, 8)] == [(), (2,), (2, 3), (2, 4, 6), (2, 4, 8)]
    assert [planned_widths(cores) for cores in (1, 2, 3, 6, 8)] == [(), (2,), (2, 3), (2, 3, 4, 6), (2, 4, 8)]


@given(st.floats(0.01, 100), st.floats(0, 2))
def test_the_fit_finds_the_serial_share(alone_ms: float, share: float) -> None:
    """Times that follow Amdahl's law are fitted exactly, and so are the widths between them."""
    measured = {w: amdahl_ms(alone_ms, share, w) for w in (2, 4, 8)}
    assert serial_share(alone_ms, measured) == pytest.approx(share, abs=1e-9)
    assert times_at(alone_ms, measured, [3]) == pytest.approx((alone_ms * (share + (1 - share) / 3),))
    assert max(fit_errors([(alone_ms, measured)])) < 1e-9


def test_the_fit_has_the_least_squared_relative_error() -> None:
    """No other share has a smaller error on times that do not follow the law."""
    measured = {2: 0.6, 4: 0.5, 8: 0.55}

    def error(share: float) -> float:
        return sum((amdahl_ms(1.0, share, w) / ms - 1) ** 2 for w, ms in measured.items())

    best = serial_share(1.0, measured)
    assert all(error(best) <= error(best + step) for step in (-0.1, -0.01, 0.01, 0.1))


def test_measured_widths_are_not_fitted() -> None:
    """A measured time is used as it is; without measurements, no width is a gain."""
    assert times_at(1.0, {2: 0.7, 4: 0.6}, [2, 4]) == (0.7, 0.6)
    assert times_at(1.0, {}, [2, 4]) == (1.0, 1.0)


def test_the_error_of_the_fit_is_described() -> None:
    """One measured width is fitted exactly, so that it tells nothing about the error."""
    assert describe_fit(fit_errors([(1.0, {2: 0.6})])) == ""
    assert "error of Amdahl's law" in describe_fit(fit_errors([(1.0, {2: 0.6, 4: 0.6})]))


def test_a_profile_fits_the_widths_that_it_lacks() -> None:
    """On six cores, three are fitted between two and four; an operator that was not measured gains nothing."""
    operators = {
        "0": OperatorCost("LSTM", (6.0,) * 6, wide_ms=(4.0, 3.0, 8 / 3)),  # a serial share of one third
        "1": OperatorCost("Relu", (0.01,) * 6),
    }
    profile = Profile(MACHINE, 6, None, operators)
    costs = profile.costs(Dag.from_edges(2, [(0, 1)]))
    assert costs.widths == (2, 3, 4, 6)
    assert [row[0] for row in costs.wide_ms] == pytest.approx([4.0, 10 / 3, 3.0, 8 / 3])
    assert [row[1] for row in costs.wide_ms] == [0.01] * 4
    assert profile.costs(Dag.from_edges(2, [(0, 1)]), 3).widths == (2, 3)


COSTS = Costs(None, ((4.0,), (5.0,), (6.0,)), (OperatorMemory(),), widths=(2, 3), wide_ms=((3.0,), (2.0,)))


def test_contention_slows_wide_operators_as_it_slows_others() -> None:
    """Two cores while three are busy take 6/5 of the time that they take while no other core is busy."""
    assert COSTS.core_ms(0, 1, 3) == 6.0
    assert COSTS.core_ms(0, 2, 2) == 3.0
    assert COSTS.core_ms(0, 2, 3) == pytest.approx(3.0 * 6 / 5)
    assert COSTS.core_ms(0, 3, 3) == 2.0


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (Schedule((0,), (2,), 2, widths=(2,)), "exceeds the 2 cores"),
        (Schedule((0,), (1,), 3, widths=(4,)), "exceeds the 3 cores"),
        (Schedule((0,), (1,), 3, widths=(0,)), "width 0"),
        (Schedule((0,), (1,), 3, widths=(2, 2)), "widths must be given for each"),
    ],
)
def test_invalid_widths_are_refused(schedule: Schedule, message: str) -> None:
    """A width must fit the cores, have measured costs, and be given for every operator."""
    with pytest.raises(ScheduleError, match=message):
        evaluate(Dag.from_edges(1, []), COSTS, schedule)


def test_a_wide_operator_waits_for_all_of_its_cores() -> None:
    """Operator 2 needs both cores: that of its own lane at 1 ms, the other one a handoff after 2 ms.

    Waking the second core takes 0.25 ms. Operator 3 starts on it when the wide one has ended, a handoff and a wake-up
    later, and operator 4 on the own lane at once.
    """
    dag = Dag.from_edges(5, [])
    costs = Costs(
        None,
        ((1.0, 2.0, 4.0, 1.0, 1.0),) * 2,
        (OperatorMemory(),) * 5,
        handoff_ms=0.5,
        widths=(2,),
        wide_ms=((1.0, 2.0, 3.0, 1.0, 1.0),),
        wake_ms=0.25,
    )
    schedule = Schedule((0, 1, 2, 3, 4), (1, 2, 1, 2, 1), 2, widths=(1, 1, 2, 1, 1))
    timeline = evaluate(dag, costs, schedule)
    assert timeline.start_ms == (0.0, 0.0, 2.75, 6.5, 5.75)
    assert timeline.latency_ms == 7.5
    assert timeline.busy_ms == (0.0, 1.0 + 3.25 + 1.0, 2.0 + 3.25 + 1.0)
