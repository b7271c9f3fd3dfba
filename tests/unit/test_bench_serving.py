"""Tests of the figures of ``scripts/bench_serving.py``."""

from __future__ import annotations

import math
import time
from pathlib import Path

import numpy as np
import pytest
from bench_serving import DROP_AFTER, LEAST, Schedule, measure
from ratios import quantile_ratio_to_best
from serving.ablation import MECHANISMS
from serving.fleet import Fleet, Trial
from serving.noticing import Noticed, format_noticed, time_until, usual_ms
from serving.report import far_behind, row_of
from serving.scenarios import Requests, Scenario
from serving.surroundings import Quota
from serving.worker import CANDIDATES, DEFAULT, ONE, OWN, TWIN, Load, serve


def trial(latency_ms: float, cpu_ms: float = 1.0) -> Trial:
    """Return a trial of equal latencies."""
    return Trial(np.arange(100) / 100, np.full(100, latency_ms), latency_ms, cpu_ms)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_mechanisms_are_switched_off_where_they_are_consulted(mechanism: str) -> None:
    """Each attribute that is replaced exists."""
    assert all(hasattr(owner, name) for owner, name, _ in MECHANISMS[mechanism])


def test_quantiles_are_of_all_latencies_together() -> None:
    """The 99th percentile of a half whose trials have one slow request in 50 is the slow one; own is twice as slow."""
    quick, slow = np.ones(49), np.array([10.0])
    trials = {"own": [np.concatenate([2 * quick, 2 * slow])] * 4, "other": [np.concatenate([quick, slow])] * 4}
    assert quantile_ratio_to_best(trials, "own", 0.99) == pytest.approx((2.0, 2.0, 2.0))
    trials["other"] = [np.concatenate([quick, slow]), np.ones(50)] * 2  # by halves: slow ones only, quick ones only
    assert quantile_ratio_to_best(trials, "own", 0.99)[0] == pytest.approx(math.sqrt(20 / 10 * 20 / 1))


def test_a_row_compares_with_the_plain_session_of_most_requests() -> None:
    """All figures are compared with those of one plain session, and CPU time with that of the default as well."""
    trials = {OWN: [trial(2.0, 3.0)] * 4, ONE: [trial(1.0, 1.0)] * 4, DEFAULT: [trial(4.0, 6.0)] * 4}
    row = row_of("model", "load", "plan", trials)
    one = "[{0} to {0}]".format
    assert row.cells == (
        *("model", "load", "plan", "500", f"0.50 {one('0.50')}", "2.00", f"2.00 {one('2.00')}"),
        *("2.00", f"2.00 {one('2.00')}", "3.00", f"3.00 {one('3.00')}", f"0.50 {one('0.50')}"),
    )
    assert row.worse == ("requests/s", "p50", "p99", "CPU to fastest")


def test_latencies_are_not_compared_with_those_of_another_session() -> None:
    """A plain session of lower median latency that serves fewer requests per second is not the reference."""
    uneven = Trial(np.arange(100) / 100, np.repeat([1.0, 9.0], [90, 10]), 1.8, 1.0)
    trials = {OWN: [trial(1.5)] * 4, ONE: [trial(1.5)] * 4, DEFAULT: [uneven] * 4}
    one = "1.00 [1.00 to 1.00]"
    assert [row_of("model", "load", "plan", trials).cells[at] for at in (4, 6, 8, 10)] == [one] * 4


def test_plain_sessions_that_are_slower_in_every_respect_are_dropped() -> None:
    """Only a plain session whose best trial is slower by the factor is dropped, never HybridSession."""
    trials = {OWN: [trial(9.0)], ONE: [trial(1.0)], "all cores": [trial(2.0), trial(1.2)], DEFAULT: [trial(1.4)]}
    assert far_behind(trials, 1.3) == [DEFAULT]


@pytest.mark.parametrize("twin", [False, True])
def test_equal_sessions_are_measured_to_the_end(*, twin: bool) -> None:
    """A slow session of one thread is dropped, unless it is compared with its twin."""

    class Candidate(Fleet):
        def __init__(self, latency_ms: float) -> None:
            self._latency_ms = latency_ms

        def trial(self, *_: object, **_options: object) -> Trial:
            return trial(self._latency_ms)

    opened = {OWN: Candidate(1.0), ONE: Candidate(2.0), DEFAULT: Candidate(1.0)}
    if twin:
        opened[TWIN] = Candidate(2.0)
    found = measure(opened, Requests("1 client"), Scenario("title", "text"), end_s=0.0)
    assert len(found[OWN]) == len(found[DEFAULT]) == LEAST
    assert {len(found[name]) for name in opened if name in {ONE, TWIN}} == {LEAST if twin else DROP_AFTER}


