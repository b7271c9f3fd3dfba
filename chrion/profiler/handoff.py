"""Measurement of handoff and dispatch latency: two lanes that run a minimal segment alternately."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import onnxruntime as ort

from chrion.common.timing import time_call
from chrion.devices import CPU_PROVIDER
from chrion.devices.host import allocate
from chrion.devices.small_models import smallest_model, smallest_session
from chrion.graph.model import TensorInfo
from chrion.machine.cores import pinned
from chrion.machine.waiting import Counter
from chrion.native import NativeBinding, NativeFrame, NativeLanes, NativeProgram, NativeSession, available
from chrion.native.bindings import RUN, SIGNAL, WAIT

#: Rounds of each measurement: enough for a median (a choice, not measured).
_ROUNDS = 400


def measure_handoff_ms(cores: Sequence[int], *, python_lanes: bool = False) -> tuple[float, float]:
    """Measure the handoff latency between two lanes, and the dispatch latency of a segment.

    The segment is an operator on one number, so that its time is the overhead of the call.

    Args:
        cores: Logical CPUs, of which the first two are used. With one CPU the handoff latency is zero.
        python_lanes: Measure Python threads, which are the lanes of programs with an accelerator, even if native lanes
            are available.

    Returns:
        The handoff latency, from the end of a segment to the start of the next one on the other lane; and the dispatch
        latency, the time of a call of a segment. Both are in ms.
    """
    if available() and not python_lanes:
        return _native_ms(cores)
    session = smallest_session(CPU_PROVIDER)
    runs = [partial(session.run_with_iobinding, _bound(session)) for _ in range(2)]
    if len(cores) < 2:
        return 0.0, statistics.median(time_call(runs[0]) for _ in range(_ROUNDS))
    _, round_trips = _alternate(cores, [lambda: None] * 2)
    # Calls are measured while the other lane waits: the GIL then passes between the threads, which makes a call slower
    # than in a loop of one thread.
    calls, _ = _alternate(cores, runs)
    return statistics.median(round_trips) / 2, statistics.median(calls)


def _native_ms(cores: Sequence[int]) -> tuple[float, float]:
    """Return the handoff and dispatch latency of two native lanes that run alternately, or of one lane alone."""
    lanes = min(2, len(cores))
    steps: list[list[tuple[int, int, int]]] = [[] for _ in range(lanes)]
    for number in range(_ROUNDS):
        own, other = number % lanes, (number + 1) % lanes
        if lanes > 1 and number:
            steps[own].append((WAIT, other, (number + 1) // 2))
        steps[own] += [(RUN, number, 0), (SIGNAL, number // lanes + 1, 0)]
    session = NativeSession(smallest_model(), ort.SessionOptions())
    info = TensorInfo("x", "tensor(float)", (1,))
    values = [allocate(info) for _ in range(2 * lanes)]
    bindings = [NativeBinding(session) for _ in range(lanes)]
    for at, value in enumerate(values):
        binding = bindings[at // 2]
        bind = binding.bind_ortvalue_output if at % 2 else binding.bind_ortvalue_input
        bind("xy"[at % 2], value)
    program = NativeProgram(steps)
    running = NativeLanes(program, cores[:lanes])
    try:
        frame = NativeFrame(program, [session] * _ROUNDS, [bindings[number % lanes] for number in range(_ROUNDS)])
        times = np.zeros((_ROUNDS, 2))
        running.run(frame)
        running.run(frame, times)
    finally:
        running.close()
    handoffs, calls = times[1:, 0] - times[:-1, 1], times[:, 1] - times[:, 0]
    return float(np.median(handoffs)) / 1e3 if lanes > 1 else 0.0, float(np.median(calls)) / 1e3


def _alternate(cores: Sequence[int], work: Sequence[Callable[[], None]]) -> tuple[list[float], list[float]]:
    """Run work in two Python threads alternately; return the times of the first one's work and of rounds, in ms."""
    ping, pong = Counter(), Counter()

    def echo() -> None:
        with pinned(cores[1]):
            for number in range(1, _ROUNDS + 1):
                ping.wait(number)
                work[1]()
                pong.advance(number)

    def round_trip(number: int) -> float:
        before = time.perf_counter()
        took_ms = time_call(work[0])
        ping.advance(number)
        pong.wait(number)
        rounds.append((time.perf_counter() - before) * 1e3)
        return took_ms

    rounds: list[float] = []
    thread = threading.Thread(target=echo, daemon=True)
    with pinned(cores[0]):
        thread.start()
        calls = [round_trip(number) for number in range(1, _ROUNDS + 1)]
    thread.join()
    return calls, rounds


def _bound(session: ort.InferenceSession) -> Any:
    """Return a binding with arrays for the input and the output of the smallest session."""
    binding = session.io_binding()
    for name, bind in (("x", binding.bind_ortvalue_input), ("y", binding.bind_ortvalue_output)):
        bind(name, ort.OrtValue.ortvalue_from_numpy(np.zeros(1, np.float32)))
    return binding
