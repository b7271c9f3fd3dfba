"""Levels of scores over time, which no feature tells."""

from __future__ import annotations

import numpy as np
import pytest

from chrion.pipelines.leaves import BRIER, LOGISTIC, SOFTMAX, SQUARED
from chrion.pipelines.levels import levels_of

#: The parts of the rows with a level of their own.
PARTS = 20


def test_variances_and_means_of_numbers_are_those_of_an_analysis_of_variance() -> None:
    """With parts of one size, they are the textbook's estimates by mean squares, for scores that are all zero."""
    rng = np.random.default_rng(0)
    parts = 3.0 + 0.8 * rng.standard_normal((PARTS, 1)) + rng.standard_normal((PARTS, 50))
    within = parts.var(axis=1, ddof=1).mean() / 50
    between = max(0.0, parts.mean(axis=1).var(ddof=1) - within)
    found = levels_of(np.zeros((PARTS * 50, 1)), parts.ravel(), SQUARED)
    assert found.future == pytest.approx(parts.mean() - between / parts.mean())
    expected = parts.mean() + between / (between + within) * (parts.mean(axis=1) - parts.mean())
    np.testing.assert_allclose(found.rows.reshape(PARTS, 50), np.repeat(expected[:, None], 50, axis=1))


@pytest.mark.parametrize("share", [0.001, 0.2, 0.999])
def test_a_share_that_is_the_same_at_all_times_is_kept(share: float) -> None:
    """The level of rows to come is the difference in log odds, which a model with equal scores has."""
    y = np.zeros(1000 * PARTS)
    y[:: round(1 / share) if share < 0.5 else 1] = 1
    if share > 0.5:
        y[:: round(1 / (1 - share))] = 0
    odds = y.mean() / (1 - y.mean())
    found = levels_of(np.full((len(y), 1), -0.5), y, LOGISTIC)
    assert found.future == pytest.approx(np.log(odds) + 0.5, rel=1e-3)
    np.testing.assert_allclose(found.rows, np.log(odds) + 0.5, rtol=1e-3)
    assert not found.vary


def test_shares_of_several_classes_are_kept() -> None:
    """Probabilities become the shares, also if one class has nearly all rows."""
    y = np.tile(np.repeat([0.0, 1.0, 2.0], [90, 9, 1]), 5 * PARTS)
    found = levels_of(np.zeros((len(y), 3)), y, SOFTMAX)
    np.testing.assert_allclose(SOFTMAX.predict(found.future[None])[0], [0.9, 0.09, 0.01], rtol=1e-3)


def test_a_share_that_goes_up_and_down_is_not_kept() -> None:
    """Days with half and with twice the odds have levels of their own, and say nothing of days to come."""
    rng = np.random.default_rng(1)
    odds = np.repeat(np.tile([-0.6, 0.8], PARTS // 2), 500)
    y = (rng.random(len(odds)) < 1 / (1 + np.exp(-odds))).astype(float)
    found = levels_of(np.zeros((len(y), 1)), y, LOGISTIC)
    assert (found.future, found.vary) == (0, True)
    np.testing.assert_allclose(found.rows[:, 0], odds, atol=0.35)


def test_classes_that_are_missing_for_a_time_have_finite_levels() -> None:
    """Rows of one class, at one time or always, change levels by a finite amount."""
    for y in (np.repeat([0.0, 1.0], 100), np.zeros(200), np.ones(200)):
        found = levels_of(np.zeros((200, 1)), y, LOGISTIC)
        assert np.isfinite(found.rows).all()
        assert np.isfinite(found.future).all()


def test_averaged_probabilities_have_no_level() -> None:
    """Scores of forests are probabilities, to which nothing may be added."""
    found = levels_of(np.full((100, 2), 0.5), np.zeros(100), BRIER)
    assert not found.rows.any()
    assert not found.future.any()
