"""Fine-tuning of a pipeline on new rows, with a guard: the tuned model is returned only if it is proven better.

The stages of :func:`finetune`:

1. Find the leaf that each row reaches in each tree (:class:`chrion.pipelines.rows.Rows`).
2. Fit the leaves with the earlier rows for several ridges, beside levels that vary with time
   (:mod:`chrion.pipelines.levels`), and choose one on later rows (:mod:`chrion.pipelines.leaves`).
   Then fit them on all of these rows.
3. Update the tables of target encoders with the earlier rows (:mod:`chrion.pipelines.encoders`), and fit the leaves for
   them likewise. Later rows tell whether that is better.
4. Append a few new trees (:mod:`chrion.pipelines.growth`), or from the level L2 on train the pipeline in its soft form
   (:mod:`chrion.pipelines.soft`).
5. Move scores to the base rate, if it is known (:mod:`chrion.pipelines.base_rate`).
6. Compare the candidates with the original on the most recent rows, which took no part (:mod:`chrion.pipelines.guard`);
   up to 200 000 rows, also those of the same stages at two earlier times. Compare them with what else could be done
   with the new rows (:mod:`chrion.pipelines.baselines`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from chrion.common.wrong_values import wrong_value
from chrion.errors import DataError, ModelError, OptionError
from chrion.graph.rewrite import refusals_of
from chrion.graph.trees import TreeEnsemble, joined
from chrion.pipelines import leaves
from chrion.pipelines.base_rate import BaseRate, ClassShares
from chrion.pipelines.baselines import baselines, retrained
from chrion.pipelines.growth import grow
from chrion.pipelines.guard import Candidate, Guard, Trial, Verdict
from chrion.pipelines.leaves import LeafProblem, fit_leaves
from chrion.pipelines.levels import Levels, levels_of
from chrion.pipelines.pipeline import Array, Pipeline
from chrion.pipelines.report import ComparedModel, FinetuningReport
from chrion.pipelines.rows import EncoderTables, Given, Rows, UpdatedTables
from chrion.pipelines.soft import LEVELS, SoftOptions, SoftPipeline, Start, as_soft, tune_soft
from chrion.pipelines.table import Table
from chrion.pipelines.tail import arithmetic_refusals

#: The ridges to choose from, in rows: leaves in which fewer rows fall move less than half of the way.
_RIDGES = (10_000.0, 3000.0, 1000.0, 300.0, 100.0, 30.0, 10.0, 3.0)
#: The gradient at which fits stop, relative to the first one; a tenth of it changes AUC by 0.04 points at most.
TOLERANCE = 1e-2
#: The most rows for which the tuning is repeated at earlier times, and other methods are tried.
MOST_ROWS = 200_000
#: How far the sum of probabilities may be from 1.
_SUM = 1e-3
SCOPES = ("all", "encoders", "leaves")

#: Called with the number of stages done, the number of all, and the name of the next one.
Progress = Callable[[int, int, str], None]


def finetune(  # noqa: PLR0913 - optional arguments are keyword-only
    model: str | Path | bytes | onnx.ModelProto,
    data: Any,
    target: str = "y",
    *,
    validation: Any = None,
    old: Any = None,
    scope: str = "all",
    level: str = "L1",
    base_rate: BaseRate | None = None,
    checkpoint: str | Path | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> tuple[onnx.ModelProto, FinetuningReport]:
    """Adapt a pipeline to new rows: the tables of its target encoders, its trees, and its linear models.

    A keyboard interrupt ends the tuning, and the best model until then is compared with the original. One during this
    comparison repeats it without earlier times, and one during that with other methods ends that.

    Args:
        model: A model with one tree ensemble, or with linear models and other arithmetic operators: a file, its bytes,
            or a ModelProto.
        data: New rows in the order of time: a Parquet or CSV file, which is read in batches, or a frame.
        target: The column with the classes or numbers to predict.
        validation: The rows that the tuned model is compared with the original on; the last fifth of the data if None.
        old: Rows that the model was fitted on, in the order of time. They are not used for the tuning; a new model of
            old and new rows is added to the comparison.
        scope: What is tuned: tables of encoders, and those that integers look up (``encoders``), the rest (``leaves``),
            or ``all``.
        level: ``L1`` fits the leaves of the trees, and appends a few trees if that is better. From ``L2`` on, the model
            becomes a differentiable network, which is slower, and more of it is trained: thresholds (``L2``), weights
            of all features in each decision (``L3``), and weights of all decisions in each leaf (``L4``); tables of
            all encoded categories; and weights of arithmetic operators, for which all of these levels are the same.
        base_rate: The share of the second class among the rows to come, or the share of each class by its label, if it
            is known to differ from that in the data. Measures are then of rows with these shares.
        checkpoint: A file for the state of the training from ``L2`` on, from which an interrupted one continues.
        seed: The seed of bootstrap samples, of the training, and of baselines.
        progress: A function that is called before each stage.

    Returns:
        The tuned model if it is better than the original in both measures by intervals that exclude zero, over all
        times at which rows were held out, else the original; and the report. The measures are AUC and log loss, for a
        regressor R2 and the mean absolute error.
        With a base rate, all scores are moved to it, and the tuned model must also have a lower log loss than the
        original with moved scores; else that one is returned if its log loss is lower than the original's.

    Raises:
        ModelError: The model cannot be read or run, or its trees cannot be fine-tuned.
        DataError: The data cannot be read, does not fit the model, or has too few rows.
        OptionError: An option is invalid, or a library is not installed.
        SpaceError: The folder of temporary files lacks the space for what rows reach.
    """
    for name, value, allowed in (("scope", scope, SCOPES), ("level", level, LEVELS)):
        if value not in allowed:
            raise wrong_value(name, f"one of {', '.join(allowed)}", value)
    if checkpoint is not None and level == "L1":
        raise OptionError("checkpoint: the level L1 has no state to keep", hint="it is for L2 to L4")
    if checkpoint is not None and not Path(checkpoint).absolute().parent.is_dir():
        raise OptionError(f"checkpoint: there is no folder {Path(checkpoint).parent}", hint="create it first")
    begin, update = time.perf_counter(), progress or (lambda _done, _total, _name: None)
    pipeline = _opened(model, level)
    shares = None if base_rate is None else ClassShares(pipeline, base_rate)

    def tables(*sources: Any) -> list[Table]:
        return [Table(source, lambda columns: pipeline.texts(columns, target)) for source in sources]

    new = tables(data) if validation is None else tables(data, validation)
    update(0, 4, "leaves of all rows")
    rows = Rows(pipeline, target, new, None if validation is None else new[1].rows)
    tuning = Tuning(rows, scope, seed)
    with_old = None if old is None else Rows(pipeline, target, [*tables(old), *new], rows.sizes[2])
    if with_old:
        next(with_old.feeds())  # a column that is missing is refused before the tuning
    tuning.run(level, None if checkpoint is None else Path(checkpoint), update)
    update(2, 4, "comparison")
    chosen, report, guard = _compared(tuning, shares, scope, seed)
    report = replace(report, seconds=time.perf_counter() - begin)
    try:
        update(3, 4, "other methods")
        if not tuning.interrupted:
            others = baselines(rows, seed, guard.compared, MOST_ROWS)
            for other in chain(others, retrained(with_old, seed, guard.compared) if with_old else ()):
                report = replace(report, compared=(*report.compared, other))
    except KeyboardInterrupt:
        report = replace(report, interrupted=True)
    return (chosen.model if report.adopted else pipeline.proto), report


def _opened(model: str | Path | bytes | onnx.ModelProto, level: str) -> Pipeline:
    """Return a pipeline; one without scores of leaves alone is refused for the level L1."""
    pipeline = Pipeline(model)
    if pipeline.tail and level == "L1":
        reason = "what follows its trees changes their scores" if pipeline.has_trees else "it has no trees"
        hint = "add --soft; in Python, level='L2'"
        raise ModelError(f"{pipeline.name}: leaves cannot be fitted: {reason}", hint=hint)
    return pipeline


class Tuning:
    """The stages of a tuning, and the candidates that they make.

    Args:
        rows: The rows.
        scope: What is tuned.
        seed: The seed of the training and of new trees.

    Attributes:
        original: The pipeline as it is.
        tuned: The pipeline with tuned tables and leaves; None if nothing is better on the rows to choose with.
        grown: The same with new trees; None if they are not better there, or missing.
        soft: The soft form, tuned; None for the level L1.
        hard: The trees with the thresholds and leaves of the soft form; None if it has more than these.
        softened: The soft form of :attr:`tuned` as it is.
        interrupted: Whether a keyboard interrupt ended the stages.
    """

    def __init__(self, rows: Rows, scope: str, seed: int) -> None:
        self.rows, self._scope, self._seed = rows, scope, seed
        self.tuned: Candidate | None = None
        self.grown: Candidate | None = None
        self.soft: Candidate | None = None
        self.hard: Candidate | None = None
        self.softened: Candidate | None = None
        self.interrupted = False
        #: What the report says of the stages.
        self.figures: dict[str, Any] = {}
        self.notes: list[ComparedModel] = []
        model = rows.pipeline.proto
        self._starts = Start(model), Start(model)
        if rows.pipeline.tail:
            self.original = _as_it_is(rows)
            return
        self._first = self._whole = _Stage(model, rows.problem)
        self.original = self._candidate("original", self._whole, rows.pipeline.ensemble)
        #: The least loss of the rows to choose with.
        self._best = rows.problem.part(rows.chosen).evaluate(rows.problem.original)[0]
        self._weights = (rows.problem.original, rows.problem.original)
        tuned = rows.problem.part(rows.tuned)
        #: How much of a change is kept: if levels vary with time, leaves may, too, and the old time counts as much.
        self._share = 0.5 if self._levels_of(tuned).vary else 1.0
        #: What is added to the scores of the rows to fit, and of these and the rows to choose with, before new trees.
        self._levels: tuple[Array, Array] = (np.zeros(1), np.zeros(1))

    def run(self, level: str, checkpoint: Path | None, update: Progress) -> None:
        """Run the stages; a keyboard interrupt ends them.

        Args:
            level: What is tuned of the trees.
            checkpoint: A file for the state of a training.
            update: Is told the stages.
        """
        self.figures = {"level": level}
        try:
            if not self.rows.pipeline.tail:
                self._run_exact(update)
            if level != "L1":
                options = SoftOptions(level, self._scope, seed=self._seed, checkpoint=checkpoint)
                self._soften(options, lambda done, total: update(1, 4, f"epoch {done + 1} of at most {total}"))
            elif self._scope == "all" and self._share == 1:
                update(1, 4, "new trees")
                self._grow()
        except KeyboardInterrupt:
            self.interrupted = True

    def _run_exact(self, update: Progress) -> None:
        if self._scope != "encoders":
            update(1, 4, "leaves")
            self._fit(self._first, lambda: self._first)
        if self._scope != "leaves":
            update(1, 4, "tables of encoders")
            self._tune_tables()
        self._starts = Start(self._first.model, self._weights[0]), Start(self._whole.model, self._weights[1])

    def _tune_tables(self) -> None:
        rows, tables = self.rows, EncoderTables(self.rows, moved=self._scope == "all", share=self._share)
        found = tables.updated(rows.fit)
        if found:
            first = _Stage(found.model, rows.reach(found.given), found)
            self._fit(first, lambda: self._updated(tables))

    def _updated(self, tables: EncoderTables) -> _Stage:
        """Return the pipeline with tables that the rows to choose with have updated, too."""
        found = tables.updated(self.rows.tuned)
        return _Stage(found.model, self.rows.reach(found.given), found) if found else self._whole

    def _fit(self, first: _Stage, whole: Callable[[], _Stage]) -> None:
        """Fit the leaves of a pipeline if they are tuned, and keep what is best on the rows to choose with.

        Args:
            first: The pipeline with tables that the rows to fit have updated.
            whole: Returns the same with the rows to choose with.
        """
        rows = self.rows
        fit, choose = first.problem.part(rows.fit), first.problem.part(rows.chosen)
        start = weights = fit.original
        levels = self._levels_of(fit)
        fit, choose = fit.moved(levels.rows), choose.moved(levels.future)
        best, ridge, found = choose.evaluate(weights)[0], None, None
        try:
            for candidate in _RIDGES if self._scope != "encoders" else ():
                start = fit_leaves(fit, candidate, start, TOLERANCE)
                loss = choose.evaluate(start)[0]
                if loss > best:
                    break
                best, ridge, weights = loss, candidate, start
            if best < self._best:
                stage, both = whole(), weights
                problem = stage.problem.part(rows.tuned)
                later = self._levels_of(problem)
                if ridge is not None:
                    both = fit_leaves(problem.moved(later.rows), ridge, weights, TOLERANCE)
                found = stage, both, later
        finally:  # after a keyboard interrupt, what the rows to fit have made is kept
            if best < self._best:
                stage, both, later = found or (first, weights, levels)
                self._best, self._first, self._whole = best, first, stage
                self._weights = self._final(weights, levels), self._final(both, later)
                self._levels = levels.rows - levels.future, later.rows - later.future
                self.figures = {"ridge": ridge, "priors": stage.tables.priors if stage.tables else ()}
                self.tuned = self._candidate("without new trees", stage, self._with_weights(self._weights[1]))

    def _levels_of(self, problem: LeafProblem) -> Levels:
        """Return the levels of the rows of a problem, if leaves are tuned."""
        raw = problem.raw(problem.original)
        found = levels_of(raw, problem.y, problem.loss)
        return Levels(0 * found.rows, 0 * found.future, found.vary) if self._scope == "encoders" else found

    def _final(self, weights: Array, levels: Levels) -> Array:
        """Return weights that a model may have, with the level of rows to come."""
        pipeline = self.rows.pipeline
        old = self.rows.problem.original
        weights = _as_probabilities(pipeline, old + self._share * (weights - old))
        ensemble = replace(pipeline.ensemble, entry_weights=weights)
        return pipeline.with_constants(ensemble, levels.future).entry_weights.astype(np.float64)

    def _grow(self) -> None:
        """Append new trees."""
        rows, (first, whole) = self.rows, self._weights
        raws = self._first.problem.raw(first), self._whole.problem.raw(whole)
        for raw, levels in zip(raws, self._levels, strict=True):
            raw[: len(levels)] += levels
        x = rows.features(given=self._whole.given)
        try:
            found = grow(rows, x, *raws, self._seed)
        except ImportError:
            self.notes.append(ComparedModel("with new trees", None, "needs the package scikit-learn"))
            return
        if found:
            self.figures |= {"trees": len(found.trees)}
            ensemble = joined(self._with_weights(whole), found.trees)
            self.grown = self._candidate("with new trees", self._whole, ensemble, found.raw(x))

    def _soften(self, options: SoftOptions, progress: Callable[[int, int], None]) -> None:
        with refusals_of(self.rows.pipeline.name):
            if self.rows.pipeline.has_trees:
                untuned = as_soft(self.rows, self._starts[1], options)
                self.softened = self._soft_candidate("soft, not trained", untuned)
            found = tune_soft(self.rows, *self._starts, options, progress)
        self.soft, self.interrupted = self._soft_candidate("soft", found), found.interrupted
        self.figures |= {"level": options.level, "epochs": found.epochs, "curve": found.curve}
        self.hard = self._hardened(found)  # last: an interrupt here keeps the network

    def _soft_candidate(self, name: str, soft: SoftPipeline) -> Candidate:
        pipeline = self.rows.pipeline
        constants = np.zeros(1 if pipeline.tail else len(pipeline.targets))
        return Candidate(name, soft.raw, soft.predict, soft.exported, constants)

    def _hardened(self, soft: SoftPipeline) -> Candidate | None:
        if self.rows.pipeline.tail:
            return None
        # After an interrupt, it is the network of the rows to fit.
        at = 0 if soft.interrupted else 1
        stage, found = (self._first, self._whole)[at], soft.hardened(self._with_weights(self._weights[at]))
        if found is None:
            return None
        ensemble, constants = found
        hard = replace(stage, problem=self.rows.reach(stage.given, ensemble))
        return replace(self._candidate("soft, as trees", hard, ensemble), constants=constants)

    def _candidate(self, name: str, stage: _Stage, ensemble: TreeEnsemble, extra: Array | None = None) -> Candidate:
        """Return a candidate with the trees of a stage, and new ones that add ``extra`` to scores."""
        pipeline, weights = self.rows.pipeline, ensemble.entry_weights[: len(stage.problem.original)].astype(np.float64)

        def raw(rows: slice) -> Array:
            scores = stage.problem.raw(weights, rows)
            return scores if extra is None else scores + extra[rows]

        def make(constants: Array) -> onnx.ModelProto:
            changed = pipeline.with_constants(ensemble, constants) if constants.any() else ensemble
            return pipeline.with_ensemble(stage.model, changed)

        return Candidate(name, raw, pipeline.loss.predict, make, np.zeros(len(pipeline.targets)))

    def _with_weights(self, weights: Array) -> TreeEnsemble:
        ensemble = self.rows.pipeline.ensemble
        return replace(ensemble, entry_weights=weights.astype(ensemble.dtype))


@dataclass(frozen=True, eq=False)
class _Stage:
    """The model, the leaves that rows reach in it, and its tables if they were updated."""

    model: onnx.ModelProto
    problem: LeafProblem
    tables: UpdatedTables | None = None

    @property
    def given(self) -> Given:
        """What the tables make of the rows."""
        return self.tables.given if self.tables else {}


def _as_it_is(rows: Rows) -> Candidate:
    """Return the original with what it returns as raw scores.

    Raises:
        DataError: It returns no number for a row.
        ModelError: It returns no probabilities, or several numbers a row.
    """
    pipeline = rows.pipeline
    run, classes = pipeline.score_runner(), pipeline.classes
    with refusals_of(pipeline.name), arithmetic_refusals():
        scores, count = np.concatenate([run(feeds) for feeds in rows.feeds()]), len(rows.y)
    if np.isnan(scores).any():
        raise DataError(
            f"{rows.tables[0].name}: the features have missing values, which a linear model has no scores for",
            hint="leave their rows out, or add an imputer to the pipeline",
        )
    if scores.shape != ((count, classes) if classes else (count,)):
        raise ModelError(f"{pipeline.name}: fine-tuning needs a score for each class, or a number for each row")
    if classes and not (scores.min() >= 0 and (np.abs(scores.sum(axis=1) - 1) < _SUM).all()):
        raise ModelError(f"{pipeline.name}: its scores are no probabilities", hint="calibrate the classifier")
    return Candidate(
        "original", lambda _rows: rows.held_scores(), lambda raw: raw, lambda _: pipeline.proto, np.zeros(1)
    )


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


def _final(
    candidate: Candidate | None, guard: Guard, rows: Rows, shares: ClassShares | None, notes: list[ComparedModel]
) -> Candidate | None:
    """Return a candidate with moved scores; None, and a note, if its model has others than it was fitted with."""
    if candidate is None:
        return None
    candidate = candidate.moved(shares, rows) if shares else candidate
    try:
        guard.scores(candidate)
    except ModelError:
        notes.append(ComparedModel(candidate.name, None, "failed: its model has other scores"))
        return None
    return _labelled(candidate, guard, notes)


def _labelled(candidate: Candidate | None, guard: Guard, notes: list[ComparedModel]) -> Candidate | None:
    """Return a candidate; None, and a note, if its labels do not follow its scores."""
    if candidate is None or guard.has_own_labels(candidate):
        return candidate
    notes.append(ComparedModel(candidate.name, None, "failed: its labels are not those of its scores"))
    return None


def _preferred(guard: Guard, first: Candidate, more: Iterable[Candidate | None], soft: Candidate | None) -> Candidate:
    """Return the first candidate, or one that is better; a network, which is slower, also if none is adopted."""
    chosen = first
    for other in more:
        if other and guard.is_better(other, chosen):
            chosen = other
    return soft if soft and (not guard.judge(chosen).adopted or guard.is_better(soft, chosen)) else chosen


def _beside_moved(guard: Guard, chosen: Candidate, verdict: Verdict, moved: Candidate) -> tuple[Candidate, Verdict]:
    """Compare a candidate with the original whose scores are moved to the base rate; return the one to adopt."""
    if verdict.adopted and not guard.compare(chosen, moved).loss.high < 0:
        reason = "its log loss is not lower than the original's with scores moved to the base rate, beyond chance"
        verdict = replace(verdict, adopted=False, reason=reason)
    if not verdict.adopted and (other := guard.judge(moved, moved=True)).adopted:
        return moved, other
    return chosen, verdict


def _compared(
    tuning: Tuning, shares: ClassShares | None, scope: str, seed: int
) -> tuple[Candidate, FinetuningReport, Guard]:
    """Return the preferred candidate, the report and the guard; after a keyboard interrupt, with less to compare."""
    trials: list[Trial] = []
    try:
        # Networks are trained once: all candidates are compared on the same rows.
        few = len(tuning.rows.y) <= MOST_ROWS
        if few and tuning.tuned and not (tuning.soft or tuning.interrupted):
            trials.extend(_trial(Tuning(rows, scope, seed), shares) for rows in tuning.rows.earlier())
        return _decide(tuning, shares, seed, trials)
    except KeyboardInterrupt:
        tuning.interrupted = True
        return _decide(tuning, shares, seed, trials)


def _trial(tuning: Tuning, shares: ClassShares | None) -> Trial:
    """Return what comes of a tuning for the rows that follow."""
    rows = tuning.rows
    tuning.run("L1", None, lambda _done, _total, _name: None)
    if tuning.interrupted:
        raise KeyboardInterrupt
    plain = tuning.tuned or tuning.original
    found = {"original": tuning.original, "without new trees": plain, "with new trees": tuning.grown or plain}
    if shares:
        found = {name: own if name == "original" else own.moved(shares, rows) for name, own in found.items()}
        found["moved"] = tuning.original.moved(shares, rows)
    scores = {name: own.predict(own.raw(rows.held) + own.constants) for name, own in found.items()}
    y = rows.y[rows.held]
    return Trial(scores, y, shares.weights(y) if shares else None)


def _decide(
    tuning: Tuning, shares: ClassShares | None, seed: int, trials: Sequence[Trial]
) -> tuple[Candidate, FinetuningReport, Guard]:
    """Return the preferred candidate, the report, which says whether it is adopted, and the guard."""
    rows, guard = tuning.rows, Guard(tuning.rows, tuning.original, shares, seed, trials)
    notes = [*tuning.notes]
    guard.scores(tuning.original)  # a model with other ones is refused, not its candidates
    plain = _labelled(tuning.tuned.moved(shares, rows) if tuning.tuned and shares else tuning.tuned, guard, notes)
    optional = (tuning.grown, tuning.hard, tuning.soft, tuning.softened)
    grown, hard, soft, softened = (_final(own, guard, rows, shares, notes) for own in optional)
    chosen = _preferred(guard, plain or tuning.original, (grown, hard), soft)
    verdict = guard.judge(chosen)
    if chosen is tuning.original:
        verdict = replace(verdict, adopted=False, reason="nothing fitted on the new rows is better on later rows")
    if shares:
        moved = replace(tuning.original.moved(shares, rows), name="moved")
        chosen, verdict = _beside_moved(guard, chosen, verdict, moved)
    fitted = chosen in {plain or tuning.original, grown, hard, soft}  # else the original with moved scores
    figures = {**(tuning.figures if fitted else {}), "level": "L1"}
    if chosen in {hard, soft} or rows.pipeline.tail:  # which have no leaves to fit
        figures["level"] = tuning.figures["level"]
    if chosen is not grown:
        figures.pop("trees", None)
    others = [own for own in (plain, grown, hard, softened, soft) if own and own is not chosen]
    measured = [("tuned", chosen), *((own.name, own) for own in others)]
    report = FinetuningReport(
        adopted=verdict.adopted,
        reason=verdict.reason,
        rows=rows.sizes,
        measures=("auc", "log_loss") if rows.pipeline.classes else ("r2", "mae"),
        gain=verdict.gain,
        loss=verdict.loss,
        prior_shift=guard.shift,
        cost=guard.cost(chosen) if chosen is soft else None,
        interrupted=tuning.interrupted,
        compared=(
            ComparedModel("original", guard.measure(tuning.original)),
            *(guard.compared(name, guard.scores(own)) for name, own in measured),
            *notes,
        ),
        seconds=0.0,
        **figures,
    )
    return chosen, report, guard
