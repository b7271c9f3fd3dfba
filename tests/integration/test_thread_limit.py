"""The number of threads of plain sessions in a process that may not use all cores."""

from __future__ import annotations

from collections.abc import Callable

import onnxruntime as ort
import psutil
import pytest

from chrion import HybridSession
from chrion.devices import CPU_PROVIDER
from chrion.runtime.execution.plain_engine import PlainEngine
from chrion.runtime.options.session_options import fingerprint, options_to_data
from chrion.runtime.options.thread_limit import limited_threads
from helpers import branches
from seams.machine import pretend_cores

Allow = Callable[[int], None]


@pytest.fixture
def allow(monkeypatch: pytest.MonkeyPatch) -> Allow:
    """Return a function that sets how many of 8 cores the process may use."""
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 16 if logical else 8)
    return lambda count: pretend_cores(monkeypatch, range(count))


def threads(options: ort.SessionOptions | None = None) -> int:
    """Return the number of threads that a plain session is opened with; 0 for onnxruntime's default."""
    return int(opened(options).session.get_session_options().intra_op_num_threads)


def opened(options: ort.SessionOptions | None = None) -> PlainEngine:
    """Return an engine of a small model."""
    return PlainEngine(branches().SerializeToString(), options, [CPU_PROVIDER], None, "for a test")


def test_threads_are_limited_to_the_cores_that_may_be_used(allow: Allow) -> None:
    """With all cores onnxruntime chooses; with fewer, there are as many threads as cores."""
    for cores, expected in ((8, 0), (3, 3), (1, 1)):
        allow(cores)
        assert threads() == threads(ort.SessionOptions()) == expected


def test_options_that_determine_the_threads_are_honoured(allow: Allow) -> None:
    """A number of threads, or their cores, take precedence."""
    allow(1)
    counted, placed = ort.SessionOptions(), ort.SessionOptions()
    counted.intra_op_num_threads = 4
    placed.intra_op_num_threads = 2
    placed.add_session_config_entry("session.intra_op_thread_affinities", "1")
    assert (threads(counted), threads(placed)) == (4, 2)


@pytest.mark.parametrize(
    ("usable", "cores", "given", "shown"),
    [(8, 3, 0, "3 threads"), (8, 1, 0, "1 thread"), (8, 3, 5, "5 threads"), (8, None, 0, "8 threads")],
)
@pytest.mark.parametrize("has_options", [True, False])
def test_plain_sessions_keep_the_cores_of_their_session(
    allow: Allow, usable: int, cores: int | None, given: int, shown: str, *, has_options: bool
) -> None:
    """``cores`` limits their threads, unless the caller's options give a number, which stays as it is."""
    allow(usable)
    options = ort.SessionOptions() if has_options or given else None
    if options:
        options.intra_op_num_threads = given
    with HybridSession(branches().SerializeToString(), options, cores=cores, tune="never") as session:
        assert f"plain onnxruntime on CPUExecutionProvider, {shown}: " in session.explain()
    assert options is None or options.intra_op_num_threads == given


@pytest.mark.parametrize(("cores", "given", "shown"), [(8, 0, "8 threads"), (3, 0, "3 threads"), (3, 1, "1 thread")])
def test_the_number_of_threads_is_explained(allow: Allow, cores: int, given: int, shown: str) -> None:
    """It is that of the cores, which onnxruntime chooses or is limited to, or the one that the options give."""
    allow(cores)
    options = ort.SessionOptions()
    options.intra_op_num_threads = given
    assert opened(options).explain() == f"plain onnxruntime on CPUExecutionProvider, {shown}: for a test"


def test_the_callers_options_are_not_changed(allow: Allow) -> None:
    """They are as before when a session has been opened, and when it could not be opened."""
    allow(2)
    options = ort.SessionOptions()
    assert threads(options) == 2
    assert options.intra_op_num_threads == 0
    with pytest.raises(ort.capi.onnxruntime_pybind11_state.InvalidProtobuf):
        PlainEngine(b"no model", options, [CPU_PROVIDER], None, "for a test")
    assert options.intra_op_num_threads == 0


def test_options_in_use_are_those_of_the_caller(allow: Allow) -> None:
    """While several sessions are created with the same options, decisions and other processes see what was given."""
    allow(2)
    options = ort.SessionOptions()
    before = fingerprint(options), options_to_data(options)
    with limited_threads(options), limited_threads(options) as changed:
        assert changed is options
        assert options.intra_op_num_threads == 2
        assert (fingerprint(options), options_to_data(options)) == before
    with limited_threads(options):
        with limited_threads(options):
            pass
        assert options.intra_op_num_threads == 2  # the outer session is still being created
    assert options.intra_op_num_threads == 0


def test_wrong_arguments_are_refused_as_by_onnxruntime(allow: Allow) -> None:
    """Options of another type reach InferenceSession."""
    allow(1)
    with pytest.raises(TypeError):
        ort.InferenceSession(branches().SerializeToString(), 3)
    with pytest.raises(TypeError):
        HybridSession(branches().SerializeToString(), 3)  # type: ignore[arg-type]


def test_a_session_of_one_thread_needs_no_second_one(allow: Allow) -> None:
    """No number of requests in flight is a crowd for it."""
    assert opened().capacity < 1000
    allow(1)
    assert opened().capacity > 1_000_000
    one = ort.SessionOptions()
    one.intra_op_num_threads = 1
    allow(8)
    assert opened(one).capacity > 1_000_000
