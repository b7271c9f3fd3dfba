"""Fine-tuning of a pipeline on new rows, with a guard: the tuned model is returned only if it is proven better.

The stages of :func:`finetune`:

1. Find the leaf that each row reaches in each tree (:class:`chrion.pipelines.pipeline.Pipeline`).
2. Update the tables of target encoders with the earlier rows, for several strengths of the old ones, and choose one on
   later rows (:mod:`chrion.pipelines.encoders`).
3. Fit the leaves for several ridges, and choose one likewise (:mod:`chrion.pipelines.leaves`). Do both on all of these
   rows.
4. Compare the tuned model with the original on the most recent rows, which took no part (the guard), and with what else
   could be done with the new rows (:mod:`chrion.pipelines.rivals`).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from chrion.common.wrong_values import wrong_value
from chrion.errors import DataError, ModelError
from chrion.pipelines import leaves
from chrion.pipelines.encoders import find_encoders, folds, tables_of, with_tables
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
#: The rows that an old value of a table is worth, to choose from.
_STRENGTHS = (1000.0, 300.0, 100.0, 30.0, 10.0)
#: The most rows that rivals are trained with, which are in memory.
_RIVAL_ROWS = 200_000
#: The largest difference between scores of the model and those computed from leaves, for scores up to 1; for larger
#: ones, relative to the largest: onnxruntime adds them in float32.
_SAME = 1e-3
SCOPES = ("all", "encoders", "leaves")

#: Called with the number of stages done, the number of all, and the name of the next one.
Progress = Callable[[int, int, str], None]


def finetune(  # noqa: PLR0913 - optional arguments are keyword-only
    model: str | Path | bytes | onnx.ModelProto,
    data: Any,
    target: str = "y",
    *,
    validation: Any = None,
    scope: str = "all",
    seed: int = 0,
    progress: Progress | None = None,
) -> tuple[onnx.ModelProto, FinetuningReport]:
    """Adapt a pipeline to new rows: the tables of its target encoders, and the leaves of its trees.

    Args:
        model: A model with one tree ensemble: a file, its bytes, or a ModelProto.
        data: New rows in the order of time: a Parquet or CSV file, which is read in batches, or a frame.
        target: The column with the classes or numbers to predict.
        validation: The rows that the tuned model is compared with the original on; the last fifth of the data if None.
        scope: What is tuned: tables of target encoders (``encoders``), ``leaves``, or ``all``.
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
    if scope not in SCOPES:
        raise wrong_value("scope", f"one of {', '.join(SCOPES)}", scope)
    begin, update = time.perf_counter(), progress or (lambda _done, _total, _name: None)
    pipeline = Pipeline(model)
    texts = pipeline.texts(target)
    with tempfile.TemporaryDirectory(prefix="chrion-leaves-") as folder:
        update(0, 4, "leaves of all rows")
        rows = _Rows(
            pipeline,
            target,
            [Table(source, texts) for source in (data, validation) if source is not None],
            Path(folder),
        )
        update(1, 4, "tables and leaves")
        tuned = _tune(rows, scope)
        update(2, 4, "comparison")
        report = _compare(rows, tuned, seed)
        report = replace(report, seconds=time.perf_counter() - begin)
        update(3, 4, "other methods")
        if sum(rows.sizes) <= _RIVAL_ROWS:
            others = rivals(rows.problem, rows.values([pipeline.node.input[0]])[0], rows.sizes, seed)
            report = replace(report, rivals=(*report.rivals, *others))
    return (tuned.model if report.adopted else pipeline.proto), report


