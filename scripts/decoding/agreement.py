"""Agreement of simulated decoders with measured loads: tables, and a summary in numbers."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from page_markers import markdown_table

from chrion.generation.scheduling import POLICIES
from decoding.orca_experiment import FACTORS, Load, LoadPoint, equal_latencies, median_points, readings

#: Measured points and simulated ones, in the same order.
Both = tuple[Sequence[LoadPoint], Sequence[LoadPoint]]
#: A workload, the latency relative to the minimum, a max batch and a policy.
Curve = tuple[tuple[str, int], float, str, str]
CURVE_HEAD = (
    *("weights", "max batch", "policy", "latency per token", "runs", "requests/s", "simulated"),
    *("simulated / measured", "runs at equal speed", "at equal speed"),
)
LOAD_HEAD = (
    *("weights", "max batch", "policy", "offered, requests/s", "served", "served, simulated", "ratio"),
    *("ms/token", "ms/token, simulated", "ratio", "iterations / costs"),
    *("ratio of served at equal speed", "ratio of ms/token at equal speed"),
)
#: The largest deviation of a ratio from 1 that counts as agreement.
TOLERANCE = 0.15


@dataclass(frozen=True, slots=True)
class CurveReading:
    """The throughputs of a curve at one latency: medians over the repetitions that cover it, measured and simulated."""

    latency_ms: float
    #: Repetitions that cover the latency, and all.
    runs: int
    repetitions: int
    measured: float
    simulated: float
    #: The median of simulated / measured.
    ratio: float

    @property
    def covered(self) -> str:
        """The repetitions as text."""
        return f"{self.runs} of {self.repetitions}"


def curve_readings(runs: Sequence[LoadPoint], expected_runs: Sequence[LoadPoint]) -> dict[Curve, CurveReading]:
    """Return the throughputs of each curve at each factor; those that no repetition covers are left out.

    Args:
        runs: Measured runs.
        expected_runs: The same, simulated.
    """
    found: dict[Curve, CurveReading] = {}
    for workload in dict.fromkeys(run.workload for run in runs):
        own, others = ([run for run in some if run.workload == workload] for some in (runs, expected_runs))
        for factor, (at, policy) in itertools.product(FACTORS, enumerate(POLICIES)):
            latencies = equal_latencies(own, factor)
            expected = readings(others, latencies)
            for batch, pairs in readings(own, latencies).items():
                both = [(pair[at], other[at]) for pair, other in zip(pairs, expected[batch], strict=True)]
                known = [(ours.low, other.low) for ours, other in both if ours.known and other.known]
                if batch == "best" or not known:
                    continue
                measured, simulated = (statistics.median(values) for values in zip(*known, strict=True))
                ratio = statistics.median(other / ours for ours, other in known)
                latency_ms = statistics.median(latencies.values())
                one = CurveReading(latency_ms, len(known), len(both), measured, simulated, ratio)
                found[workload, factor, batch, policy] = one
    return found


def curve_rows(as_measured: Both, at_equal_speed: Both) -> list[tuple[str, ...]]:
    """Return the throughputs of each curve at equal latencies, and the ratios at equal speed."""
    rows: list[tuple[str, ...]] = [CURVE_HEAD]
    scaled = curve_readings(*at_equal_speed)
    for curve, one in curve_readings(*as_measured).items():
        (weights, _), _, batch, policy = curve
        other = scaled.get(curve)
        head = (weights, batch, policy, f"{one.latency_ms:.1f} ms", one.covered)
        ratios = (f"{one.ratio:.2f}", *((other.covered, f"{other.ratio:.2f}") if other else ("-", "-")))
        rows.append((*head, f"{one.measured:.1f}", f"{one.simulated:.1f}", *ratios))
    return rows


def load_rows(
    as_measured: Both, at_equal_speed: Both, slowdowns: Mapping[Load, Sequence[float]]
) -> list[tuple[str, ...]]:
    """Return a line for each load, of medians over its runs.

    Args:
        as_measured: Runs and their simulation.
        at_equal_speed: The same at equal speed.
        slowdowns: The times of the iterations of runs relative to the costs.
    """
    rows: list[tuple[str, ...]] = [LOAD_HEAD]
    medians = [median_points(some) for some in (*as_measured, *at_equal_speed)]
    for point, other, scaled, simulated in zip(*medians, strict=True):
        head = (point.model, str(point.max_batch), point.policy)
        pairs = ((point.requests_per_s, other.requests_per_s), (point.ms_per_token, other.ms_per_token))
        cells = [cell for ours, theirs in pairs for cell in (f"{ours:.1f}", f"{theirs:.1f}", f"{theirs / ours:.2f}")]
        own = slowdowns.get(point.load, [])
        slowdown = f"{min(own):.2f} to {max(own):.2f}" if own else "-"
        ratios = (simulated.requests_per_s / scaled.requests_per_s, simulated.ms_per_token / scaled.ms_per_token)
        rows.append((*head, f"{point.offered_per_s:.1f}", *cells, slowdown, *(f"{ratio:.2f}" for ratio in ratios)))
    return rows


def agreement_text(as_measured: Both, at_equal_speed: Both, slowdowns: Mapping[Load, Sequence[float]]) -> str:
    """Return how many figures agree, as a table and sentences; the arguments are as in :func:`load_rows`."""
    several = [curve_readings(*some) for some in (as_measured, at_equal_speed)]
    at_latency = [[one.ratio for one in found.values()] for found in several]
    rows: list[tuple[str, ...]] = [
        (f"simulated / measured within {100 * TOLERANCE:g} %", "as measured", "at equal speed"),
        ("throughput at equal latency", *map(_within, at_latency)),
    ]
    for name, figure in (("throughput", "requests_per_s"), ("latency", "ms_per_token")):
        for policy in POLICIES:
            counts = (_within(point_ratios(some, policy, figure)) for some in (as_measured, at_equal_speed))
            rows.append((f"{name} of {policy}-level points", *counts))
    sentences = []
    times = [slowdown for own in slowdowns.values() for slowdown in own]
    if times:
        sentences.append(f"The iterations of a run took {_spread(times)} times as long as by the fitted costs.")
    spreads = []
    for title, found, ratios in zip(("as measured", "at equal speed"), several, at_latency, strict=True):
        if ratios:
            runs, of = (sum(getattr(one, name) for one in found.values()) for name in ("runs", "repetitions"))
            spreads.append(f"{title} {_spread(ratios)} over {len(ratios)} curves ({runs} of {of} repetitions)")
    if spreads:
        sentences.append(f"Simulated / measured throughput at equal latency: {'; '.join(spreads)}.")
    return f"{markdown_table(rows)}\n\n{' '.join(sentences)}".rstrip()


def point_ratios(both: Both, policy: str, figure: str) -> list[float]:
    """Return simulated / measured of the loads of a policy: medians over runs of a figure of :class:`LoadPoint`."""
    measured, simulated = map(median_points, both)
    return [
        getattr(other, figure) / getattr(point, figure)
        for point, other in zip(measured, simulated, strict=True)
        if point.policy == policy
    ]


def _within(ratios: Iterable[float]) -> str:
    several = list(ratios)
    return f"{sum(abs(ratio - 1) <= TOLERANCE for ratio in several)} of {len(several)}"


def _spread(values: Sequence[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f} (median {statistics.median(values):.2f})"
