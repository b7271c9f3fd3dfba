"""The rows of the data: to fit, to choose with, and held out; with what a pipeline makes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import onnx

from chrion.errors import DataError
from chrion.graph.trees import TreeEnsemble
from chrion.pipelines.encoders import EncodedRows, Prior, find_encoders, with_tables
from chrion.pipelines.leaves import LeafProblem
from chrion.pipelines.pipeline import Array, Feeds, Pipeline
from chrion.pipelines.scratch import allocate
from chrion.pipelines.table import Table, categories_of

#: The share of the rows that are held out, and that of those to choose with.
_SHARE = 5
#: The fewest rows of each of them.
_LEAST_ROWS = 100
#: The earlier times at which a tuning is repeated, a fifth of the rows apart.
_EARLIER = 2
#: The most values of the model's inputs that are kept, so that they are read once.
_MOST_KEPT = 1 << 21
#: Values before the ensemble that are not computed by the model, of all rows.
Given = Mapping[str, Array]


class Rows:
    """The rows of tables that follow each other, with the leaves that they reach.

    Args:
        pipeline: The pipeline.
        target: The column with the classes or numbers.
        tables: The tables, the oldest first.
        held: The number of the last rows, which are held out; None for a fifth.

    Attributes:
        sizes: The rows to fit, to choose with, and held out, in this order.
        y: The class of each row, or the number.

    Raises:
        DataError: The data do not fit the model, or have too few rows.
    """

    def __init__(self, pipeline: Pipeline, target: str, tables: Sequence[Table], held: int | None = None) -> None:
        self.pipeline, self.target, self.tables = pipeline, target, tables
        labels = [pipeline.encode(table.column(target), f"{table.name}: target {target!r}") for table in tables]
        total = sum(table.rows for table in tables)
        held = total // _SHARE if held is None else held
        self.sizes = _sizes(total - held, held)
        if min(self.sizes) < _LEAST_ROWS:
            raise DataError(
                f"{tables[0].name}: {tables[0].rows} rows are too few: {self.sizes[0]} to fit, {self.sizes[1]} to "
                f"choose with, {held} held out",
                hint=f"at least {_LEAST_ROWS} of each are needed",
            )
        self.y = np.concatenate(labels)
        self._kept: list[Feeds] | None = None

    @cached_property
    def problem(self) -> LeafProblem:
        """The leaves that rows reach in the pipeline as it is.

        Raises:
            DataError: The data do not fit the model.
            SpaceError: The folder of temporary files lacks the space.
        """
        return self.reach({})

    def earlier(self) -> list[Rows]:
        """Return the rows until earlier times, of which the last ones are held out; none if these were given."""
        end, held = self.held.start, self.sizes[2]
        times = [end - back * held for back in range(_EARLIER, 0, -1)] if len(self.tables) == 1 else []
        found = [self._until(time, held) for time in times]
        return [rows for rows in found if min(rows.sizes) >= _LEAST_ROWS // 2]

    def _until(self, rest: int, held: int) -> Rows:
        """Return the first rows, of which the last ones are held out."""
        own, end = copy(self), rest + held
        own.sizes, own.y, own.problem = _sizes(rest, held), self.y[:end], self.problem.part(slice(0, end))
        return own

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

    def reach(self, given: Given, ensemble: TreeEnsemble | None = None) -> LeafProblem:
        """Return the problem of the leaves that rows reach, of an ensemble with other thresholds if it is given."""
        pipeline = self.pipeline
        weights = (ensemble or pipeline.ensemble).entry_weights.astype(np.float64)
        kind = np.min_scalar_type(max(1, len(weights) - 1))
        return LeafProblem(
            reached=self._filled(pipeline.columns[-1].stop, kind, pipeline.leaf_runner(given, ensemble), given),
            columns=pipeline.columns,
            y=self.y,
            base=pipeline.base,
            scale=pipeline.scale,
            loss=pipeline.loss,
            original=weights,
        )

    def features(self, model: onnx.ModelProto | None = None, given: Given | None = None) -> Array:
        """Return the features that the ensemble reads, [rows, features].

        Args:
            model: A model with other tables before the ensemble, in place of the pipeline.
            given: Values that it does not compute.
        """
        first = next(iter(self.feeds()))
        width = self.pipeline.feature_runner()({name: values[:1] for name, values in first.items()}).shape[1]
        given = given or {}
        return self._filled(width, np.float32, self.pipeline.feature_runner(model, given), given)

    def _filled(self, width: int, dtype: object, run: Callable[[Feeds], Array], given: Given) -> Array:
        """Return what a model makes of the rows, [rows, width]."""
        filled, at = allocate((len(self.y), width), dtype, self.pipeline.name), 0
        for feeds in self.feeds():
            own = slice(at, at + len(next(iter(feeds.values()))))
            filled[own] = run(feeds | {name: values[own] for name, values in given.items()})
            at = own.stop
        return filled

    def feeds(self) -> Iterator[Feeds]:
        """Yield the inputs of the model for some rows at a time."""
        left = len(self.y)
        for feeds in self._all_feeds():
            if left <= 0:
                return
            count = len(next(iter(feeds.values())))
            yield feeds if count <= left else {name: values[:left] for name, values in feeds.items()}
            left -= count

    def _all_feeds(self) -> Iterator[Feeds]:
        """Yield the inputs for all rows; those of a small table are kept."""
        if self._kept is not None:
            yield from self._kept
            return
        kept, size = [], 0
        for table in self.tables:
            for feeds in self.pipeline.feeds(table, self.target):
                size += sum(values.size for values in feeds.values())
                if size <= _MOST_KEPT:
                    kept.append(feeds)
                yield feeds
        self._kept = kept if size <= _MOST_KEPT else None

    def values(self, names: Sequence[str]) -> list[Array]:
        """Return values before the ensemble, of all rows."""
        run = self.pipeline.value_runner(names)
        parts = [run(feeds) for feeds in self.feeds()]
        return [np.concatenate(own) for own in zip(*parts, strict=True)]

    def held_scores(self, model: onnx.ModelProto | None = None) -> Array:
        """Return what a model returns for the held-out rows."""
        return self._held(self.pipeline.score_runner(model))

    def held_labels(self, model: onnx.ModelProto | None = None) -> Array:
        """Return the share of the held-out rows whose label has the largest score, for each output of labels."""
        found: Array = self._held(self.pipeline.label_runner(model)).mean(axis=0)
        return found

    def _held(self, run: Callable[[Feeds], Array]) -> Array:
        at, parts = 0, []
        for feeds in self.feeds():
            size = len(next(iter(feeds.values())))
            if at + size > self.held.start:
                first = max(0, self.held.start - at)
                parts.append(run({name: values[first:] for name, values in feeds.items()}))
            at += size
        return np.concatenate(parts)


def _sizes(rest: int, held: int) -> tuple[int, int, int]:
    """Return the rows to fit, to choose with, and held out; the second are a share of what is not held out."""
    return rest - rest // _SHARE, rest // _SHARE, held


@dataclass(frozen=True, eq=False)
class UpdatedTables:
    """A pipeline with updated tables, what they make of all rows, and the priors of the tables."""

    model: onnx.ModelProto
    given: Given
    priors: tuple[Prior | None, ...]


class EncoderTables:
    """The tables of a pipeline's target encoders, to be updated with rows.

    Args:
        rows: The rows.
        moved: Whether a change of the mean target is left to the leaves.
        share: How much of the change of a value is kept.
        empty: Whether the tables begin without categories, as those of a new encoder do.
    """

    def __init__(self, rows: Rows, *, moved: bool, share: float = 1.0, empty: bool = False) -> None:
        pipeline, y = rows.pipeline, rows.y
        self._proto, tuned = pipeline.proto, y[rows.tuned]
        low, high = (0.0, 1.0) if pipeline.classes else (float(tuned.min()), float(tuned.max()))
        several = pipeline.classes > 2  # one table a class
        encoders = [] if several else find_encoders(pipeline.proto, pipeline.place, low, high)
        if empty:
            encoders = [replace(encoder, values={}, default=float(y[rows.fit].mean())) for encoder in encoders]
        names = list(dict.fromkeys(encoder.source for encoder in encoders))
        found = dict(zip(names, rows.values(names), strict=True)) if names else {}
        self._shapes = {encoder.output: found[encoder.source].shape for encoder in encoders}
        self._columns = [
            EncodedRows(
                encoder,
                *categories_of(found[encoder.source]),
                y,
                fractions=pipeline.classes > 0,
                moved=moved,
                share=share,
            )
            for encoder in encoders
            if found[encoder.source].size == len(y)
        ]

    def updated(self, fitted: slice) -> UpdatedTables | None:
        """Return the tables that the first rows update; None if all of them stay.

        Args:
            fitted: These rows. What is made of them is cross-fitted.
        """
        found = [(column.encoder, column.updated(fitted.stop)) for column in self._columns]
        priors = tuple(own.prior for _, own in found)
        if not any(priors):
            return None
        model = with_tables(self._proto, {encoder.at: own.table for encoder, own in found})
        given = {encoder.output: own.values.reshape(self._shapes[encoder.output]) for encoder, own in found}
        return UpdatedTables(model, given, priors)
