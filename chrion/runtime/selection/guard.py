"""The guard, which times plans against plain sessions, so that no plan replaces a faster session.

Predictions err, so a session that makes its own plans times all candidates: the plain session the caller would have
created, plain sessions with other numbers of threads, and the plans. A round consists of one trial of each candidate,
one after another, for a few hundredths of a second each.

Other processes may use the cores meanwhile. The guard does not wait for them to stop, which may take forever. Instead
it compares statistics that interference changes little: low quantiles, since interference only adds time, and the
number of rounds in which one candidate was faster than another, since interference that lasts for a round affects all
candidates. Rounds with interference do not count if enough rounds have none.

If too few have none, the fastest run of each trial is compared instead of the lower quartile, and more rounds follow
for some seconds, until a sign test of all rounds has decided between the plans and the plain sessions
(:mod:`chrion.common.sign_test`, which states the error). If it has not, only a plan that leads by far is selected, and
the result is uncertain.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from chrion.common.sign_test import LEAD, MOST_PAIRS, is_faster
from chrion.common.timing import time_calls_until
from chrion.graph.ort_sessions import first_line
from chrion.machine.allocator import resident_mb
from chrion.machine.cores import physical_cores
from chrion.profiler.interference import CoreMonitor, UsageMonitor
from chrion.runtime.selection.decisions import TimedCandidate

# `tests/quality/test_guard_under_noise.py` shows how often these numbers select a slower candidate under interference.

#: Duration of a trial in seconds, after a warm-up run, and its minimum number of runs.
_TRIAL_S = 0.02
_MIN_RUNS = 2
#: Minimum number of rounds. After them, no round begins once the comparison has taken ``_BUDGET_S`` seconds.
_MIN_ROUNDS, _BUDGET_S = 3, 1.5
#: Number of rounds after which the comparison ends if the result is clear: no plan leads, or one takes at most
#: ``_CLEAR_LEAD`` of the fastest plain session's time; maximum number of rounds.
_CLEAR_ROUNDS, _CLEAR_LEAD, _MAX_ROUNDS = 5, 0.8, 12
#: Time in seconds after which no round begins whose pairs are needed because of interference, if there are as many as
#: may decide (a choice, not measured).
_PAIRS_S = 5.0
#: Elimination thresholds relative to the fastest candidate, after 0, 1, 2 and more rounds without interference. The
#: best plain sessions are never eliminated, since every plan has to beat them.
_THRESHOLDS = (8.0, 1.5, 1.5, 1.15)
#: A candidate is selected over the caller's own session if it takes at most this share of its latency: smaller gains
#: are noise.
SHARE = 0.95

#: A function that runs one request of an open candidate, and a function that closes the candidate.
Opened = tuple[Callable[[], object], Callable[[], None]]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to run the model."""

    name: str
    open: Callable[[], Opened]
    #: Predicted accelerator memory in MB, by the definition that alpha prices.
    memory_mb: float = 0.0
    #: Whether it is a plain session; otherwise it is a plan.
    plain: bool = True
    #: It stays open between its trials while the remaining candidates like it add at most this much to the memory of
    #: the process, in MB. Plain sessions do not: their threads spin after a run.
    room_mb: float = 0.0
    #: A plan is selected if it takes at most this share of a plain session's latency.
    share: float = SHARE


class Comparison(NamedTuple):
    """Result of a comparison."""

    #: Name of the selected candidate.
    winner: str
    #: All candidates, in the given order.
    results: tuple[TimedCandidate, ...]
    #: Whether too few rounds were free of interference, and pairs have not decided, so that the result is uncertain.
    interference: bool = False
    #: The lead that a candidate needs over plain sessions, in words.
    lead: str = ""
    #: Whether pairs have decided, beside other processes: latencies then need not have the order of the candidates.
    by_pairs: bool = False


class _Trial(NamedTuple):
    """Latencies of one candidate in one round, in ms."""

    lower_quartile: float
    fastest: float


class _Record:
    """Measurements of a candidate."""

    def __init__(self, candidate: Candidate) -> None:
        self.candidate = candidate
        #: Trials by the number of the round.
        self.trials: dict[int, _Trial] = {}
        self.failure = ""
        #: Memory by which the process grew in its first trial, in MB; 0 if it is not measured.
        self.grown_mb = 0.0
        #: None while it is closed.
        self._opened: Opened | None = None

    def open(self) -> Callable[[], object]:
        """Open the candidate, unless it is open; return the function that runs a request."""
        if self._opened is None:
            self._opened = self.candidate.open()
            if not self.candidate.plain:
                self._opened[0]()  # onnxruntime allocates memory in the first two runs
        return self._opened[0]

    def close(self) -> None:
        """Close the candidate, if it is open."""
        if self._opened:
            (_, close), self._opened = self._opened, None
            close()

    def fail(self, error: Exception) -> None:
        """Discard all rounds: a candidate that fails once cannot be selected."""
        self.trials.clear()
        self.failure = f"{type(error).__name__}: {first_line(error)}"


