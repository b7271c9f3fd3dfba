"""The fit of the costs of iterations."""

from __future__ import annotations

import numpy as np
import pytest
from decoding.costs import fit_costs

from chrion.serving.simulator.decoder_costs import IterationCosts


def test_costs_are_fitted_to_measured_iterations() -> None:
    """Exact times give the costs back; a term that would be below zero is left out."""
    rng = np.random.default_rng(0)
    batches = [(rng.integers(1, 50, size), rng.integers(0, 500, size)) for size in rng.integers(1, 9, 100)]
    costs = IterationCosts(3.0, 0.25, 0.5, 0.002, 1.0)
    found = fit_costs(batches, [costs.iteration_ms(*batch) for batch in batches])
    for name in ("fixed_ms", "token_ms", "request_ms", "pair_ms", "batch_ms"):
        assert getattr(found, name) == pytest.approx(getattr(costs, name))
    falling = fit_costs(batches, [1000.0 / len(batch[0]) for batch in batches])
    assert min(falling.fixed_ms, falling.token_ms, falling.request_ms, falling.pair_ms) >= 0.0


def test_fitted_costs_predict_the_sum_of_delayed_iterations() -> None:
    """If every fourth iteration takes twice as long, the fitted ones take 1.25 times as long, as they do on average."""
    rng = np.random.default_rng(0)
    batches = [([1] * size, rng.integers(0, 500, size).tolist()) for size in rng.integers(1, 33, 4000)]
    costs = IterationCosts(1.0, 0.0, 0.1, 0.0)
    times_ms = [costs.iteration_ms(*batch) * (1 + (at % 4 == 0)) for at, batch in enumerate(batches)]
    found = fit_costs(batches, times_ms)
    assert sum(found.iteration_ms(*batch) for batch in batches) == pytest.approx(sum(times_ms), rel=0.01)
    assert found.iteration_ms([1] * 8, [200] * 8) == pytest.approx(1.25 * 1.8, rel=0.03)


def test_one_stall_does_not_move_fitted_costs() -> None:
    """One iteration of 200 takes a hundred times as long; the fit of the others moves by a few per cent."""
    batches = [([1] * size, [100] * size) for size in range(1, 21)] * 10
    costs = IterationCosts(1.0, 0.0, 0.1, 0.0)
    times_ms = [costs.iteration_ms(*batch) for batch in batches]
    times_ms[7] *= 100
    assert fit_costs(batches, times_ms).iteration_ms([1] * 8, [100] * 8) == pytest.approx(1.8, rel=0.05)
