"""The processes of ``scripts/bench_serving.py``: a busy neighbour, and sessions that are started."""

from __future__ import annotations

import os
import re
import time

import psutil
import pytest
from serving.starting import start_row
from serving.surroundings import Neighbour

from helpers import FLOAT, make_model, node, value


def test_a_neighbour_computes_only_while_it_is_resumed() -> None:
    """Its CPU time grows by about the time for which it is resumed."""
    with Neighbour(min(os.sched_getaffinity(0))) as neighbour:
        process = psutil.Process(neighbour.pid)

        def used_s() -> float:
            times = process.cpu_times()
            return float(times.user + times.system)

        first = used_s()
        time.sleep(0.2)
        assert used_s() == pytest.approx(first, abs=0.03)
        neighbour.resume()
        end = time.monotonic() + 20
        while used_s() < first + 0.1:
            assert time.monotonic() < end
            time.sleep(0.02)
    assert not process.is_running()


def test_the_start_of_a_session_is_compared_with_a_plain_one() -> None:
    """The first request ends after the creation, and the ratio is within its interval."""
    model = make_model([node("Relu", ["x"], ["y"])], [value("x", FLOAT, [1])], [value("y", FLOAT, [1])])
    name, *figures, ratio = start_row("relu", model.SerializeToString())
    created, done, own_created, own_done = map(float, figures)
    assert name == "relu"
    assert 0 < created <= done
    assert 0 < own_created <= own_done
    middle, low, high = map(float, re.findall(r"[\d.]+", ratio))
    assert 0 < low <= middle <= high
