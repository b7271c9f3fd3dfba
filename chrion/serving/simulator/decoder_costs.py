"""The time of an iteration of a decoder: a sum of terms, a table of measured times, or a roofline."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Annotated, Any, Protocol

from msgspec import Meta
from msgspec.structs import asdict

from chrion.common.records import NonNegative, Positive, PositiveCount, Record, read_record
from chrion.common.wrong_values import wrong_value
from chrion.errors import ScenarioError

#: The key by which a table of measured times is recognised.
TABULATED = "tokens"


class Costs(Protocol):
    """What determines the time of an iteration."""

    def iteration_ms(self, tokens: Sequence[int], past: Sequence[int], chosen: int | None = None) -> float:
        """Return the time of an iteration.

        Args:
            tokens: New tokens of each request.
            past: Tokens of each request in the cache.
            chosen: The requests that get a token; None for all.
        """


def pairs_of(tokens: Sequence[int], past: Sequence[int]) -> float:
    """Return the pairs of a new token and a token that it attends to."""
    return sum(new * before + new * (new + 1) / 2 for new, before in zip(tokens, past, strict=True))


class IterationCosts(Record, frozen=True):
    """The time of an iteration as a sum of terms, in ms."""

    #: For each iteration.
    fixed_ms: NonNegative = 5.0
    #: For each new token of a request: the matrix products.
    token_ms: NonNegative = 0.05
    #: For each request that gets a token: its choice.
    request_ms: NonNegative = 0.05
    #: For each pair of a new token and a token that it attends to: the attention.
    pair_ms: NonNegative = 0.0
    #: For each iteration of several requests: products of matrices in place of a matrix and a vector.
    batch_ms: NonNegative = 0.0

    @staticmethod
    def features(tokens: Sequence[int], past: Sequence[int], chosen: int | None = None) -> tuple[float, ...]:
        """Return the numbers that the terms multiply; see :class:`Costs`."""
        count = len(tokens) if chosen is None else chosen
        return 1.0, float(sum(tokens)), float(count), pairs_of(tokens, past), float(len(tokens) > 1)

    def iteration_ms(self, tokens: Sequence[int], past: Sequence[int], chosen: int | None = None) -> float:
        """Return the time of an iteration; see :class:`Costs`."""
        terms = (self.fixed_ms, self.token_ms, self.request_ms, self.pair_ms, self.batch_ms)
        return sum(term * number for term, number in zip(terms, self.features(tokens, past, chosen), strict=True))


class TabulatedCosts(Record, frozen=True):
    """Measured times of iterations by their number of new tokens: by batch, if each request has one.

    Between measured numbers the time is interpolated. Beyond the last one it grows as between the last two, below the
    first one it is that of the first.
    """

    #: Ascending.
    tokens: Annotated[tuple[PositiveCount, ...], Meta(min_length=1)]
    #: The times of iterations with so many new tokens.
    ms: Annotated[tuple[Positive, ...], Meta(min_length=1)]
    #: Added for each request that gets a token, and for each pair as in :class:`IterationCosts`.
    request_ms: NonNegative = 0.0
    pair_ms: NonNegative = 0.0

    def iteration_ms(self, tokens: Sequence[int], past: Sequence[int], chosen: int | None = None) -> float:
        """Return the time of an iteration; see :class:`Costs`."""
        time_ms = self._measured(sum(tokens)) + self.request_ms * (len(tokens) if chosen is None else chosen)
        return time_ms + self.pair_ms * pairs_of(tokens, past) if self.pair_ms else time_ms

    def _measured(self, count: int) -> float:
        at = min(bisect_left(self.tokens, count), len(self.tokens) - 1)
        if at == 0:
            return self.ms[0]
        (left, right), (low, high) = self.tokens[at - 1 : at + 1], self.ms[at - 1 : at + 1]
        slope = (high - low) / (right - left)
        return low + slope * (count - left) if count < right else high + max(slope, 0.0) * (count - right)


class RooflineCosts(Record, frozen=True):
    """The time of an iteration as the larger of arithmetic and memory traffic, in addition to what overlaps with none.

    Williams et al., *Roofline* (2009). :mod:`chrion.serving.simulator.decoder_table` computes the terms.
    """

    #: For each iteration: the launches of its kernels.
    fixed_ms: NonNegative
    #: Arithmetic, for each new token and for each pair of a new token and a token that it attends to.
    token_ms: NonNegative
    pair_ms: NonNegative
    #: Traffic, for each iteration, which reads all weights, and for each token whose keys and values it reads.
    weights_ms: NonNegative
    context_ms: NonNegative

    def iteration_ms(self, tokens: Sequence[int], past: Sequence[int], chosen: int | None = None) -> float:
        """Return the time of an iteration; see :class:`Costs`. The choice of tokens takes no time."""
        del chosen
        new = sum(tokens)
        arithmetic_ms = self.token_ms * new + self.pair_ms * pairs_of(tokens, past)
        traffic_ms = self.weights_ms + self.context_ms * (new + sum(past))
        return self.fixed_ms + max(arithmetic_ms, traffic_ms)


def read_costs(costs: Any, prompt_costs: Any, *, of_hardware: bool) -> tuple[Costs, Costs]:
    """Return the costs of iterations in which each request has one new token, and of the others.

    Args:
        costs: The table ``[decoder.costs]``.
        prompt_costs: The table ``[decoder.prompt_costs]``; terms that it lacks are those of ``costs``.
        of_hardware: Whether they are those of a datasheet, unless they are measured: then all iterations have the same.

    Raises:
        ScenarioError: A table is invalid.
    """
    where, of_prompts = "decoder.costs", "decoder.prompt_costs"
    if of_hardware and TABULATED not in costs:
        if prompt_costs:
            hint = f"{where} is for all iterations"
            raise ScenarioError(f"{of_prompts}: has no effect with hardware", hint=hint)
        roofline = read_record(RooflineCosts, costs, where)
        _check_sum(roofline, where)
        return roofline, roofline
    own = _read(costs, where)
    if TABULATED in prompt_costs:
        return own, _read(prompt_costs, of_prompts)
    given = asdict(own)
    return own, _read({**given, **prompt_costs}, of_prompts)


def _read(table: Any, where: str) -> IterationCosts | TabulatedCosts:
    if not isinstance(table, dict) or TABULATED not in table:
        found = read_record(IterationCosts, table, where)
        _check_sum(found, where)
        return found
    measured = read_record(TabulatedCosts, table, where)
    if len(measured.ms) != len(measured.tokens):
        expected = f"as many times as tokens, {len(measured.tokens)}"
        raise wrong_value(f"{where}.ms", expected, len(measured.ms), failure=ScenarioError)
    if list(measured.tokens) != sorted(set(measured.tokens)):
        raise wrong_value(f"{where}.tokens", "ascending numbers", list(measured.tokens), failure=ScenarioError)
    return measured


def _check_sum(costs: IterationCosts | RooflineCosts, where: str) -> None:
    if not any(term for name, term in asdict(costs).items() if name != "batch_ms"):
        raise ScenarioError(f"{where}: expected a term above 0")
