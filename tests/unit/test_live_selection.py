"""Selection between the plain session and a plan on live requests, on simulated latencies."""

from __future__ import annotations

import pytest
from adoption_simulation import QUIET, Noise, SimulatedApplication

from chrion.runtime.live_selection import LiveSelection


@pytest.mark.parametrize("pause_s", [0.0, 0.02, 0.1])
@pytest.mark.parametrize("plain_ms", [0.5, 2.0, 40.0, 400.0])
@pytest.mark.parametrize(("ratio", "wins"), [(0.8, True), (1.25, False), (0.5, True), (3.0, False)])
def test_the_faster_engine_is_selected(plain_ms: float, ratio: float, wins: bool, pause_s: float) -> None:  # noqa: FBT001
    """In at least 95 % of 60 noisy applications; within 10 s or 500 requests in nine of ten."""
    right, late = 0, 0
    for seed in range(60):
        application = SimulatedApplication(plain_ms, ratio * plain_ms, seed, pause_s=pause_s)
        application.serve()
        assert application.ended == [application.selection]
        right += application.selection.plan_wins is wins
        late += application.now_s > 10 and len(application.diverted) > 500
    assert right >= 57
    assert late <= 6


def test_without_noise_the_least_number_of_pairs_decides() -> None:
    """Five pairs of two blocks of six requests; of requests in the 0.09 s after each of five changes, none counts."""
    for plan_ms, wins in ((8.0, True), (12.0, False)):
        application = SimulatedApplication(10.0, plan_ms, seed=0, noise=QUIET)
        application.serve()
        assert application.selection.plan_wins is wins
        assert application.selection.pairs == 5
        assert len(application.diverted) <= 10 * 6 + 5 * 12
        assert (application.selection.plain_ms, application.selection.plan_ms) == pytest.approx((10.0, plan_ms))


def test_pauses_are_waits_for_the_other_engines_threads() -> None:
    """With 0.1 s between requests, each of them counts: two a block."""
    application = SimulatedApplication(10.0, 8.0, seed=0, noise=QUIET, pause_s=0.1)
    application.serve()
    assert len(application.diverted) == 5 * 2 * 2


def test_equal_engines_leave_the_plain_session() -> None:
    """A plan that is no faster is never worth it, however long it takes."""
    wins = 0
    for seed in range(100):
        application = SimulatedApplication(5.0, 5.0, seed, Noise(deviation=0.05))
        application.serve()
        wins += application.selection.plan_wins is True
    assert wins <= 5


def test_a_far_slower_plan_serves_few_requests() -> None:
    """One request of each block, or two if they are short, and those of the first 0.09 s after a change."""
    for plain_ms, most in ((100.0, 5 + 3), (4.0, 5 * 2 + 3 * 3)):
        application = SimulatedApplication(plain_ms, 10 * plain_ms, seed=0, noise=QUIET)
        application.serve()
        assert application.selection.plan_wins is False
        assert application.diverted.count(True) <= most


def test_requests_that_began_before_a_change_do_not_count() -> None:
    """They ran on the engine that served before."""
    selection = LiveSelection(object(), lambda _: None, 0.95)
    for _ in range(100):
        selection.record(0.0, 0.01, diverted=True)
    assert not selection.diverts
    for at in range(17):
        selection.record(at * 0.01, (at + 1) * 0.01, diverted=False)
    assert selection.diverts
    for _ in range(100):
        selection.record(0.0, 0.01, diverted=False)
    assert selection.pairs == 0


def test_a_selection_that_was_ended_sends_no_requests_to_the_plan() -> None:
    """Nor does it select anything later."""
    ended: list[LiveSelection] = []
    selection = LiveSelection(object(), ended.append, 0.95)
    for at in range(17):
        selection.record(at * 0.01, (at + 1) * 0.01, diverted=False)
    assert selection.diverts
    selection.end()
    for _ in range(1000):
        assert not selection.diverts
        selection.record(0.0, 0.01, diverted=False)
    assert not ended