class _Judge:
    """Comparison of candidates by their measurements so far.

    Args:
        pairs: Whether more rounds follow for their pairs; otherwise a limit of latency decides.
    """

    def __init__(self, *, pairs: bool) -> None:
        #: Rounds without interference.
        self.calm: set[int] = set()
        self._pairs = pairs

    @property
    def certain(self) -> bool:
        """Whether enough rounds are free of interference."""
        return len(self.calm) >= _MIN_ROUNDS

    def lead(self, records: Sequence[_Record]) -> str:
        """Return the lead that :meth:`best` requires of a candidate, in words."""
        share = min((r.candidate.share for r in records if not r.candidate.plain), default=SHARE)
        rounds = "and in half of the rounds" if self.certain else f"in {LEAD} rounds more than not"
        return f"by {1 - share:.0%} {rounds}".replace("%", " %")

    def latency_ms(self, record: _Record) -> float:
        """Return the lower quartile over the rounds that count; infinite without any."""
        return _lower_quartile(list(self._counting(record).values()))

    def beats(self, record: _Record, other: _Record, share: float) -> bool:
        """Return whether a candidate takes at most a share of another's latency, and is faster in half of the rounds.

        The second condition guards against selection bias, and against interference with one of the two. With
        interference pairs decide, or the lead must be clear.
        """
        if not self.certain:
            if (decided := self.pairs_decide(record, other, share)) is not None:
                return decided
            share = min(share, _CLEAR_LEAD)
        own_ms, other_ms = self._counting(record), self._counting(other)
        common = own_ms.keys() & other_ms.keys()
        faster = sum(own_ms[at] < other_ms[at] for at in common)
        latency_ms = self.latency_ms(record)
        return math.inf > latency_ms <= share * self.latency_ms(other) and 2 * faster >= len(common)

    @staticmethod
    def pairs_decide(record: _Record, other: _Record, share: float) -> bool | None:
        """Return whether a candidate is faster than another by the rounds of both; None if that is undecided."""
        common = record.trials.keys() & other.trials.keys()
        return is_faster(((record.trials[at].fastest, other.trials[at].fastest) for at in common), share)

    def best(self, records: Sequence[_Record]) -> _Record:
        """Return the candidate to select: the first plain session, unless another candidate beats it.

        A plan must beat all plain sessions. With interference no other plain session is selected: its number of threads
        is likely the best only while other processes use the cores.
        """
        plain, plans = _split(records)
        better = [r for r in plain[1:] if self.certain and self.beats(r, plain[0], SHARE)]
        better += [r for r in plans if all(self.beats(r, other, r.candidate.share) for other in plain)]
        if not self.certain:  # a plan that only leads by far is not preferred to one that pairs have proven
            proven = [r for r in better if all(self.pairs_decide(r, other, r.candidate.share) for other in plain)]
            better = proven or better
        return min(better or plain[:1] or plans, key=self.latency_ms)

    def eliminate(self, records: Sequence[_Record]) -> list[_Record]:
        """Keep the candidates within a threshold, the caller's plain session, and the fastest plain session."""
        timed = [r for r in records if not r.failure]
        threshold = _THRESHOLDS[min(len(self.calm), len(_THRESHOLDS) - 1)]
        limit_ms = threshold * min(map(self.latency_ms, timed), default=0.0)
        plain = _split(timed)[0]
        kept = [plain[0], min(plain, key=self.latency_ms)] if plain else []
        return [r for r in timed if self.latency_ms(r) <= limit_ms or r in kept]

    def is_clear(self, records: Sequence[_Record]) -> bool:
        """Return whether no plan leads, or a plan leads by far, in enough rounds without interference."""
        plain, plans = _split(records)
        if not plain or not plans:
            return True
        plain_ms, plan_ms = (min(map(self.latency_ms, group)) for group in (plain, plans))
        far = plan_ms <= _CLEAR_LEAD * plain_ms and not self.best(records).candidate.plain
        return self.certain and (far or plan_ms > plain_ms)

    def is_settled(self, records: Sequence[_Record]) -> bool:
        """Return whether a plan is faster than all plain sessions by pairs, or no candidate faster than the first."""
        plain, plans = _split(records)
        if not plain or len(records) < 2:
            return False
        rest = [r for r in records if r is not plain[0]]
        won = any(all(self.pairs_decide(r, other, r.candidate.share) for other in plain) for r in plans)
        return won or all(self.pairs_decide(r, plain[0], r.candidate.share) is False for r in rest)

    def is_over(self, records: Sequence[_Record], rounds: int, took_s: float) -> bool:
        """Return whether no further round is needed or allowed."""
        if rounds >= _CLEAR_ROUNDS and self.is_clear(records):
            return True
        if rounds < _MAX_ROUNDS and (rounds < _MIN_ROUNDS or took_s <= _BUDGET_S):
            return False
        spent = rounds >= MOST_PAIRS or (rounds >= LEAD and took_s > _PAIRS_S)
        return self.certain or not self._pairs or spent or self.is_settled(records)

    def _counting(self, record: _Record) -> dict[int, float]:
        """Return the latency in each round that counts, by the number of the round."""
        if not self.certain:
            return {at: trial.fastest for at, trial in record.trials.items()}
        calm = {at: trial.lower_quartile for at, trial in record.trials.items() if at in self.calm}
        return calm or {at: trial.lower_quartile for at, trial in record.trials.items()}


