"""Decisions as the program of the tuning process makes them, and the client of the process, with other programs."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import psutil
import pytest

from chrion import Graph, load
from chrion.graph.opened_model import OpenedModel
from chrion.runtime.execution.engine import CannotCutError, Footprint
from chrion.runtime.selection.configuration import SessionConfig, config_to_data
from chrion.runtime.selection.decisions import Decision, decision_from_json
from chrion.runtime.selection.footprint import can_measure
from chrion.runtime.selection.tuning_process import StarvedError, TuningProcess
from chrion.runtime.selection.worker import Decider, answers
from helpers import branches, free_branches, make_model, node, value
from seams.sessions import decide_by, starve_soon, use_interpreter
from tuning_support import alternate, wait_for

pytestmark = pytest.mark.usefixtures("background_tuning")


def config_of(source: str | bytes) -> SessionConfig:
    """Return the configuration of a session without arguments."""
    return SessionConfig(OpenedModel(source))


def ask(
    source: str | bytes, *questions: Mapping[str, Sequence[int]], anew: bool = False
) -> list[Decision | dict[str, Any]]:
    """Return the worker's decisions on sets of shapes; its answer where it makes none."""
    lines = [json.dumps({"shapes": shapes, "anew": anew, "busy": False}).encode() + b"\n" for shapes in questions]
    found = list(answers(io.BytesIO(b"".join([*config_to_data(config_of(source)), *lines]))))
    return [decision_from_json(answer["decision"]) if "decision" in answer else answer for answer in found]


def test_each_set_of_shapes_has_an_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Shapes that do not fit have a reason, and others a decision, with the plan's memory."""
    use_interpreter(monkeypatch, tmp_path / "python", "echo '[100.0, 12.0]'")
    decided = decide_by(monkeypatch, alternate)
    path = tmp_path / "model.onnx"
    onnx.save(free_branches(), path)
    first, failed, second = ask(str(path), {"x": (2, 4)}, {"x": (3, 5)}, {"x": (3, 4)})
    for rows, decision in ((2, first), (3, second)):
        assert isinstance(decision, Decision)
        assert decision.plan == alternate(load(path, {"x": (rows, 4)})).plan
        assert decision.footprint == (Footprint(100.0, 12.0) if can_measure() else None)
    assert list(failed) == ["failure"]  # type: ignore[call-overload]
    assert len(decided) == 2


def test_a_model_given_as_bytes_is_decided_on_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its decision is cached, and made anew only if that is requested."""
    decided = decide_by(monkeypatch, alternate)
    source = branches().SerializeToString()
    for anew, count in ((False, 1), (False, 1), (True, 2)):
        (found,) = ask(source, {}, anew=anew)
        assert isinstance(found, Decision)
        assert found.winner == "plan 1"
        assert len(decided) == count


def test_models_that_cannot_be_cut_run_plain_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason is that of loading the model, of its types, or of the comparison."""

    def refuse(_: Graph) -> Decision:
        raise CannotCutError("not for a test")

    decide_by(monkeypatch, refuse)
    text = make_model([node("Identity", ["t"], ["u"])], *([value(n, onnx.TensorProto.STRING, [2])] for n in "tu"))
    for source, reason in (
        (b"no model", "not an ONNX model"),
        (text.SerializeToString(), "'t' is a tensor(string)"),
        (branches().SerializeToString(), "not for a test"),
    ):
        (found,) = ask(source, {})
        assert isinstance(found, Decision)
        assert (found.winner, found.plan) == ("plain", None)
        assert reason in found.why


def test_a_model_file_that_is_missing_has_no_decision() -> None:
    """The answer has the reason."""
    assert ask("/nonexistent/model.onnx", {}) == [
        {"failure": "/nonexistent/model.onnx: cannot be read: No such file or directory"}
    ]


def test_the_digest_of_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is that of the graph with these shapes, and empty for a model that cannot be loaded."""
    decide_by(monkeypatch, alternate)
    model = free_branches()
    decider = Decider(config_of(model.SerializeToString()))
    assert decider.digest({"x": (2, 4)}) == load(model, {"x": (2, 4)}).digest != decider.digest({"x": (3, 4)})
    assert Decider(config_of(b"no model")).digest({}) == ""


# The client.


def test_the_client_sends_the_model_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The program receives the configuration, the bytes of the model, and one line for each set of shapes."""
    received = tmp_path / "received"
    answer = "case $line in *shapes*) echo 1;; esac"
    use_interpreter(
        monkeypatch, tmp_path / "python", f'while read -r line; do echo "$line" >> {received}; {answer}; done'
    )
    config = config_of(b"a model of one line\n")
    process = TuningProcess(config)
    try:
        process.ask({"x": (2, 4)})
        process.ask({"x": (3, 4)}, anew=True)
    finally:
        process.kill()
    sent = b"".join(config_to_data(config))
    lines = received.read_bytes().removeprefix(sent).splitlines()
    assert received.read_bytes().startswith(sent)
    assert [json.loads(line) for line in lines] == [
        {"shapes": {"x": [2, 4]}, "anew": False, "busy": False},
        {"shapes": {"x": [3, 4]}, "anew": True, "busy": False},
    ]


@pytest.mark.usefixtures("no_process_left")
def test_a_process_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A tuning process has a time limit, after which it is killed."""
    use_interpreter(monkeypatch, tmp_path / "python", "exec sleep 600")
    process = TuningProcess(config_of(b""), limit_s=0.1)
    with pytest.raises(OSError, match="the tuning process ended with status -9"):
        process.ask({})
    process.kill()


@pytest.mark.usefixtures("no_process_left")
def test_a_process_without_time_of_the_cores_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One that uses spare time only, and finds none."""
    use_interpreter(monkeypatch, tmp_path / "python", "exec sleep 600")
    starve_soon(monkeypatch)
    process = TuningProcess(config_of(b""), spare=True)
    with pytest.raises(StarvedError):
        process.ask({})
    process.kill()


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="no such policy")
@pytest.mark.parametrize("spare", [True, False])
def test_the_priority_of_the_process(*, spare: bool) -> None:
    """It runs only on idle cores, or at a lower priority than other processes."""
    before = set(psutil.Process().children())
    process = TuningProcess(config_of(b""), spare=spare)
    try:
        (child,) = set(psutil.Process().children()) - before
        if spare:
            wait_for(lambda: os.sched_getscheduler(child.pid) == os.SCHED_IDLE)
        else:
            wait_for(lambda: child.nice() > psutil.Process().nice())
    finally:
        process.kill()
