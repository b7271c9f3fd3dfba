"""Tuning in the background: requests are served at once, and decisions arrive later."""

from __future__ import annotations

import gc
import json
import logging
import os
import re
import shutil
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from chrion import HybridSession, load, zoo
from chrion.common.files import cache_folder
from chrion.errors import OptionError, ProviderError, UnsafeModelError
from chrion.graph.model import Graph
from chrion.graph.opened_model import OpenedModel
from chrion.machine.cores import affinity
from chrion.runtime.execution.cut_engine import CutEngine
from chrion.runtime.process_hooks import in_flight
from chrion.runtime.selection.configuration import SessionConfig
from chrion.runtime.selection.decision_source import DecisionSource, Load
from chrion.runtime.selection.decisions import Decision
from chrion.runtime.selection.tuning_process import NamedShapes
from helpers import assert_same_as_plain, branches, free_branches, make_model, node, value
from seams.sessions import (
    before_step,
    decide_by,
    engine_of,
    pretend_load,
    record_requests,
    replace_tuning_process,
    use_interpreter,
    yields_of,
)
from tuning_support import alternate, wait_for

pytestmark = pytest.mark.usefixtures("background_tuning")

X = np.ones((2, 4), np.float32)
CORES = len(affinity() or ())


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
    """The decision on a file is used until the file holds another model."""
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
        wait_for(lambda: tuned_shapes)
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


@pytest.mark.parametrize("free", [False, True])
@pytest.mark.usefixtures("tuned_shapes")
def test_wrong_requests_raise_what_inference_session_raises(gate: threading.Event, *, free: bool) -> None:
    """The type of the exception is equal before and after the plan is in use."""
    model = free_branches() if free else branches()
    feeds: list[dict[str, Any]] = [{}, {"z": X}, {"x": X.astype(np.float64)}, {"x": np.ones((2, 5), np.float32)}]
    expected = []
    for feed in feeds:
        with pytest.raises(Exception, match=r".") as plain:
            ort.InferenceSession(model.SerializeToString()).run(None, feed)
        expected.append(type(plain.value))
    with HybridSession(model) as session:
        session.run(None, {"x": X})
        for tuned in (False, True):
            if tuned:
                gate.set()
                assert session.wait_until_tuned(30)
            assert (session.plan is not None) is tuned
            for feed, error in zip(feeds, expected, strict=True):
                with pytest.raises(error):
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
    with HybridSession(branches(), tune="never") as session:
        assert "tuning is switched off" in session.explain()
        gate.set()
        assert session.wait_until_tuned(30)
        assert "tuning is switched off" in session.explain()
    with HybridSession(branches()) as session:
        assert session.wait_until_tuned(30)
    with HybridSession(branches(), tune="never") as session:
        assert session.wait_until_tuned(30)
        assert session.plan is not None
    assert len(tuned_shapes) == 1


@pytest.mark.parametrize("tune", ["never", "background"])
@pytest.mark.parametrize("kind", ["sequence", "text"])
def test_a_model_that_is_never_tuned_says_why(tuned_shapes: list[NamedShapes], tune: str, kind: str) -> None:
    """Inputs that are no tensors of numbers are the reason from the first request on."""
    nodes, info, feed = {
        "sequence": (
            [node("SequenceLength", ["s"], ["y"])],
            onnx.helper.make_tensor_sequence_value_info("s", onnx.TensorProto.FLOAT, None),
            [X, X],
        ),
        "text": ([node("Shape", ["s"], ["y"])], value("s", onnx.TensorProto.STRING, [2]), np.array(["a", "b"], object)),
    }[kind]
    shape: list[int] = [] if kind == "sequence" else [1]
    model = make_model(nodes, [info], [value("y", onnx.TensorProto.INT64, shape)])
    with HybridSession(model, tune=tune) as session:
        assert session.run(None, {"s": feed})[0] == 2
        assert session.wait_until_tuned(30)
        assert re.search(r": input 's' is a (seq\(tensor\(float\)\)|tensor\(string\)), not numbers$", session.explain())
    assert not tuned_shapes


