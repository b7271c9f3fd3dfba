"""The lines of tables: figures of a HybridSession and ratios to the best plain session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from ratios import quantile_ratio_to_best, ratio_to_best

from serving.fleet import Trial
from serving.worker import DEFAULT, OWN

HEAD = (
    *("model", "load", "runs", "requests/s", "ratio", "p50, ms", "ratio", "p99, ms", "ratio"),
    *("CPU, ms", "to fastest", "to default"),
)
ABLATION_HEAD = ("model", "load", "without", "requests/s", "p50", "p99", "CPU")
#: A ratio is worse if its whole interval is above this.
LIMIT = 1.05

#: A ratio and its 90 % interval.
Ratio = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Row:
    """Figures of one model under one load.

    Attributes:
        cells: As in the table.
        worse: Names of the figures that are worse than plain sessions' by more than the limit.
    """

    cells: tuple[str, ...]
    worse: tuple[str, ...]


def row_of(model: str, load: str, selected: str, trials: Mapping[str, Sequence[Trial]]) -> Row:
    """Return the line of one model and load, from two trials or more of each candidate.

    Requests per second are compared with those of the best plain session, which ``ratios.py`` selects without selection
    bias. Latencies and CPU time are compared with those of the plain session that serves the most requests per second:
    no session has the median of one and the 99th percentile of another. CPU time is also compared with the default's.
    """
    per_request = {name: [trial.ms_per_request for trial in own] for name, own in trials.items()}
    latencies = {name: [trial.latencies_ms for trial in own] for name, own in trials.items()}
    cpu_ms = {name: [trial.cpu_ms for trial in own] for name, own in trials.items()}
    p50_ms, p99_ms = ({name: _pooled(own, q) for name, own in latencies.items()} for q in (0.5, 0.99))
    fastest = min((name for name in trials if name != OWN), key=lambda name: float(np.median(per_request[name])))
    pair = {name: latencies[name] for name in (OWN, fastest)}
    time = ratio_to_best(per_request, OWN)
    ratios = {
        "requests/s": time,
        "p50": quantile_ratio_to_best(pair, OWN, 0.5),
        "p99": quantile_ratio_to_best(pair, OWN, 0.99),
        "CPU to fastest": ratio_to_best({name: cpu_ms[name] for name in (OWN, fastest)}, OWN),
        "CPU to default": ratio_to_best({name: cpu_ms[name] for name in (OWN, DEFAULT)}, OWN),
    }
    shown = {name: format_ratio(ratio) for name, ratio in ratios.items()}
    shown["requests/s"] = format_ratio((1 / time[0], 1 / time[2], 1 / time[1]))
    cells = (
        *(model, load, selected),
        *(f"{1e3 / float(np.median(per_request[OWN])):.0f}", shown["requests/s"]),
        *(f"{p50_ms[OWN]:.2f}", shown["p50"], f"{p99_ms[OWN]:.2f}", shown["p99"]),
        *(f"{float(np.median(cpu_ms[OWN])):.2f}", shown["CPU to fastest"], shown["CPU to default"]),
    )
    return Row(cells, tuple(name for name, (_, low, _) in ratios.items() if low > LIMIT))


def ablation_row(model: str, load: str, without: str, trials: Sequence[Trial], whole: Sequence[Trial]) -> Row:
    """Return the line that compares HybridSession without a mechanism with the whole one, from trials of both."""
    pair = {without: trials, OWN: whole}
    times = ratio_to_best({name: [trial.ms_per_request for trial in own] for name, own in pair.items()}, without)
    latencies = {name: [trial.latencies_ms for trial in own] for name, own in pair.items()}
    p50, p99 = (quantile_ratio_to_best(latencies, without, q) for q in (0.5, 0.99))
    cpu = ratio_to_best({name: [trial.cpu_ms for trial in own] for name, own in pair.items()}, without)
    shown = (format_ratio(ratio) for ratio in ((1 / times[0], 1 / times[2], 1 / times[1]), p50, p99, cpu))
    return Row((model, load, without, *shown), ())


def format_ratio(ratio: Ratio) -> str:
    """Return a ratio with its interval."""
    return "{:.2f} [{:.2f} to {:.2f}]".format(*ratio)


def far_behind(trials: Mapping[str, Sequence[Trial]], factor: float) -> list[str]:
    """Return the plain sessions that are slower than others by a factor in every respect but the CPU time."""
    plain = {name: own for name, own in trials.items() if name != OWN}
    figures = {
        name: (
            min(trial.ms_per_request for trial in own),
            *(min(float(np.quantile(trial.latencies_ms, q)) for trial in own) for q in (0.5, 0.99)),
        )
        for name, own in plain.items()
    }
    best = np.array([_medians(own) for own in plain.values()]).min(axis=0)
    return [name for name, mins in figures.items() if (np.array(mins) > factor * best).all()]


def _medians(trials: Sequence[Trial]) -> tuple[float, float, float]:
    p50, p99 = (float(np.median([np.quantile(trial.latencies_ms, q) for trial in trials])) for q in (0.5, 0.99))
    return float(np.median([trial.ms_per_request for trial in trials])), p50, p99


def _pooled(trials: Sequence[np.ndarray[tuple[int], np.dtype[np.float64]]], quantile: float) -> float:
    return float(np.quantile(np.concatenate(trials), quantile))
