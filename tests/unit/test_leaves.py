"""Leaves fitted anew: against a closed form, a condition of optimality, and finite differences."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("scipy", reason="no SciPy in this environment")

from chrion.pipelines.leaves import BRIER, LOGISTIC, PROBABILITY, SOFTMAX, SQUARED, LeafProblem, Loss, fit_leaves, refit
from property_tests import examples

LOSSES = {"logistic": LOGISTIC, "softmax": SOFTMAX, "brier": BRIER, "probability": PROBABILITY, "squared": SQUARED}


def problem(rng: Any, loss: Loss, rows: int = 60, trees: int = 4, leaves: int = 3) -> LeafProblem:
    """Return a problem of random leaves."""
    targets = 3 if loss in {SOFTMAX, BRIER} else 1
    columns = [slice(at * trees, (at + 1) * trees) for at in range(targets)]
    first = np.arange(targets * trees) * leaves
    y = rng.standard_normal(rows) if loss is SQUARED else rng.integers(0, max(2, targets), rows).astype(float)
    return LeafProblem(
        reached=rng.integers(0, leaves, (rows, targets * trees)) + first,
        columns=columns,
        y=y,
        base=rng.standard_normal(targets),
        scale=1 / trees if loss in {BRIER, PROBABILITY} else 1.0,
        loss=loss,
        original=rng.standard_normal(targets * trees * leaves),
    )


def test_squared_loss_has_the_solution_of_the_normal_equations() -> None:
    """The ridge regression is the one that NumPy solves with the whole matrix."""
    given_here = problem(np.random.default_rng(0), SQUARED)
    matrix = np.zeros((60, 12))
    np.put_along_axis(matrix, given_here.reached, 1.0, axis=1)
    target = given_here.y - given_here.base[0] - matrix @ given_here.original
    expected = given_here.original + np.linalg.solve(matrix.T @ matrix + 2.0 * np.eye(12), matrix.T @ target)
    np.testing.assert_allclose(fit_leaves(given_here, 2.0), expected, atol=1e-3)


@pytest.mark.parametrize("name", LOSSES)
@given(seed=st.integers(0, 2**32))
@examples(20)
def test_gradients_are_those_of_finite_differences(name: str, seed: int) -> None:
    """The derivative along a random direction is the difference quotient."""
    rng = np.random.default_rng(seed)
    given_here = problem(rng, LOSSES[name])
    at, direction = given_here.original, rng.standard_normal(len(given_here.original))
    step = 1e-5
    quotient = (
        (given_here.evaluate(at + step * direction)[0] - given_here.evaluate(at - step * direction)[0]) / 2 / step
    )
    assert given_here.evaluate(at)[1] @ direction == pytest.approx(quotient, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("name", LOSSES)
def test_fitted_leaves_are_optimal(name: str) -> None:
    """The gradient of losses and ridge vanishes, and leaves that no row reaches keep their weights."""
    given_here = problem(np.random.default_rng(1), LOSSES[name])
    unreached = given_here.reached[0, 0]
    given_here = given_here.part(given_here.reached[:, 0] != unreached)  # type: ignore[arg-type] # a mask selects rows, too
    ridge = 1.5
    found = fit_leaves(given_here, ridge)
    rest = given_here.evaluate(found)[1] + ridge * given_here.loss.curvature * (found - given_here.original)
    first = given_here.evaluate(given_here.original)[1]
    assert np.abs(rest).max() <= 2e-4 * np.abs(first).max()
    assert found[unreached] == given_here.original[unreached]


def test_a_large_ridge_keeps_the_original() -> None:
    """The weights move less the larger the ridge is."""
    given_here = problem(np.random.default_rng(2), LOGISTIC)
    moves = [np.abs(fit_leaves(given_here, ridge) - given_here.original).max() for ridge in (1.0, 100.0, 1e6)]
    assert moves[0] > moves[1] > moves[2]
    assert moves[2] < 1e-3


def test_raw_scores_of_many_rows_take_little_memory() -> None:
    """Weights of 20 000 rows and 300 trees would take 48 MB at once; the sums are those of each tree after another."""
    rng = np.random.default_rng(3)
    reached, weights = rng.integers(0, 900, (20_000, 300), np.uint16), rng.standard_normal(900)
    given_here = LeafProblem(
        reached, [slice(0, 200), slice(200, 300)], np.zeros(20_000), np.ones(2), 0.5, BRIER, weights
    )
    tracemalloc.start()
    found = given_here.raw(weights, slice(10, None))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20e6
    for at, columns in enumerate(given_here.columns):
        expected = 1 + 0.5 * sum(weights[reached[10:, column]] for column in range(columns.start, columns.stop))
        np.testing.assert_allclose(found[:, at], expected)


def test_a_refit_is_that_of_lightgbm() -> None:
    """Two leaves by hand: nine tenths and a tenth of the Newton step; a leaf that no row reaches keeps nine tenths."""
    reached, y = np.array([[0], [1], [1], [1]]), np.array([0.0, 1.0, 1.0, 0.0])
    given_here = LeafProblem(reached, [slice(0, 1)], y, np.zeros(1), 1.0, LOGISTIC, np.array([1.0, -2.0, 3.0]))
    steps = np.array([-0.5 / 0.25, 0.5 / 0.75, 0.0])
    np.testing.assert_allclose(refit(given_here, 0.3), 0.9 * given_here.original + 0.1 * 0.3 * steps)
