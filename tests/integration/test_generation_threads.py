"""The threads of a generator do not share cores with each other."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from chrion import Generator
from chrion.cores import physical_cores
from decoder_support import small_decoder

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(physical_cores()) < 2, reason="fewer than two cores, or no affinities"
)


def own_threads() -> set[int]:
    """Return the threads of this process by the numbers of the system."""
    return {int(path.name) for path in Path("/proc/self/task").iterdir()}


def test_the_caller_and_the_threads_of_its_sessions_are_on_different_cores() -> None:
    before, usable = own_threads(), os.sched_getaffinity(0)
    with Generator(small_decoder("llama-decoder"), threads=2) as generator:
        generator.submit([1, 2, 3], 4).result(60)
        (loop,) = (thread for thread in threading.enumerate() if thread.name == "chrion-generation")
        (caller,) = os.sched_getaffinity(loop.native_id or 0)
        sessions = own_threads() - before - {loop.native_id}
        assert sessions
        for thread in sessions:
            (core,) = os.sched_getaffinity(thread)
            assert core != caller
            assert core in usable
    assert os.sched_getaffinity(0) == usable


@pytest.mark.parametrize(
    "options", [{"threads": 1}, {"threads": 2, "n_workers": 2}, {"threads": len(physical_cores()) + 1}], ids=str
)
def test_other_threads_are_not_pinned(options: dict[str, int]) -> None:
    """One thread has nobody to share a core with; with two batches in flight each caller would need its own threads."""
    before, usable = own_threads(), os.sched_getaffinity(0)
    with Generator(small_decoder("llama-decoder"), **options) as generator:
        generator.submit([1, 2, 3], 4).result(60)
        for thread in own_threads() - before:
            assert os.sched_getaffinity(thread) == usable


def test_two_generators_call_from_different_cores() -> None:
    with (
        Generator(small_decoder("llama-decoder"), threads=2) as first,
        Generator(small_decoder("llama-decoder"), threads=2) as second,
    ):
        for generator in (first, second):
            generator.submit([1, 2, 3], 4).result(60)
        loops = [thread for thread in threading.enumerate() if thread.name == "chrion-generation"]
        found = [os.sched_getaffinity(thread.native_id or 0) for thread in loops]
        assert len(found) == 2
        assert found[0].isdisjoint(found[1])
