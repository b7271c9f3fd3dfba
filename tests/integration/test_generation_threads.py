"""The threads of a generator do not share cores with each other."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from chrion import Generator
from chrion.machine.cores import physical_cores
from decoder_support import small_decoder

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(physical_cores()) < 2, reason="fewer than two cores, or no affinities"
)
MODEL = small_decoder("llama-decoder", layers=1)


def own_threads() -> set[int]:
    """Return the threads of this process by the numbers of the system."""
    return {int(path.name) for path in Path("/proc/self/task").iterdir()}


def caller_of(generator: Generator, before: set[int]) -> int:
    """Return the core of the new thread that calls sessions, which those of the sessions do not share."""
    generator.submit([1, 2, 3], 4).result(60)
    loops = {thread.native_id for thread in threading.enumerate() if thread.name == "chrion-generation"}
    (loop,) = loops - before
    (caller,) = os.sched_getaffinity(loop or 0)
    sessions = own_threads() - before - {loop}
    assert sessions
    for thread in sessions:
        (core,) = os.sched_getaffinity(thread)
        assert core != caller
        assert core in os.sched_getaffinity(0)
    return caller


def test_callers_and_the_threads_of_their_sessions_are_on_different_cores() -> None:
    """Two generators call from different cores, and each has its sessions' threads on others than its own."""
    before, usable = own_threads(), os.sched_getaffinity(0)
    with Generator(MODEL, threads=2) as first:
        one, between = caller_of(first, before), own_threads()
        with Generator(MODEL, threads=2) as second:
            assert caller_of(second, between) != one
    assert os.sched_getaffinity(0) == usable


def test_threads_of_several_batches_are_not_pinned() -> None:
    """With two batches in flight, each caller would need threads of its own."""
    before, usable = own_threads(), os.sched_getaffinity(0)
    with Generator(MODEL, threads=2, n_workers=2) as generator:
        generator.submit([1, 2, 3], 4).result(60)
        for thread in own_threads() - before:
            assert os.sched_getaffinity(thread) == usable
