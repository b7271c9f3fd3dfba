"""Tests of the worker processes for jobs that may crash or hang."""

from __future__ import annotations

import os
import signal
import time

import pytest

from worker_processes import FailedJob, run_all


def square(number: int) -> int:
    """Square a number; crash on 3 and 8, and hang on 4."""
    if number % 5 == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if number == 4:
        time.sleep(60)
    return number * number


@pytest.mark.parametrize("processes", [1, 3])
def test_a_crash_or_timeout_affects_one_job_only(processes: int) -> None:
    """Every job has a result or the reason for its failure."""
    found = dict(run_all(square, range(10), processes, timeout_s=1.5))
    crashed, timed_out = FailedJob("crashed"), FailedJob("no result within 2 s")
    assert found == {0: 0, 1: 1, 2: 4, 3: crashed, 4: timed_out, 5: 25, 6: 36, 7: 49, 8: crashed, 9: 81}


def test_no_jobs_give_no_results() -> None:
    """Without jobs, the iterator is empty."""
    assert list(run_all(square, [], 2)) == []
