"""Tuning in the background: requests are served at once, and decisions arrive later."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from chrion import HybridSession, load
from chrion.errors import OptionError, ProviderError, UnsafeModelError
from chrion.graph.model import Graph
from chrion.runtime.selection import tuning, tuning_process, worker
from chrion.runtime.selection.decisions import Decision
from chrion.runtime.selection.tuning_process import NamedShapes
from chrion.scheduler import fixed_plan
from helpers import alternating_lanes, assert_same_as_plain, branches, free_branches
from tuning_support import alternate, deciding_with, wait_for

pytestmark = pytest.mark.usefixtures("background_tuning")

X = np.ones((2, 4), np.float32)


@pytest.mark.usefixtures("tuned_shapes")
def test_requests_are_served_before_tuning_ends(gate: threading.Event) -> None:
    """The plain session serves requests until the plan is installed.

    Descriptions of inputs and outputs do not change.
    """
    model = branches()
    with HybridSession(model) as session:
        described = [str(info) for info in (*session.get_inputs(), *session.get_outputs())]
        assert session.plan is None
        assert "tuning has not finished" in session.explain()
        assert_same_as_plain(session, model, {"x": X})
        assert not session.wait_until_tuned(0.05)
        gate.set()
        assert session.wait_until_tuned(30)
        assert session.plan is not None
        assert_same_as_plain(session, model, {"x": X})
        assert [str(info) for info in (*session.get_inputs(), *session.get_outputs())] == described
        assert session.get_modelmeta().graph_name == "tiny"


def test_a_cached_decision_needs_no_process(tuned_shapes: list[NamedShapes], gate: threading.Event) -> None:
    """A second session of the model uses the first one's decision."""
    gate.set()
    for _ in range(2):
        with HybridSession(branches()) as session:
            assert session.wait_until_tuned(30)
            assert session.plan is not None
    assert len(tuned_shapes) == 1


def test_a_changed_file_is_tuned_again(tuned_shapes: list[NamedShapes], gate: threading.Event, tmp_path: Path) -> None:
    """The decision on a file is used until the file's size or modification time changes."""
    gate.set()
    path = tmp_path / "model.onnx"
    for size in (4, 4, 8):
        if not path.exists() or size != 4:
            onnx.save(branches(size=size), path)
        with HybridSession(path) as session:
            assert session.wait_until_tuned(30)
    assert len(tuned_shapes) == 2


def test_several_sessions_of_a_model_tune_once(tuned_shapes: list[NamedShapes], gate: threading.Event) -> None:
    """The second session waits for the decision of the first."""
    with HybridSession(branches()) as first, HybridSession(branches()) as second:
        wait_for(lambda: bool(tuned_shapes))
        time.sleep(0.3)
        gate.set()
        assert first.wait_until_tuned(30)
        assert second.wait_until_tuned(30)
        assert first.plan is not None
        assert second.plan is not None
    assert len(tuned_shapes) == 1


def test_every_shape_is_served_before_it_is_tuned(tuned_shapes: list[NamedShapes], gate: threading.Event) -> None:
    """A model with free dimensions is tuned for each shape; a request of a new shape does not wait."""
    model = free_branches()
    with HybridSession(model) as session:
        assert session.get_inputs()[0].shape == ["batch", 4]
        for batch in (1, 2, 3):
            assert_same_as_plain(session, model, {"x": np.ones((batch, 4), np.float32)})
        gate.set()
        assert session.wait_until_tuned(30)
        for batch in (1, 2, 3, 4, 2):
            assert_same_as_plain(session, model, {"x": np.ones((batch, 4), np.float32)})
            session.wait_until_tuned(30)
            assert session.plan is not None or batch == 4
    assert [shapes["x"] for shapes in tuned_shapes] == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_shapes_in_rotation_are_not_tuned_without_end(tuned_shapes: list[NamedShapes], gate: threading.Event) -> None:
    """Of forty shapes requested once or twice, the first ones are tuned."""
    gate.set()
    model = free_branches()
    with HybridSession(model) as session:
        for _ in range(2):
            for batch in range(1, 41):
                session.run(None, {"x": np.ones((batch, 4), np.float32)})
        assert session.wait_until_tuned(60)
    assert len(tuned_shapes) == 8


@pytest.mark.parametrize("feed", [{}, {"z": X}, {"x": X.astype(np.float64)}, {"x": np.ones((2, 5), np.float32)}])
@pytest.mark.parametrize("tuned", [False, True])
@pytest.mark.parametrize("free", [False, True])
@pytest.mark.usefixtures("tuned_shapes")
def test_wrong_requests_raise_what_inference_session_raises(
    gate: threading.Event, feed: dict[str, Any], *, tuned: bool, free: bool
) -> None:
    """The type of the exception is equal before and after the plan is in use."""
    model = free_branches() if free else branches()
    with pytest.raises(Exception, match=r".") as plain:
        ort.InferenceSession(model.SerializeToString()).run(None, feed)
    with HybridSession(model) as session:
        session.run(None, {"x": X})
        if tuned:
            gate.set()
            assert session.wait_until_tuned(30)
            assert session.plan is not None
        with pytest.raises(type(plain.value)):
            session.run(None, feed)


