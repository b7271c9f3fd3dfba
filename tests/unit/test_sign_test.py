"""The sequential sign test, against the theory of random walks between two limits."""

from __future__ import annotations

from random import Random

import pytest

from chrion.common.sign_test import MOST_PAIRS, is_faster


def draw_test(random: Random, p: float) -> tuple[bool | None, int]:
    """Return the decision, and the number of pairs, of which each is won with probability ``p``."""
    pairs: list[tuple[float, float]] = []
    faster = None
    while faster is None and len(pairs) < MOST_PAIRS:
        pairs.append((1.0, 2.0) if random.random() < p else (2.0, 1.0))
        faster = is_faster(pairs, 0.95)
    return faster, len(pairs)


@pytest.mark.parametrize("p", [0.6, 0.7, 0.8])
def test_the_error_and_the_number_of_pairs_are_those_of_the_theory(p: float) -> None:
    """Of a walk between -5 and 5: Feller, An Introduction to Probability Theory, chapter XIV, equations 2.4 and 3.4."""
    random, trials = Random(0), 4000
    found = [draw_test(random, p) for _ in range(trials)]
    wrong = 1 / (1 + (p / (1 - p)) ** 5)
    assert sum(faster is False for faster, _ in found) == pytest.approx(wrong * trials, abs=4 * (wrong * trials) ** 0.5)
    mean = 5 * (1 - 2 * wrong) / (2 * p - 1)
    assert sum(pairs for _, pairs in found) / trials == pytest.approx(mean, rel=0.05)


def test_a_candidate_has_to_be_faster_by_the_share() -> None:
    """It wins a pair at exactly this share of the baseline's latency, and loses it above; four pairs do not decide."""
    assert is_faster([(0.8, 1.0)] * 5, 0.8) is True
    assert is_faster([(0.81, 1.0)] * 5, 0.8) is False
    assert is_faster([(0.8, 1.0)] * 4, 0.8) is None
    assert is_faster([(0.8, 1.0)] * 20 + [(1.0, 1.0)] * 16, 0.8) is None
    assert is_faster([], 0.95) is None
