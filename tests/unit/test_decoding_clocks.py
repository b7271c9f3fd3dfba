"""Times of loads and of repeated iterations, on a clock whose times are known."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from decoding import load, repeated_iterations
from decoding.on_device import DEVICE, HOST, TWO_BATCHES, WAYS, DeviceDecoder
from decoding.repeated_iterations import WARM_S, time_in_turn

from chrion.generation.rewrites.decoder import DecoderSignature
from chrion.serving.simulator.decoder_requests import DecoderWorkload
from seams.commands import replace_clock


class Clock:
    """A clock that moves when it is told to, and calls functions at their times."""

    def __init__(self) -> None:
        self.now_s = 10.0
        self._due: list[tuple[float, Callable[[], None]]] = []

    def perf_counter(self) -> float:
        """Return the time."""
        return self.now_s

    def sleep(self, seconds: float) -> None:
        """Move the clock."""
        end_s = self.now_s + seconds
        while self._due and min(self._due, key=lambda one: one[0])[0] <= end_s:
            first = min(self._due, key=lambda one: one[0])
            self._due.remove(first)
            self.now_s = first[0]
            first[1]()
        self.now_s = end_s

    def call_at(self, time_s: float, function: Callable[[], None]) -> None:
        """Call a function at a time."""
        self._due.append((time_s, function))


class FakeStream:
    """A stream that ends after a time."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock, self.ends_s = clock, clock.now_s + seconds

    def add_done_callback(self, function: Callable[[FakeStream], None]) -> None:
        """Call a function at the end."""
        self._clock.call_at(self.ends_s, partial(function, self))

    def result(self) -> None:
        """Wait for the end."""
        self._clock.sleep(max(0.0, self.ends_s - self._clock.now_s))


class FakeGenerator:
    """A generator that serves requests in given times, and takes 150 ms to accept one."""

    def __init__(self, clock: Clock, seconds: list[float]) -> None:
        self._clock, self._seconds = clock, iter(seconds)
        self.requests: list[tuple[int, int]] = []

    def submit(self, prompt: list[int], new: int, **_: Any) -> FakeStream:
        """Return a stream."""
        self.requests.append((len(prompt), new))
        self._clock.sleep(0.15)
        return FakeStream(self._clock, next(self._seconds))


def test_latencies_count_from_the_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third request arrives while the second one is submitted, and waits; throughput is from the first arrival.

    They are submitted at 0.1, 0.3 and 0.45 s, and end at 0.75, 0.65 and 1.5 s.
    """
    clock = Clock()
    replace_clock(monkeypatch, load, clock)
    generator = FakeGenerator(clock, [0.5, 0.2, 0.9])
    workload = DecoderWorkload(np.array([100.0, 300.0, 400.0]), np.array([3, 5, 7]), np.array([1, 2, 4]))
    throughput, latency = load.serve(generator, workload)  # type: ignore[arg-type]
    assert generator.requests == [(3, 1), (5, 2), (7, 4)]
    assert throughput == pytest.approx(3 / (1.5 - 0.1))
    assert latency == pytest.approx(np.median([650 / 1, 350 / 2, 1100 / 4]))


def test_a_timed_run_follows_runs_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """In every round each way runs for 10 ms before it is timed once; the first round does not count."""
    clock = Clock()
    replace_clock(monkeypatch, repeated_iterations, clock)
    calls: list[str] = []
    # The fifth run of "fast" in a round is the timed one: the others are faster, so that mixing them up is seen.
    fast_s = [0.003, 0.003, 0.003, 0.003, 0.007]

    def fast() -> None:
        clock.sleep(fast_s[calls.count("fast") % 5])
        calls.append("fast")

    def slow() -> None:
        clock.sleep(2 * WARM_S)
        calls.append("slow")

    times = time_in_turn({"fast": fast, "slow": slow}, 2)
    assert calls == [*["fast"] * 5, *["slow"] * 2] * 3
    assert times == {"fast": pytest.approx([7.0, 7.0]), "slow": pytest.approx([20.0, 20.0])}


class MadeDecoder(DeviceDecoder):
    """A decoder whose iterations take 20 ms, but on the device 21, 90 and 30 ms in the rounds that count."""

    def __init__(self, clock: Clock) -> None:
        self.engine = self  # type: ignore[assignment]
        self.by_token = False
        self.iterations = 0
        self._clock, self._lock = clock, threading.Lock()
        self._on_device_s = iter([0.02, 0.02, 0.02, 0.021, 0.02, 0.09, 0.02, 0.03])  # warm-up and timed run of a round

    @property
    def signature(self) -> DecoderSignature:
        """The inputs and outputs of a decoder of one layer."""
        return DecoderSignature(("input_ids",), ("k", "v"), ("pk", "pv"), ((1, 2),) * 2, np.dtype(np.float32), 9, 0)

    def on_device(self, _: object) -> Callable[[], object]:
        """Return an iteration on the device."""
        return lambda: self._clock.sleep(next(self._on_device_s))

    def run(self, batch: Sequence[object]) -> Sequence[object]:
        """Run an iteration by selective batching."""
        with self._lock:
            self.iterations += 1
            self._clock.sleep(0.02)
        return batch


def test_two_batches_count_for_two_times_four_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two batches side by side, a timed run has four iterations of each, and its time is divided by eight."""
    clock = Clock()
    replace_clock(monkeypatch, repeated_iterations, clock)
    decoder = MadeDecoder(clock)
    found = decoder.time([4], 9, 3, WAYS)
    assert decoder.iterations == (1 + 3) * 2 * (1 + 2 * 4)
    assert [(times.way, times.batch) for times in found] == [(way, 4) for way in (DEVICE, HOST, TWO_BATCHES)]
    assert [times.iteration_ms for times in found] == pytest.approx([30.0, 20.0, 20.0])
    assert [times.tokens_per_s for times in found] == pytest.approx([4 / 0.03, 200, 200])
