"""How two rivals compare, from turns taken on cores that others use at times.

Two things would lean: turns in which somebody else had the cores, and the luck of whoever is picked as the best of
several that are equally fast. So turns count by how fast the cores were right before and after them, whatever they
timed; and the best of the others is picked on one half of the turns and timed on the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from chrion.profiler.interference import TOLERANCE

_RESAMPLES = 1000

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of one rival."""

    rival: str
    median_ms: float
    #: What the same arithmetic took on all cores at once right before and after the turn: the longer of the two.
    look_ms: float


def quiet(turns: Sequence[Turn], fastest_ms: float, least: int) -> dict[str, list[float]]:
    """The turns that count: those on quiet cores, or if a rival has too few of these, those on the quietest.

    One mark holds for all: otherwise a rival with few quiet turns would be compared by worse ones.

    Args:
        turns: In the order in which they were taken.
        fastest_ms: What a look takes on cores that nobody else uses.
        least: How many of each rival count at least.

    Returns:
        Medians in ms, by rival, in the same order.
    """
    rivals = {turn.rival: sorted(other.look_ms for other in turns if other.rival == turn.rival) for turn in turns}
    mark_ms = max(TOLERANCE * fastest_ms, *(looks_ms[:least][-1] for looks_ms in rivals.values()))
    return {name: [t.median_ms for t in turns if t.rival == name and t.look_ms <= mark_ms] for name in rivals}


def ratio(turns: Mapping[str, Sequence[float]], own: str) -> tuple[float, float, float]:
    """One rival's time over that of the best of the others.

    The best is picked by medians over every other turn, and its median over the turns between is what ``own`` is
    compared with, and the other way round; the result is the geometric mean of both.

    Args:
        turns: Times by rival, two or more of each.
        own: Whose time it is.

    Returns:
        The ratio, and its 90 % interval: percentiles of a bootstrap over turns.
    """
    rng = np.random.default_rng(0)
    halves = [{name: np.asarray(times[half::2]) for name, times in turns.items()} for half in (0, 1)]
    point = _crossed([{name: np.median(times, keepdims=True) for name, times in half.items()} for half in halves], own)
    drawn = [{name: _resampled(times, rng) for name, times in half.items()} for half in halves]
    low, high = np.quantile(_crossed(drawn, own), [0.05, 0.95])
    return float(point[0]), float(low), float(high)


def _resampled(times: Array, rng: np.random.Generator) -> Array:
    """Medians of as many times drawn with replacement, often."""
    return np.median(rng.choice(times, (_RESAMPLES, len(times))), axis=1)  # type: ignore[no-any-return]


def _crossed(halves: Sequence[Mapping[str, Array]], own: str) -> Array:
    product = np.ones(1)
    for picking, timing in (halves, halves[::-1]):
        picked = np.array([medians for name, medians in picking.items() if name != own]).argmin(axis=0)
        others = np.array([medians for name, medians in timing.items() if name != own])
        product = product * timing[own] / np.take_along_axis(others, picked[None], axis=0)[0]
    return np.sqrt(product)
