"""The guard, which times plans against plain sessions, so that no plan replaces a faster session.

Predictions err, so a session that makes its own plans times all candidates: the plain session the caller would have
created, plain sessions with other numbers of threads, and the plans. A round consists of one trial of each candidate,
one after another, for a fraction of a second each. A plan needs more rounds to be selected than a plain session does,
since a few rounds say little while other processes use the cores.
"""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from chrion.cores import physical_cores
from chrion.graph.ort_sessions import first_line
from chrion.profiler.interference import CoreMonitor, InterferenceMonitor
from chrion.timing import time_calls_until

#: Duration of a trial in seconds, after a warm-up run, and its minimum number of runs.
_TRIAL_S = 0.025
_MIN_RUNS = 3
#: Minimum number of rounds. After them, no round begins once all trials together have taken ``_BUDGET_S`` seconds.
_MIN_ROUNDS, _BUDGET_S = 3, 3.0
#: Number of rounds after which a plain session is selected if it leads, or a plan if it takes at most ``_CLEAR_LEAD``
#: of the fastest plain session's time; maximum number of rounds.
_CLEAR_ROUNDS, _CLEAR_LEAD, _MAX_ROUNDS = 6, 0.8, 12
#: Elimination thresholds relative to the fastest candidate: after the first round, and after the minimum of rounds. The
#: best plain sessions are never eliminated, since every plan has to beat them.
_FIRST_THRESHOLD, _THRESHOLD = 1.5, 1.15
#: A plan is selected if its fastest run takes at most this share of a plain session's: smaller gains are noise. Its
#: median over rounds must not be larger either, which guards against selection bias.
SHARE = 0.95
#: Longest total time that the guard waits for interference to end, in seconds.
_PATIENCE_S = 2.0

#: Opens a candidate; returns a function that runs one request, and a function that closes the candidate.
Opener = Callable[[], tuple[Callable[[], object], Callable[[], None]]]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to run the model."""

    name: str
    open: Opener
    #: Predicted resident accelerator memory, in MB.
    resident_mb: float = 0.0
    #: Whether it is a plain session; otherwise it is a plan.
    plain: bool = True
    #: Whether it stays open between its trials. Plain sessions do not: their threads spin after a run.
    kept_open: bool = False
    #: A plan is selected if it takes at most this share of a plain session's latency.
    share: float = SHARE


@dataclass(frozen=True, slots=True)
class CandidateResult:
    """Result of timing one candidate."""

    name: str
    #: Median latency of its best round in ms; infinite if it failed or was not timed.
    median_ms: float
    resident_mb: float
    #: Reason of its failure; empty if it did not fail.
    failure: str = ""
    plain: bool = True
    #: Number of rounds in which it was timed.
    rounds: int = 0


class Comparison(NamedTuple):
    """Result of a comparison."""

    #: Name of the selected candidate.
    winner: str
    #: Results of all candidates.
    results: tuple[CandidateResult, ...]
    #: Whether most trials began while other processes used the cores, so that the result is uncertain.
    interference: bool = False


class _Record:
    """Measurements of a candidate."""

    def __init__(self, candidate: Candidate) -> None:
        self.candidate = candidate
        #: Number of rounds that began without interference.
        self.undisturbed = 0
        #: Median latency of each round.
        self.medians_ms: list[float] = []
        #: Latency of the fastest run; interference can only add to it.
        self.fastest_ms = math.inf
        self.failure = ""

    @property
    def best_ms(self) -> float:
        """Median latency of the best round; infinite without one."""
        return min(self.medians_ms, default=math.inf)

    @property
    def typical_ms(self) -> float:
        """Median of the rounds' medians."""
        return statistics.median(self.medians_ms)

    def add(self, times_ms: Sequence[float]) -> None:
        """Add the latencies of a round."""
        self.medians_ms.append(statistics.median(times_ms))
        self.fastest_ms = min(self.fastest_ms, *times_ms)

    def fail(self, error: Exception) -> None:
        """Discard all rounds: a candidate that fails once cannot be selected."""
        self.medians_ms, self.fastest_ms = [math.inf], math.inf
        self.failure = f"{type(error).__name__}: {first_line(error)}"

    def result(self) -> CandidateResult:
        """Return what the comparison reports."""
        candidate, rounds = self.candidate, len(self.medians_ms)
        return CandidateResult(
            candidate.name, self.best_ms, candidate.resident_mb, self.failure, candidate.plain, rounds
        )

    def beats(self, plain: Sequence[_Record]) -> bool:
        """Return whether this plan is fast enough to be selected over all of the plain sessions."""
        fastest_ms = min((r.fastest_ms for r in plain), default=math.inf)
        comparable = [r for r in plain if len(r.medians_ms) >= len(self.medians_ms)]
        typical_ms = min((r.typical_ms for r in comparable), default=math.inf)
        return self.fastest_ms <= self.candidate.share * fastest_ms and self.typical_ms <= typical_ms


