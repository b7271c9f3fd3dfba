"""Jobs in processes of their own."""

from __future__ import annotations

import os
import signal
import time

import pytest

from worker_processes import Lost, run_all


def job(number: int) -> int:
    """Some crash, one hangs, the others square their number."""
    if number % 5 == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if number == 4:
        time.sleep(60)
    return number * number


@pytest.mark.parametrize("processes", [1, 3])
def test_a_job_that_takes_its_process_with_it_costs_no_other(processes: int) -> None:
    """Every job has a result, or says what became of it."""
    found = dict(run_all(job, range(10), processes, patience_s=1.5))
    crashed, hung = Lost("crashed"), Lost("no answer in 2 s")
    assert found == {0: 0, 1: 1, 2: 4, 3: crashed, 4: hung, 5: 25, 6: 36, 7: 49, 8: crashed, 9: 81}


def test_no_jobs_take_no_process() -> None:
    """Nothing comes of nothing."""
    assert list(run_all(job, [], 2)) == []
