"""Tuning in the background: requests are served at once, and decisions arrive later."""

from __future__ import annotations

import gc
import io
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import psutil
import pytest

from chrion import HybridSession, load
from chrion.errors import OptionError, ProviderError, UnsafeModelError
from chrion.graph.model import Graph
from chrion.runtime.options.session_options import fingerprint
from chrion.runtime.options.transport import options_from_data, options_to_data
from chrion.runtime.selection import guard, tuning, tuning_process, worker
from chrion.runtime.selection.configuration import SessionConfig
from chrion.runtime.selection.decisions import Decision, decision_from_json
from chrion.scheduler import fixed_plan
from helpers import alternating_lanes, assert_same_as_plain, branches

X = np.ones((2, 4), np.float32)
Ask = Callable[[Any, tuning.NamedShapes], dict[str, Any]]


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Begin tuning without a delay, with an empty cache."""
    monkeypatch.setattr(tuning, "_DELAY_S", 0.0)
    monkeypatch.setenv("CHRION_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CHRION_TUNE")


@pytest.fixture(autouse=True)
def _no_process_left() -> Iterator[None]:
    """Check that no tuning process outlives its session."""
    yield
    gc.collect()
    _wait(lambda: not psutil.Process().children())


def _wait(condition: Callable[[], bool], limit_s: float = 30.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def split(graph: Graph, *_: Any) -> Decision:
    """Decide on a plan that alternates between two lanes."""
    return Decision("plan 1", fixed_plan(graph, alternating_lanes(graph)), "by the test")


def answer_with(decide: Callable[[Graph], Decision], asked: list[tuning.NamedShapes], wait: threading.Event) -> type:
    """Return a stand-in for the tuning process that decides by a function, once an event is set."""

    class Worker:
        def __init__(self, config: SessionConfig) -> None:
            self._source = config.source

        def ask(self, shapes: tuning.NamedShapes) -> dict[str, Any]:
            asked.append(shapes)
            wait.wait(30)
            decision = decide(load(self._source, {name: tuple(shape) for name, shape in shapes.items()}))
            return {"decision": json.loads(json.dumps(decision.to_json()))}

        def kill(self) -> None:
            wait.set()

    return Worker


@pytest.fixture
def gate() -> threading.Event:
    """Let the stand-in for the tuning process answer."""
    return threading.Event()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, gate: threading.Event) -> list[tuning.NamedShapes]:
    """Replace the tuning process by one that always selects a plan; list what it is asked for."""
    shapes: list[tuning.NamedShapes] = []
    monkeypatch.setattr(tuning, "TuningProcess", answer_with(split, shapes, gate))
    return shapes


def free_batch() -> onnx.ModelProto:
    """Return the model with a free first dimension."""
    model = branches()
    for info in (*model.graph.input, *model.graph.output):
        info.type.tensor_type.shape.dim[0].dim_param = "batch"
    return model


@pytest.mark.usefixtures("asked")
def test_requests_are_served_before_tuning_ends(gate: threading.Event) -> None:
    """The plain session serves; the plan serves later requests; descriptions do not change."""
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


def test_a_cached_decision_needs_no_process(asked: list[tuning.NamedShapes], gate: threading.Event) -> None:
    """A second session of the model uses the first one's decision."""
    gate.set()
    for _ in range(2):
        with HybridSession(branches()) as session:
            assert session.wait_until_tuned(30)
            assert session.plan is not None
    assert len(asked) == 1


def test_a_changed_file_is_tuned_again(asked: list[tuning.NamedShapes], gate: threading.Event, tmp_path: Path) -> None:
    """The decision on a file holds while its size and modification time do."""
    gate.set()
    path = tmp_path / "model.onnx"
    for size in (4, 4, 8):
        if not path.exists() or size != 4:
            onnx.save(branches(size=size), path)
        with HybridSession(path) as session:
            assert session.wait_until_tuned(30)
    assert len(asked) == 2


