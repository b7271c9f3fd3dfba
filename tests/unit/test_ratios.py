"""How the benchmarks compare rivals."""

from __future__ import annotations

import numpy as np
import pytest
from ratios import Turn, quiet, ratio


def test_turns_count_by_the_cores_and_not_by_what_they_timed() -> None:
    """Full speed is 1 ms: up to 1.1 ms is quiet."""
    turns = [Turn("a", 5.0, 1.0), Turn("b", 9.0, 1.1), Turn("a", 1.0, 1.2), Turn("b", 8.0, 1.0), Turn("a", 6.0, 1.05)]
    assert quiet(turns, 1.0, 1) == {"a": [5.0, 6.0], "b": [9.0, 8.0]}


def test_where_it_is_never_quiet_the_quietest_count() -> None:
    """And as many of them as are asked for, or all."""
    turns = [Turn("a", 5.0, 2.0), Turn("a", 4.0, 1.5), Turn("a", 3.0, 3.0)]
    assert quiet(turns, 1.0, 2) == {"a": [5.0, 4.0]}
    assert quiet(turns, 1.0, 9) == {"a": [5.0, 4.0, 3.0]}


def test_one_mark_holds_for_all() -> None:
    """Where one rival has too few quiet turns, the others' are taken from as busy cores."""
    turns = [Turn("a", 5.0, 1.0), Turn("a", 6.0, 1.5), Turn("a", 7.0, 2.0), Turn("b", 9.0, 1.5), Turn("b", 9.5, 2.5)]
    assert quiet(turns, 1.0, 1) == {"a": [5.0, 6.0], "b": [9.0]}


def test_turns_without_noise_give_the_quotient() -> None:
    """3 ms beside 4 ms and 9 ms."""
    found = ratio({"own": [3.0] * 4, "slow": [9.0] * 4, "fast": [4.0] * 4}, "own")
    assert found == pytest.approx((0.75, 0.75, 0.75))


def test_nobody_is_the_best_by_luck() -> None:
    """Of four that are equally fast, the ratio is 1 on average, which it is not over the best of the same turns."""
    rng = np.random.default_rng(0)
    fair, lucky = [], []
    for _ in range(200):
        turns = {name: rng.normal(1.0, 0.05, 20) for name in ("own", "a", "b", "c")}
        fair.append(ratio({name: list(times) for name, times in turns.items()}, "own")[0])
        lucky.append(np.median(turns["own"]) / min(np.median(turns[name]) for name in "abc"))
    assert np.mean(fair) == pytest.approx(1.0, abs=0.005)  # standard error 0.002
    assert np.mean(lucky) > 1.008


def test_the_interval_holds_the_true_ratio_nine_times_out_of_ten() -> None:
    """Give or take what a bootstrap over so few turns, and 200 tries, are off by."""
    rng = np.random.default_rng(1)
    held = 0
    for _ in range(200):
        turns = {"own": rng.normal(0.8, 0.04, 24), "a": rng.normal(1.0, 0.05, 24), "b": rng.normal(1.3, 0.05, 24)}
        _, low, high = ratio({name: list(times) for name, times in turns.items()}, "own")
        held += low <= 0.8 <= high
    assert 0.82 <= held / 200 <= 0.97