def test_the_time_until_a_change_is_noticed() -> None:
    """Latencies of 5 ms from 1.0 s to 1.6 s are noticed after 0.55 to 0.65 s; those that stay slow, never."""
    starts_s = np.arange(0.0, 4.0, 0.01)
    latencies_ms = np.where((starts_s >= 1.0) & (starts_s < 1.6), 5.0, 1.0)
    found = Trial(starts_s, latencies_ms, 1.0, 1.0)
    assert 0.55 <= time_until(found, 1.0, 3.0, 1.0) <= 0.65
    assert time_until(found, 2.0, 3.0, 1.0) == 0.0
    assert time_until(found, 1.0, 3.0, 0.9) == math.inf


def test_a_few_slow_windows_are_usual() -> None:
    """One window in forty of 5 ms does not raise the usual mean latency; four do."""
    starts_s = np.arange(0.0, 10.2, 0.01)
    for slow, expected_ms in ((0.25, 1.0), (1.0, 5.0)):
        trials = [Trial(starts_s, np.where(starts_s < slow, 5.0, 1.0), 1.0, 1.0)]
        assert usual_ms(trials) == pytest.approx(expected_ms)


def test_what_is_not_noticed_is_said() -> None:
    """Medians and longest times are shown; an infinite one in words."""
    noticed = [Noticed(0.5, 1.0), Noticed(0.7, math.inf), Noticed(0.6, 2.0)]
    assert format_noticed("model", noticed) == ("model", "3", "0.60", "0.70", "2.00", "not noticed")


def test_a_load_counts_the_requests_of_its_time() -> None:
    """Two clients with requests of 10 ms finish about 2 x 30 requests in 0.3 s; the warm-up does not count."""

    class Session:
        calls = 0

        def run(self, *_: object) -> None:
            self.calls += 1
            time.sleep(0.01)

    session, start_s = Session(), time.perf_counter() + 0.2
    served = serve([session], [{}], Load(2, 0.0, start_s, 0.3))
    assert 0 < served.finished < session.calls
    assert served.starts_s.min() >= start_s
    assert served.starts_s.max() < start_s + 0.3
    assert served.latencies_s.min() >= 0.01
    assert served.cpu_s < served.took_s


def test_each_client_has_a_request_that_counts() -> None:
    """A request that takes longer than the trial is followed by one that counts."""

    class Session:
        @staticmethod
        def run(*_: object) -> None:
            time.sleep(0.2)

    served = serve([Session()], [{}], Load(2, 0.0, time.perf_counter() + 0.05, 0.1))
    assert len(served.latencies_s) == 2
    assert served.finished == 0


def test_time_is_divided_among_measurements() -> None:
    """With a minute for four measurements, the first may take a quarter of what is left after openings."""
    schedule = Schedule(1.0, 4, 2)
    assert schedule.next_end_s() - time.monotonic() == pytest.approx((60 - 30) / 4, abs=0.5)
    schedule.opened()
    assert schedule.next_end_s() - time.monotonic() == pytest.approx((60 - 15) / 3, abs=0.5)
    assert not schedule.is_over()
    assert Schedule(-1.0, 4, 2).is_over()


@pytest.mark.parametrize("newer", [True, False])
def test_a_quota_is_written_to_a_group_of_its_own(newer: bool, tmp_path: Path) -> None:  # noqa: FBT001 - a case
    """Both versions of control groups get half a CPU, and the group is removed afterwards if it is empty."""
    quota = Quota(0.5, (tmp_path, newer))
    (group,) = tmp_path.iterdir()
    quota.add(123)
    written = {file.name: file.read_text() for file in group.iterdir()}
    expected = {"cpu.max": "50000 100000"} if newer else {"cpu.cfs_quota_us": "50000", "cpu.cfs_period_us": "100000"}
    assert written == expected | {"cgroup.procs": "123"}
    for file in group.iterdir():
        file.unlink()
    quota.__exit__()
    assert not list(tmp_path.iterdir())


def test_candidates_begin_with_the_own_one() -> None:
    """The names are distinct, and HybridSession's processes are opened first, so that they tune alone."""
    assert CANDIDATES[0] == OWN
    assert len(set(CANDIDATES)) == 4