def test_several_sessions_of_a_model_tune_once(asked: list[tuning.NamedShapes], gate: threading.Event) -> None:
    """The second waits for the decision of the first."""
    with HybridSession(branches()) as first, HybridSession(branches()) as second:
        _wait(lambda: bool(asked))
        time.sleep(0.3)
        gate.set()
        assert first.wait_until_tuned(30)
        assert second.wait_until_tuned(30)
        assert first.plan is not None
        assert second.plan is not None
    assert len(asked) == 1


def test_every_shape_is_served_before_it_is_tuned(asked: list[tuning.NamedShapes], gate: threading.Event) -> None:
    """A model with free dimensions is tuned for each shape; a request of a new shape does not wait."""
    model = free_batch()
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
    assert [shapes["x"] for shapes in asked] == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_shapes_in_rotation_are_not_tuned_for_ever(asked: list[tuning.NamedShapes], gate: threading.Event) -> None:
    """Of forty shapes requested once or twice, the first ones are tuned."""
    gate.set()
    model = free_batch()
    with HybridSession(model) as session:
        for _ in range(2):
            for batch in range(1, 41):
                session.run(None, {"x": np.ones((batch, 4), np.float32)})
        assert session.wait_until_tuned(60)
    assert len(asked) == 8


@pytest.mark.parametrize("feed", [{}, {"z": X}, {"x": X.astype(np.float64)}, {"x": np.ones((2, 5), np.float32)}])
@pytest.mark.parametrize("tuned", [False, True])
@pytest.mark.parametrize("free", [False, True])
@pytest.mark.usefixtures("asked")
def test_wrong_requests_raise_what_inference_session_raises(
    gate: threading.Event, feed: dict[str, Any], *, tuned: bool, free: bool
) -> None:
    """Before the swap and after it."""
    model = free_batch() if free else branches()
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


@pytest.mark.usefixtures("asked")
def test_bindings_made_before_the_swap_work_after_it(gate: threading.Event) -> None:
    """Bindings of the session, and of onnxruntime's own class."""
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


@pytest.mark.usefixtures("asked")
def test_callers_run_through_the_swap(gate: threading.Event) -> None:
    """Threads that call all the time see right answers only."""
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


def test_never_uses_cached_decisions_only(asked: list[tuning.NamedShapes], gate: threading.Event) -> None:
    """Without one, the model stays plain and says so."""
    gate.set()
    with HybridSession(branches(), tune="never") as session:
        assert session.wait_until_tuned(30)
        assert "tuning is switched off" in session.explain()
    with HybridSession(branches()) as session:
        assert session.wait_until_tuned(30)
    with HybridSession(branches(), tune="never") as session:
        assert session.wait_until_tuned(30)
        assert session.plan is not None
    assert len(asked) == 1


def test_the_environment_sets_the_default(monkeypatch: pytest.MonkeyPatch, asked: list[tuning.NamedShapes]) -> None:
    """``CHRION_TUNE`` stands for a missing argument."""
    monkeypatch.setenv("CHRION_TUNE", "never")
    with HybridSession(branches()) as session:
        assert session.wait_until_tuned(30)
        assert "tuning is switched off" in session.explain()
    assert not asked
    monkeypatch.setenv("CHRION_TUNE", "later")
    with pytest.raises(OptionError, match=r"environment variable CHRION_TUNE.*background, now, never.*'later'"):
        HybridSession(branches())
    with pytest.raises(OptionError, match=r"tune: expected.*'soon'"):
        HybridSession(branches(), tune="soon")


def test_closing_stops_tuning(asked: list[tuning.NamedShapes], gate: threading.Event) -> None:
    """At once, and no engine is swapped in afterwards."""
    session = HybridSession(branches())
    _wait(lambda: bool(asked))
    start = time.monotonic()
    session.close()
    assert session.wait_until_tuned(5)
    assert time.monotonic() - start < 5
    assert gate.is_set()
    with pytest.raises(RuntimeError, match="closed"):
        session.run(None, {"x": X})


