"""How often the guard errs beside simulated processes that use the cores for a while, on a fake clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest

from chrion.runtime.selection.guard import Candidate, Comparison, compare

OWN, ONE_THREAD, PLAN = "plain", "plain, threads: 1", "plan 1"
SEEDS = 200


@dataclass
class NoisyMachine:
    """Two cores, one of which another process uses now and then.

    Attributes:
        busy_share: Share of the time in which the other process runs.
        period_s: Mean time from one start of the other process to the next.
        detection: Probability that a check notices that the process has run since the previous one.
    """

    pick: Random
    busy_share: float
    period_s: float
    detection: float = 1.0
    now_s: float = 0.0
    _busy: bool = False
    _until_s: float = 0.0
    _noticed: bool = field(default=False)

    def has_interference(self) -> bool:
        """Return whether the other process has run since the last check, if that is noticed."""
        ran, self._noticed = self._noticed or self._is_busy(), False
        self.now_s += 0.005
        return ran and self.pick.random() < self.detection

    def wait(self) -> bool:
        """Return whether the cores are free now."""
        return not self._is_busy()

    def candidate(self, name: str, ms: float, *, cores: int) -> Candidate:
        """Return a candidate that takes up to 2.5 times as long while the other process is on one of its cores.

        A candidate on one core is affected half of the time, since the other process may be on the other core.
        """

        def run() -> None:
            hit = self._is_busy() and (cores == 2 or self.pick.random() < 0.5)
            slowdown = self.pick.uniform(1.5, 2.5) if hit else self.pick.uniform(1.0, 1.03)
            self.now_s += ms * slowdown / 1e3

        return Candidate(name, lambda: (run, lambda: None), plain=name != PLAN)

    def _is_busy(self) -> bool:
        while self.now_s >= self._until_s:
            self._busy = not self._busy
            share = self.busy_share if self._busy else 1 - self.busy_share
            self._until_s += self.pick.expovariate(1 / (share * self.period_s)) if share > 0 else 0.0
        self._noticed |= self._busy
        return self._busy


def decide(seed: int, times_ms: tuple[float, float, float], **noise: float) -> Comparison:
    """Compare candidates on a noisy machine."""
    machine = NoisyMachine(Random(seed), **noise)
    candidates = [
        machine.candidate(name, ms, cores=cores)
        for name, ms, cores in zip((OWN, ONE_THREAD, PLAN), times_ms, (2, 1, 2), strict=True)
    ]
    return compare(candidates, None, machine, lambda: machine.now_s)


#: Latencies of the own session, of the one with one thread and of the plan; the best choice.
CASES = [((5.0, 8.0, 6.0), OWN), ((5.0, 8.0, 3.0), PLAN), ((2.0, 1.0, 1.5), ONE_THREAD), ((1.0, 0.95, 0.6), PLAN)]


@pytest.mark.parametrize(("times_ms", "best"), CASES)
def test_on_a_quiet_machine_the_best_candidate_is_selected(times_ms: tuple[float, float, float], best: str) -> None:
    """There is no wrong and no uncertain choice."""
    found = [decide(seed, times_ms, busy_share=0.0, period_s=1.0) for seed in range(SEEDS)]
    assert {comparison.winner for comparison in found} == {best}
    assert not any(comparison.interference for comparison in found)


@pytest.mark.parametrize(("times_ms", "best"), CASES)
@pytest.mark.parametrize("period_s", [0.02, 0.2, 2.0])
@pytest.mark.parametrize("busy_share", [0.2, 0.5, 0.8])
def test_beside_another_process_certain_choices_are_right(
    times_ms: tuple[float, float, float],
    best: str,
    period_s: float,
    busy_share: float,
) -> None:
    """No certain choice is wrong, and no uncertain one is a plain session other than the caller's own."""
    found = [decide(seed, times_ms, busy_share=busy_share, period_s=period_s) for seed in range(SEEDS)]
    certain = [comparison.winner for comparison in found if not comparison.interference]
    assert sum(winner != best for winner in certain) == 0
    assert not any(comparison.winner == ONE_THREAD for comparison in found if comparison.interference)


@pytest.mark.parametrize(("times_ms", "best"), CASES)
def test_with_a_monitor_that_misses_a_fifth_few_certain_choices_are_wrong(
    times_ms: tuple[float, float, float], best: str
) -> None:
    """At most one in twenty choices is certain and wrong, since quantiles and rounds do not rest on the monitor."""
    noise = {"busy_share": 0.5, "period_s": 0.2, "detection": 0.8}
    found = [decide(seed, times_ms, **noise) for seed in range(SEEDS)]
    wrong = sum(comparison.winner != best for comparison in found if not comparison.interference)
    assert wrong <= SEEDS / 20


@pytest.mark.parametrize(("plan_ms", "best"), [(0.8, PLAN), (0.9, PLAN), (1.1, OWN)])
@pytest.mark.parametrize("period_s", [0.02, 0.2, 2.0])
@pytest.mark.parametrize("busy_share", [0.5, 0.8, 1.0])
def test_beside_a_neighbour_pairs_find_the_faster_engine(
    plan_ms: float, best: str, period_s: float, busy_share: float
) -> None:
    """It is selected with certainty in at least 95 % of the comparisons, also if the neighbour never pauses."""
    seeds = range(SEEDS // 2)
    found = [decide(seed, (1.0, 1.9, plan_ms), busy_share=busy_share, period_s=period_s) for seed in seeds]
    assert sum(comparison.winner == best and not comparison.interference for comparison in found) >= 0.95 * len(seeds)
