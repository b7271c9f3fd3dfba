"""The choice of the next token: greedy, or at random from the most probable ones, and the probabilities of tokens.

The order of the steps is that of transformers: biases of tokens, repetition penalty (Keskar et al., *CTRL*, 2019,
section 4.1), temperature, top-k (Fan et al., 2018), top-p (Holtzman et al., *The curious case of neural text
degeneration*, 2020), min-p (Nguyen et al., *Turning up the heat*, 2024). Two penalties of the OpenAI API follow the
repetition penalty, as in vLLM: the score of a token that has been generated c > 0 times is reduced by c times the
frequency penalty, and once by the presence penalty.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from chrion.common.wrong_values import wrong_value
from chrion.generation.arguments import whole_number

Array = np.ndarray[Any, Any]
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")


@dataclass(frozen=True, slots=True)
class Sampling:
    """The way in which the tokens of a request are chosen.

    Raises:
        OptionError: A number is out of range.
    """

    #: Divides the scores; 0 chooses the most probable token.
    temperature: float = 0.0
    #: Only the ``top_k`` most probable tokens; 0 for all.
    top_k: int = 0
    #: Only the fewest most probable tokens of this total probability.
    top_p: float = 1.0
    #: Divides the positive scores of tokens in the prompt or the text, and multiplies the negative ones.
    repetition_penalty: float = 1.0
    seed: int = 0
    #: Is subtracted from the scores of tokens that have been generated.
    presence_penalty: float = 0.0
    #: Is subtracted from the score of a token for each time that it has been generated.
    frequency_penalty: float = 0.0
    #: Is added to the scores of single tokens.
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    #: Only tokens of at least this share of the greatest probability.
    min_p: float = 0.0

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            object.__setattr__(self, name, _finite_number(name, getattr(self, name)))
        for name in ("top_k", "seed"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name)))
        for name, allowed, expected in (
            ("temperature", self.temperature >= 0, "0 or more"),
            ("top_k", self.top_k >= 0, "0 or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "0 to 1"),
            ("repetition_penalty", self.repetition_penalty > 0, "above 0"),
            ("seed", self.seed >= 0, "0 or more"),
        ):
            if not allowed:
                raise wrong_value(name, expected, getattr(self, name))
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))

    @property
    def changes_scores(self) -> bool:
        """True if the most probable token of the model may not be the most probable one after penalties and biases."""
        penalised = self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        return penalised or bool(self.logit_bias)


class Sampler:
    """The choices of one request. Its random numbers depend on its seed and the number of its token only.

    Args:
        sampling: How to choose.
        prompt: The tokens of the prompt.
        late: Tokens that are not chosen before there are ``least`` others.
        least: The number of other tokens before them.
    """

    def __init__(self, sampling: Sampling, prompt: Collection[int], late: Collection[int] = (), least: int = 0) -> None:
        self._sampling, self._changes_scores = sampling, sampling.changes_scores
        self._seen = dict.fromkeys(prompt)
        self._counts: dict[int, int] = {}
        self._late, self._least, self._chosen = np.array([*late], np.int64), least, 0

    def choose(self, scores: Array) -> int:
        """Return the next token.

        Args:
            scores: The logits, [vocabulary].

        Raises:
            ValueError: A score is not a number, or no token may be chosen.
        """
        best = int(scores.argmax())  # the first NaN, if there is one
        if not math.isfinite(scores.item(best)):
            raise ValueError("the model's scores are not numbers")
        changed = self._changes_scores or self._is_early
        if not changed and self._sampling.temperature == 0:
            token = best
        else:
            exact = np.array(scores, np.float64)
            token = self._draw(self._change(exact) if changed else exact)
        if self._changes_scores:
            self._seen[token] = None
            self._counts[token] = self._counts.get(token, 0) + 1
        self._chosen += 1
        return token

    @functools.cached_property
    def _bias(self) -> tuple[Array, Array]:
        """The tokens with biases, and these."""
        return _arrays(self._sampling.logit_bias)

    @functools.cached_property
    def _random(self) -> np.random.Generator:
        """The random numbers; to seed them takes longer than to choose a token."""
        return np.random.default_rng(self._sampling.seed)

    @property
    def _is_early(self) -> bool:
        return self._chosen < self._least and self._late.size > 0

    def _change(self, scores: Array) -> Array:
        """Return scores after biases and penalties; the array is overwritten."""
        how = self._sampling
        if how.logit_bias:
            tokens, bias = self._bias
            scores[tokens] = _limited(scores[tokens], scores[tokens] + bias)
        if how.repetition_penalty != 1 and self._seen:
            seen = np.fromiter(self._seen, np.int64)
            scores[seen] = _penalise(scores[seen], how.repetition_penalty)
        if (how.frequency_penalty or how.presence_penalty) and self._counts:
            tokens, counts = _arrays(self._counts)
            with np.errstate(over="ignore"):
                penalised = scores[tokens] - counts * how.frequency_penalty - how.presence_penalty
            scores[tokens] = _limited(scores[tokens], penalised)
        if self._is_early:
            scores[self._late] = -np.inf
            if np.isneginf(scores.max()):
                raise ValueError("every other token is excluded")
        return scores

    def _draw(self, scores: Array) -> int:
        how = self._sampling
        if how.temperature == 0:
            return int(np.argmax(scores))
        with np.errstate(over="ignore"):  # the greatest score is 0, those far below have the probability 0
            scaled = (scores - scores.max()) / how.temperature
        shares = probabilities(scaled, how.top_k, how.top_p, how.min_p)
        # One random number for every token, whatever the shares, so that the sequence depends on the seed only.
        limits = np.cumsum(shares)
        chosen = int(np.searchsorted(limits, self._random.random() * limits[-1], side="right"))
        return min(chosen, int(np.flatnonzero(shares)[-1]))  # the product may be rounded up to the total


def _penalise(scores: Array, penalty: float) -> Array:
    """Return scores with the repetition penalty."""
    with np.errstate(over="ignore"):
        return _limited(scores, np.where(scores > 0, scores / penalty, scores * penalty))


def _limited(before: Array, after: Array) -> Array:
    """Return changed scores; those that were finite remain finite, and the others remain what they were."""
    most = np.finfo(np.float64).max
    return np.asarray(np.where(np.isfinite(before), np.clip(after, -most, most), before))


def probabilities(scores: Array, top_k: int, top_p: float, min_p: float = 0.0) -> Array:
    """Return the probabilities of the tokens after top-k, top-p and min-p, not normalised.

    Of equal scores the lower token comes first. At least one token remains.
    """
    shares = np.exp(scores - scores.max())
    if top_k or top_p < 1:
        order = np.argsort(-shares, kind="stable")
        kept = order[: top_k or len(order)]
        totals = np.cumsum(shares[kept])
        kept = kept[: 1 + int(np.searchsorted(totals, top_p * totals[-1]))] if top_p < 1 else kept
        filtered = np.zeros_like(shares)
        filtered[kept] = shares[kept]
        shares = filtered
    if min_p:
        shares[shares < min_p] = 0.0  # the greatest share is 1
    return np.asarray(shares)


def log_probabilities(scores: Array, token: int, count: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    """Return the logarithm of the probability of a token, and the most probable tokens with theirs.

    Args:
        scores: The logits, [vocabulary].
        token: The token.
        count: The number of most probable tokens to return, the most probable first; of equal ones the lower first.
    """
    exact = np.asarray(scores, np.float64)
    greatest = exact.max()
    total = greatest + math.log(np.exp(exact - greatest).sum())
    count = min(count, len(exact))
    top: Array = np.empty(0, np.int64)
    if count:
        likeliest = np.flatnonzero(exact >= np.partition(exact, -count)[-count])
        top = likeliest[np.argsort(-exact[likeliest], kind="stable")[:count]]
    return float(exact[token] - total), tuple((int(at), float(exact[at] - total)) for at in top)


def _arrays(pairs: Mapping[int, float]) -> tuple[Array, Array]:
    """Return the tokens of a mapping, and their numbers."""
    return np.fromiter(pairs, np.int64, len(pairs)), np.fromiter(pairs.values(), np.float64, len(pairs))


def _checked_bias(bias: Mapping[int, float]) -> dict[int, float]:
    """Return biases as a dictionary of their own.

    Raises:
        OptionError: They are no mapping of tokens to numbers.
    """
    if not isinstance(bias, Mapping):
        raise wrong_value("logit_bias", "a mapping of tokens to numbers", bias)
    for token, value in bias.items():
        if whole_number("logit_bias", token) < 0:
            raise wrong_value("logit_bias", "tokens of 0 or more", token)
        _finite_number("logit_bias", value)
    return {whole_number("logit_bias", token): float(value) for token, value in bias.items()}


def _finite_number(name: str, value: float) -> float:
    """Return a number, of any type that has a float's value, as a float.

    Raises:
        OptionError: It is not a number, or a float cannot represent it.
    """
    try:
        finite = math.isfinite(value)
    except (TypeError, OverflowError):  # no number, or a whole number beyond any float
        raise wrong_value(name, "a number that a float can represent", value) from None
    if not finite:
        raise wrong_value(name, "a finite number", value)
    return float(value)