def test_a_collected_session_stops_tuning(asked: list[tuning.NamedShapes], gate: threading.Event) -> None:
    """A session that is dropped without being closed."""
    session = HybridSession(branches())
    _wait(lambda: bool(asked))
    del session
    gc.collect()
    assert gate.wait(10)


def test_an_uncertain_decision_is_made_again(monkeypatch: pytest.MonkeyPatch, gate: threading.Event) -> None:
    """By the session that is running, after the time for which the decision is valid."""
    gate.set()
    decisions = [Decision("plain", None, "at first", uncertain=True)]

    def decide(graph: Graph) -> Decision:
        return decisions.pop() if decisions else split(graph)

    monkeypatch.setattr(tuning, "TuningProcess", answer_with(decide, [], gate))
    monkeypatch.setattr("chrion.runtime.selection.decisions._FIRST_RETRY_S", 0.5)
    with HybridSession(branches()) as session:
        assert session.wait_until_tuned(30)
        assert "at first" in session.explain()
        _wait(lambda: session.plan is not None)


def test_a_model_that_cannot_be_cut_stays_plain_with_the_reason() -> None:
    """As the tuning process found it."""
    model = branches()
    options = ort.SessionOptions()
    options.enable_profiling = False
    with HybridSession(model, options) as session:
        assert session.wait_until_tuned(60)
        assert "tuning has not finished" not in session.explain()


def test_options_that_require_a_plain_session_start_no_tuning(asked: list[tuning.NamedShapes]) -> None:
    """The reason is known at once."""
    with HybridSession(branches(), disabled_optimizers=["ConstantFolding"]) as session:
        assert session.wait_until_tuned(0)
        assert "disabled_optimizers" in session.explain()
    assert not asked


def test_added_initialisers_stay_in_effect(asked: list[tuning.NamedShapes], gate: threading.Event) -> None:
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
    assert asked


def test_a_process_that_ends_leaves_the_session_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model may have ended it, and would end this process as well."""
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with HybridSession(branches()) as session:
        assert session.wait_until_tuned(60)
        assert "the tuning process ended with status 1" in session.explain()
        assert_same_as_plain(session, branches(), {"x": X})


@pytest.mark.parametrize("executable", ["", "/nonexistent/python"])
def test_without_a_process_tuning_takes_place_in_this_one(monkeypatch: pytest.MonkeyPatch, executable: str) -> None:
    """The decision is made all the same."""
    monkeypatch.setattr(sys, "executable", executable)
    monkeypatch.setattr(worker.Decider, "decide", lambda self, _: split(self._graph))
    with HybridSession(branches()) as session:
        assert session.wait_until_tuned(60)
        assert session.plan is not None


def test_an_error_of_tuning_leaves_the_session_plain(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged."""
    monkeypatch.setattr(tuning.Tuner, "_decision", lambda *_: 1 / 0)
    with caplog.at_level(logging.WARNING), HybridSession(branches()) as session:
        assert session.wait_until_tuned(30)
        assert_same_as_plain(session, branches(), {"x": X})
    assert "tuning failed: ZeroDivisionError" in caplog.text


