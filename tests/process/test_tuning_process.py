"""The tuning process, and the sessions that use it."""

from __future__ import annotations

import re
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

from chrion import HybridSession
from chrion.graph.opened_model import OpenedModel
from chrion.runtime.selection.configuration import SessionConfig
from chrion.runtime.selection.decisions import decision_from_json
from chrion.runtime.selection.tuning_process import NamedShapes, TuningProcess
from chrion.zoo import build
from helpers import branches, free_branches
from tuning_support import background_tuning, no_process_left, wait_for  # noqa: F401 - fixtures

pytestmark = pytest.mark.usefixtures("background_tuning", "no_process_left")


def configuration(source: str | bytes) -> SessionConfig:
    """Return a configuration of the CPU."""
    return SessionConfig(OpenedModel(source), ort.SessionOptions())


def child() -> psutil.Process:
    """Return the only Python process that this process has started."""
    (found,) = [process for process in psutil.Process().children() if "-P" in process.cmdline()]
    return found


def ask_process(source: str | bytes, *shapes: NamedShapes) -> list[dict[str, Any]]:
    """Return the decisions of a real tuning process."""
    process = TuningProcess(configuration(source))
    try:
        answers = [process.ask(shape) for shape in shapes]
        assert child().nice() > psutil.Process().nice()
        return answers
    finally:
        process.kill()


def test_a_session_is_tuned_by_the_process() -> None:
    """The explanation has the reason that the process has found."""
    with HybridSession(branches()) as session:
        assert session.wait_until_tuned(120)
        assert re.search(r"plain, \d+ threads?: [0-9.]+ .* rounds", session.explain())


def test_the_process_decides(tmp_path: Path) -> None:
    """The process decides on a model's file, and on its bytes for given shapes."""
    path = tmp_path / "model.onnx"
    onnx.save(free_branches(), path)
    answers = ask_process(str(path), {"x": (2, 4)}, {"x": (3, 4)}, {"x": (3, 5)})
    for answer in answers[:2]:
        decision = decision_from_json(answer["decision"])
        assert decision.winner.startswith("pla")
    assert "failure" in answers[2]
    assert "decision" in ask_process(branches().SerializeToString(), {})[0]


def test_the_process_ends_with_its_parent() -> None:
    """The process ends, also if its parent is killed."""
    code = (
        "import sys, time, onnx\n"
        "from chrion.graph.opened_model import OpenedModel\n"
        "from chrion.runtime.selection import tuning_process\n"
        "from chrion.runtime.selection.configuration import SessionConfig\n"
        "process = tuning_process.TuningProcess(SessionConfig(OpenedModel(b'')))\n"
        "import psutil\n"
        "print(psutil.Process().children()[0].pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)  # noqa: S603 - ourselves
    assert parent.stdout
    worker = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_for(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE)


def test_an_interrupt_from_the_keyboard_does_not_end_the_process() -> None:
    """The process continues after a Ctrl-C, which a terminal also sends to it."""
    process = TuningProcess(configuration(branches().SerializeToString()))
    try:
        assert "decision" in process.ask({})
        child().send_signal(signal.SIGINT)
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


#: Serves SqueezeNet by a plain session, and prints the peak of its memory in MB.
PLAIN = """
import sys
import numpy as np
import onnxruntime as ort
session = ort.InferenceSession(sys.argv[1])
for _ in range(3):
    session.run(None, {i.name: np.zeros(i.shape, np.float32) for i in session.get_inputs()})
print(int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) / 1e3)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_process_takes_little_more_memory_than_a_plain_session(tmp_path: Path) -> None:
    """Its peak for SqueezeNet is some 150 MB higher: a plan, whose sessions have an arena each, is open at a time."""
    path = tmp_path / "model.onnx"
    onnx.save(build("squeezenet"), path)
    plain = subprocess.run([sys.executable, "-c", PLAIN, str(path)], capture_output=True, text=True, check=True)  # noqa: S603
    process = TuningProcess(SessionConfig(OpenedModel(str(path))))
    try:
        answer = process.ask({})
        status = Path(f"/proc/{child().pid}/status").read_text(encoding="ascii")
    finally:
        process.kill()
    assert re.search(r"plan 1: [0-9.]+ ms", answer["decision"]["why"])
    peak_mb = int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) / 1e3
    assert peak_mb < float(plain.stdout) + 200