@pytest.mark.usefixtures("tuned_shapes")
def test_bindings_made_before_the_swap_work_after_it(gate: threading.Event) -> None:
    """Bindings of the session and those of onnxruntime's class still work when the plan has been installed."""
    with HybridSession(branches()) as session:
        bindings = [session.io_binding(), ort.IOBinding(session)]
        for binding in bindings:
            binding.bind_cpu_input("x", X)
            binding.bind_output("y")
        session.run_with_iobinding(bindings[0])
        session.run_with_iobinding(bindings[1])
        before = [binding.copy_outputs_to_cpu()[0] for binding in bindings]
        gate.set()
        assert session.wait_until_tuned(30)
        assert session.plan is not None
        for binding, expected in zip(bindings, before, strict=True):
            session.run_with_iobinding(binding)
            np.testing.assert_allclose(binding.copy_outputs_to_cpu()[0], expected)


@pytest.mark.usefixtures("tuned_shapes")
def test_callers_run_through_the_swap(gate: threading.Event) -> None:
    """All outputs that threads receive while the plan is being installed are correct."""
    model = branches()
    expected = ort.InferenceSession(model.SerializeToString()).run(None, {"x": X})
    wrong: list[object] = []
    with HybridSession(model) as session:
        stop = threading.Event()

        def call() -> None:
            while not stop.is_set():
                try:
                    np.testing.assert_allclose(session.run(None, {"x": X})[0], expected[0], rtol=1e-5)
                except Exception as error:  # noqa: BLE001 - reported below
                    wrong.append(error)

        threads = [threading.Thread(target=call) for _ in range(4)]
        for thread in threads:
            thread.start()
        gate.set()
        tuned = session.wait_until_tuned(60)
        time.sleep(0.1)
        stop.set()
        for thread in threads:
            thread.join()
        assert tuned
        assert session.plan is not None
    assert not wrong


def test_never_uses_cached_decisions_only(tuned_shapes: list[NamedShapes], gate: threading.Event) -> None:
    """Without a cached decision, the model stays plain, and the explanation has the reason."""
    gate.set()
    with HybridSession(branches(), tune="never") as session:
        assert session.wait_until_tuned(30)
        assert "tuning is switched off" in session.explain()
    with HybridSession(branches()) as session:
        assert session.wait_until_tuned(30)
    with HybridSession(branches(), tune="never") as session:
        assert session.wait_until_tuned(30)
        assert session.plan is not None
    assert len(tuned_shapes) == 1


def test_the_environment_sets_the_default(monkeypatch: pytest.MonkeyPatch, tuned_shapes: list[NamedShapes]) -> None:
    """``CHRION_TUNE`` replaces a missing argument; an unknown value raises."""
    monkeypatch.setenv("CHRION_TUNE", "never")
    with HybridSession(branches()) as session:
        assert session.wait_until_tuned(30)
        assert "tuning is switched off" in session.explain()
    assert not tuned_shapes
    monkeypatch.setenv("CHRION_TUNE", "later")
    with pytest.raises(OptionError, match=r"environment variable CHRION_TUNE.*background, now, never.*'later'"):
        HybridSession(branches())
    with pytest.raises(OptionError, match=r"tune: expected.*'soon'"):
        HybridSession(branches(), tune="soon")


def test_closing_stops_tuning(tuned_shapes: list[NamedShapes], gate: threading.Event) -> None:
    """Tuning ends at once when the session is closed, and no engine is installed afterwards."""
    session = HybridSession(branches())
    wait_for(lambda: bool(tuned_shapes))
    start = time.monotonic()
    session.close()
    assert session.wait_until_tuned(5)
    assert time.monotonic() - start < 5
    assert gate.is_set()
    with pytest.raises(RuntimeError, match="closed"):
        session.run(None, {"x": X})


def test_a_collected_session_stops_tuning(tuned_shapes: list[NamedShapes], gate: threading.Event) -> None:
    """Tuning stops when the session is garbage-collected without being closed."""
    session = HybridSession(branches())
    wait_for(lambda: bool(tuned_shapes))
    del session
    gc.collect()
    assert gate.wait(10)


