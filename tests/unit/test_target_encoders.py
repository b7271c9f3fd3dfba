"""Tables of target encoders updated with new rows: against their formulas, row by row."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chrion.pipelines.encoders import FOLDS, PRIORS, EncodedRows, Encoder, Prior
from property_tests import examples

OLD = {"a": 0.1, "b": 0.4, "c": 0.9}
NEW = 0.5
NAMES = ["b", "new", "a", "other"]


def rows_of(codes: Any, y: Any, *, fractions: bool = True, moved: bool = False, share: float = 1.0) -> EncodedRows:
    """Return rows of a table with three categories."""
    encoder = Encoder(0, "city", "code", OLD, NEW)
    return EncodedRows(encoder, NAMES, np.asarray(codes), y, fractions=fractions, moved=moved, share=share)


def value(name: str, prior: Prior | None, mean: float, y: list[float]) -> float:
    """Return the value of a category with the targets of some of its rows."""
    old = OLD.get(name, NEW)
    if prior is None or not y:
        return old
    return (prior.old * len(y) * old + prior.mean * mean + sum(y)) / (prior.old * len(y) + prior.mean + len(y))


@pytest.mark.parametrize("fractions", [True, False])
@given(seed=st.integers(0, 2**32 - 1))
@examples(10)
def test_values_follow_the_prior_that_predicts_parts_from_the_others(*, fractions: bool, seed: int) -> None:
    """Rows that update the table get values of the other four parts, later ones those of the table."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 4, 60)
    y = rng.integers(0, 2, 60).astype(float) if fractions else rng.random(60)
    part = np.arange(40) // (40 // FOLDS)
    mean = float(y[:40].mean())

    def other(prior: Prior | None, at: int) -> float:
        used = [y[i] for i in range(40) if codes[i] == codes[at] and (at >= 40 or part[i] != part[at])]
        return value(NAMES[codes[at]], prior, mean, used)

    def loss(prior: Prior | None) -> float:
        found = [other(prior, at) for at in range(40)]
        if not fractions:
            return sum((f - own) ** 2 for f, own in zip(found, y, strict=False))
        clipped = [min(max(f, 1e-6), 1 - 1e-6) for f in found]
        return sum(-math.log(f if own else 1 - f) for f, own in zip(clipped, y, strict=False))

    found = rows_of(codes, y, fractions=fractions).updated(40)
    assert loss(found.prior) == pytest.approx(min(map(loss, PRIORS)))
    np.testing.assert_allclose(found.values, [other(found.prior, at) for at in range(60)], atol=1e-6)
    seen = {NAMES[code] for code in codes[:40].tolist()}
    assert set(found.table) == {*OLD, *seen}
    for name in seen:
        own = y[:40][codes[:40] == NAMES.index(name)].tolist()
        assert found.table[name] == pytest.approx(value(name, found.prior, mean, own))
    assert found.table["c"] == OLD["c"]


def test_a_change_of_the_mean_target_is_left_to_the_leaves() -> None:
    """If the odds of all categories fall by one factor, their values stay about the same, and no order changes."""
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 4, 40_000)
    rates = np.array([OLD.get(name, NEW) for name in NAMES])
    fallen = 0.3 * rates / (1 - 0.7 * rates)
    found = rows_of(codes, (rng.random(40_000) < fallen[codes]).astype(float), moved=True).updated(40_000)
    for name, rate in zip(NAMES, rates, strict=True):
        assert found.table.get(name, NEW) == pytest.approx(rate, abs=0.03)
    kept = rows_of(codes, (rng.random(40_000) < fallen[codes]).astype(float)).updated(40_000)
    assert kept.table["b"] == pytest.approx(fallen[0], abs=0.03)


def test_priors_follow_how_much_categories_have_changed() -> None:
    """Old values of 300 categories count much where rates are as they were, and little where they are others."""
    rng = np.random.default_rng(0)
    same, others = rng.random(300), rng.random(300)
    codes, names = rng.integers(0, 300, 6000), [f"c{at}" for at in range(300)]
    encoder = Encoder(0, "city", "code", dict(zip(names, same.tolist(), strict=True)), NEW)
    kept, changed = (
        EncodedRows(encoder, names, codes, (rng.random(6000) < rates[codes]).astype(float), fractions=True, moved=True)
        .updated(6000)
        .prior
        for rates in (same, others)
    )
    assert kept is None or kept.old >= 10
    assert changed is not None
    assert changed.old <= 0.3


def test_a_share_of_each_change_is_kept() -> None:
    """Half a share has values in the middle between the old and the new ones, in the table and for all rows."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 4, 400)
    y = (rng.random(400) < np.array([0.9, 0.1, 0.5, 0.5])[codes]).astype(float)
    half, whole = (rows_of(codes, y, share=share).updated(300) for share in (0.5, 1.0))
    assert whole.prior is not None
    old = np.array([OLD.get(name, NEW) for name in NAMES])
    np.testing.assert_allclose(half.values, (whole.values + old[codes]) / 2, atol=1e-6)
    assert half.table == pytest.approx({name: (new + OLD.get(name, NEW)) / 2 for name, new in whole.table.items()})
