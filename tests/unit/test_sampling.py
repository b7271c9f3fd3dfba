"""The choice of tokens: greedy, temperature, filters, penalties, biases and seeds; and their probabilities."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from chrion.errors import OptionError
from chrion.generation.sampling import Sampler, Sampling, log_probabilities, probabilities

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
    """Chi-squared of 5000 draws stays below the 0.999 quantile of four degrees of freedom, 18.47."""
    sampler = Sampler(Sampling(temperature=1.0, seed=1), [])
    draws = np.bincount([sampler.choose(SCORES) for _ in range(5000)], minlength=5)
    expected = np.exp(SCORES) * 5000
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


@given(scores=score_lists, data=st.data())
def test_penalties_follow_the_formula_of_openai(scores: Array, data: st.DataObject) -> None:
    """The score of a token is reduced by its count times one penalty, and once by the other, also if it is greedy."""
    frequency, presence = data.draw(st.floats(-2, 2)), data.draw(st.floats(-2, 2))
    how = Sampling(frequency_penalty=frequency, presence_penalty=presence)
    prompt = data.draw(st.lists(st.integers(0, len(scores) - 1)))  # its tokens do not count
    sampler = Sampler(how, prompt)
    counts = np.zeros(len(scores))
    for _ in range(6):
        expected = int(np.argmax(scores - counts * frequency - (counts > 0) * presence))
        assert sampler.choose(scores) == expected
        counts[expected] += 1


def test_biases_are_added_to_scores() -> None:
    """A bias of 100 is an exclusive choice, one of -100 a ban, and a small one shifts probabilities."""
    assert Sampler(Sampling(logit_bias={2: 100}), []).choose(SCORES) == 2
    assert Sampler(Sampling(logit_bias={1: -100}), []).choose(SCORES) == 3
    sampler = Sampler(Sampling(temperature=1.0, seed=2, logit_bias={0: np.log(3.0)}), [])
    draws = np.bincount([sampler.choose(SCORES) for _ in range(5000)], minlength=5)
    expected = np.array([0.3, 0.4, 0.05, 0.25, 0.2]) / 1.2 * 5000
    assert float(np.sum((draws - expected) ** 2 / expected)) < 18.47  # as above


def test_min_p_keeps_tokens_of_a_share_of_the_greatest_probability() -> None:
    """Of 0.1, 0.4, 0.05, 0.25 and 0.2, those of at least half of 0.4 remain; so they do among the filtered ones."""
    expected = np.array([0.0, 0.4, 0.0, 0.25, 0.2]) / 0.4
    np.testing.assert_allclose(probabilities(SCORES, 0, 1.0, 0.49), expected)
    np.testing.assert_allclose(probabilities(SCORES, 2, 1.0, 0.49), expected * [0, 1, 0, 1, 0])
    sampler = Sampler(Sampling(temperature=1.0, min_p=1.0), [])
    assert {sampler.choose(SCORES) for _ in range(40)} == {1}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("penalty", [1e308, -1e308])
def test_extreme_penalties_and_biases_are_limits(temperature: float, penalty: float) -> None:
    """Numbers that overflow are the greatest ones, and scores that were not finite stay so."""
    how = Sampling(temperature, frequency_penalty=penalty, presence_penalty=penalty, logit_bias={0: penalty, 2: 1e308})
    sampler = Sampler(how, [])
    assert {sampler.choose(np.array([1.0, 1.0, -np.inf])) for _ in range(6)} <= {0, 1}


def test_tokens_that_come_late() -> None:
    """The end tokens are not chosen before the least number of others, and then as if nothing had been excluded."""
    for temperature in (0.0, 1e-3):
        sampler = Sampler(Sampling(temperature), [], late=[1, 3], least=3)
        assert [sampler.choose(SCORES) for _ in range(5)] == [4, 4, 4, 1, 1]
    with pytest.raises(ValueError, match="every other token is excluded"):
        Sampler(Sampling(), [], late=range(5), least=1).choose(SCORES)


@given(score_lists, st.integers(0, 13), st.data())
def test_log_probabilities_are_those_of_softmax(scores: Array, count: int, data: st.DataObject) -> None:
    """The most probable tokens come first, of equal ones the lower, also for scores far from zero."""
    token = data.draw(st.integers(0, len(scores) - 1))
    shares = np.exp(scores) / np.sum(np.exp(scores))
    for shift in (0.0, 1000.0, -1000.0):
        found, top = log_probabilities(scores + shift, token, count)
        assert found == pytest.approx(float(np.log(shares[token])), abs=1e-9)
        expected = sorted(range(len(scores)), key=lambda at: (-scores[at], at))[:count]
        assert [at for at, _ in top] == expected
        np.testing.assert_allclose([value for _, value in top], np.log(shares[expected]), atol=1e-9)


def test_log_probabilities_of_impossible_tokens() -> None:
    """A score of minus infinity is the probability zero."""
    found, top = log_probabilities(np.array([0.0, -np.inf, 0.0], np.float32), 1, 3)
    assert found == -np.inf
    assert top == ((0, pytest.approx(np.log(0.5))), (2, pytest.approx(np.log(0.5))), (1, -np.inf))


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
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("presence_penalty", float("inf")),
        ("frequency_penalty", "0"),
        ("logit_bias", [1]),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {"1": 1.0}),
        ("logit_bias", {1: "much"}),
        ("logit_bias", {1: float("nan")}),
    ],
)
def test_wrong_settings_are_refused(name: str, value: Any) -> None:
    """The message names the setting."""
    with pytest.raises(OptionError, match=f"{name}: "):
        Sampling(**{name: value})


def test_settings_are_values() -> None:
    """They have copies of their own of what may change, and equal ones are equal keys."""
    bias = {1: 2}
    how = Sampling(logit_bias=bias)
    bias[1] = 3
    assert how == Sampling(logit_bias={1: 2.0})
    assert len({how, Sampling(logit_bias={1: 2.0}), Sampling()}) == 2


def test_numbers_of_other_types_are_floats() -> None:
    """Decimals and fractions choose as the floats of their values."""
    scores = np.random.default_rng(3).standard_normal(50).astype(np.float32)
    found = Sampling(Decimal("0.7"), 20, Fraction(1, 2), Decimal("1.1"), seed=np.uint8(4))  # type: ignore[arg-type]
    expected = Sampling(0.7, 20, 0.5, 1.1, seed=4)
    assert found == expected
    one, other = Sampler(found, [1, 2]), Sampler(expected, [1, 2])
    assert [one.choose(scores) for _ in range(20)] == [other.choose(scores) for _ in range(20)]
