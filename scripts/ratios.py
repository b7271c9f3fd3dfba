"""Ratio of one candidate's time to the best other candidate's, from trials on cores that other processes use at times.

Two effects would bias it: interference during some trials, and selection bias, since the best of several equally fast
candidates looks faster than it is. Therefore trials count by the speed of the cores just before and after them,
whatever they measured; and the best other candidate is selected on one half of the trials and timed on the other half.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from chrion.profiler.interference import TOLERANCE

_RESAMPLES, _POOLED_RESAMPLES = 1000, 300

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class TimedTrial:
    """One trial of a candidate."""

    candidate: str
    median_ms: float
    #: Time of a fixed computation on all cores at once, just before or just after the trial, whichever is longer.
    reference_ms: float


def undisturbed_trials(trials: Sequence[TimedTrial], fastest_ms: float, least: int) -> dict[str, list[float]]:
    """Return the trials that count: those on undisturbed cores, or the least disturbed ones if there are too few.

    One threshold holds for all candidates. Otherwise a candidate with few undisturbed trials would be compared by more
    disturbed ones.

    Args:
        trials: In the order in which they were run.
        fastest_ms: Time of the reference computation on undisturbed cores.
        least: Number of each candidate's trials that count at least.

    Returns:
        Medians in ms by candidate, in the same order.
    """
    references = {
        trial.candidate: sorted(t.reference_ms for t in trials if t.candidate == trial.candidate) for trial in trials
    }
    threshold_ms = max(TOLERANCE * fastest_ms, *(times_ms[:least][-1] for times_ms in references.values()))
    return {
        name: [t.median_ms for t in trials if t.candidate == name and t.reference_ms <= threshold_ms]
        for name in references
    }


def ratio_to_best(trials: Mapping[str, Sequence[float]], own: str) -> tuple[float, float, float]:
    """Return the ratio of a candidate's time to that of the best other candidate.

    The best other candidate is selected by its median over every second trial, and timed by its median over the
    remaining ones; then the halves are exchanged. The result is the geometric mean of both ratios.

    Args:
        trials: Times by candidate, two or more of each.
        own: The candidate.

    Returns:
        The ratio and its 90 % interval: percentiles of a bootstrap over trials.
    """
    rng = np.random.default_rng(0)
    halves = [{name: np.asarray(times[half::2]) for name, times in trials.items()} for half in (0, 1)]
    medians = [{name: np.median(times, keepdims=True) for name, times in half.items()} for half in halves]
    point = _cross_validated_ratios(medians, own)
    resampled = [{name: _resampled_medians(times, rng) for name, times in half.items()} for half in halves]
    low, high = np.quantile(_cross_validated_ratios(resampled, own), [0.05, 0.95])
    return float(point[0]), float(low), float(high)


def quantile_ratio_to_best(
    trials: Mapping[str, Sequence[Array]], own: str, quantile: float
) -> tuple[float, float, float]:
    """Return the ratio of a quantile of a candidate's latencies to that of the best other candidate.

    Like :func:`ratio_to_best`, but a half of the trials is summarised by the quantile of all latencies in it, since a
    trial has too few requests for a high quantile of its own.

    Args:
        trials: Latencies by candidate, two trials or more of each.
        own: The candidate.
        quantile: 0.99 for the 99th percentile.

    Returns:
        The ratio and its 90 % interval: percentiles of a bootstrap over trials.
    """
    rng = np.random.default_rng(0)
    halves = [{name: times[half::2] for name, times in trials.items()} for half in (0, 1)]
    once = [{name: _quantiles(times, np.ones((1, len(times))), quantile) for name, times in h.items()} for h in halves]
    resampled = [
        {name: _quantiles(times, _resampled_weights(len(times), rng), quantile) for name, times in half.items()}
        for half in halves
    ]
    low, high = np.quantile(_cross_validated_ratios(resampled, own), [0.05, 0.95])
    return float(_cross_validated_ratios(once, own)[0]), float(low), float(high)


def _resampled_weights(trials: int, rng: np.random.Generator) -> Array:
    """Return how often each trial is in each of some bootstrap resamples."""
    return rng.multinomial(trials, [1 / trials] * trials, _POOLED_RESAMPLES).astype(np.float64)


def _quantiles(trials: Sequence[Array], weights: Array, quantile: float) -> Array:
    """Return a quantile of the latencies of all trials, once for each row of weights of the trials."""
    latencies = np.concatenate(trials)
    order = np.argsort(latencies)
    trial_of = np.repeat(np.arange(len(trials)), [len(trial) for trial in trials])[order]
    found = []
    for row in weights:
        reached = np.cumsum(row[trial_of])
        found.append(latencies[order][np.searchsorted(reached, quantile * reached[-1])])
    return np.array(found)


def _resampled_medians(times: Array, rng: np.random.Generator) -> Array:
    """Return the medians of bootstrap resamples."""
    return np.median(rng.choice(times, (_RESAMPLES, len(times))), axis=1)  # type: ignore[no-any-return]


def _cross_validated_ratios(halves: Sequence[Mapping[str, Array]], own: str) -> Array:
    product = np.ones(1)
    for selecting, timing in (halves, halves[::-1]):
        selected = np.array([medians for name, medians in selecting.items() if name != own]).argmin(axis=0)
        others = np.array([medians for name, medians in timing.items() if name != own])
        product = product * timing[own] / np.take_along_axis(others, selected[None], axis=0)[0]
    return np.sqrt(product)
