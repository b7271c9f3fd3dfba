"""The description of a comparison, from its results alone, so that it cannot contradict them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from chrion.common.units import format_beyond_ms, format_count, format_ms
from chrion.profiler.interference import OTHERS_USED_CORES, TOO_BUSY
from chrion.runtime.selection.decisions import TimedCandidate
from chrion.runtime.selection.guard import Comparison

#: Name of the plain session that the caller would have created.
PLAIN = "plain"
#: Prefix of the names of plain sessions with a number of threads, before that number.
PLAIN_THREADS = "plain, threads: "
NOT_PARALLEL = "the plan runs the whole model as one segment"


def describe(comparison: Comparison, slo_ms: float | None, *, planned: bool, threads: int) -> str:
    """Describe why a comparison selected its winner.

    Args:
        comparison: The comparison.
        slo_ms: The SLO, or None.
        planned: Whether there was a plan to compare.
        threads: Number of threads of the caller's plain session.
    """
    parts = [] if planned else [NOT_PARALLEL]
    timed = [result for result in comparison.results if result.latency_ms < math.inf]
    if timed:
        among = "" if planned else "of the plain sessions, "
        quartiles = "lower quartiles, beside other processes; " if comparison.by_pairs else ""
        figures = f"{quartiles}{describe_timings(timed, threads)}"
        parts.append(f"{among}{_relation(comparison, timed, slo_ms, threads)} ({figures})")
    elif planned:
        failure = next((result.failure for result in comparison.results if result.failure), "there was no candidate")
        parts.append(f"no candidate could be timed on synthetic inputs ({failure})")
    disturbed = f", while {OTHERS_USED_CORES}" if comparison.interference else ""
    return "; ".join(parts) + disturbed


def candidate_name(name: str, threads: int) -> str:
    """Return the name of a candidate in messages: ``plain, 1 thread`` for ``plain, threads: 1``.

    Args:
        name: The name.
        threads: Number of threads of the caller's plain session.
    """
    count = str(threads) if name == PLAIN else name.removeprefix(PLAIN_THREADS)
    return f"plain, {format_count(int(count), 'thread')}" if count != name and count.isdecimal() else name


def missed_slo(results: Sequence[TimedCandidate], slo_ms: float | None) -> str:
    """Return a message if no candidate meets the SLO; empty if one does, or if none was timed."""
    fastest_ms = min((result.latency_ms for result in results), default=math.inf)
    if slo_ms is None or not slo_ms < fastest_ms < math.inf:
        return ""
    fastest = format_beyond_ms(fastest_ms, slo_ms)
    return f"no candidate meets the SLO of {format_ms(slo_ms)}: the fastest takes {fastest}"


def _relation(comparison: Comparison, timed: Sequence[TimedCandidate], slo_ms: float | None, threads: int) -> str:
    """Return how the winner compares with the other candidates."""
    winner = candidate_name(comparison.winner, threads)
    own = next((result for result in timed if result.name == comparison.winner), None)
    if own is None:
        return f"{winner} was not timed"
    own_ms, led = own.latency_ms, f"led every plain session {comparison.lead}"
    if comparison.by_pairs and not own.plain:
        return f"{winner}, which {led}"
    if own_ms <= min(result.latency_ms for result in timed):
        return "fastest when timed" if len(timed) > 1 else "the only candidate when timed"
    if slo_ms is not None and own_ms <= slo_ms:
        return f"least accelerator memory within the SLO of {format_ms(slo_ms)} when timed"
    if comparison.interference:
        return f"kept {winner}: {TOO_BUSY}"
    return f"{winner}, since no faster candidate {led}" if own.plain else f"{winner}, which {led}; no faster one did"


def describe_timings(timed: Sequence[TimedCandidate], threads: int) -> str:
    """Return the figures of candidates as ``plain, 2 threads: 2.00 ms; plan 1: 730 us; 5 rounds``.

    Args:
        timed: The candidates.
        threads: Number of threads of the caller's plain session.
    """
    rounds = max(result.rounds for result in timed)
    figures = "; ".join(f"{candidate_name(result.name, threads)}: {format_ms(result.latency_ms)}" for result in timed)
    return f"{figures}; {format_count(rounds, 'round')}"