def compare(
    candidates: Sequence[Candidate], slo_ms: float | None, monitor: InterferenceMonitor | None = None
) -> Comparison:
    """Time all candidates and select one.

    Args:
        candidates: Candidates, plain ones first: they win ties.
        slo_ms: Select the candidate with the least accelerator memory among those whose best round meets this latency.
            If None, or if no candidate meets it, select the fastest.
        monitor: Detects interference; by default it monitors all physical cores.

    Returns:
        The result. A single candidate is selected without being timed, unless there is an SLO.
    """
    monitor = monitor or CoreMonitor(physical_cores(), _PATIENCE_S)
    records = [_Record(c) for c in candidates]
    _run_rounds(records, monitor, least=0 if slo_ms is None else 1)
    results = tuple(record.result() for record in records)
    fitting = [r for r in records if slo_ms is not None and r.best_ms <= slo_ms]
    least_mb = min((r.candidate.resident_mb for r in fitting), default=0.0)
    plain, plans = _split([r for r in fitting if r.candidate.resident_mb == least_mb] or records)
    better = [r for r in plans if r.beats(plain)]
    winner = min([*plain, *better], key=lambda r: r.best_ms).candidate.name
    interference = 2 * sum(r.undisturbed for r in records) < sum(len(r.medians_ms) for r in records)
    return Comparison(winner, results, interference)


def _run_rounds(records: Sequence[_Record], monitor: InterferenceMonitor, least: int) -> None:
    """Time the candidates in rounds, without those that are eliminated, until the result is clear.

    Args:
        records: The candidates, with their measurements.
        monitor: Detects interference.
        least: Minimum number of rounds if there is a single candidate.
    """
    remaining, ran_s = list(records), 0.0
    with contextlib.ExitStack() as kept:
        openers = {r: _open_once(r.candidate, kept) if r.candidate.kept_open else r.candidate.open for r in records}
        for done in range(_MAX_ROUNDS):
            if done:
                remaining = _eliminate(remaining, _THRESHOLD if done >= _MIN_ROUNDS else _FIRST_THRESHOLD)
            spent = done >= _MIN_ROUNDS and ran_s > _BUDGET_S
            if (len(remaining) < 2 and done >= least) or spent or (done >= _CLEAR_ROUNDS and _is_clear(remaining)):
                break
            for record in remaining:
                try:
                    times_ms, took_s, undisturbed = _run_trial(openers[record], monitor)
                except Exception as error:  # noqa: BLE001 - a candidate that raises anything is not selected
                    record.fail(error)
                    continue
                record.add(times_ms)
                record.undisturbed += undisturbed
                ran_s += took_s


def _eliminate(records: Sequence[_Record], threshold: float) -> list[_Record]:
    """Keep the candidates within the threshold, the caller's plain session, and the best ones by run and by median."""
    timed = [r for r in records if r.fastest_ms < math.inf]
    limit_ms = threshold * min((r.fastest_ms for r in timed), default=0.0)
    plain = _split(timed)[0]
    kept = [plain[0], min(plain, key=lambda r: r.fastest_ms), min(plain, key=lambda r: r.typical_ms)] if plain else []
    return [r for r in timed if r.fastest_ms <= limit_ms or r in kept]


def _is_clear(records: Sequence[_Record]) -> bool:
    """Return whether a plain session leads, or a plan leads by far."""
    plain, plans = _split(records)
    if not plain or not plans:
        return True
    plain_ms, plan = min(r.fastest_ms for r in plain), min(plans, key=lambda r: r.fastest_ms)
    return plan.fastest_ms > plain_ms or (plan.fastest_ms <= _CLEAR_LEAD * plain_ms and plan.beats(plain))


def _split(records: Sequence[_Record]) -> tuple[list[_Record], list[_Record]]:
    """Return the records of plain sessions and those of plans."""
    return [r for r in records if r.candidate.plain], [r for r in records if not r.candidate.plain]


def _open_once(candidate: Candidate, kept: contextlib.ExitStack) -> Opener:
    """Return an opener that opens the candidate at its first call, and leaves closing it to the stack."""

    @functools.cache
    def run() -> Callable[[], object]:
        opened, close = candidate.open()
        kept.callback(close)
        return opened

    return lambda: (run(), lambda: None)


def _run_trial(opener: Opener, monitor: InterferenceMonitor) -> tuple[list[float], float, bool]:
    """Return the latencies of a trial in ms, its duration in seconds, and whether it began without interference.

    Raises:
        Exception: Raised by the candidate when it is opened or run.
    """
    run, close = opener()
    try:
        run()
        undisturbed = monitor.wait()  # right before timing, since opening takes a while
        start = time.perf_counter()
        run()  # warm-up
        times = time_calls_until(run, start + _TRIAL_S, _MIN_RUNS)
        return times, time.perf_counter() - start, undisturbed
    finally:
        close()
