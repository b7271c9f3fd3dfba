"""CSV files of every simulated request, and of every value that a search tried."""

from __future__ import annotations

import contextlib
import csv
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from chrion.common.files import open_atomically
from chrion.serving.simulator.find import Limit
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
    with csv_rows(path, _COLUMNS) as write:
        yield lambda pattern, rows: write(_lines(scenario, pattern, rows))


@contextlib.contextmanager
def csv_rows(path: Path, columns: Sequence[str]) -> Iterator[Callable[[Iterable[Sequence[object]]], None]]:
    """Yield a function that writes rows to a CSV file, which appears at the end of the context.

    Args:
        path: The file.
        columns: Its header.

    Raises:
        OptionError: The file cannot be written.
    """
    with open_atomically(path) as file, io.TextIOWrapper(file, "utf-8", newline="") as lines:
        writer = csv.writer(lines, lineterminator="\n")
        writer.writerow(columns)
        yield writer.writerows


def write_curve(path: Path, unit: str, metric: str, limits: Sequence[Limit]) -> None:
    """Write the values that a search tried to a file, one line for each.

    Args:
        path: The file.
        unit: The quantity, as the header names it.
        metric: The figure of the condition, a share or in ms.
        limits: The results of the search.

    Raises:
        OptionError: The file cannot be written.
    """
    columns = ("pattern", unit, metric, "low", "high", "utilisation", "replications", "meets", "cost_per_hour")
    with csv_rows(path, columns) as write:
        for limit in limits:
            for probe in limit.curve:
                figure = probe.figure
                about = probe.offered_load, probe.replications, probe.met, probe.cost_per_hour
                write([(limit.pattern, probe.amount, figure.mean, figure.low, figure.high, *about)])


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
