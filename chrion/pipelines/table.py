"""Tables of data: Parquet and CSV files, which are read in batches, and frames in memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from chrion.common.installation import install_hint
from chrion.common.suggestions import did_you_mean
from chrion.errors import DataError, OptionError
from chrion.graph.model import TensorInfo
from chrion.graph.ort_sessions import first_line

Array = np.ndarray[Any, Any]
#: Rows that are read and computed at once.
BATCH_ROWS = 1 << 14
_NUMBERS: Mapping[str, Any] = {
    "tensor(float)": np.float32,
    "tensor(double)": np.float64,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(bool)": np.bool_,
}
#: The columns that an error lists at most.
_LISTED = 12
#: The type of inputs that are texts.
TEXT = "tensor(string)"


class Table:
    """Rows in the order of time, of which the last ones are the most recent.

    Args:
        source: A file (.parquet, .csv), or a frame of pandas, Polars or pyarrow, or any object with
            ``__arrow_c_stream__``.
        texts: Returns which of the columns are texts, even if all of them in a CSV file are numbers: codes may begin
            with zeros.

    Raises:
        OptionError: pyarrow is not installed.
        DataError: The file cannot be read or is not UTF-8, or the object is no frame.
    """

    def __init__(self, source: Any, texts: Callable[[Sequence[str]], Collection[str]] = lambda _: ()) -> None:
        self._arrow, self._texts = _pyarrow(), texts
        self.name = str(source) if isinstance(source, str | Path) else "data"
        try:
            self._open(source)
        except (OSError, ValueError, TypeError, AttributeError) as error:  # those of pyarrow are among them
            raise DataError(f"{self.name}: cannot be read: {first_line(error)}") from error

    def _open(self, source: Any) -> None:
        if isinstance(source, str | Path):
            path = Path(source)
            if path.suffix not in {".parquet", ".pq", ".csv"}:
                raise ValueError(f"unknown format {path.suffix!r}, expected .parquet or .csv")
            if not path.exists():
                raise ValueError("no such file or folder")
            self._data = self._arrow.dataset.dataset(path, format="parquet" if path.suffix != ".csv" else "csv")
            if path.suffix == ".csv":
                self._data = self._arrow.dataset.dataset(path, format=self._csv(self._data.schema.names))
        else:
            made = source if isinstance(source, self._arrow.Table) else self._arrow.table(source)
            self._data = self._arrow.dataset.dataset(made)
        self.columns: tuple[str, ...] = tuple(self._data.schema.names)
        if len(set(self.columns)) < len(self.columns):
            raise ValueError("two columns have the same name")
        for field in self._data.schema:
            if self._arrow.types.is_binary(field.type) or self._arrow.types.is_large_binary(field.type):
                raise ValueError(f"column {field.name!r} is not UTF-8")
        self.rows = int(self._data.count_rows())

    def _csv(self, columns: Sequence[str]) -> Any:
        """Return the format of CSV files, with the type of columns that are texts."""
        types = dict.fromkeys(self._texts(columns), self._arrow.string())
        return self._arrow.dataset.CsvFileFormat(convert_options=self._arrow.csv.ConvertOptions(column_types=types))

    def column(self, name: str) -> Array:
        """Return a whole column; missing values are None or NaN.

        Raises:
            DataError: The column does not exist or cannot be read.
        """
        self.require([name])
        parts = [batch[name] for batch in self.batches([name])]
        return np.concatenate(parts) if parts else np.zeros(0)

    def require(self, names: Sequence[str]) -> None:
        """Raise a DataError if the table lacks a column."""
        for name in names:
            if name not in self.columns:
                shown = [*map(repr, self.columns[:_LISTED]), *(["..."] if len(self.columns) > _LISTED else [])]
                hint = did_you_mean(name, self.columns, f"columns: {', '.join(shown)}")
                raise DataError(f"{self.name}: no column {name!r}", hint=hint)

    def batches(self, names: Sequence[str], rows: int = BATCH_ROWS) -> Iterator[dict[str, Array]]:
        """Yield the columns of a few thousand rows at a time, in order.

        Raises:
            DataError: The file cannot be read.
        """
        try:
            for batch in self._data.to_batches(columns=[*names], batch_size=rows):
                for at in range(0, batch.num_rows, rows):
                    part = batch.slice(at, rows)
                    yield {name: part.column(name).to_numpy(zero_copy_only=False) for name in names}
        except (OSError, ValueError) as error:
            raise DataError(f"{self.name}: cannot be read: {first_line(error)}") from error


class Feeder:
    """Makes the inputs of a model from the columns of a table.

    A model has one input a column, [rows, 1] or [rows], or a single input of all features, [rows, features]: then the
    columns other than the target are its features in the order of the table, or of another one with the same columns.

    Args:
        inputs: The inputs of the model.
        table: A table.
        target: The column of the target.
        features: The columns of the table that has the order of features; none for that of this table.

    Raises:
        DataError: The table has no column for an input, or not as many as the input has features.
    """

    def __init__(self, inputs: Sequence[TensorInfo], table: Table, target: str, features: Sequence[str] = ()) -> None:
        self._inputs, self._table = inputs, table
        named = all(info.name in table.columns for info in inputs)
        if named or len(inputs) != 1:
            self.columns = [info.name for info in inputs]
            table.require(self.columns)
            return
        self.columns = [name for name in features or table.columns if name != target]
        table.require(self.columns)
        if not self.columns:
            raise DataError(f"{table.name}: no column beside the target {target!r}")
        width = (inputs[0].shape or ())[-1:]
        if width and isinstance(width[0], int) and width[0] != len(self.columns):
            raise DataError(
                f"{table.name}: {len(self.columns)} columns beside {target!r}, but input {inputs[0].name!r} "
                f"has {width[0]} features"
            )

    def feeds(self, batch: Mapping[str, Array]) -> dict[str, Array]:
        """Return the inputs of the model for a batch.

        Raises:
            DataError: A value does not have the type of its input.
        """
        if len(self._inputs) == 1 and self.columns != [self._inputs[0].name]:
            info = self._inputs[0]
            return {info.name: np.stack([self._typed(batch[name], name, info) for name in self.columns], axis=1)}
        each = {info.name: self._typed(batch[info.name], info.name, info) for info in self._inputs}
        return {i.name: each[i.name] if len(i.shape or (0, 0)) == 1 else each[i.name][:, None] for i in self._inputs}

    def _typed(self, values: Array, name: str, info: TensorInfo) -> Array:
        """Return a column as an input's type: missing numbers become NaN, missing texts empty ones."""
        where = f"{self._table.name}: column {name!r}"
        if info.type == TEXT:
            if np.issubdtype(values.dtype, np.floating) and np.isfinite(values).any():
                raise DataError(f"{where}: expected texts or whole numbers, found {values.dtype}")
            return np.array(["" if _missing(value) else str(value) for value in values.tolist()], object)
        dtype = _NUMBERS.get(info.type)
        if dtype is None:
            raise DataError(f"{where}: the model wants {info.type}, which no column has")
        try:
            numbers = np.asarray(values, np.float64) if values.dtype == object else values
            whole = not np.issubdtype(dtype, np.floating) and np.issubdtype(numbers.dtype, np.floating)
            if whole and not (np.isfinite(numbers) & (numbers == np.floor(numbers))).all():
                raise DataError(f"{where}: a value is missing or a fraction, and the model wants {info.type}")
            return numbers.astype(dtype)
        except (TypeError, ValueError) as error:
            raise DataError(f"{where}: expected {info.type}, found {values.dtype}") from error


def categories_of(values: Array) -> tuple[list[Any], Array]:
    """Return the categories of texts or integers, and the number of each value's own."""
    found = _pyarrow().array(values.reshape(-1)).dictionary_encode()
    return found.dictionary.to_pylist(), found.indices.to_numpy().astype(np.int64)


def _missing(value: object) -> bool:
    return value is None or value != value  # noqa: PLR0124 - NaN


def _pyarrow() -> Any:
    try:
        import pyarrow as pa  # noqa: PLC0415 - part of an extra
        import pyarrow.csv  # noqa: PLC0415 - part of an extra
        import pyarrow.dataset  # noqa: PLC0415 - part of an extra
    except ImportError as error:
        raise OptionError("tables need the package pyarrow", hint=install_hint("finetune")) from error
    return pa