@pytest.mark.parametrize("free", [False, True])
def test_a_plan_that_is_being_opened_is_explained(monkeypatch: pytest.MonkeyPatch, *, free: bool) -> None:
    """While requests wait for the plan of a cached decision, the reason names the decision."""
    model = free_branches() if free else branches()
    decide_by(monkeypatch, alternate)
    with HybridSession(model, tune="now") as session:
        session.run(None, {"x": X})
    opening, opened = threading.Event(), threading.Event()

    def hold() -> None:
        opening.set()
        opened.wait(30)

    before_step(monkeypatch, "open the engine", hold)
    with HybridSession(model, tune="never") as session:
        session.run(None, {"x": X})
        assert opening.wait(30)
        assert "a plan was selected and is being opened: by the test (tuned " in session.explain()
        opened.set()
        assert session.wait_until_tuned(30)
        session.run(None, {"x": X})
        assert session.plan is not None
        assert "is being opened" not in session.explain()


@pytest.mark.parametrize("free", [False, True])
def test_decisions_made_now_serve_sessions_in_every_mode(monkeypatch: pytest.MonkeyPatch, *, free: bool) -> None:
    """They find it by the model alone; but not one made for a graph that the caller has given."""
    model = free_branches() if free else branches()
    decided = decide_by(monkeypatch, alternate)

    def serve(tune: str) -> bool:
        with HybridSession(model, tune=tune) as session:
            session.run(None, {"x": X})
            assert session.wait_until_tuned(30)
            session.run(None, {"x": X})
            return session.plan is not None

    assert not serve("never")
    with HybridSession(load(model, {"x": X.shape}), tune="now") as session:
        assert session.plan is not None
    assert not serve("never")
    assert serve("now")
    assert serve("never")
    assert serve("background")
    assert len(decided) == 1


