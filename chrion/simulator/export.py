"""A CSV file of every simulated request."""

from __future__ import annotations

import contextlib
import csv
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from chrion.errors import OptionError
from chrion.manager.policies import rounding_ms
from chrion.simulator.histograms import Floats
from chrion.simulator.run import Keep
from chrion.simulator.scenario import Scenario

#: The first columns, by which a file of this kind is recognised.
HEADER = ("pattern", "number", "model", "server", "variant")
_COLUMNS = (*HEADER, "arrival_ms", "start_ms", "end_ms", "waited_for_load", "outcome")


@contextlib.contextmanager
def export_requests(path: Path, scenario: Scenario) -> Iterator[Keep]:
    """Write requests to a file as they are simulated; the file appears when the simulation is complete.

    Args:
        path: The file.
        scenario: The scenario.

    Yields:
        The function that writes the records of a pattern's requests.

    Raises:
        OptionError: The file cannot be written.
    """
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    try:
        with scratch.open("x", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(_COLUMNS)
            yield lambda pattern, rows: writer.writerows(_lines(scenario, pattern, rows))
        os.replace(scratch, path)  # noqa: PTH105 # as in chrion.files
    except OSError as error:
        raise OptionError(f"{path}: cannot be written: {error.strerror}") from error
    finally:
        scratch.unlink(missing_ok=True)


def _lines(scenario: Scenario, pattern: str, rows: Floats) -> Iterator[tuple[object, ...]]:
    models, levels = scenario.models, scenario.levels(pattern)
    slo_ms = np.array([model.slo_ms for model in models])[rows[:, 1].astype(np.int64)]
    begin = rows[:, 3] if scenario.measure == "response" else rows[:, 4]
    late = rows[:, 5] - begin > slo_ms + rounding_ms(rows[:, 5])
    for row, is_late in zip(rows.tolist(), late.tolist(), strict=True):
        number, model, server, arrival, start, end, cold, kind = row
        dropped = start != start  # noqa: PLR0124 # NaN
        yield (
            pattern,
            int(number),
            models[int(model)].name,
            int(server),
            "" if dropped else levels[int(kind) // len(models)],
            f"{arrival:.6f}",
            "" if dropped else f"{start:.6f}",
            "" if dropped else f"{end:.6f}",
            int(cold),
            "dropped" if dropped else "late" if is_late else "in time",
        )