def test_an_uncertain_decision_is_made_again(monkeypatch: pytest.MonkeyPatch, gate: threading.Event) -> None:
    """The session makes an uncertain decision again after the time for which it is valid."""
    gate.set()
    decisions = [Decision("plain", None, "at first", uncertain=True)]

    def decide(graph: Graph) -> Decision:
        return decisions.pop() if decisions else alternate(graph)

    monkeypatch.setattr(tuning, "TuningProcess", deciding_with(decide, [], gate))
    monkeypatch.setattr("chrion.runtime.selection.decisions._FIRST_RETRY_S", 0.5)
    with HybridSession(branches()) as session:
        assert session.wait_until_tuned(30)
        assert "at first" in session.explain()
        wait_for(lambda: session.plan is not None)


def test_a_model_that_cannot_be_cut_stays_plain_with_the_reason() -> None:
    """The explanation has the reason of the tuning process."""
    model = branches()
    options = ort.SessionOptions()
    options.enable_profiling = False
    with HybridSession(model, options) as session:
        assert session.wait_until_tuned(60)
        assert "tuning has not finished" not in session.explain()


def test_options_that_require_a_plain_session_start_no_tuning(tuned_shapes: list[NamedShapes]) -> None:
    """The reason for the plain session is known at once, and no tuning is started."""
    with HybridSession(branches(), disabled_optimizers=["ConstantFolding"]) as session:
        assert session.wait_until_tuned(0)
        assert "disabled_optimizers" in session.explain()
    assert not tuned_shapes


def test_added_initialisers_stay_in_effect(tuned_shapes: list[NamedShapes], gate: threading.Event) -> None:
    """A plan does not replace a session with options that no other process can read."""
    gate.set()
    replaced = ort.OrtValue.ortvalue_from_numpy(np.ones((4, 4), np.float32))
    options = ort.SessionOptions()
    options.add_initializer("w", replaced)
    plain = ort.InferenceSession(branches().SerializeToString(), options).run(None, {"x": X})
    with HybridSession(branches(), options) as session:
        assert session.wait_until_tuned(30)
        assert "add_initializer" in session.explain()
        np.testing.assert_array_equal(session.run(None, {"x": X})[0], plain[0])
    assert tuned_shapes