def test_a_model_that_is_copied_touched_or_trained_further_keeps_its_decision(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The plan runs with the weights of each session's own file; another graph has no decision."""
    decide_by(monkeypatch, alternate)
    path, copy = tmp_path / "m.onnx", tmp_path / "copy.onnx"
    model = zoo.build("lstm", {"layers": 2, "batch": 1, "io": 32, "seq": 4, "chunk": 4})
    onnx.save(model, path)
    with HybridSession(path, tune="now") as session:
        assert session.plan is not None
        feed = {info.name: np.ones(info.shape, np.float32) for info in session.get_inputs()}
    for weight in model.graph.initializer:
        if len(weight.raw_data) > 1024:
            weight.raw_data = np.flip(np.frombuffer(weight.raw_data, np.float32)).tobytes()
    onnx.save(model, tmp_path / "trained.onnx")
    shutil.copy(path, copy)
    os.utime(path, (1.0, 2.0))
    for known in (path, copy, tmp_path / "trained.onnx"):
        with HybridSession(known, tune="never") as session:
            assert session.wait_until_tuned(30)
            assert session.plan is not None, known
            assert_same_as_plain(session, str(known), feed)
    model.graph.node[0].name = "another"
    onnx.save(model, path)
    with HybridSession(path, tune="never") as session:
        assert session.wait_until_tuned(30)
        assert session.plan is None


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


@pytest.mark.parametrize(
    ("all_cores", "own_cores", "busy", "spare"),
    [
        (0.1, 0.1, False, True),
        (1.0, 1.0, True, True),
        (CORES - 0.1, CORES - 0.2, True, True),
        (CORES - 0.1, 1.0, True, False),
    ],
)
@pytest.mark.usefixtures("tuned_shapes")
def test_the_tuning_process_takes_what_the_cores_leave(
    monkeypatch: pytest.MonkeyPatch,
    gate: threading.Event,
    all_cores: float,
    own_cores: float,
    *,
    busy: bool,
    spare: bool,
) -> None:
    """Idle time if there is some, or if requests can leave some; only then they take longer, and only meanwhile."""
    requests = record_requests(monkeypatch)
    pretend_load(monkeypatch, all_cores, own_cores)
    with HybridSession(branches()) as session:
        wait_for(lambda: requests)
        assert requests == [(busy, spare)]
        assert (yields_of(session) > 0) is (own_cores == CORES - 0.2)
        assert_same_as_plain(session, branches(), {"x": X})
        gate.set()
        assert session.wait_until_tuned(30)
        assert yields_of(session) == 0


def test_a_process_that_starves_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """By one that competes for the cores."""
    replace_tuning_process(monkeypatch, alternate)
    requests = record_requests(monkeypatch, starves=True)
    pretend_load(monkeypatch, 1.0, 1.0)
    with HybridSession(branches()) as session:
        assert session.wait_until_tuned(30)
        assert session.plan is not None
    assert requests == [(True, True), (True, False)]


def test_the_priority_of_the_process_follows_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process in spare time is replaced where there is none: it cannot raise its priority. The other one stays."""
    replace_tuning_process(monkeypatch, alternate)
    requests = record_requests(monkeypatch)
    source = DecisionSource(SessionConfig(OpenedModel(branches().SerializeToString())), cached_only=False)
    for spare in (True, False, True):
        assert source.decide({}, Load(spare=spare), anew=True).plan is not None
    source.close()
    assert requests == [(False, True), (False, False), (False, False)]


def test_a_crowd_is_not_disturbed(tuned_shapes: list[NamedShapes], gate: threading.Event) -> None:
    """Tuning waits until requests are no longer crowded."""
    gate.set()
    with HybridSession(free_branches()) as session:
        in_flight.extend([None] * 64)
        session.run(None, {"x": X})
        for _ in range(64):
            in_flight.pop()
        time.sleep(0.5)
        assert not tuned_shapes
        session.run(None, {"x": X})
        assert session.wait_until_tuned(30)
        session.run(None, {"x": X})
        assert session.plan is not None


def test_closing_stops_tuning(tuned_shapes: list[NamedShapes], gate: threading.Event) -> None:
    """Tuning ends at once when the session is closed, and no engine is installed afterwards."""
    session = HybridSession(branches())
    wait_for(lambda: tuned_shapes)
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
    wait_for(lambda: tuned_shapes)
    del session
    gc.collect()
    assert gate.wait(10)


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


def test_an_uncertain_decision_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The session makes an uncertain decision again after the time for which it is valid."""
    uncertain = [Decision("plain", None, "at first", uncertain=True)]
    replace_tuning_process(monkeypatch, lambda graph: uncertain.pop() if uncertain else alternate(graph))
    with HybridSession(branches()) as session:
        assert session.wait_until_tuned(30)
        assert "at first" in session.explain()
        wait_for(lambda: session.plan is not None)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("exit 1", "the tuning process ended with status 1"),
        ("echo no JSON; cat", "JSONDecodeError"),
        ("echo {}; cat", "KeyError"),
        ("""echo '{"failure": "no such thing"}'; cat""", "no such thing"),
    ],
)
@pytest.mark.usefixtures("no_process_left")
def test_a_process_that_fails_leaves_the_session_plain(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, reason: str
) -> None:
    """The model is not tuned in the session's own process, which it might end as well; later it is tried again."""
    use_interpreter(monkeypatch, tmp_path / "python", script)
    decided = decide_by(monkeypatch, alternate)
    with HybridSession(branches()) as session:
        assert session.wait_until_tuned(60)
        assert reason in session.explain()
        assert_same_as_plain(session, branches(), {"x": X})
    assert not decided
    (file,) = cache_folder().rglob("decisions/*.json")
    assert json.loads(file.read_text())["uncertain"]


