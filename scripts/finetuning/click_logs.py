"""Flight, Avazu and Criteo as people have them on disk, with the splits of Yu (2022), section 5.4.1.

- Flight: a folder with 2006.csv, 2007.csv and 2008.csv of the ASA Data Expo, or with .csv.gz or .csv.bz2. Years 2006
  and 2007; 2008 until June; the rest of 2008.
- Avazu: train, train.csv or train.gz of the Kaggle competition. 90, 5 and 5 % after a shuffle.
- Criteo: train.txt or train.txt.gz of the Kaggle challenge. The first 90, the next 5 and the last 5 %.

Files are read in batches, of which a share of the rows may be kept; categories become numbers at once.
The text does not name the columns of Flight. Two numbers and six categories with 694 values are those of the usual
benchmark: departure time and distance; month, day, weekday, carrier, origin and destination. The time is the scheduled
one here, since the actual one tells the delay. Flights that never left have no delay and are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import compute, csv

Array = np.ndarray[Any, Any]
_BLOCK = 1 << 24
_AVAZU = (
    *("C1", "banner_pos", "site_id", "site_domain", "site_category", "app_id", "app_domain", "app_category"),
    *("device_id", "device_ip", "device_model", "device_type", "device_conn_type"),
    *(f"C{at}" for at in range(14, 22)),
)


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of a data set.

    Attributes:
        numbers: [rows, numbers], float32; NaN if missing.
        categories: [rows, categories], numbers of categories; a missing one is a category.
        y: The class of each row, 0 or 1.
    """

    numbers: Array
    categories: Array
    y: Array

    def __len__(self) -> int:
        return len(self.y)

    def part(self, which: Array | slice) -> Rows:
        """Return some of the rows."""
        return Rows(self.numbers[which], self.categories[which], self.y[which])


@dataclass(frozen=True, eq=False)
class Splits:
    """The rows to train with, to choose with and to test with."""

    train: Rows
    validation: Rows
    test: Rows


def read_log(name: str, path: Path, share: float = 1.0, seed: int = 0) -> Splits:
    """Return a data set with the splits of the text.

    Args:
        name: ``flight``, ``avazu`` or ``criteo``.
        path: The folder or the file.
        share: The share of the rows that is kept; each batch keeps as many.
        seed: The seed of the choice, and of the shuffle of Avazu.

    Raises:
        ValueError: There is no such data set, or a file is not of its format; the message names the file.
    """
    if name not in LOGS:
        raise ValueError(f"unknown data {name!r}: expected one of {', '.join(LOGS)}")
    return LOGS[name](path, share, seed)


def _flight(path: Path, share: float, seed: int) -> Splits:
    names = ["Month", "DayofMonth", "DayOfWeek", "UniqueCarrier", "Origin", "Dest"]
    files = [_file(path, [f"{year}.csv{end}" for end in ("", ".gz", ".bz2")]) for year in (2006, 2007, 2008)]
    parts = [_read(file, ["CRSDepTime", "Distance", "DepDelay"], names, share, seed, null="NA") for file in files]
    table = pa.concat_tables(parts)
    delay = table.column("DepDelay").to_numpy()
    rows = Rows(_numbers(table, ["CRSDepTime", "Distance"]), _categories(table, names), (delay >= 15).astype(np.int8))
    month = np.array(compute.cast(table.column("Month"), pa.string()).to_pylist()).astype(np.int64)
    last = np.arange(len(rows)) >= parts[0].num_rows + parts[1].num_rows
    known = ~np.isnan(delay)
    return Splits(*(rows.part(known & own) for own in (~last, last & (month <= 6), last & (month > 6))))


