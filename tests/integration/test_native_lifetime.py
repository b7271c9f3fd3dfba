"""Lifetime of native lanes and their resources: closed lanes, reference cycles, signals, and the fallback."""

from __future__ import annotations

import ctypes
import gc
import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from chrion import HybridSession, load
from chrion.native import NativeBinding, NativeFrame, NativeLanes, NativeProgram, NativeSession, available
from chrion.native.bindings import RUN
from chrion.native.library import path_of
from chrion.scheduler import fixed_plan
from helpers import FLOAT, alternating_lanes, assert_same_as_plain, branches, make_model, node, value
from seams.execution import fail, forget_warnings, note_releases

pytestmark = pytest.mark.timeout(120, method="thread")
compiled = pytest.mark.skipif(not available(), reason="lanes are not compiled here")
FEED = {"x": np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)}


class MallocInfo(ctypes.Structure):
    """What glibc's ``mallinfo2`` returns; ``uordblks`` is the number of bytes in use."""

    _fields_ = [(name, ctypes.c_size_t) for name in (*[f"other {at}" for at in range(7)], "uordblks", "free", "top")]


def identity() -> NativeSession:
    """Return a session of one operator."""
    model = make_model([node("Relu", ["x"], ["y"])], [value("x", FLOAT, [1])], [value("y", FLOAT, [1])])
    return NativeSession(model.SerializeToString(), ort.SessionOptions())


def one_segment() -> tuple[NativeLanes, NativeFrame, list[ort.OrtValue]]:
    """Return lanes that run one segment, a frame of them, and the tensors bound to it."""
    session = identity()
    binding = NativeBinding(session)
    tensors = [ort.OrtValue.ortvalue_from_numpy(np.ones(1, np.float32)) for _ in "xy"]
    binding.bind_ortvalue_input("x", tensors[0])
    binding.bind_ortvalue_output("y", tensors[1])
    program = NativeProgram([[(RUN, 0, 0)], []])
    return NativeLanes(program, [None, None]), NativeFrame(program, [session], [binding]), tensors


@compiled
def test_closed_lanes_refuse_to_run() -> None:
    """A frame cannot be run once its lanes are closed."""
    lanes, frame, _tensors = one_segment()
    lanes.run(frame)
    lanes.close()
    with pytest.raises(RuntimeError, match="lanes are closed"):
        lanes.run(frame)


@compiled
def test_a_frame_of_another_program_is_refused() -> None:
    """The frame is refused, since its counters may be fewer than the lanes have."""
    (lanes, _, _first), (other, frame, _second) = one_segment(), one_segment()
    with pytest.raises(ValueError, match="another program"):
        lanes.run(frame)
    lanes.close()
    other.close()


@compiled
@pytest.mark.parametrize("order", [0, 1, 2])
def test_a_reference_cycle_is_released_in_a_safe_order(order: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames are released before bindings and bindings before sessions, whichever the collector clears first."""
    released = note_releases(monkeypatch)
    session = identity()
    binding = NativeBinding(session)
    frame = NativeFrame(NativeProgram([[(RUN, 0, 0)], []]), [session], [binding])
    expected = [frame.pointer, binding.resource.pointer, session.resource.pointer]
    cycle: list[Any] = [session, binding, frame]
    for at, thing in enumerate(cycle):  # each refers to the next one, from a different start
        thing.cycle = cycle[(at + 1 + order) % 3], cycle
    del session, binding, frame, thing, cycle
    gc.collect()
    assert [pointer for pointer in released if pointer in expected] == expected


@compiled
def test_a_resource_whose_constructor_was_interrupted_is_dropped_silently() -> None:
    """Its finaliser raises nothing, although it has no attributes yet; pytest would report the exception."""
    kind = type(identity().resource)
    kind.__new__(kind)
    gc.collect()


def lane_masks() -> list[int]:
    """Return the blocked signals of every native lane."""
    masks = []
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().startswith("chrion-lane-"):
            (line,) = [line for line in (task / "status").read_text().splitlines() if line.startswith("SigBlk")]
            masks.append(int(line.split()[1], 16))
    return masks


@compiled
def test_lanes_block_asynchronous_signals_only() -> None:
    """A fault in a kernel reaches the handler that the application has installed; Ctrl+C reaches the main thread."""
    import signal  # noqa: PLC0415 - its names are the subject

    lanes, frame, _tensors = one_segment()
    lanes.run(frame)  # a thread that has just been created still blocks all signals
    (mask,) = lane_masks()
    lanes.close()

    def blocked(number: int) -> bool:
        return bool(mask >> (number - 1) & 1)

    faults = ("SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGTRAP", "SIGSYS", "SIGABRT")
    assert not [name for name in faults if blocked(getattr(signal, name))]
    assert all(blocked(getattr(signal, name)) for name in ("SIGINT", "SIGTERM", "SIGALRM", "SIGCHLD", "SIGUSR1"))


@compiled
def test_the_fallback_to_lane_threads_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log reports the fallback once, and so does ``explain``; the session serves."""
    fail(monkeypatch, "start native lanes", RuntimeError("the system provides no threads for lanes"))
    graph = load(branches())
    with (
        caplog.at_level(logging.WARNING),
        HybridSession(graph, plan=fixed_plan(graph, alternating_lanes(graph))) as session,
    ):
        for _ in range(3):
            assert_same_as_plain(session, branches(), FEED)
        assert "lane threads (native lanes failed: the system provides no threads for lanes)" in session.explain()
    assert caplog.text.count("no threads for lanes") == 1


@pytest.mark.usefixtures("interpreted")
def test_lanes_that_are_not_compiled_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    """The log reports missing lanes once for the process, and ``explain`` of every session does."""
    forget_warnings()
    graph = load(branches())
    plan = fixed_plan(graph, alternating_lanes(graph))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            with HybridSession(graph, plan=plan) as session:
                assert "lane threads (native lanes are not compiled" in session.explain()
    assert caplog.text.count("not compiled") == 1


def test_lane_threads_of_an_accelerator_are_explained(caplog: pytest.LogCaptureFixture) -> None:
    """An accelerator's lanes are threads by design, so that the log has no warning."""
    graph = load(branches())
    plan = fixed_plan(graph, [0, 1, 0, 1], accelerator="CPUExecutionProvider")
    with HybridSession(graph, plan=plan) as session:
        assert "lane threads (the plan uses an accelerator)" in session.explain()
    assert "lanes" not in caplog.text


@compiled
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="no mallinfo2 here")
def test_a_failed_open_keeps_no_options() -> None:
    """Options that are registered replace those of a session that was not opened on this thread."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = MallocInfo
    entries = {f"key {number}": "x" * 1000 for number in range(50)}

    def fail() -> None:
        options = ort.SessionOptions()
        for key, text in entries.items():
            options.add_session_config_entry(key, text)
        options.register_custom_ops_library(str(path_of("lanes")))  # which InferenceSession would do, and then fail

    fail()
    before = mallinfo2().uordblks
    for _ in range(100):
        fail()
    assert mallinfo2().uordblks - before < 10 * 50 * 1000


@compiled
def test_no_wait_depends_on_the_clock_of_the_system() -> None:
    """The library calls no function that waits until a time of the system's clock, which may be set back meanwhile."""
    content = Path(path_of("lanes")).read_bytes()
    for name in (b"pthread_timedjoin_np", b"pthread_cond_timedwait", b"sem_timedwait", b"pthread_mutex_timedlock"):
        assert name not in content
