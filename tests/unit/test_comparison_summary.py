"""The description of comparisons, over generated results."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from chrion.common.units import format_ms
from chrion.runtime.selection.comparison_summary import NOT_PARALLEL, describe, missed_slo
from chrion.runtime.selection.decisions import TimedCandidate
from chrion.runtime.selection.guard import Candidate, Comparison, compare
from helpers import FakeClock, FakeInterferenceMonitor
from property_tests import examples

NAMES = ["plain", "plain, threads: 1", "plan 1", "plan 2"]
#: The names in descriptions.
SHOWN = dict(zip(NAMES, ["plain, 2 threads", "plain, 1 thread", "plan 1", "plan 2"], strict=True))
LATENCIES = st.sampled_from([1.0, 1.01, 1.5, 2.0, 3.0, math.inf])


def results_of(latencies: list[float]) -> tuple[TimedCandidate, ...]:
    """Return results of the first candidates; those without a latency failed."""
    return tuple(
        TimedCandidate(name, name.startswith("plain"), ms, 3, "" if ms < math.inf else "RuntimeError: no")
        for name, ms in zip(NAMES, latencies, strict=False)
    )


@examples(100)
@given(
    latencies=st.lists(LATENCIES, min_size=1, max_size=4),
    at=st.integers(0, 3),
    slo_ms=st.sampled_from([None, 1.2, 5.0]),
    interference=st.booleans(),
    planned=st.booleans(),
)
def test_the_description_agrees_with_the_results(
    latencies: list[float], at: int, slo_ms: float | None, *, interference: bool, planned: bool
) -> None:
    """Whatever the results and the winner are, each statement of the description follows from them."""
    results = results_of(latencies)
    winner = results[at % len(results)]
    comparison = Comparison(winner.name, results, interference, "by 5 % and in half of the rounds")
    text = describe(comparison, slo_ms, planned=planned, threads=2)
    least_ms = min(latencies)
    if "fastest when timed" in text:
        assert winner.latency_ms == least_ms < math.inf
    if "no faster" in text:
        assert least_ms < winner.latency_ms < math.inf
        lead = "led every plain session by 5 % and in half of the rounds"
        lead = f"since no faster candidate {lead}" if winner.plain else f"which {lead}; no faster one did"
        assert f"{SHOWN[winner.name]}, {lead} (" in text
        assert not interference
    if "is kept" in text:
        assert least_ms < winner.latency_ms < math.inf
        assert interference
    if "least accelerator memory" in text:
        assert slo_ms is not None
        assert winner.latency_ms <= slo_ms
    for result in results:
        shown = f"{SHOWN[result.name]}: {format_ms(result.latency_ms)}"
        assert (shown in text) is (result.latency_ms < math.inf)
    assert ("other processes" in text) is interference
    assert (NOT_PARALLEL in text) is not planned
    assert (f"{NOT_PARALLEL}; of the plain sessions, " in text) is (not planned and least_ms < math.inf)
    assert ("no candidate could be timed" in text) is (planned and least_ms == math.inf)


@examples(100)
@given(
    generated=st.lists(st.tuples(st.sampled_from([1.0, 1.02, 1.2, 2.0]), st.booleans()), min_size=2, max_size=4),
    busy=st.booleans(),
    slo_ms=st.sampled_from([None, 1.1, 5.0]),
)
def test_the_description_of_a_real_comparison_names_its_winner_as_fastest_or_says_why_not(
    generated: list[tuple[float, bool]], *, busy: bool, slo_ms: float | None
) -> None:
    """Of candidates on a fake clock, a winner that others undercut is never called the fastest."""
    clock = FakeClock()

    def open_(ms: float, *, fails: bool) -> Callable[[], tuple[Callable[[], object], Callable[[], None]]]:
        def run() -> None:
            if fails:
                raise RuntimeError("no")
            clock.now_s += ms / 1e3

        return lambda: (run, lambda: None)

    candidates = [
        Candidate(name, open_(ms, fails=fails), plain=name.startswith("plain"))
        for name, (ms, fails) in zip(NAMES, generated, strict=False)
    ]
    comparison = compare(candidates, slo_ms, FakeInterferenceMonitor(range(99) if busy else ()), clock)
    text = describe(comparison, slo_ms, planned=True, threads=2)
    found = re.findall(r"(plain, 2 threads|plain, 1 thread|plan \d): ([\d.]+) (ms|us)", text)
    shown = {name: float(figure) / (1000 if unit == "us" else 1) for name, figure, unit in found}
    if "fastest when timed" in text:
        assert shown[SHOWN[comparison.winner]] == min(shown.values())
    elif shown:
        assert shown[SHOWN[comparison.winner]] >= min(shown.values())
    assert bool(shown) is any(not fails for _, fails in generated)


def test_figures_that_did_not_decide_are_named() -> None:
    """Beside other processes, a plan may have won more rounds and have the higher lower quartile."""
    lead = "by 20 % in 5 rounds more than not"
    comparison = Comparison("plan 1", results_of([2.0, 3.0, 3.0]), lead=lead, by_pairs=True)
    assert describe(comparison, None, planned=True, threads=2) == (
        f"plan 1, which led every plain session {lead} (lower quartiles, beside other processes; "
        "plain, 2 threads: 2.00 ms; plain, 1 thread: 3.00 ms; plan 1: 3.00 ms; 3 rounds)"
    )


def test_the_number_of_rounds_has_its_noun() -> None:
    """It is in the singular for one round only."""
    for rounds, noun in ((1, "1 round"), (2, "2 rounds")):
        result = TimedCandidate("plain", plain=True, latency_ms=1.0, rounds=rounds)
        assert describe(Comparison("plain", (result,)), None, planned=True, threads=1).endswith(
            f"(plain, 1 thread: 1.00 ms; {noun})"
        )


def test_a_missed_slo_is_reported() -> None:
    """The message has the latency of the fastest candidate; there is none if one meets the SLO or none was timed."""
    assert missed_slo(results_of([3.0, 2.0]), 1.5) == "no candidate meets the SLO of 1.50 ms: the fastest takes 2.00 ms"
    assert (
        missed_slo(results_of([2.001]), 2.0)
        == "no candidate meets the SLO of 2.00 ms: the fastest takes 1.00 us longer"
    )
    assert missed_slo(results_of([3.0, 2.0]), 2.0) == ""
    assert missed_slo(results_of([3.0]), None) == ""
    assert missed_slo(results_of([math.inf]), 1.0) == ""
