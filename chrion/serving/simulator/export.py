"""A CSV file of every simulated request."""

from __future__ import annotations

import contextlib
import csv
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from chrion.errors import OptionError
from chrion.serving.simulator.histograms import Floats
from chrion.serving.simulator.metrics import OUTCOMES
from chrion.serving.simulator.run import Keep
from chrion.serving.simulator.scenario import Scenario

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
        os.replace(scratch, path)  # noqa: PTH105 # as in chrion.common.files
    except OSError as error:
        raise OptionError(f"{path}: cannot be written: {error.strerror}") from error
    finally:
        scratch.unlink(missing_ok=True)


def _lines(scenario: Scenario, pattern: str, rows: Floats) -> Iterator[tuple[object, ...]]:
    models, levels = scenario.models, scenario.levels(pattern)
    for row in rows.tolist():
        number, model, server, arrival, start, end, cold, kind, outcome = row
        begun = start == start  # noqa: PLR0124 # not NaN
        yield (
            pattern,
            int(number),
            models[int(model)].name,
            int(server),
            models[int(model)].variants[levels[int(kind) // len(models) % len(levels)]].name if begun else "",
            f"{arrival:.6f}",
            f"{start:.6f}" if begun else "",
            f"{end:.6f}" if end == end else "",  # noqa: PLR0124 # not NaN
            int(cold),
            OUTCOMES[int(outcome)],
        )
