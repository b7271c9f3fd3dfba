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
from hypothesis import given
from hypothesis import strategies as st

from chrion.runtime.options.session_options import fingerprint
from chrion.runtime.options.table import SESSION_KEYS
from chrion.runtime.options.transport import options_from_data, options_to_data
from chrion.runtime.selection.configuration import SessionConfig, config_from_data, config_to_data
from chrion.runtime.selection.decisions import decision_from_json
from chrion.runtime.selection.tuning_process import NamedShapes, TuningProcess
from helpers import branches, free_branches
from tuning_support import wait_for


def configuration(source: str | bytes, options: ort.SessionOptions | None = None) -> SessionConfig:
    """Return a configuration of the CPU."""
    return SessionConfig(source, options, None, None, None, None, None, None)


def ask_process(source: str | bytes, *shapes: NamedShapes) -> list[dict[str, Any]]:
    """Return the decision of a real tuning process."""
    process = TuningProcess(configuration(source, ort.SessionOptions()))
    try:
        answers = [process.ask(shape) for shape in shapes]
        assert psutil.Process(process._process.pid).nice() > psutil.Process().nice()
        return answers
    finally:
        process.kill()


def test_the_process_decides(tmp_path: Path) -> None:
    """The process decides on a model's file, and on its bytes for given shapes. The decision names the file's state."""
    path = tmp_path / "model.onnx"
    onnx.save(free_branches(), path)
    answers = ask_process(str(path), {"x": (2, 4)}, {"x": (3, 4)}, {"x": (3, 5)})
    for answer in answers[:2]:
        decision = decision_from_json(answer["decision"])
        assert decision.winner.startswith("pla")
        assert decision.files == ((str(path), path.stat().st_size, path.stat().st_mtime_ns),)
    assert "failure" in answers[2]
    found = decision_from_json(ask_process(branches().SerializeToString(), {})[0]["decision"])
    assert not found.files


def test_the_process_ends_with_its_parent() -> None:
    """The process ends, also if its parent is killed."""
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


ATTRIBUTES = {
    "enable_cpu_mem_arena": st.booleans(),
    "enable_mem_pattern": st.booleans(),
    "enable_mem_reuse": st.booleans(),
    "execution_mode": st.sampled_from([ort.ExecutionMode.ORT_SEQUENTIAL, ort.ExecutionMode.ORT_PARALLEL]),
    "execution_order": st.sampled_from([ort.ExecutionOrder.DEFAULT, ort.ExecutionOrder.PRIORITY_BASED]),
    "graph_optimization_level": st.sampled_from(list(ort.GraphOptimizationLevel.__members__.values())),
    "inter_op_num_threads": st.integers(0, 64),
    "intra_op_num_threads": st.integers(0, 64),
    "log_severity_level": st.integers(0, 4),
    "log_verbosity_level": st.integers(0, 9),
    "logid": st.text("abc \u00e4\u4e2d"),
    "use_deterministic_compute": st.booleans(),
}
ENTRIES = st.dictionaries(st.sampled_from(sorted(SESSION_KEYS)), st.sampled_from(["0", "1", "", "a;b", "\u00e4"]))


@given(st.fixed_dictionaries({}, optional=ATTRIBUTES), ENTRIES)
def test_options_survive_the_transport(attributes: dict[str, Any], entries: dict[str, str]) -> None:
    """Options are equal in the other process, and different options have different fingerprints."""
    options = ort.SessionOptions()
    for name, value in attributes.items():
        setattr(options, name, value)
    for key, value in entries.items():
        options.add_session_config_entry(key, value)
    data = json.loads(json.dumps(options_to_data(options)))
    made = options_from_data(data)
    assert made is not None
    assert fingerprint(made) == fingerprint(options)
    assert {name: getattr(made, name) for name in attributes} == attributes
    assert {key: made.get_session_config_entry(key) for key in entries} == entries


def test_missing_options_stay_missing() -> None:
    """A session without options differs from one with default options."""
    assert options_from_data(options_to_data(None)) is None
    assert fingerprint(None) != fingerprint(ort.SessionOptions())


def test_the_configuration_survives_the_transport() -> None:
    """All of the configuration is sent, except a plan, which needs no tuning."""
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
    found = config_from_data(io.BytesIO(b"".join(config_to_data(config))))
    assert found == config
    assert found.decision_key == config.decision_key


def test_a_configuration_with_objects_raises() -> None:
    """Provider options with objects are refused, since they cannot be sent to another process."""
    providers = [("CPUExecutionProvider", {"stream": object()})]
    config = SessionConfig(b"", None, providers, None, None, None, None, None)
    with pytest.raises(TypeError):
        config_to_data(config)


def test_an_interrupt_from_the_keyboard_does_not_end_the_process() -> None:
    """The process continues after a Ctrl-C, which a terminal also sends to it."""
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
    """A file in the working directory with the name of a module is not imported."""
    (tmp_path / "json.py").write_text("raise SystemExit(7)")
    monkeypatch.chdir(tmp_path)
    assert "" not in sys.path
    assert "decision" in ask_process(branches().SerializeToString(), {})[0]


def test_a_model_given_as_bytes_is_not_copied() -> None:
    """The bytes of a model, which may take most of the memory, are not copied."""
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
