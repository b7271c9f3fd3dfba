"""The guard: a candidate replaces the original only if it is proven better on rows that took no part."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx

from chrion.errors import ModelError
from chrion.pipelines.base_rate import ClassShares
from chrion.pipelines.measures import Differences, Interval, Measures, Pair, compare, measure, prior_shift
from chrion.pipelines.pipeline import Array, Feeds
from chrion.pipelines.report import ComparedModel
from chrion.pipelines.rows import Rows

#: The largest difference between scores of a model and those that it was fitted as, for scores up to 1; for larger
#: ones, relative to the largest: onnxruntime adds them in float32.
_SAME = 1e-3
#: The loss of AUC by which an order of scores is still the same: float32 makes scores equal near 0 and 1.
_SAME_ORDER = 1e-4
#: The share of rows by which labels may follow scores less often than before.
_OTHER_LABELS = 1e-3
#: The measurements of a latency, of which the median counts.
_REPEATS = 15


@dataclass(frozen=True, eq=False)
class Candidate:
    """A model that may replace the original."""

    name: str
    #: Return the raw scores of rows, [rows, targets], and what they are as probabilities or numbers.
    raw: Callable[[slice], Array]
    predict: Callable[[Array], Array]
    #: Return the model with constants added to its raw scores, and these constants.
    make: Callable[[Array], onnx.ModelProto]
    constants: Array

    @property
    def model(self) -> onnx.ModelProto:
        """The model."""
        return self.make(self.constants)

    def moved(self, shares: ClassShares, rows: Rows) -> Candidate:
        """Return the candidate with its scores moved to known shares of the classes."""
        raw = self.raw(rows.tuned) + self.constants
        found = shares.constants(raw, rows.y[rows.tuned], rows.pipeline.loss)
        return replace(self, constants=self.constants + found)


@dataclass(frozen=True, eq=False)
class Trial:
    """A tuning at an earlier time: the scores of its candidates for the rows that followed, by name."""

    scores: Mapping[str, Array]
    y: Array
    weights: Array | None


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a candidate replaces the original, why, and by how much it differs in both measures."""

    adopted: bool
    reason: str
    gain: Interval
    loss: Interval


