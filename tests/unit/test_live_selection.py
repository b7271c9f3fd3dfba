"""Selection between the plain session and a plan on live requests, on simulated latencies."""

from __future__ import annotations

import random

import pytest

from chrion.runtime.live_selection import LiveSelection

#: Requests after which a simulation gives up; far more than any selection takes.
LIMIT = 20_000


class Application:
    """Requests one after another, each on the engine that the selection wants; latencies vary as on a shared machine.

    Their logarithm has a standard deviation of ``noise``, one in fifty takes five times longer, and a neighbour makes
    both engines slower by half for some tens of requests now and then.
    """

    def __init__(self, plain_ms: float, plan_ms: float, seed: int, noise: float = 0.2) -> None:
        self.ended: list[LiveSelection] = []
        self._random = random.Random(seed)
        self.selection = LiveSelection(object(), self.ended.append)
        self._ms = {False: plain_ms, True: plan_ms}
        self._noise = noise
        self._slower = 1.0
        self.now_s = 0.0
        #: Engine of each request: True for the plan.
        self.diverted: list[bool] = []

    def serve(self) -> None:
        """Serve requests until an engine is selected."""
        while not self.ended:
            assert len(self.diverted) < LIMIT
            diverted = self.selection.diverts
            if self._random.random() < 0.02:
                self._slower = self._random.choice([1.0, 1.5])
            factor = self._random.lognormvariate(0.0, self._noise) if self._noise else 1.0
            factor *= 5.0 if self._noise and self._random.random() < 0.02 else 1.0
            end_s = self.now_s + self._ms[diverted] * factor * (self._slower if self._noise else 1.0) / 1e3
            self.selection.record(self.now_s, end_s, diverted=diverted)
            self.now_s = end_s
            self.diverted.append(diverted)


@pytest.mark.parametrize("plain_ms", [0.5, 2.0, 40.0, 400.0])
@pytest.mark.parametrize(("ratio", "wins"), [(0.8, True), (1.25, False), (0.5, True), (3.0, False)])
def test_the_faster_engine_is_selected(plain_ms: float, ratio: float, wins: bool) -> None:  # noqa: FBT001
    """In at least 95 % of 100 noisy applications; within 10 s, or 500 requests if they are slow, in the median."""
    right, late = 0, 0
    for seed in range(100):
        application = Application(plain_ms, ratio * plain_ms, seed)
        application.serve()
        assert application.ended == [application.selection]
        right += application.selection.plan_wins is wins
        late += application.now_s > 10 and len(application.diverted) > 500
    assert right >= 95
    assert late <= 50


def test_without_noise_the_least_number_of_pairs_decides() -> None:
    """Five pairs of two blocks of six requests; in each, the engine changes once, and is unsettled for 100 ms then."""
    for plan_ms, wins in ((8.0, True), (12.0, False)):
        application = Application(10.0, plan_ms, seed=0, noise=0.0)
        application.serve()
        assert application.selection.plan_wins is wins
        assert application.selection.pairs == 5
        assert len(application.diverted) == pytest.approx(60 + 3 * 100 / 10 + 3 * 100 / plan_ms, abs=6)
        assert (application.selection.plain_ms, application.selection.plan_ms) == pytest.approx((10.0, plan_ms))


def test_equal_engines_leave_the_plain_session() -> None:
    """A plan that is no faster is never worth it, however long it takes."""
    wins = 0
    for seed in range(100):
        application = Application(5.0, 5.0, seed, noise=0.05)
        application.serve()
        wins += application.selection.plan_wins is True
    assert wins <= 5


def test_a_far_slower_plan_serves_few_requests() -> None:
    """Its blocks end after two requests that count, and one that does not after each change."""
    application = Application(100.0, 1000.0, seed=0, noise=0.0)
    application.serve()
    assert application.selection.plan_wins is False
    assert application.diverted.count(True) <= 5 * 2 + 3


def test_requests_that_began_before_a_change_do_not_count() -> None:
    """They ran on the engine that served before."""
    selection = LiveSelection(object(), lambda _: None)
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
    selection = LiveSelection(object(), ended.append)
    for at in range(17):
        selection.record(at * 0.01, (at + 1) * 0.01, diverted=False)
    assert selection.diverts
    selection.end()
    for _ in range(1000):
        assert not selection.diverts
        selection.record(0.0, 0.01, diverted=False)
    assert not ended