def _avazu(path: Path, share: float, seed: int) -> Splits:
    file = _file(path, ["train.gz", "train.csv", "train"])
    table = _read(file, ["click"], [*_AVAZU, "hour"], share, seed)
    codes = _categories(table, [*_AVAZU, "hour"])
    hours = table.unify_dictionaries().column("hour").chunk(0).dictionary.to_pylist() if table.num_rows else []
    try:
        times = [datetime.strptime(hour, "%y%m%d%H") for hour in hours]  # noqa: DTZ007 - local hours, of no zone
    except ValueError as error:
        raise ValueError(f"{file}: column 'hour': expected YYMMDDHH: {error}") from error
    moments = np.array([(time.hour, time.weekday()) for time in times], np.int32).reshape(-1, 2)
    rows = Rows(
        np.zeros((len(codes), 0), np.float32),
        np.hstack([codes[:, :-1], moments[codes[:, -1]]]),
        _classes(table, "click"),
    )
    return _by_share(rows.part(np.random.default_rng(seed).permutation(len(rows))))


def _criteo(path: Path, share: float, seed: int) -> Splits:
    numbers, names = [f"I{at}" for at in range(1, 14)], [f"C{at}" for at in range(1, 27)]
    file = _file(path, ["train.txt", "train.txt.gz"])
    header = ["label", *numbers, *names]
    table = _read(file, ["label", *numbers], names, share, seed, header=header, delimiter="\t")
    return _by_share(Rows(_numbers(table, numbers), _categories(table, names), _classes(table, "label")))


LOGS: Mapping[str, Callable[[Path, float, int], Splits]] = {"flight": _flight, "avazu": _avazu, "criteo": _criteo}


def _by_share(rows: Rows) -> Splits:
    """Return the first 90, the next 5 and the last 5 % of the rows."""
    cuts = [0, len(rows) * 90 // 100, len(rows) * 95 // 100, len(rows)]
    return Splits(*(rows.part(slice(*pair)) for pair in pairwise(cuts)))


def _file(path: Path, names: Sequence[str]) -> Path:
    """Return the file, or the first of these names in the folder."""
    if not path.is_dir():
        return path
    found = [path / name for name in names if (path / name).is_file()]
    if not found:
        raise ValueError(f"{path}: expected a file {' or '.join(names)}")
    return found[0]


def _read(  # noqa: PLR0913 - the format of a file
    file: Path,
    numbers: Sequence[str],
    categories: Sequence[str],
    share: float,
    seed: int,
    *,
    header: Sequence[str] | None = None,
    delimiter: str = ",",
    null: str = "",
) -> pa.Table:
    """Return the columns of a file, categories as dictionaries."""
    types = dict.fromkeys(numbers, pa.float32()) | dict.fromkeys(categories, pa.dictionary(pa.int32(), pa.string()))
    convert = csv.ConvertOptions(column_types=types, include_columns=list(types), null_values=[null])
    read = csv.ReadOptions(block_size=_BLOCK, column_names=header)
    rng, batches = np.random.default_rng(seed), []
    try:
        with csv.open_csv(file, read, csv.ParseOptions(delimiter=delimiter), convert) as reader:
            for batch in reader:
                kept = np.flatnonzero(rng.random(batch.num_rows) < share)
                batches.append(batch if share >= 1 else batch.take(pa.array(kept)))
            return pa.Table.from_batches(batches, reader.schema)
    except (pa.ArrowInvalid, pa.ArrowKeyError, OSError) as error:
        raise ValueError(f"{file}: {str(error).splitlines()[0]}") from error


def _numbers(table: pa.Table, names: Sequence[str]) -> Array:
    return np.stack([table.column(name).to_numpy() for name in names], axis=1)


def _categories(table: pa.Table, names: Sequence[str]) -> Array:
    """Return the numbers of categories, [rows, names]."""
    unified = table.unify_dictionaries()
    columns = [[chunk.indices.to_numpy() for chunk in unified.column(name).chunks] for name in names]
    return np.stack([np.concatenate([np.zeros(0, np.int32), *chunks]) for chunks in columns], axis=1)


def _classes(table: pa.Table, name: str) -> Array:
    return np.asarray(table.column(name).to_numpy(), np.int8)