def test_a_process_that_ends_leaves_the_session_plain(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The model is not tuned in the session's own process, which it might end as well."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with HybridSession(branches()) as session:
        assert session.wait_until_tuned(60)
        assert "the tuning process ended with status 1" in session.explain()
        assert_same_as_plain(session, branches(), {"x": X})


@pytest.mark.parametrize("executable", ["", "/nonexistent/python", "/usr/sbin/uwsgi"])
def test_without_a_process_tuning_takes_place_in_this_one(monkeypatch: pytest.MonkeyPatch, executable: str) -> None:
    """If no interpreter can be started, or the executable is an application, the decision is made in this process."""
    monkeypatch.setattr(sys, "executable", executable)
    monkeypatch.setattr(worker.Decider, "decide", lambda self, *_, **__: alternate(self._graph))
    with HybridSession(branches()) as session:
        assert session.wait_until_tuned(60)
        assert session.plan is not None


def test_an_error_of_tuning_leaves_the_session_plain(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The error is logged, and the plain session serves."""
    monkeypatch.setattr(tuning.Tuner, "_decision", lambda *_, **__: 1 / 0)
    with caplog.at_level(logging.WARNING), HybridSession(branches()) as session:
        assert session.wait_until_tuned(30)
        assert_same_as_plain(session, branches(), {"x": X})
    assert "tuning failed: ZeroDivisionError" in caplog.text


def test_a_plan_that_does_not_open_leaves_the_session_plain(
    gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decision on another graph is refused, and the plain session serves."""
    gate.set()
    other = load(branches(size=8))
    decision = Decision("plan 1", fixed_plan(other, alternating_lanes(other)), "of another model")
    monkeypatch.setattr(tuning, "TuningProcess", deciding_with(lambda _: decision, [], gate))
    with HybridSession(branches()) as session:
        assert session.wait_until_tuned(30)
        assert session.plan is None
        assert_same_as_plain(session, branches(), {"x": X})


def test_files_outside_of_the_models_folder_are_refused(tmp_path: Path) -> None:
    """The error is raised when the session is created."""
    (tmp_path / "secret.bin").write_bytes(bytes(64))
    model = branches()
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, text in (("location", "../secret.bin"), ("length", "64")):
        tensor.external_data.add(key=key, value=text)
    folder = tmp_path / "inner"
    folder.mkdir()
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(UnsafeModelError):
        HybridSession(folder / "model.onnx")


def test_a_strict_session_raises_for_an_accelerator_that_does_not_work() -> None:
    """The error is raised when the session is created, before tuning."""
    with pytest.raises(ProviderError):
        HybridSession(branches(), providers=["NoSuchExecutionProvider", "CPUExecutionProvider"], strict=True)


def test_models_that_inference_session_refuses_raise_its_error() -> None:
    """The error is that of the plain session, which is opened first."""
    with pytest.raises(Exception, match=r".") as plain:
        ort.InferenceSession(b"nothing")
    with pytest.raises(type(plain.value)):
        HybridSession(b"nothing")


def test_exits_do_not_wait_for_tuning() -> None:
    """A script that ends right after its first request exits without waiting for tuning."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import numpy as np\n"
        "from chrion import HybridSession\n"
        "from helpers import branches\n"
        "session = HybridSession(branches())\n"
        "session.run(None, {'x': np.ones((2, 4), np.float32)})\n"
        "import time; time.sleep(float(sys.argv[2]))\n"
    )
    for pause in ("0", "1"):
        start = time.monotonic()
        done = subprocess.run(  # noqa: S603 - ourselves
            [sys.executable, "-c", code, str(Path(__file__).parent.parent), pause],
            env=os.environ | {"CHRION_TUNE": "background"},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert time.monotonic() - start < 60


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_has_no_tuning_and_no_crowd() -> None:
    """A child that is forked while threads of its parent run has neither.

    Plain onnxruntime itself may hang if it runs in such a child.
    """
    code = (
        "import os, sys, threading, time; sys.path.insert(0, sys.argv[1])\n"
        "import numpy as np\n"
        "from chrion import HybridSession\n"
        "from helpers import branches\n"
        "session = HybridSession(branches())\n"
        "x = {'x': np.ones((2, 4), np.float32)}\n"
        "stop = threading.Event()\n"
        "def call():\n"
        "    while not stop.is_set():\n"
        "        session.run(None, x)\n"
        "threads = [threading.Thread(target=call) for _ in range(4)]\n"
        "for thread in threads:\n"
        "    thread.start()\n"
        "time.sleep(0.6)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    from chrion.runtime.crowding import in_flight as crowd\n"
        "    session._engines.close_at_exit(time.monotonic() + 30)\n"
        "    os._exit(0 if session.wait_until_tuned(0) and not crowd else 1)\n"
        "stop.set()\n"
        "for thread in threads:\n"
        "    thread.join()\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    done = subprocess.run(  # noqa: S603 - ourselves
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code, str(Path(__file__).parent.parent)],
        env=os.environ | {"CHRION_TUNE": "background"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("0\n", "", 0)


def test_a_process_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A tuning process has a time limit, after which it is killed and the session stays plain."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 600\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(tuning_process, "_LIMIT_S", 0.2)
    with HybridSession(branches()) as session:
        assert session.wait_until_tuned(60)
        assert "the tuning process ended" in session.explain()


@pytest.mark.parametrize("mode", ["now", "background"])
@pytest.mark.parametrize("options", [None, ort.SessionOptions()])
def test_a_missed_slo_is_logged(
    caplog: pytest.LogCaptureFixture, mode: str, options: ort.SessionOptions | None
) -> None:
    """An SLO that no candidate meets gives a warning, also from a cached decision."""
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.WARNING), HybridSession(branches(), options, slo="1ns", tune=mode) as session:
            assert session.wait_until_tuned(120)
        assert "no candidate meets the SLO of" in caplog.text


def test_one_plain_session_is_open_after_tuning(
    monkeypatch: pytest.MonkeyPatch, tuned_shapes: list[NamedShapes], gate: threading.Event
) -> None:
    """A plain session with another number of threads replaces the first one, which is dropped."""
    gate.set()
    decision = Decision("plain, threads: 1", None, "of the test")
    monkeypatch.setattr(tuning, "TuningProcess", deciding_with(lambda _: decision, tuned_shapes, gate))
    with HybridSession(branches()) as session:
        described = [str(info) for info in session.get_inputs()]
        assert session.wait_until_tuned(30)
        assert session._engines._plain is None
        assert session._engine.session.get_session_options().intra_op_num_threads == 1
        assert [str(info) for info in session.get_inputs()] == described
        assert_same_as_plain(session, branches(), {"x": X})


@pytest.mark.parametrize("mode", ["background", "now"])
def test_metadata_that_is_not_utf8_does_not_prevent_a_session(tmp_path: Path, mode: str) -> None:
    """A model whose producer is not UTF-8 is served, as InferenceSession serves it."""
    model = branches()
    model.producer_name = "NAME"
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString().replace(b"NAME", b"\xff\xfe\xfd\xfc"))
    expected = ort.InferenceSession(str(path)).run(None, {"x": X})
    with HybridSession(path, tune=mode) as session:
        np.testing.assert_allclose(session.run(None, {"x": X})[0], expected[0])
        assert session.wait_until_tuned(120)
        np.testing.assert_allclose(session.run(None, {"x": X})[0], expected[0], rtol=1e-6)
