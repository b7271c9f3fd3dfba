"""The choice of tokens: greedy, temperature, top-k, top-p, repetition penalty and seeds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from chrion.errors import OptionError
from chrion.generation.sampling import Sampler, Sampling, probabilities

Array = np.ndarray[Any, Any]
SCORES = np.log(np.array([0.1, 0.4, 0.05, 0.25, 0.2]))
score_lists = arrays(np.float64, st.integers(1, 12), elements=st.floats(-8, 8, width=16))


def reference(scores: Array, top_k: int, top_p: float) -> Array:
    """Return what remains of the probabilities by the definitions, with one loop."""
    shares = np.exp(scores - scores.max())
    order = sorted(range(len(shares)), key=lambda token: (-shares[token], token))
    order = order[:top_k] if top_k else order
    total = sum(shares[token] for token in order)
    kept, sum_kept = [], 0.0
    for token in order:
        kept.append(token)
        sum_kept += shares[token]
        if top_p < 1 and sum_kept >= top_p * total:
            break
    return np.array([shares[token] if token in kept else 0.0 for token in range(len(shares))])


@given(score_lists, st.integers(0, 13), st.sampled_from([0.1, 0.5, 0.9, 1.0]))
def test_filters_follow_their_definitions(scores: Array, top_k: int, top_p: float) -> None:
    """Top-k keeps the k most probable tokens, top-p the fewest of these of a total probability."""
    np.testing.assert_allclose(probabilities(scores, top_k, top_p), reference(scores, top_k, top_p))


@given(score_lists, st.integers(0, 5), st.integers(0, 2**32))
def test_choices_have_a_probability(scores: Array, top_k: int, seed: int) -> None:
    """A token outside the filters is never chosen."""
    token = Sampler(Sampling(temperature=0.5, top_k=top_k, top_p=0.8, seed=seed), []).choose(scores)
    assert probabilities(scores / 0.5, top_k, 0.8)[token] > 0


def test_frequencies_are_the_probabilities() -> None:
    """Chi-squared of 20 000 draws stays below the 0.999 quantile of four degrees of freedom, 18.47."""
    sampler = Sampler(Sampling(temperature=1.0, seed=1), [])
    draws = np.bincount([sampler.choose(SCORES) for _ in range(20_000)], minlength=5)
    expected = np.exp(SCORES) * 20_000
    assert float(np.sum((draws - expected) ** 2 / expected)) < 18.47


def test_temperature_sharpens() -> None:
    """At temperature 0.5 probabilities are squared and normalised."""
    shares = probabilities(SCORES / 0.5, 0, 1.0)
    np.testing.assert_allclose(shares / shares.sum(), np.exp(SCORES) ** 2 / np.sum(np.exp(SCORES) ** 2))


@pytest.mark.parametrize("temperature", [5e-324, 1e-307, 1e-300])
def test_the_limit_of_low_temperatures_is_greedy(temperature: float) -> None:
    """Scores that overflow when they are divided choose the most probable token, or one of equal ones."""
    for scores, best in ((SCORES, {1}), (-1000 * SCORES, {2}), (np.array([3.0, -np.inf, 3.0]), {0, 2})):
        sampler = Sampler(Sampling(temperature=temperature, top_k=4, top_p=0.99, seed=3), [])
        assert {sampler.choose(scores) for _ in range(40)} == best


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("penalty", "token"), [(5e-324, 0), (1e308, 1)])
def test_extreme_repetition_penalties_are_limits(penalty: float, temperature: float, token: int) -> None:
    """Of a token in the prompt and another one, a penalty near 0 chooses the first, and a huge one the second."""
    how = Sampling(temperature=temperature, repetition_penalty=penalty)
    assert Sampler(how, [0]).choose(np.array([3.0, 2.0])) == token
    assert Sampler(how, [0, 1]).choose(np.array([-3.0, -2.0, -np.inf])) in {0, 1}


def test_greedy_takes_the_first_of_equal_scores() -> None:
    """Temperature 0 is argmax."""
    assert Sampler(Sampling(), []).choose(np.array([1.0, 3.0, 3.0])) == 1


def test_repetition_penalty_applies_to_the_prompt_and_to_chosen_tokens() -> None:
    """Positive scores are divided and negative ones multiplied, once for each token however often it occurs."""
    sampler = Sampler(Sampling(repetition_penalty=2.0), [0, 0])
    scores = np.array([3.0, 2.0, -1.0])
    assert [sampler.choose(scores) for _ in range(2)] == [1, 0]  # 1.5 < 2, then 1.5 > 1
    assert Sampler(Sampling(repetition_penalty=2.0), [1]).choose(np.array([-1.5, -1.0])) == 0


def test_equal_seeds_give_equal_tokens() -> None:
    """The sequence depends on the seed, and other seeds give others."""

    def draw(seed: int) -> list[int]:
        sampler = Sampler(Sampling(temperature=1.0, seed=seed), [])
        return [sampler.choose(SCORES) for _ in range(30)]

    assert draw(5) == draw(5) != draw(6)


def test_scores_that_are_not_numbers_are_refused() -> None:
    """A model that overflows does not give tokens."""
    for scores in ([1.0, np.nan], [-np.inf, -np.inf], [1.0, np.inf]):
        for sampling in (Sampling(), Sampling(temperature=1.0)):
            with pytest.raises(ValueError, match="not numbers"):
                Sampler(sampling, []).choose(np.array(scores))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        pytest.param("temperature", 10**400, id="temperature-beyond-floats"),
        pytest.param("repetition_penalty", 10**400, id="penalty-beyond-floats"),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("repetition_penalty", 0.0),
        ("seed", -1),
        ("seed", 1.5),
        ("top_k", 2.5),
    ],
)
def test_wrong_settings_are_refused(name: str, value: float) -> None:
    """The message names the setting."""
    with pytest.raises(OptionError, match=f"{name}: "):
        Sampling(**{name: value})  # type: ignore[arg-type]
