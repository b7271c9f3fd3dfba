"""Fine-tuning of a pipeline on new rows, with a guard: the tuned model is returned only if it is proven better.

The stages of :func:`finetune`:

1. Find the leaf that each row reaches in each tree (:class:`chrion.pipelines.pipeline.Pipeline`).
2. Fit the leaves on the earlier rows for several ridges, and choose one on later rows (:mod:`chrion.pipelines.leaves`).
3. Fit them on both.
4. Compare the tuned model with the original on the most recent rows, which took no part (the guard), and with what else
   could be done with the new rows (:mod:`chrion.pipelines.rivals`).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from chrion.errors import DataError, ModelError, OptionError
from chrion.pipelines import leaves
from chrion.pipelines.leaves import LeafProblem, fit_leaves
from chrion.pipelines.measures import Interval, compare, measure, prior_shift
from chrion.pipelines.pipeline import Pipeline
from chrion.pipelines.report import FinetuningReport, Rival
from chrion.pipelines.rivals import rivals
from chrion.pipelines.table import Table

Array = np.ndarray[Any, Any]
#: The share of the rows that are held out, and that of those to choose the ridge with.
_SHARE = 5
#: The fewest rows of each of them.
_LEAST_ROWS = 100
#: The ridges to choose from, in rows: leaves in which fewer rows fall move less than half of the way.
_RIDGES = (1000.0, 300.0, 100.0, 30.0, 10.0, 3.0)
#: The most rows that rivals are trained with, which are in memory.
_RIVAL_ROWS = 200_000
#: The largest difference between scores of the model and those computed from leaves.
_SAME = 1e-3
SCOPES, LEVELS = ("leaves",), ("L1",)

#: Called with the number of stages done, the number of all, and the name of the next one.
Progress = Callable[[int, int, str], None]


def finetune(  # noqa: PLR0913 - optional arguments are keyword-only
    model: str | Path | bytes | onnx.ModelProto,
    data: Any,
    target: str = "y",
    *,
    validation: Any = None,
    scope: str = "leaves",
    level: str = "L1",
    seed: int = 0,
    progress: Progress | None = None,
) -> tuple[onnx.ModelProto, FinetuningReport]:
    """Adapt the leaves of a pipeline's trees to new rows.

    Args:
        model: A model with one tree ensemble: a file, its bytes, or a ModelProto.
        data: New rows in the order of time: a Parquet or CSV file, which is read in batches, or a frame.
        target: The column with the classes or numbers to predict.
        validation: The rows that the tuned model is compared with the original on; the last fifth of the data if None.
        scope: What is tuned: ``leaves``.
        level: How far: ``L1``, the weights of leaves alone.
        seed: The seed of bootstrap samples and of rivals.
        progress: A function that is called before each stage.

    Returns:
        The tuned model if it is better than the original in both measures by intervals that exclude zero, else the
        original; and the report. The measures are AUC and log loss, for a regressor R2 and the mean absolute error.

    Raises:
        ModelError: The model cannot be read or run, or its trees cannot be fine-tuned.
        DataError: The data cannot be read, does not fit the model, or has too few rows.
        OptionError: An option is invalid, or pyarrow is not installed.
    """
    _check("scope", scope, SCOPES)
    _check("level", level, LEVELS)
    begin, update = time.perf_counter(), progress or (lambda _done, _total, _name: None)
    pipeline = Pipeline(model)
    with tempfile.TemporaryDirectory(prefix="chrion-leaves-") as folder:
        update(0, 4, "leaves of all rows")
        rows = _Rows(
            pipeline, target, [Table(data), *([] if validation is None else [Table(validation)])], Path(folder)
        )
        update(1, 4, "leaves")
        ridge, weights = _fit(rows)
        update(2, 4, "comparison")
        tuned = pipeline.with_weights(weights)
        report = _compare(rows, tuned, weights, ridge, seed)
        report = replace(report, seconds=time.perf_counter() - begin)
        update(3, 4, "other methods")
        if sum(rows.sizes) <= _RIVAL_ROWS:
            others = rivals(rows.problem, rows.features(), rows.sizes, seed)
            report = replace(report, rivals=(*report.rivals, *others))
    return (tuned if report.adopted else pipeline.proto), report


def _check(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise OptionError(f"{name}: {value!r} is not supported", hint=f"one of {', '.join(known)}")


class _Rows:
    """The rows of one or two tables, with the leaves that they reach: to fit, to choose with, and held out."""

    def __init__(self, pipeline: Pipeline, target: str, tables: list[Table], folder: Path) -> None:
        self.pipeline, self.target, self.tables = pipeline, target, tables
        labels, reached = [], []
        for at, table in enumerate(tables):
            labels.append(pipeline.encode(table.column(target), f"{table.name}: target {target!r}"))
            reached.append(pipeline.reach(table, target, folder / f"{at}.npy"))
        total = tables[0].rows
        held = tables[1].rows if len(tables) > 1 else total // _SHARE
        rest = total if len(tables) > 1 else total - held
        chosen = rest // _SHARE
        self.sizes = (rest - chosen, chosen, held)
        if min(self.sizes) < _LEAST_ROWS:
            raise DataError(
                f"{tables[0].name}: {total} rows are too few: {self.sizes[0]} to fit, {chosen} to choose with, "
                f"{held} held out",
                hint=f"at least {_LEAST_ROWS} of each are needed",
            )
        self.problem = LeafProblem(
            reached=reached[0] if len(tables) == 1 else np.concatenate(reached),
            columns=pipeline.columns,
            y=np.concatenate(labels),
            base=pipeline.base,
            scale=pipeline.scale,
            loss=pipeline.loss,
            original=pipeline.ensemble.entry_weights.astype(np.float64),
        )

    @property
    def fitted(self) -> slice:
        """The rows that take part in the fit: all but those held out."""
        return slice(0, self.sizes[0] + self.sizes[1])

    @property
    def held(self) -> slice:
        """The held-out rows."""
        return slice(self.sizes[0] + self.sizes[1], sum(self.sizes))

    def held_scores(self, model: onnx.ModelProto | None = None) -> Array:
        """Return what a model returns for the held-out rows."""
        first = self.held.start if len(self.tables) == 1 else 0
        return self.pipeline.scores(self.tables[-1], self.target, first, model)

    def features(self) -> Array:
        """Return what the ensemble reads, of all rows."""
        return np.concatenate([self.pipeline.features(table, self.target) for table in self.tables])


def _fit(rows: _Rows) -> tuple[float | None, Array]:
    """Return the ridge with the least loss on the rows to choose with, and leaves fitted with it; None for no ridge."""
    problem = rows.problem
    fit, choose = problem.part(slice(0, rows.sizes[0])), problem.part(slice(rows.sizes[0], rows.fitted.stop))
    best, weights = choose.evaluate(problem.original)[0], problem.original
    ridge: float | None = None
    start = problem.original
    for candidate in _RIDGES:
        start = fit_leaves(fit, candidate, start)
        loss = choose.evaluate(start)[0]
        if loss < best:
            best, ridge, weights = loss, candidate, start
    if ridge is not None:
        weights = fit_leaves(problem.part(rows.fitted), ridge, weights)
    return ridge, _as_probabilities(rows.pipeline, weights)


def _as_probabilities(pipeline: Pipeline, weights: Array) -> Array:
    """Return the weights of a forest's leaves as probabilities: of at least 0, with the same sum in each leaf."""
    if pipeline.loss is leaves.PROBABILITY:
        top = 1.0 if pipeline.scale < 1 else float(pipeline.ensemble.entry_weights.max())
        return np.clip(weights, 0, top)
    if pipeline.loss is not leaves.BRIER:
        return weights
    of = pipeline.ensemble.entry_leaves
    before = np.bincount(of, pipeline.ensemble.entry_weights)
    clipped = np.maximum(weights, 0)
    sums = np.bincount(of, clipped)
    return clipped * (before / np.where(sums > 0, sums, 1))[of]


