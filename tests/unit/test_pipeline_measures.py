"""Measures of predictions, their intervals, and prior shift."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chrion.pipelines.measures import Pair, compare, measure, prior_shift
from property_tests import examples


def two_classes(positive: list[float]) -> np.ndarray:
    """Return probabilities of two classes."""
    return np.array([[1 - p, p] for p in positive])


@given(rows=st.lists(st.tuples(st.sampled_from([0.1, 0.2, 0.5, 0.9]), st.booleans()), min_size=2, max_size=30))
@examples(200)
def test_auc_is_the_share_of_pairs_in_order(rows: list[tuple[float, bool]]) -> None:
    """Of all pairs of a positive and a negative row, the positive one has the larger score; ties count half."""
    scores, y = [s for s, _ in rows], np.array([float(label) for _, label in rows])
    ups = [s for s, label in rows if label]
    downs = [s for s, label in rows if not label]
    pairs = [(a > b) + 0.5 * (a == b) for a in ups for b in downs]
    expected = sum(pairs) / len(pairs) if pairs else 0.5
    assert measure(two_classes(scores), y).gain == pytest.approx(expected)


def test_log_loss_and_calibration_follow_their_definitions() -> None:
    """Two rows with probability 0.8, of which one is positive."""
    found = measure(two_classes([0.8] * 20), np.array([0.0, 1.0] * 10))
    assert found.loss == pytest.approx(-(math.log(0.8) + math.log(0.2)) / 2)
    assert found.calibration == pytest.approx(0.3)


def test_measures_of_numbers_are_r2_and_the_mean_absolute_error() -> None:
    """The mean has an R2 of 0; predictions that are right have 1 and no error."""
    y = np.array([1.0, 2.0, 6.0])
    assert measure(np.full(3, 3.0), y).gain == pytest.approx(0)
    assert measure(np.full(3, 3.0), y).loss == pytest.approx(2)
    assert (measure(y, y).gain, measure(y, y).loss) == (1, 0)


def test_intervals_hold_the_true_difference_about_as_often_as_they_state() -> None:
    """In 60 data sets with a known difference of 0.1 in error, nearly all intervals of 95 % hold it."""
    rng, held = np.random.default_rng(0), 0
    for seed in range(60):
        y = rng.standard_normal(200)
        old, new = y + 1.0 + 0.5 * rng.standard_normal(200), y + 0.9 + 0.5 * rng.standard_normal(200)
        truth = np.mean(np.abs(0.9 + 0.5 * np.random.default_rng(1).standard_normal(10**5)))
        truth -= np.mean(np.abs(1.0 + 0.5 * np.random.default_rng(2).standard_normal(10**5)))
        loss = compare([Pair(new, old, y)], seed).loss
        held += loss.low <= truth <= loss.high
    assert held >= 51  # the chance of fewer is below 0.001 at 95 %


def test_intervals_hold_a_difference_that_varies_with_time() -> None:
    """In 60 data sets of 50 days on which new errors differ by 0.1 from old ones, with a deviation of 0.3."""
    held = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        new = 3.1 + np.repeat(0.3 * rng.standard_normal(50), 40) + 0.1 * rng.standard_normal(2000)
        loss = compare([Pair(new, np.full(2000, 3.0), np.zeros(2000))], seed).loss
        held += loss.low <= 0.1 <= loss.high
    assert held >= 51


def test_differences_at_several_times_are_means_by_the_number_of_rows() -> None:
    """An error of 1 in 30 rows and of 4 in 10 is one of 1.75; AUC is that within each time, not between them."""
    numbers = [Pair(np.full(rows, error), np.zeros(rows), np.zeros(rows)) for rows, error in ((30, 1.0), (10, 4.0))]
    assert compare(numbers, 0).loss.value == pytest.approx(1.75)
    y = np.array([0.0, 1.0] * 20)
    right, wrong = two_classes([0.1, 0.2] * 20), two_classes([0.9, 0.8] * 20)
    gain = compare([Pair(right, wrong, y), Pair(two_classes([0.7, 0.8] * 20), wrong, y)], 0).gain
    assert (gain.value, gain.low, gain.high) == (1, 1, 1)


@given(seed=st.integers(0, 2**32))
@examples(50)
def test_differences_are_those_of_the_measures(seed: int) -> None:
    """Of two and of three classes, and of weighted rows; numbers have no calibration."""
    rng = np.random.default_rng(seed)
    classes = int(rng.integers(2, 4))
    y = rng.integers(0, classes, 60).astype(float)
    new, old = (rng.dirichlet(np.ones(classes), 60) for _ in range(2))
    weights = rng.random(60) if rng.random() < 0.5 else None
    found, measures = compare([Pair(new, old, y, weights)], 0), [measure(own, y, weights) for own in (new, old)]
    for name in ("gain", "loss", "calibration"):
        expected = getattr(measures[0], name) - getattr(measures[1], name)
        assert getattr(found, name).value == pytest.approx(expected, abs=1e-12)
    assert compare([Pair(y, y + 1, y)], 0).calibration is None


def test_probabilities_that_are_right_are_better_calibrated_beyond_chance() -> None:
    """Of 2000 rows of which 30 % are positive, 0.3 has an error near 0 and 0.5 one of 0.2."""
    y = (np.random.default_rng(0).random(2000) < 0.3).astype(float)
    right, wrong = two_classes([0.3] * 2000), two_classes([0.5] * 2000)
    found = compare([Pair(right, wrong, y)], 0).calibration
    assert found
    assert found.excludes_zero
    assert found.low < -0.19 < found.high < 0


def test_equal_predictions_differ_by_nothing() -> None:
    """Both intervals are zero."""
    scores, y = two_classes([0.2, 0.4, 0.9, 0.5]), np.array([0.0, 1.0, 1.0, 0.0])
    found = compare([Pair(scores, scores, y)], 0)
    for interval in (found.gain, found.loss, found.calibration):
        assert interval
        assert not interval.excludes_zero
        assert (interval.value, interval.low, interval.high) == (0, 0, 0)


def test_a_base_rate_that_changes_beyond_chance_is_found() -> None:
    """30 % of 3000 rows and 20 % of 1000 rows differ; 30 % and 31 % do not."""
    earlier = np.repeat([1.0, 0.0], [900, 2100])
    assert prior_shift(earlier, np.repeat([1.0, 0.0], [200, 800]), 2) == (0.3, 0.2)
    assert prior_shift(earlier, np.repeat([1.0, 0.0], [310, 690]), 2) is None
