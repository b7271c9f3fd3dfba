"""The rows of the data: to fit, to choose with, and held out; with what a pipeline makes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import onnx

from chrion.errors import DataError
from chrion.pipelines.encoders import find_encoders, folds, tables_of, with_tables
from chrion.pipelines.leaves import LeafProblem
from chrion.pipelines.pipeline import Array, Feeds, Pipeline
from chrion.pipelines.scratch import allocate
from chrion.pipelines.table import Table

#: The share of the rows that are held out, and that of those to choose with.
_SHARE = 5
#: The fewest rows of each of them.
_LEAST_ROWS = 100
#: The rows that an old value of a table is worth, to choose from.
_STRENGTHS = (1000.0, 300.0, 100.0, 30.0, 10.0)
#: Models with other tables before the ensemble, and the rows that each of them encodes, as a mask.
Encoded = Iterable[tuple[onnx.ModelProto, Array]]


class Rows:
    """The rows of one or two tables, with the leaves that they reach.

    Args:
        pipeline: The pipeline.
        target: The column with the classes or numbers.
        tables: The data, and the held-out rows if they are a table of their own.

    Attributes:
        sizes: The rows to fit, to choose with, and held out, in this order.
        y: The class of each row, or the number.
        problem: The leaves that rows reach in the pipeline as it is.

    Raises:
        DataError: The data do not fit the model, or have too few rows.
        SpaceError: The folder of temporary files lacks the space for what rows reach.
    """

    def __init__(self, pipeline: Pipeline, target: str, tables: list[Table]) -> None:
        self.pipeline, self.target, self.tables = pipeline, target, tables
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
        self.y = np.concatenate(labels)
        self.problem = self.reach([(pipeline.proto, np.ones(len(self.y), bool))])

    @property
    def fit(self) -> slice:
        """The rows to fit."""
        return slice(0, self.sizes[0])

    @property
    def chosen(self) -> slice:
        """The rows to choose with."""
        return slice(self.sizes[0], self.sizes[0] + self.sizes[1])

    @property
    def tuned(self) -> slice:
        """The rows to fit and to choose with."""
        return slice(0, self.sizes[0] + self.sizes[1])

    @property
    def held(self) -> slice:
        """The held-out rows."""
        return slice(self.sizes[0] + self.sizes[1], sum(self.sizes))

    def reach(self, models: Encoded) -> LeafProblem:
        """Return the problem of the leaves that rows reach; those of rows that no model encodes are of no meaning."""
        pipeline = self.pipeline
        weights = pipeline.ensemble.entry_weights.astype(np.float64)
        kind = np.min_scalar_type(max(1, len(weights) - 1))
        return LeafProblem(
            reached=self._filled(pipeline.columns[-1].stop, kind, models, pipeline.leaf_runner),
            columns=pipeline.columns,
            y=self.y,
            base=pipeline.base,
            scale=pipeline.scale,
            loss=pipeline.loss,
            original=weights,
        )

    def features(self, models: Encoded) -> Array:
        """Return the features that the ensemble reads, [rows, features]."""
        first = next(iter(self.feeds()))
        width = self.pipeline.feature_runner()({name: values[:1] for name, values in first.items()}).shape[1]
        return self._filled(width, np.float32, models, self.pipeline.feature_runner)

    def _filled(
        self, width: int, dtype: object, models: Encoded, make: Callable[[onnx.ModelProto], Callable[[Feeds], Array]]
    ) -> Array:
        """Return what models make of the rows, [rows, width]."""
        filled = allocate((len(self.y), width), dtype, self.pipeline.name)
        for model, mask in models:
            run, at = make(model), 0
            for feeds in self.feeds():
                size = len(next(iter(feeds.values())))
                own = np.flatnonzero(mask[at : at + size])
                if len(own):
                    filled[at + own] = run({name: values[own] for name, values in feeds.items()})
                at += size
        return filled

    def feeds(self) -> Iterator[Feeds]:
        """Yield the inputs of the model for some rows at a time."""
        for table in self.tables:
            yield from self.pipeline.feeds(table, self.target)

    def values(self, names: Sequence[str]) -> list[Array]:
        """Return values before the ensemble, of all rows."""
        run = self.pipeline.value_runner(names)
        parts = [run(feeds) for feeds in self.feeds()]
        return [np.concatenate(own) for own in zip(*parts, strict=True)]

    def held_scores(self, model: onnx.ModelProto | None = None) -> Array:
        """Return what a model returns for the held-out rows."""
        run, at, parts = self.pipeline.score_runner(model), 0, []
        for feeds in self.feeds():
            size = len(next(iter(feeds.values())))
            if at + size > self.held.start:
                first = max(0, self.held.start - at)
                parts.append(run({name: values[first:] for name, values in feeds.items()}))
            at += size
        return np.concatenate(parts)


class EncoderTables:
    """The tables of a pipeline's target encoders, updated with rows.

    Args:
        rows: The rows.
    """

    def __init__(self, rows: Rows) -> None:
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
            problem = rows.reach([(self.model(rows.fit, candidate), mask)])
            loss = problem.part(rows.chosen).evaluate(original)[0]
            if loss < best:
                best, strength = loss, candidate
        return strength

    def model(self, rows: slice | Array, strength: float) -> onnx.ModelProto:
        """Return the pipeline with tables that some rows update."""
        mask = np.zeros(len(self._rows.y), bool)
        mask[rows] = True
        return with_tables(
            self._rows.pipeline.proto, tables_of(self.encoders, self._categories, self._rows.y, mask, strength)
        )

    def encoded(self, fitted: slice, strength: float) -> Encoded:
        """Yield models that encode the fitted rows by cross-fitted tables, and the others by tables of these."""
        for mask, own in folds(len(self._rows.y), fitted.stop):
            yield self.model(mask, strength), own