def _compare(
    rows: _Rows,
    tuned: onnx.ModelProto,
    weights: Array,
    ridge: float | None,
    seed: int,
) -> FinetuningReport:
    """Return the report on the held-out rows; its decision is the guard's."""
    pipeline, problem = rows.pipeline, rows.problem
    held = problem.part(rows.held)
    old, new = rows.held_scores(), rows.held_scores(tuned)
    for scores, own in ((old, problem.original), (new, weights)):
        expected = held.predict(own)
        if scores.shape != expected.shape or np.abs(scores - expected).max() > _SAME:
            raise ModelError(f"{pipeline.name}: what follows its trees changes their scores, which is not supported")
    gain, loss = compare(new, old, held.y, seed)
    shift = None
    if pipeline.classes:
        shift = prior_shift(problem.y[rows.fitted], held.y, pipeline.classes)
    verdict = _judge(gain, loss, ridge)
    if verdict.adopted and shift and not _better_in_both_halves(new, old, held.y):
        verdict = _Verdict(
            adopted=False, reason="under prior shift, it is not better in both halves of the held-out rows"
        )
    found = (Rival("original", measure(old, held.y)), Rival("tuned leaves", measure(new, held.y)))
    names = ("auc", "log_loss") if pipeline.classes else ("r2", "mae")
    return FinetuningReport(
        verdict.adopted, verdict.reason, rows.sizes, names, ridge, gain, loss, shift, found, seconds=0.0
    )


@dataclass(frozen=True, slots=True)
class _Verdict:
    adopted: bool
    reason: str


def _judge(gain: Interval, loss: Interval, ridge: float | None) -> _Verdict:
    if ridge is None:
        return _Verdict(adopted=False, reason="no leaves fitted on the new rows are better on later rows")
    if gain.low > 0 and loss.high < 0:
        return _Verdict(adopted=True, reason="better in both measures, by intervals that exclude zero")
    worse = "worse" if gain.value < 0 or loss.value > 0 else "not better beyond chance"
    return _Verdict(adopted=False, reason=f"the tuned leaves are {worse} on the held-out rows")


def _better_in_both_halves(new: Array, old: Array, y: Array) -> bool:
    middle = len(y) // 2
    halves = (slice(0, middle), slice(middle, None))
    return all(measure(new[half], y[half]).loss < measure(old[half], y[half]).loss for half in halves)
