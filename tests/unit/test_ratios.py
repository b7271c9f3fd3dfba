"""Tests of the ratio that the benchmarks report."""

from __future__ import annotations

import pytest
from ratios import TimedTrial, ratio_to_best, undisturbed_trials


def test_trials_count_by_the_speed_of_the_cores() -> None:
    """With a full speed of 1 ms, trials count up to a reference time of 1.1 ms, for any latency measured."""
    trials = [
        TimedTrial("a", 5.0, 1.0),
        TimedTrial("b", 9.0, 1.1),
        TimedTrial("a", 1.0, 1.2),
        TimedTrial("b", 8.0, 1.0),
        TimedTrial("a", 6.0, 1.05),
    ]
    assert undisturbed_trials(trials, 1.0, 1) == {"a": [5.0, 6.0], "b": [9.0, 8.0]}


def test_the_least_disturbed_trials_count_if_all_are_disturbed() -> None:
    """The requested number of least disturbed trials counts, or all if there are fewer."""
    trials = [TimedTrial("a", 5.0, 2.0), TimedTrial("a", 4.0, 1.5), TimedTrial("a", 3.0, 3.0)]
    assert undisturbed_trials(trials, 1.0, 2) == {"a": [5.0, 4.0]}
    assert undisturbed_trials(trials, 1.0, 9) == {"a": [5.0, 4.0, 3.0]}


def test_one_threshold_holds_for_all_candidates() -> None:
    """If one candidate has too few undisturbed trials, the other's count up to the same disturbance."""
    trials = [
        TimedTrial("a", 5.0, 1.0),
        TimedTrial("a", 6.0, 1.5),
        TimedTrial("a", 7.0, 2.0),
        TimedTrial("b", 9.0, 1.5),
        TimedTrial("b", 9.5, 2.5),
    ]
    assert undisturbed_trials(trials, 1.0, 1) == {"a": [5.0, 6.0], "b": [9.0]}


def test_trials_without_noise_give_the_quotient() -> None:
    """A candidate of 3 ms against 4 ms and 9 ms has a ratio of 0.75, with an interval of width 0."""
    found = ratio_to_best({"own": [3.0] * 4, "slow": [9.0] * 4, "fast": [4.0] * 4}, "own")
    assert found == pytest.approx((0.75, 0.75, 0.75))
