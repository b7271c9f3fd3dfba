"""Measurement of costs that do not depend on operators: handoff, dispatch, wake-ups of threads, and weight reload."""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import onnxruntime as ort

from chrion.common.timing import time_call, time_calls
from chrion.devices import CPU_PROVIDER
from chrion.devices.host import allocate
from chrion.devices.intra_op import set_threads
from chrion.devices.small_models import product_session, smallest_model, smallest_session
from chrion.graph.model import TensorInfo
from chrion.machine.cores import pinned, run_on_cores
from chrion.machine.waiting import Counter
from chrion.native import NativeBinding, NativeFrame, NativeLanes, NativeProgram, NativeSession, available
from chrion.native.bindings import RUN, SIGNAL, WAIT

#: Rounds in which two lanes run a minimal segment alternately: enough for a median (a choice, not measured).
_HANDOFF_ROUNDS = 400


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
        return 0.0, statistics.median(time_call(runs[0]) for _ in range(_HANDOFF_ROUNDS))
    _, round_trips = _alternate(cores, [lambda: None] * 2)
    # Calls are measured while the other lane waits: the GIL then passes between the threads, which makes a call slower
    # than in a loop of one thread.
    calls, _ = _alternate(cores, runs)
    return statistics.median(round_trips) / 2, statistics.median(calls)


def _native_ms(cores: Sequence[int]) -> tuple[float, float]:
    """Return the handoff and dispatch latency of two native lanes that run alternately, or of one lane alone."""
    lanes = min(2, len(cores))
    steps: list[list[tuple[int, int, int]]] = [[] for _ in range(lanes)]
    for number in range(_HANDOFF_ROUNDS):
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
        frame = NativeFrame(
            program, [session] * _HANDOFF_ROUNDS, [bindings[number % lanes] for number in range(_HANDOFF_ROUNDS)]
        )
        times = np.zeros((_HANDOFF_ROUNDS, 2))
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
            for number in range(1, _HANDOFF_ROUNDS + 1):
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
        calls = [round_trip(number) for number in range(1, _HANDOFF_ROUNDS + 1)]
    thread.join()
    return calls, rounds


def _bound(session: ort.InferenceSession) -> Any:
    """Return a binding with arrays for the input and the output of the smallest session."""
    binding = session.io_binding()
    for name, bind in (("x", binding.bind_ortvalue_input), ("y", binding.bind_ortvalue_output)):
        bind(name, ort.OrtValue.ortvalue_from_numpy(np.zeros(1, np.float32)))
    return binding


#: The product that is timed: some tenths of a millisecond on one core, so that waking a thread pays.
_WAKE_ROWS, _WAKE_SIDE = 64, 512
#: Rounds, so that interference affects both sessions alike, and calls of each (choices, not measured).
_WAKE_ROUNDS, _WAKE_CALLS = 4, 60


def measure_wake_ms(cores: Sequence[int]) -> float:
    """Measure how much longer a matrix product on two cores takes if the second thread has to be woken.

    Args:
        cores: Logical CPUs, of which the first two are used.

    Returns:
        The difference in ms, 0 or more; 0 with a single core.
    """
    if len(cores) < 2:
        return 0.0
    x = np.ones((_WAKE_ROWS, _WAKE_SIDE), np.float32)

    def lower_quartile_ms(*, spinning: bool) -> float:
        options = ort.SessionOptions()
        set_threads(options, 2, cores[1:2], in_a_loop=spinning)
        session = product_session(CPU_PROVIDER, _WAKE_ROWS, _WAKE_SIDE, options)
        return statistics.quantiles(time_calls(lambda: session.run(None, {"x": x}), _WAKE_CALLS), n=4)[0]

    def difference_ms() -> float:
        rounds = [(lower_quartile_ms(spinning=False), lower_quartile_ms(spinning=True)) for _ in range(_WAKE_ROUNDS)]
        # Interference only adds time. The median of the wake-ups counts, since they vary.
        return statistics.median(woken for woken, _ in rounds) - min(spun for _, spun in rounds)

    [wake_ms] = run_on_cores(cores[:1], difference_ms)
    return max(0.0, wake_ms)


#: The number of matrix products that run in turn, each with its own weights of half the cache size: before its turn
#: comes again, the others have replaced its weights.
_RELOAD_PRODUCTS = 12
#: Rows of a product: few, so that reading its weights takes a large part of its time; and rounds over all products, of
#: which the first one is a warm-up.
_RELOAD_ROWS = 16
_RELOAD_ROUNDS = 8


def measure_reload_ms_per_byte(cores: Sequence[int], cache_bytes: int) -> float:
    """Measure how much longer an operator takes per byte of its weights if they are not in the cache.

    Every core runs several products in turn, each of them twice; the second time, its weights are in the cache. All
    cores run at the same time, since they share the memory behind their private caches.

    Args:
        cores: Logical CPUs.
        cache_bytes: The size of a core's private cache; zero if unknown.

    Returns:
        Milliseconds per byte; zero if the size of the cache is unknown.
    """
    side = math.isqrt(cache_bytes // 8)
    if not side:
        return 0.0
    x = np.ones((_RELOAD_ROWS, side), np.float32)

    def differences_ms() -> list[float]:
        products = [product_session(CPU_PROVIDER, _RELOAD_ROWS, side) for _ in range(_RELOAD_PRODUCTS)]
        differences_s = []
        for _ in range(_RELOAD_ROUNDS):
            for product in products:
                times = [time.perf_counter()]
                for _ in range(2):
                    product.run(None, {"x": x})
                    times.append(time.perf_counter())
                differences_s.append((times[1] - times[0]) - (times[2] - times[1]))
        return [s * 1e3 for s in differences_s[_RELOAD_PRODUCTS:]]

    differences = [ms for core in run_on_cores(cores, differences_ms) for ms in core]
    return max(0.0, statistics.median(differences)) / (4 * side * side)


class Overheads(NamedTuple):
    """Costs that do not depend on operators."""

    handoff_ms: float
    dispatch_ms: float
    wake_ms: float
    reload_ms_per_byte: float

    @classmethod
    def measure(cls, lanes: Sequence[int], cache_bytes: int, *, python_lanes: bool) -> Overheads:
        """Measure them on some cores, whose private caches have a size."""
        handoff_ms, dispatch_ms = measure_handoff_ms(lanes, python_lanes=python_lanes)
        wake_ms, reload_ms_per_byte = measure_wake_ms(lanes), measure_reload_ms_per_byte(lanes, cache_bytes)
        return cls(handoff_ms, dispatch_ms, wake_ms, reload_ms_per_byte)


#: Typical overheads of native lanes: those that estimates from datasheets have at 3 GHz, and 20 GB/s beyond the private
#: cache.
TYPICAL = Overheads(handoff_ms=0.4e-3, dispatch_ms=1.8e-3, wake_ms=0.09, reload_ms_per_byte=0.5e-7)