class _Rows:
    """The rows of one or two tables, with the leaves that they reach: to fit, to choose with, and held out."""

    def __init__(self, pipeline: Pipeline, target: str, tables: list[Table], folder: Path) -> None:
        self.pipeline, self.target, self.tables, self._folder = pipeline, target, tables, folder
        labels = [pipeline.encode(table.column(target), f"{table.name}: target {target!r}") for table in tables]
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
        self._files = 0
        self.y = np.concatenate(labels)
        self.problem = self.reach([(pipeline.proto, np.ones(len(self.y), bool))])

    @property
    def chosen(self) -> slice:
        """The rows to choose with."""
        return slice(self.sizes[0], self.sizes[0] + self.sizes[1])

    @property
    def held(self) -> slice:
        """The held-out rows."""
        return slice(self.sizes[0] + self.sizes[1], sum(self.sizes))

    def reach(self, models: Iterable[tuple[onnx.ModelProto, Array]]) -> LeafProblem:
        """Return the problem of the leaves that rows reach.

        Args:
            models: Models with other tables, and the rows that each of them encodes, as a mask.
        """
        pipeline, self._files = self.pipeline, self._files + 1
        shape = (len(self.y), pipeline.columns[-1].stop)
        reached = np.lib.format.open_memmap(self._folder / f"{self._files}.npy", "w+", np.int32, shape)
        for model, mask in models:
            at = 0
            for block in chain.from_iterable(pipeline.reached(table, self.target, model) for table in self.tables):
                own = np.flatnonzero(mask[at : at + len(block)])
                reached[at + own] = block[own]
                at += len(block)
        return LeafProblem(
            reached=reached,
            columns=pipeline.columns,
            y=self.y,
            base=pipeline.base,
            scale=pipeline.scale,
            loss=pipeline.loss,
            original=pipeline.ensemble.entry_weights.astype(np.float64),
        )

    def values(self, names: Sequence[str]) -> list[Array]:
        """Return values before the ensemble, of all rows."""
        parts = [self.pipeline.values(table, self.target, names) for table in self.tables]
        return [np.concatenate(own) for own in zip(*parts, strict=True)]

    def held_scores(self, model: onnx.ModelProto | None = None) -> Array:
        """Return what a model returns for the held-out rows."""
        first = self.held.start if len(self.tables) == 1 else 0
        return self.pipeline.scores(self.tables[-1], self.target, first, model)


class _Tables:
    """The tables of a pipeline's target encoders, updated with rows."""

    def __init__(self, rows: _Rows) -> None:
        self._rows, pipeline = rows, rows.pipeline
        low, high = (0.0, 1.0) if pipeline.classes else (float(rows.y.min()), float(rows.y.max()))
        several = pipeline.classes > 2  # one table a class
        self.encoders = [] if several else find_encoders(pipeline.proto, pipeline.place, low, high)
        names = list(dict.fromkeys(encoder.source for encoder in self.encoders))
        found = dict(zip(names, rows.values(names), strict=True)) if names else {}
        self._categories = [found[encoder.source].reshape(len(rows.y)) for encoder in self.encoders]

    def choose(self) -> float | None:
        """Return the strength of the old tables with the least loss on the rows to choose with; None to keep them."""
        rows, strength = self._rows, None
        if not self.encoders:
            return None
        original = rows.problem.original
        best = rows.problem.part(rows.chosen).evaluate(original)[0]
        mask = np.zeros(len(rows.y), bool)
        mask[rows.chosen] = True
        for candidate in _STRENGTHS:
            problem = rows.reach([(self.model(np.arange(len(rows.y)) < rows.sizes[0], candidate), mask)])
            loss = problem.part(rows.chosen).evaluate(original)[0]
            if loss < best:
                best, strength = loss, candidate
        return strength

    def model(self, mask: Array, strength: float) -> onnx.ModelProto:
        """Return the pipeline with tables that some rows update."""
        return with_tables(
            self._rows.pipeline.proto, tables_of(self.encoders, self._categories, self._rows.y, mask, strength)
        )

    def problem(self, fitted: int, strength: float) -> LeafProblem:
        """Return the problem with the first rows encoded by cross-fitted tables, and the others by tables of these."""
        pairs = folds(len(self._rows.y), fitted)
        return self._rows.reach((self.model(mask, strength), own) for mask, own in pairs)