def compare(
    candidates: Sequence[Candidate],
    slo_ms: float | None,
    monitor: CoreMonitor | None = None,
    clock: Callable[[], float] = time.perf_counter,
    memory_mb: Callable[[], float] = resident_mb,
) -> Comparison:
    """Time all candidates and select one.

    Args:
        candidates: Candidates, plain ones first, of which the caller's own is the first: it wins ties.
        slo_ms: Select the candidate with the least accelerator memory among those that meet this latency. If None, or
            if no candidate meets it, select the fastest.
        monitor: Detects interference; by default it monitors all physical cores.
        clock: Returns the time in seconds.
        memory_mb: Returns the memory of the process in MB.

    Returns:
        The result. A single candidate is selected without being timed, unless there is an SLO.
    """
    records, judge = [_Record(c) for c in candidates], _Judge(pairs=slo_ms is None)
    least = 0 if slo_ms is None else 1
    try:
        rounds, remaining = _run_rounds(records, judge, monitor, clock, memory_mb, least)
    finally:
        for record in records:
            record.close()
    latency_ms = {record: judge.latency_ms(record) for record in records}
    fitting = [r for r in records if slo_ms is not None and latency_ms[r] <= slo_ms]
    least_mb = min((r.candidate.memory_mb for r in fitting), default=0.0)
    winner = judge.best([r for r in fitting if r.candidate.memory_mb == least_mb] or remaining or records)
    results = tuple(
        TimedCandidate(r.candidate.name, r.candidate.plain, latency_ms[r], len(r.trials), r.failure) for r in records
    )
    few = len(judge.calm) < min(rounds, _MIN_ROUNDS)
    interference = few and not (slo_ms is None and judge.is_settled(remaining))
    return Comparison(winner.candidate.name, results, interference, judge.lead(records), few and not interference)


def _run_rounds(  # noqa: PLR0913, PLR0917 - what a comparison observes
    records: Sequence[_Record],
    judge: _Judge,
    monitor: CoreMonitor | None,
    clock: Callable[[], float],
    memory_mb: Callable[[], float],
    least: int,
) -> tuple[int, list[_Record]]:
    """Time the candidates in rounds, without those that are eliminated, until the result is clear.

    Args:
        records: The candidates, with their measurements.
        judge: Compares them, and is told of rounds without interference.
        monitor: Detects interference; created if None and there is a round.
        clock: Returns the time in seconds.
        memory_mb: Returns the memory of the process in MB.
        least: Minimum number of rounds if there is a single candidate.

    Returns:
        The number of rounds, and the candidates that were not eliminated.
    """
    remaining, start, calm = list(records), clock(), True
    for done in itertools.count():
        if done:
            remaining = judge.eliminate(remaining)
            for record in records:
                if record not in remaining:
                    record.close()
        if (len(remaining) < 2 and done >= least) or judge.is_over(remaining, done, clock() - start):
            break
        if monitor is None:
            monitor = UsageMonitor(physical_cores())
        grown_mb = sum(record.grown_mb for record in remaining)
        for record in remaining if done % 2 == 0 else remaining[::-1]:  # load that rises or falls favours none
            keep = done > 0 and 0.0 < record.candidate.room_mb >= grown_mb
            try:
                record.trials[done] = _run_trial(record, clock, memory_mb, keep=keep)
            except Exception as error:  # noqa: BLE001 - a candidate that raises anything is not selected
                record.fail(error)
        before, calm = calm, not monitor.has_interference()
        if before and calm and done < _MAX_ROUNDS:  # of many rounds, some seem calm by chance
            judge.calm.add(done)
    return done, remaining


def _lower_quartile(values: Sequence[float]) -> float:
    """Return the lower quartile; infinite without values."""
    if len(values) < 2:
        return min(values, default=math.inf)
    return statistics.quantiles(values, n=4, method="inclusive")[0]


def _split(records: Sequence[_Record]) -> tuple[list[_Record], list[_Record]]:
    """Return the records of plain sessions and those of plans."""
    return [r for r in records if r.candidate.plain], [r for r in records if not r.candidate.plain]


def _run_trial(record: _Record, clock: Callable[[], float], memory_mb: Callable[[], float], *, keep: bool) -> _Trial:
    """Time a candidate, after a warm-up run; measure its memory in its first trial, if it may be kept open.

    Raises:
        Exception: Raised by the candidate when it is opened or run.
    """
    before_mb = memory_mb()  # also returns what the candidate before has left
    try:
        run = record.open()
        run()
        times = time_calls_until(run, clock() + _TRIAL_S, _MIN_RUNS, clock)
        if record.candidate.room_mb > 0 and not record.trials:
            record.grown_mb = memory_mb() - before_mb
        return _Trial(_lower_quartile(times), min(times))
    finally:
        if not keep:
            record.close()
