"""The choice of the next token: greedy, or at random from the most probable ones.

The order of the steps is that of transformers: repetition penalty (Keskar et al., *CTRL*, 2019, section 4.1),
temperature, top-k (Fan et al., 2018), top-p (Holtzman et al., *The curious case of neural text degeneration*, 2020).
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from chrion.errors import OptionError
from chrion.generation.scheduling import whole_number

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the tokens of a request are chosen.

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

    def __post_init__(self) -> None:
        numbers = {"temperature": self.temperature, "top_p": self.top_p, "repetition_penalty": self.repetition_penalty}
        for name, value in numbers.items():
            try:
                finite = math.isfinite(value)
            except (TypeError, OverflowError):  # no number, or a whole number beyond any float
                message = f"{name}: expected a number that a float can represent, found {value!r:.40}"
                raise OptionError(message) from None
            if not finite:
                raise OptionError(f"{name}: {value} is not a finite number")
        for name, whole in (("top_k", self.top_k), ("seed", self.seed)):
            whole_number(name, whole)
        if self.temperature < 0:
            raise OptionError(f"temperature: {self.temperature} is below 0")
        if self.top_k < 0:
            raise OptionError(f"top_k: {self.top_k} is below 0")
        if not 0 < self.top_p <= 1:
            raise OptionError(f"top_p: {self.top_p} is not above 0 and at most 1")
        if self.repetition_penalty <= 0:
            raise OptionError(f"repetition_penalty: {self.repetition_penalty} is not above 0")
        if self.seed < 0:
            raise OptionError(f"seed: {self.seed} is below 0")


class Sampler:
    """The choices of one request. Its random numbers depend on its seed and the number of its token only.

    Args:
        sampling: How to choose.
        prompt: The tokens of the prompt.
    """

    def __init__(self, sampling: Sampling, prompt: Collection[int]) -> None:
        self._sampling = sampling
        self._random = np.random.default_rng(sampling.seed)
        self._seen = dict.fromkeys(prompt)

    def choose(self, scores: Array) -> int:
        """Return the next token.

        Args:
            scores: The logits, [vocabulary].

        Raises:
            ValueError: A score is not a number.
        """
        best = int(scores.argmax())  # the first NaN, if there is one
        if not math.isfinite(scores[best]):
            raise ValueError("the model's scores are not numbers")
        how = self._sampling
        plain = how.temperature == 0 and how.repetition_penalty == 1
        token = best if plain else self._choose(np.asarray(scores, np.float64))
        self._seen[token] = None
        return token

    def _choose(self, scores: Array) -> int:
        how = self._sampling
        if how.repetition_penalty != 1 and self._seen:
            seen = np.fromiter(self._seen, np.int64)
            scores = scores.copy()
            scores[seen] = _penalise(scores[seen], how.repetition_penalty)
        if how.temperature == 0:
            return int(np.argmax(scores))
        with np.errstate(over="ignore"):  # the greatest score is 0, those far below have the probability 0
            scaled = (scores - scores.max()) / how.temperature
        shares = probabilities(scaled, how.top_k, how.top_p)
        # One random number for every token, whatever the shares, so that the sequence depends on the seed only.
        limits = np.cumsum(shares)
        chosen = int(np.searchsorted(limits, self._random.random() * limits[-1], side="right"))
        return min(chosen, int(np.flatnonzero(shares)[-1]))  # the product may be rounded up to the total


def _penalise(scores: Array, penalty: float) -> Array:
    """Return scores with the repetition penalty; those that are finite remain finite."""
    most = np.finfo(np.float64).max
    with np.errstate(over="ignore"):
        penalised = np.where(scores > 0, scores / penalty, scores * penalty)
    return np.asarray(np.where(np.isfinite(scores), np.clip(penalised, -most, most), scores))


def probabilities(scores: Array, top_k: int, top_p: float) -> Array:
    """Return the probabilities of the tokens after top-k and top-p, not normalised.

    Of equal scores the lower token comes first. At least one token remains.
    """
    shares = np.exp(scores - scores.max())
    if not top_k and top_p == 1:
        return np.asarray(shares)
    order = np.argsort(-shares, kind="stable")
    kept = order[: top_k or len(order)]
    totals = np.cumsum(shares[kept])
    kept = kept[: 1 + int(np.searchsorted(totals, top_p * totals[-1]))] if top_p < 1 else kept
    filtered: Array = np.zeros_like(shares)
    filtered[kept] = shares[kept]
    return filtered
