"""The statistics of the ratios that benchmarks report: no selection bias, and the confidence of their intervals."""

from __future__ import annotations

import numpy as np
import pytest
from ratios import quantile_ratio_to_best, ratio_to_best


def test_the_ratio_has_no_selection_bias() -> None:
    """Among four equally fast candidates the mean ratio is 1, unlike the ratio to the best of the same trials."""
    rng = np.random.default_rng(0)
    unbiased, biased = [], []
    for _ in range(200):
        trials = {name: rng.normal(1.0, 0.05, 20) for name in ("own", "a", "b", "c")}
        unbiased.append(ratio_to_best({name: list(times) for name, times in trials.items()}, "own")[0])
        biased.append(np.median(trials["own"]) / min(np.median(trials[name]) for name in "abc"))
    assert np.mean(unbiased) == pytest.approx(1.0, abs=0.005)  # standard error 0.002
    assert np.mean(biased) > 1.008


def test_the_interval_contains_the_true_ratio_nine_times_out_of_ten() -> None:
    """Nine in ten intervals contain the true ratio.

    The tolerance covers the error of a bootstrap over so few trials and the noise of 200 repetitions.
    """
    rng = np.random.default_rng(1)
    contained = 0
    for _ in range(200):
        trials = {"own": rng.normal(0.8, 0.04, 24), "a": rng.normal(1.0, 0.05, 24), "b": rng.normal(1.3, 0.05, 24)}
        _, low, high = ratio_to_best(trials, "own")
        contained += low <= 0.8 <= high
    assert 0.82 <= contained / 200 <= 0.97


def test_the_ratio_of_quantiles_has_no_selection_bias() -> None:
    """Among equally fast candidates the mean ratio of 99th percentiles is 1."""
    rng = np.random.default_rng(0)
    found = [
        quantile_ratio_to_best({name: list(rng.gamma(4.0, 1.0, (8, 200))) for name in "oabc"}, "o", 0.99)
        for _ in range(100)
    ]
    assert np.mean([ratio for ratio, _, _ in found]) == pytest.approx(1.0, abs=0.02)
    assert 0.75 <= np.mean([low <= 1.0 <= high for _, low, high in found]) <= 1.0
