"""The tuning process and its protocol."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort
import psutil
import pytest

from chrion.runtime.options.session_options import fingerprint
from chrion.runtime.options.transport import options_from_data, options_to_data
from chrion.runtime.selection import worker
from chrion.runtime.selection.configuration import SessionConfig
from chrion.runtime.selection.decisions import decision_from_json
from chrion.runtime.selection.tuning_process import NamedShapes, TuningProcess
from helpers import branches
from tuning_support import free_batch, wait_for

pytestmark = pytest.mark.usefixtures("background_tuning")


def configuration(source: str | bytes, options: ort.SessionOptions | None = None) -> SessionConfig:
    """Return a configuration of the CPU."""
    return SessionConfig(source, options, None, None, None, None, None, None)


def ask_process(source: str | bytes, *shapes: NamedShapes) -> list[dict[str, Any]]:
    """Ask a real tuning process."""
    process = TuningProcess(SessionConfig(source, ort.SessionOptions(), None, None, None, None, None, None))
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
    wait_for(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


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
    found = worker.config_from_data(io.BytesIO(b"".join(worker.config_to_data(config))))
    assert found == config
    assert found.goal == config.goal


def test_a_configuration_with_objects_raises() -> None:
    """Provider options may hold objects, which no other process can have."""
    providers = [("CPUExecutionProvider", {"stream": object()})]
    config = SessionConfig(b"", None, providers, None, None, None, None, None)
    with pytest.raises(TypeError):
        worker.config_to_data(config)


def test_an_interrupt_from_the_keyboard_does_not_end_the_process() -> None:
    """A terminal sends it to the tuning process as well; a notebook goes on after it."""
    process = TuningProcess(configuration(branches().SerializeToString()))
    try:
        assert "decision" in process.ask({})
        process._process.send_signal(signal.SIGINT)
        assert "decision" in process.ask({})
    finally:
        process.kill()


def test_the_process_imports_nothing_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file there may have the name of a module."""
    (tmp_path / "json.py").write_text("raise SystemExit(7)")
    monkeypatch.chdir(tmp_path)
    assert "" not in sys.path
    assert "decision" in ask_process(branches().SerializeToString(), {})[0]


def test_a_model_given_as_bytes_is_not_copied() -> None:
    """A model may take most of the memory."""
    size = 1 << 26
    config = configuration(bytes(size))
    tracemalloc.start()
    try:
        process = TuningProcess(config)
        try:
            assert "not an ONNX model" in process.ask({})["decision"]["why"]
        finally:
            process.kill()
        assert tracemalloc.get_traced_memory()[1] < size // 4
    finally:
        tracemalloc.stop()
