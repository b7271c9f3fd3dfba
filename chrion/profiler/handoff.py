"""What it costs to start work on a lane, and to hand work to another: lanes taking turns at next to nothing."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import onnxruntime as ort

from chrion.cores import pinned
from chrion.devices import CPU_PROVIDER
from chrion.devices.host import allocate
from chrion.devices.probe import smallest_model, smallest_session
from chrion.graph.model import TensorInfo
from chrion.native import NativeBinding, NativeFrame, NativeLanes, NativeSession, available
from chrion.native.bindings import RUN, SIGNAL, WAIT
from chrion.timing import time_call
from chrion.waiting import Counter

_ROUNDS = 400


def measure_handoff_ms(cores: Sequence[int], *, interpreted: bool = False) -> tuple[float, float]:
    """Time from the end of a segment to the start of one on another lane, and what calling a segment takes.

    The call is that of an operator on one number, so all but its work.

    Args:
        cores: Logical CPUs; the first two are used. With one, nothing is handed over: zero.
        interpreted: Whether lanes are threads of the interpreter, as they are beside an accelerator.
    """
    if available() and not interpreted:
        return _native_ms(cores)
    session = smallest_session(CPU_PROVIDER)
    runs = [partial(session.run_with_iobinding, _bound(session)) for _ in range(2)]
    if len(cores) < 2:
        return 0.0, statistics.median(time_call(runs[0]) for _ in range(_ROUNDS))
    _, round_trips = _taking_turns(cores, [_nothing, _nothing])
    # Measured while another lane waits and takes over: the interpreter lock changes hands then, which makes the call
    # dearer than in a loop of its own.
    calls, _ = _taking_turns(cores, runs)
    return statistics.median(round_trips) / 2, statistics.median(calls)


def _native_ms(cores: Sequence[int]) -> tuple[float, float]:
    """Two lanes in C that take turns, or one on its own."""
    lanes = min(2, len(cores))
    steps: list[list[tuple[int, int, int]]] = [[] for _ in range(lanes)]
    for turn in range(_ROUNDS):
        mine, other = turn % lanes, (turn + 1) % lanes
        if lanes > 1 and turn:
            steps[mine].append((WAIT, other, (turn + 1) // 2))
        steps[mine] += [(RUN, turn, 0), (SIGNAL, turn // lanes + 1, 0)]
    session = NativeSession(smallest_model(), ort.SessionOptions())
    info = TensorInfo("x", "tensor(float)", (1,))
    values = [allocate(info) for _ in range(2 * lanes)]
    bindings = [NativeBinding(session) for _ in range(lanes)]
    for at, value in enumerate(values):
        binding = bindings[at // 2]
        bind = binding.bind_ortvalue_output if at % 2 else binding.bind_ortvalue_input
        bind("xy"[at % 2], value)
    running = NativeLanes(steps, cores[:lanes])
    try:
        frame = NativeFrame(running, [session] * _ROUNDS, [bindings[turn % lanes] for turn in range(_ROUNDS)])
        times = np.zeros((_ROUNDS, 2))
        running.run(frame)
        running.run(frame, times)
    finally:
        running.close()
    handoffs, calls = times[1:, 0] - times[:-1, 1], times[:, 1] - times[:, 0]
    return float(np.median(handoffs)) / 1e3 if lanes > 1 else 0.0, float(np.median(calls)) / 1e3


def _taking_turns(cores: Sequence[int], work: Sequence[Callable[[], None]]) -> tuple[list[float], list[float]]:
    """Two threads of the interpreter at work in turn: what the first one's work takes, and a whole round, in ms."""
    ping, pong = Counter(), Counter()

    def echo() -> None:
        with pinned(cores[1]):
            for turn in range(1, _ROUNDS + 1):
                ping.wait(turn)
                work[1]()
                pong.advance(turn)

    def round_trip(turn: int) -> float:
        before = time.perf_counter()
        took_ms = time_call(work[0])
        ping.advance(turn)
        pong.wait(turn)
        rounds.append((time.perf_counter() - before) * 1e3)
        return took_ms

    rounds: list[float] = []
    thread = threading.Thread(target=echo, daemon=True)
    with pinned(cores[0]):
        thread.start()
        calls = [round_trip(turn) for turn in range(1, _ROUNDS + 1)]
    thread.join()
    return calls, rounds


def _nothing() -> None:
    """No work."""


def _bound(session: ort.InferenceSession) -> Any:
    """A binding with an array for the smallest session's input and its output."""
    binding = session.io_binding()
    for name, bind in (("x", binding.bind_ortvalue_input), ("y", binding.bind_ortvalue_output)):
        bind(name, ort.OrtValue.ortvalue_from_numpy(np.zeros(1, np.float32)))
    return binding
