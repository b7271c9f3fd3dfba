"""The cache of decisions, on a fake clock."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from chrion.common.files import cache_folder
from chrion.runtime.selection import decisions
from chrion.runtime.selection.decisions import Decision, DecisionCache, TimedCandidate
from chrion.scheduler import fixed_plan
from helpers import FakeClock, smallest_graph
from property_tests import examples

TIMINGS = st.builds(
    TimedCandidate,
    name=st.text(),
    plain=st.booleans(),
    latency_ms=st.floats(0, exclude_min=True, allow_infinity=False),
    rounds=st.integers(0, 100),
)
DECISIONS = st.builds(
    Decision,
    winner=st.text(),
    plan=st.sampled_from([None, fixed_plan(smallest_graph(), [1] * len(smallest_graph().dag))]),
    why=st.text(),
    uncertain=st.booleans(),
    attempts=st.integers(1, 10**6),
    timings=st.lists(TIMINGS, max_size=3).map(tuple),
)
#: What a damaged file may hold in place of a value.
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@pytest.fixture(autouse=True)
def _empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CHRION_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def clock() -> FakeClock:
    """Return the clock that the cache reads."""
    return FakeClock(1e9)


def cache_file() -> Path:
    """Return the only file of the cache."""
    (found,) = cache_folder().rglob("*.json")
    return found


@examples(100)
@given(DECISIONS)
def test_decisions_survive_json(decision: Decision) -> None:
    """Any decision is read as it was written."""
    assert decisions.decision_from_json(json.loads(json.dumps(decision.to_json()))) == decision


def test_a_decision_has_the_latencies_of_the_winner_and_of_the_fastest_plain_session() -> None:
    """Candidates that were not timed have none."""
    timings = (
        TimedCandidate("plain", plain=True, latency_ms=3.0, rounds=6),
        TimedCandidate("plain, threads: 1", plain=True, latency_ms=2.0, rounds=6),
        TimedCandidate("plan 1", plain=False, latency_ms=1.5, rounds=6),
    )
    decision = Decision("plan 1", None, "", timings=timings)
    assert (decision.latency_ms, decision.plain_ms) == (1.5, 2.0)
    untimed = Decision("plain", None, "", timings=timings[2:])
    assert (untimed.latency_ms, untimed.plain_ms) == (None, None)


@pytest.mark.parametrize("latency_ms", [0.0, -1.0, math.inf, math.nan])
def test_a_latency_in_a_file_is_positive_and_finite(latency_ms: float) -> None:
    """Any other number is refused, so that live latencies can be compared with it."""
    content = Decision("plain", None, "").to_json() | {"timings": [["plain", True, latency_ms, 3]]}
    with pytest.raises(ValueError, match="expected a positive number"):
        decisions.decision_from_json(content)


@pytest.mark.parametrize("made_s", [-1.0, 1e300, math.nan])
def test_a_time_in_a_file_can_be_printed(made_s: float) -> None:
    """A time before 1970, or after the year 9999, is refused."""
    content = Decision("plain", None, "").to_json() | {"made_s": made_s}
    with pytest.raises(ValueError, match="expected a time in seconds"):
        decisions.decision_from_json(content)


def test_the_evidence_of_a_decision() -> None:
    """The reason is followed by the time of the decision and the file in which it was found."""
    assert Decision("plain", None, "fastest").evidence == "fastest"
    assert Decision("plain", None, "fastest", made_s=86400.0).evidence == "fastest (tuned 1970-01-02 00:00 UTC)"
    found = Decision("plain", None, "fastest", made_s=86400.0, origin="m.json")
    assert found.evidence == "fastest (tuned 1970-01-02 00:00 UTC, found in m.json)"


@examples(100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_damaged_file_holds_no_decision(data: st.DataObject) -> None:
    """A file with any value replaced is ignored or read as a decision, and the next decision replaces it."""
    cache = DecisionCache("damaged")
    cache.keep(data.draw(DECISIONS))
    content: dict[str, Any] = json.loads(cache_file().read_text())
    content[data.draw(st.sampled_from(sorted(content)))] = data.draw(JSON)
    cache_file().write_text(json.dumps(content))
    found = cache.recall()
    assert found is None or found.valid_s > 0
    kept = cache.keep(Decision("plain", None, "again"))
    assert cache.recall() == kept


@examples(100)
@given(st.integers())
def test_an_uncertain_decision_is_valid_for_a_minute_to_a_year(attempts: int) -> None:
    """The time is within these limits for any number of attempts, since a damaged file may hold any number."""
    assert 60 <= Decision("plain", None, "", uncertain=True, attempts=attempts).valid_s <= 365 * 86400
    assert Decision("plain", None, "", attempts=attempts).valid_s == math.inf


def test_decisions_are_found_by_their_key() -> None:
    """No decision is found under another key, or in a file that is not JSON."""
    DecisionCache("machine", 1).keep(Decision("plain", None, "because"))
    assert DecisionCache("machine", 1).recall() == Decision("plain", None, "because")
    assert DecisionCache("machine", 2).recall() is None
    cache_file().write_text('{"winner": 3')
    assert DecisionCache("machine", 1).recall() is None


def test_a_certain_decision_stays_valid(clock: FakeClock) -> None:
    """A certain decision is still used three years later."""
    cache = DecisionCache("model", clock=clock)
    cache.keep(Decision("plain", None, "fastest"))
    clock.now_s += 1e8
    assert cache.recall() == Decision("plain", None, "fastest")


def test_a_decision_keeps_the_time_at_which_it_was_made(clock: FakeClock) -> None:
    """Stored again later, under another key or the same, it is as old as before."""
    made = DecisionCache("graph", clock=clock).keep(Decision("plain", None, "by chance", uncertain=True))
    clock.now_s += 50
    again = DecisionCache("source", clock=clock)
    assert (again.keep(made).made_s, again.keep(made).attempts) == (made.made_s, 1)
    clock.now_s += 11
    assert again.recall() is None


def test_a_decision_that_is_marked_uncertain_is_made_again_after_a_minute(clock: FakeClock) -> None:
    """The minute begins when it is marked, however old it is."""
    cache = DecisionCache("model", clock=clock)
    cache.keep(Decision("plain", None, "fastest"))
    clock.now_s += 1000
    cache.mark_uncertain()
    assert cache.recall() is not None
    clock.now_s += 61
    assert cache.recall() is None


def test_an_uncertain_decision_is_valid_for_a_limited_time(clock: FakeClock) -> None:
    """An uncertain decision is valid for a minute at first.

    Each further one is valid for four times as long, which makes 11 decisions a year.
    """
    cache = DecisionCache("model", clock=clock)
    for attempt in range(4):
        cache.keep(Decision("plain", None, "by chance", uncertain=True))
        clock.now_s += 60 * 4**attempt - 1
        assert cache.recall() is not None
        clock.now_s += 2
        assert cache.recall() is None
    cache.keep(Decision("plain", None, "certain"))
    cache.keep(Decision("plain", None, "by chance", uncertain=True))
    clock.now_s += 61
    assert cache.recall() is None


def test_a_decision_from_the_future_is_not_used(clock: FakeClock) -> None:
    """A decision with a later date is ignored, since after setting back a clock it would be valid for too long."""
    cache = DecisionCache("model", clock=clock)
    cache.keep(Decision("plain", None, "by chance", uncertain=True))
    clock.now_s -= 1e6
    assert cache.recall() is None