class Guard:
    """The held-out rows, and the original's results for them.

    Args:
        rows: The rows.
        original: The original.
        shares: The known shares of the classes; None if they are those of the rows.
        seed: The seed of bootstrap samples.
        trials: The same tuning at earlier times.
    """

    def __init__(
        self, rows: Rows, original: Candidate, shares: ClassShares | None, seed: int, trials: Sequence[Trial] = ()
    ) -> None:
        self._rows, self._seed, self._y, self._trials = rows, seed, rows.y[rows.held], trials
        self.weights = None if shares is None else shares.weights(self._y)
        self._scores: dict[int, tuple[Candidate, Array]] = {}
        self._original = original
        self._labels: Array | None = None
        classes = rows.pipeline.classes
        self.shift = prior_shift(rows.y[: rows.held.start], self._y, classes) if classes else None

    def scores(self, candidate: Candidate) -> Array:
        """Return what the model of a candidate returns for the held-out rows.

        Raises:
            ModelError: It is not what the candidate was fitted as.
        """
        if id(candidate) not in self._scores:
            expected = candidate.predict(candidate.raw(self._rows.held) + candidate.constants)
            found = self._rows.held_scores(candidate.model)
            if not are_same(found, expected):
                name = self._rows.pipeline.name
                raise ModelError(f"{name}: what follows its trees changes their scores, which is not supported")
            self._scores[id(candidate)] = candidate, found
        return self._scores[id(candidate)][1]

    def has_own_labels(self, candidate: Candidate) -> bool:
        """Return whether labels are those of the largest scores as often as in the original."""
        if self._labels is None:
            self._labels = self._rows.held_labels()
        return bool((self._rows.held_labels(candidate.model) >= self._labels - _OTHER_LABELS).all())

    def measure(self, candidate: Candidate) -> Measures:
        """Return the measures of a candidate."""
        return measure(self.scores(candidate), self._y, self.weights)

    def compared(self, name: str, scores: Array) -> ComparedModel:
        """Return the measures of a model by its scores for the held-out rows, and how they differ from the original's.

        Args:
            name: The name of the model.
            scores: The scores.
        """
        pair = Pair(scores, self.scores(self._original), self._y, self.weights)
        measures = measure(scores, self._y, self.weights)
        return ComparedModel(name, measures, difference=compare([pair], self._seed))

    def compare(self, new: Candidate, old: Candidate) -> Differences:
        """Return by how much candidates differ in all measures, with intervals."""
        pairs = [
            Pair(trial.scores[new.name], trial.scores[old.name], trial.y, trial.weights)
            for trial in self._trials
            if {new.name, old.name} <= trial.scores.keys()
        ]
        return compare([*pairs, Pair(self.scores(new), self.scores(old), self._y, self.weights)], self._seed)

    def is_better(self, new: Candidate, old: Candidate) -> bool:
        """Return whether a candidate is better than another one in both measures, by intervals that exclude zero."""
        found = self.compare(new, old)
        return found.gain.low > 0 and found.loss.high < 0

    def judge(self, candidate: Candidate, *, moved: bool = False) -> Verdict:
        """Return whether a candidate replaces the original.

        Args:
            candidate: The candidate.
            moved: Whether it is the original with moved scores, whose order is the same.
        """
        found = self.compare(candidate, self._original)
        gain, loss = found.gain, found.loss
        if moved and gain.low > -_SAME_ORDER and loss.high < 0:
            reason = "scores moved to the base rate have a lower log loss, by an interval that excludes zero"
            return Verdict(adopted=True, reason=reason, gain=gain, loss=loss)
        if gain.low > 0 and loss.high < 0:
            new, old = self.measure(candidate), self.measure(self._original)
            if not new.beats(old):
                reason = "the tuned model is better at earlier times, but not on the most recent rows"
                return Verdict(adopted=False, reason=reason, gain=gain, loss=loss)
            if self.shift and not self._is_better_in_both_halves(candidate):
                reason = "under prior shift, the tuned model is not better in both halves of the held-out rows"
                return Verdict(adopted=False, reason=reason, gain=gain, loss=loss)
            both = "AUC and log loss" if self._rows.pipeline.classes else "R2 and mean absolute error"
            reason = f"better in {both}, by intervals that exclude zero"
            return Verdict(adopted=True, reason=reason, gain=gain, loss=loss)
        worse = "worse" if gain.high < 0 or loss.low > 0 else "not better beyond chance"
        return Verdict(False, f"the tuned model is {worse} on the held-out rows", gain, loss)  # noqa: FBT003 - not adopted

    def cost(self, candidate: Candidate) -> tuple[float, float]:
        """Return how many times as long as the original a candidate takes for one row, and for a thousand."""
        pipeline = self._rows.pipeline
        feeds = next(iter(self._rows.feeds()))
        runs = [pipeline.score_runner(), pipeline.score_runner(candidate.model)]
        ratios = []
        for count in (1, 1000):
            some = {name: values[:count] for name, values in feeds.items()}
            times = np.array([[_timed(run, some) for run in runs] for _ in range(_REPEATS)])
            old, new = np.median(times, axis=0)
            ratios.append(float(new / old))
        return ratios[0], ratios[1]

    def _is_better_in_both_halves(self, candidate: Candidate) -> bool:
        new, old, middle = self.scores(candidate), self.scores(self._original), len(self._y) // 2
        weights = np.ones(len(self._y)) if self.weights is None else self.weights
        return all(
            measure(new[half], self._y[half], weights[half]).loss
            < measure(old[half], self._y[half], weights[half]).loss
            for half in (slice(0, middle), slice(middle, None))
        )


def are_same(found: Array, expected: Array) -> bool:
    """Return whether scores are those that are expected, except for rounding."""
    largest = _SAME * max(1.0, np.abs(expected).max())
    return found.shape == expected.shape and bool((np.abs(found - expected) <= largest).all())


def _timed(run: Callable[[Feeds], Array], feeds: Feeds) -> float:
    begin = time.perf_counter()
    run(feeds)
    return time.perf_counter() - begin