@pytest.mark.usefixtures("no_process_left")
def test_without_a_process_tuning_takes_place_in_this_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """If no interpreter can be started, or it fails and options were given, the decision is made in this process."""
    decided = decide_by(monkeypatch, alternate)
    failing = tmp_path / "python"
    use_interpreter(monkeypatch, failing, """echo '{"failure": "of a test"}'; cat""")
    cases = [("", None), ("/nonexistent/python", None), ("/usr/sbin/uwsgi", None), (failing, ort.SessionOptions())]
    for number, (interpreter, options) in enumerate(cases, start=1):
        use_interpreter(monkeypatch, interpreter)
        monkeypatch.setenv("CHRION_CACHE", str(tmp_path / str(number)))
        with HybridSession(branches(), options) as session:
            assert session.wait_until_tuned(60)
            assert session.plan is not None
        assert len(decided) == number


def test_an_error_of_tuning_leaves_the_session_plain(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The error is logged, and the plain session serves."""
    replace_tuning_process(monkeypatch, lambda _: 1 / 0)  # type: ignore[arg-type,return-value]
    with caplog.at_level(logging.WARNING), HybridSession(branches()) as session:
        assert session.wait_until_tuned(30)
        assert_same_as_plain(session, branches(), {"x": X})
        assert "tuning failed: ZeroDivisionError" in session.explain()
    assert "tuning failed: ZeroDivisionError" in caplog.text


def test_a_plan_that_does_not_open_leaves_the_session_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decision on another graph is refused, and the plain session serves."""
    decision = alternate(load(branches(size=8)))
    replace_tuning_process(monkeypatch, lambda _: decision)
    with HybridSession(branches()) as session:
        assert session.wait_until_tuned(30)
        assert session.plan is None
        assert "different shapes or attributes" in session.explain()
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


@pytest.mark.parametrize("tune", ["now", "background"])
def test_a_missed_slo_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tune: str) -> None:
    """An SLO that no candidate meets gives a warning, also from a cached decision."""

    def decide(graph: Graph) -> Decision:
        return replace(alternate(graph), missed="no candidate meets the SLO of a test")

    decided = [decide_by(monkeypatch, decide), replace_tuning_process(monkeypatch, decide)]
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.WARNING), HybridSession(branches(), slo="1ns", tune=tune) as session:
            assert session.wait_until_tuned(60)
            assert session.plan is not None
        assert "no candidate meets the SLO of a test" in caplog.text
    assert sum(map(len, decided)) == 1


@pytest.mark.parametrize("winner", ["plain, threads: 1", "plan 1"])
def test_the_first_session_is_closed_after_tuning(monkeypatch: pytest.MonkeyPatch, winner: str) -> None:
    """A plan, or a plain session with another number of threads, replaces it, and the weights are held once."""
    decided = Decision(winner, None, "of the test")
    replace_tuning_process(monkeypatch, alternate if winner == "plan 1" else lambda _: decided)
    with HybridSession(branches()) as session:
        first = weakref.ref(engine_of(session).session)  # type: ignore[union-attr]
        described = [str(info) for info in session.get_inputs()]
        assert session.wait_until_tuned(30)
        gc.collect()
        assert first() is None
        engine = engine_of(session)
        assert isinstance(engine, CutEngine) or engine.session.get_session_options().intra_op_num_threads == 1
        assert [str(info) for info in session.get_inputs()] == described
        assert_same_as_plain(session, branches(), {"x": X})


@pytest.mark.parametrize("tune", ["now", "background"])
def test_metadata_that_is_not_utf8_does_not_prevent_a_session(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tune: str
) -> None:
    """A model whose producer is not UTF-8 is served, as InferenceSession serves it, also by a plan."""
    decide_by(monkeypatch, alternate)
    replace_tuning_process(monkeypatch, alternate)
    model = branches()
    model.producer_name = "NAME"
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString().replace(b"NAME", b"\xff\xfe\xfd\xfc"))
    expected = ort.InferenceSession(str(path)).run(None, {"x": X})
    with HybridSession(path, tune=tune) as session:
        np.testing.assert_allclose(session.run(None, {"x": X})[0], expected[0], rtol=1e-6)
        assert session.wait_until_tuned(60)
        np.testing.assert_allclose(session.run(None, {"x": X})[0], expected[0], rtol=1e-6)
        assert session.plan is not None