def test_a_plan_that_does_not_open_leaves_the_session_plain(
    gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decision on another graph is refused."""
    gate.set()
    other = load(branches(size=8))
    decision = Decision("plan 1", fixed_plan(other, alternating_lanes(other)), "of another model")
    monkeypatch.setattr(tuning, "TuningProcess", answer_with(lambda _: decision, [], gate))
    with HybridSession(branches()) as session:
        assert session.wait_until_tuned(30)
        assert session.plan is None
        assert_same_as_plain(session, branches(), {"x": X})


def test_files_outside_of_the_models_folder_are_refused(tmp_path: Path) -> None:
    """At creation, as when tuning at once."""
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
    """At creation, before tuning."""
    with pytest.raises(ProviderError):
        HybridSession(branches(), providers=["NoSuchExecutionProvider", "CPUExecutionProvider"], strict=True)


def test_models_that_inference_session_refuses_raise_its_error() -> None:
    """The first error is that of the plain session."""
    with pytest.raises(Exception, match=r".") as plain:
        ort.InferenceSession(b"nothing")
    with pytest.raises(type(plain.value)):
        HybridSession(b"nothing")


# The tuning process.


def ask_process(source: str | bytes, *shapes: tuning.NamedShapes) -> list[dict[str, Any]]:
    """Ask a real tuning process."""
    process = tuning_process.TuningProcess(
        SessionConfig(source, ort.SessionOptions(), None, None, None, None, None, None)
    )
    try:
        answers = [process.ask(shape) for shape in shapes]
        assert psutil.Process(process._process.pid).nice() > psutil.Process().nice()
        return answers
    finally:
        process.kill()


def test_the_process_decides(tmp_path: Path) -> None:
    """On a model's file and on its bytes, for given shapes; the decision names the file's state."""
    path = tmp_path / "model.onnx"
    onnx.save(free_batch(), path)
    answers = ask_process(str(path), {"x": (2, 4)}, {"x": (3, 4)}, {"x": (3, 5)})
    for answer in answers[:2]:
        decision = decision_from_json(answer["decision"])
        assert decision.winner.startswith("pla")
        assert decision.files == ((str(path), path.stat().st_size, path.stat().st_mtime_ns),)
    assert "failure" in answers[2]
    found = decision_from_json(ask_process(branches().SerializeToString(), {})[0]["decision"])
    assert not found.files


def test_the_process_ends_with_its_parent() -> None:
    """Also if the parent is killed."""
    code = (
        "import sys, time, onnx\n"
        "from chrion.runtime.selection import tuning_process\n"
        "from chrion.runtime.selection.configuration import SessionConfig\n"
        "process = tuning_process.TuningProcess(SessionConfig(b'', None, None, None, None, None, None, None))\n"
        "print(process._process.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)  # noqa: S603 - ourselves
    assert parent.stdout
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    _wait(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def test_options_survive_the_transport() -> None:
    """Equal options are made in the other process."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 3
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.enable_mem_pattern = False
    options.logid = "mine"
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    data = json.loads(json.dumps(options_to_data(options)))
    made = options_from_data(data)
    assert fingerprint(made) == fingerprint(options) != fingerprint(ort.SessionOptions())
    assert made is not None
    assert made.logid == "mine"
    assert options_from_data(options_to_data(None)) is None


def test_the_configuration_survives_the_transport() -> None:
    """All but a plan, which needs no tuning."""
    config = SessionConfig(
        source=b"model",
        options=None,
        providers=[("CUDAExecutionProvider", {"device_id": "1"}), "CPUExecutionProvider"],
        provider_options=None,
        plan=None,
        slo_ms=5.0,
        alpha=0.3,
        cores=2,
        budget_mb=600.0,
        rest={"enable_fallback": 0},
    )
    found = worker.config_from_data(io.BytesIO(worker.config_to_data(config)))
    assert found == config
    assert found.goal == config.goal


def test_a_session_that_cannot_be_described_is_tuned_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Provider options may hold objects."""
    monkeypatch.setattr(worker.Decider, "decide", lambda self, _: split(self._graph))
    providers = [("CPUExecutionProvider", {"stream": object()})]
    config = SessionConfig(b"", None, providers, None, None, None, None, None)
    with pytest.raises(TypeError):
        worker.config_to_data(config)


def test_interference_makes_a_decision_uncertain() -> None:
    """Most rounds begin while other processes use the cores."""

    class Busy:
        def wait(self) -> bool:
            return False

        def has_interference(self) -> bool:
            return True

    def candidate(name: str, *, plain: bool) -> guard.Candidate:
        return guard.Candidate(name, lambda: (lambda: time.sleep(1e-4), lambda: None), plain=plain)

    candidates = [candidate("plain", plain=True), candidate("plan", plain=False)]
    assert guard.compare(candidates, None, Busy()).interference


def test_exits_do_not_wait_for_tuning() -> None:
    """A script that ends right after its first request."""
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