def _tune(rows: _Rows, scope: str) -> _Tuned:
    """Return the tuned model: tables first, then leaves for the new tables."""
    pipeline, end = rows.pipeline, rows.chosen.stop
    first = whole = rows.problem
    model, strength, tables = pipeline.proto, None, None
    if scope != "leaves":
        tables = _Tables(rows)
        strength = tables.choose()
    if tables and strength:
        model = tables.model(np.arange(len(rows.y)) < end, strength)
        first, whole = tables.problem(rows.sizes[0], strength), tables.problem(end, strength)
    ridge, weights = (None, whole.original) if scope == "encoders" else _fit(first, whole, rows)
    count = len(tables.encoders) if tables and strength else 0
    return _Tuned(pipeline.with_weights(model, weights), whole, weights, ridge, strength, count)


@dataclass(frozen=True, eq=False)
class _Tuned:
    """A tuned model, and the leaves that rows reach in it with their weights."""

    model: onnx.ModelProto
    problem: LeafProblem
    weights: Array
    ridge: float | None
    strength: float | None
    tables: int


def _fit(first: LeafProblem, whole: LeafProblem, rows: _Rows) -> tuple[float | None, Array]:
    """Return the ridge with the least loss on the rows to choose with, and leaves fitted with it; None for no ridge."""
    fit, choose = first.part(slice(0, rows.sizes[0])), first.part(rows.chosen)
    best, weights = choose.evaluate(first.original)[0], first.original
    ridge: float | None = None
    start = first.original
    for candidate in _RIDGES:
        start = fit_leaves(fit, candidate, start)
        loss = choose.evaluate(start)[0]
        if loss < best:
            best, ridge, weights = loss, candidate, start
    if ridge is not None:
        weights = fit_leaves(whole.part(slice(0, rows.chosen.stop)), ridge, weights)
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


def _compare(rows: _Rows, tuned: _Tuned, seed: int) -> FinetuningReport:
    """Return the report on the held-out rows; its decision is the guard's."""
    pipeline, y = rows.pipeline, rows.y[rows.held]
    old, new = rows.held_scores(), rows.held_scores(tuned.model)
    for scores, problem, weights in (
        (old, rows.problem, rows.problem.original),
        (new, tuned.problem, tuned.weights),
    ):
        expected = problem.part(rows.held).predict(weights)
        largest = _SAME * max(1.0, np.abs(expected).max())
        if scores.shape != expected.shape or not (np.abs(scores - expected) <= largest).all():
            raise ModelError(f"{pipeline.name}: what follows its trees changes their scores, which is not supported")
    gain, loss = compare(new, old, y, seed)
    shift = prior_shift(rows.y[: rows.held.start], y, pipeline.classes) if pipeline.classes else None
    verdict = _judge(gain, loss, changed=tuned.ridge is not None or tuned.strength is not None)
    if verdict.adopted and shift and not _better_in_both_halves(new, old, y):
        verdict = _Verdict(
            adopted=False, reason="under prior shift, it is not better in both halves of the held-out rows"
        )
    return FinetuningReport(
        adopted=verdict.adopted,
        reason=verdict.reason,
        rows=rows.sizes,
        measures=("auc", "log_loss") if pipeline.classes else ("r2", "mae"),
        ridge=tuned.ridge,
        tables=tuned.tables,
        strength=tuned.strength,
        gain=gain,
        loss=loss,
        prior_shift=shift,
        rivals=(Rival("original", measure(old, y)), Rival("tuned", measure(new, y))),
        seconds=0.0,
    )


@dataclass(frozen=True, slots=True)
class _Verdict:
    adopted: bool
    reason: str


def _judge(gain: Interval, loss: Interval, *, changed: bool) -> _Verdict:
    if not changed:
        return _Verdict(adopted=False, reason="nothing fitted on the new rows is better on later rows")
    if gain.low > 0 and loss.high < 0:
        return _Verdict(adopted=True, reason="better in both measures, by intervals that exclude zero")
    worse = "worse" if gain.value < 0 or loss.value > 0 else "not better beyond chance"
    return _Verdict(adopted=False, reason=f"the tuned model is {worse} on the held-out rows")


def _better_in_both_halves(new: Array, old: Array, y: Array) -> bool:
    middle = len(y) // 2
    halves = (slice(0, middle), slice(middle, None))
    return all(measure(new[half], y[half]).loss < measure(old[half], y[half]).loss for half in halves)
