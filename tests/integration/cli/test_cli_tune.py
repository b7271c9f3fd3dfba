"""``chrion tune``, and the file that it writes beside a model."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import onnx
import pytest

from chrion import HybridSession
from chrion.common.files import cache_folder
from chrion.graph.model import Graph
from chrion.graph.opened_model import OpenedModel
from chrion.runtime.selection import shipped
from chrion.runtime.selection.decisions import Decision
from chrion.runtime.selection.tuning_lock import tuning_lock
from command_line import Chrion, assert_refused
from helpers import FLOAT, assert_same_as_plain, make_model, node, value
from seams.sessions import decide_by, replace_step, replace_tuning_process, shorten_waits, use_interpreter
from tuning_support import alternate


@pytest.fixture
def decide(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """Let every comparison select a plan of two lanes; return the graphs of the comparisons."""
    return decide_by(monkeypatch, alternate)


@pytest.fixture
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHRION_CACHE", str(tmp_path / "cache"))
    shorten_waits(monkeypatch)


@pytest.fixture
def clear(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function after which no decision is cached and none can be made."""
    request.getfixturevalue("decide")

    def refuse(_: Graph) -> Decision:
        raise AssertionError("decided again")

    def run() -> None:
        monkeypatch.setenv("CHRION_CACHE", str(tmp_path / "empty cache"))
        decide_by(monkeypatch, refuse)
        replace_tuning_process(monkeypatch, refuse)

    return run


@pytest.fixture
def free(tmp_path: Path) -> Path:
    """Return the path of a model with a free dimension."""
    nodes = [node("Relu", ["x"], ["a"]), node("Neg", ["x"], ["b"]), node("Add", ["a", "b"], ["y"])]
    path = tmp_path / "free.onnx"
    onnx.save(make_model(nodes, [value("x", FLOAT, ["n", 4])], [value("y", FLOAT, ["n", 4])]), path)
    return path


def runs_plan(model: Path, **arguments: Any) -> bool:
    """Return whether a session without tuning runs a plan."""
    with HybridSession(model, tune="never", **arguments) as session:
        assert session.wait_until_tuned(30)
        return session.plan is not None


@pytest.mark.usefixtures("_empty_cache")
def test_sessions_find_decisions_made_ahead(cli: Chrion, model: Path, decide: list[Graph]) -> None:
    """A session without tuning runs the plan that the command selected; the command does not decide twice."""
    code, out, err = cli("tune", "m.onnx")
    assert (code, len(decide)) == (0, 1), err
    assert "plan 1" in out
    assert not shipped.shipped_path(model).exists()
    assert runs_plan(model)
    assert not runs_plan(model, slo="1ms")
    assert cli("tune", "m.onnx")[0] == 0
    assert len(decide) == 1
    assert cli("tune", "m.onnx", "--fresh")[0] == 0
    assert len(decide) == 2


@pytest.mark.usefixtures("_empty_cache")
@pytest.mark.parametrize("tune", ["never", "now", "background"])
def test_sessions_find_the_file_beside_the_model(
    cli: Chrion, model: Path, clear: Callable[[], None], tune: str
) -> None:
    """In every mode, the session runs the plan in the file and says where it found it, without deciding."""
    code, out, _ = cli("tune", "m.onnx", "--beside")
    assert (code, "written: m.onnx.chrion.json" in out) == (0, True)
    clear()
    with HybridSession(str(model), tune=tune) as session:
        assert session.wait_until_tuned(30)
        assert session.plan is not None
        assert f"found in {model}.chrion.json" in session.explain()
        feed = {i.name: np.ones(i.shape, np.float32) for i in session.get_inputs()}
        assert_same_as_plain(session, str(model), feed)


@pytest.mark.usefixtures("_empty_cache")
def test_the_file_survives_a_copy_of_the_model(
    cli: Chrion, model: Path, tmp_path: Path, clear: Callable[[], None]
) -> None:
    """The content of the model counts, not its path or time; another content is another model."""
    cli("tune", "m.onnx", "--beside")
    clear()
    copied = tmp_path / "elsewhere.onnx"
    copied.write_bytes(model.read_bytes())
    shipped.shipped_path(copied).write_bytes(shipped.shipped_path(model).read_bytes())
    assert runs_plan(copied)
    changed = onnx.load(copied)
    changed.producer_name = "another version"
    onnx.save(changed, copied)
    assert not runs_plan(copied)


@pytest.mark.usefixtures("_empty_cache")
def test_a_file_for_other_conditions_is_ignored(
    cli: Chrion, model: Path, clear: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    """Decisions of another machine, other versions or another configuration are ignored, with a line in the log."""
    cli("tune", "m.onnx", "--beside")
    path = shipped.shipped_path(model)
    good = json.loads(path.read_text())
    clear()
    caplog.set_level("INFO", "chrion")
    for name in ("machine", "software", "configuration"):
        content = json.loads(json.dumps(good))
        content["decisions"][0]["conditions"][name] = "another"
        path.write_text(json.dumps(content))
        caplog.clear()
        assert not runs_plan(model)
        assert f"{path} is ignored" in caplog.text
    path.write_text(json.dumps(good | {"decisions": [*content["decisions"], *good["decisions"]]}))
    assert runs_plan(model)  # the first decision is for another configuration, the second one for this session
    path.write_text(json.dumps(good))
    assert runs_plan(model)
    assert not runs_plan(model, cores=1)


@pytest.mark.usefixtures("_empty_cache")
def test_a_damaged_file_is_ignored(cli: Chrion, model: Path, clear: Callable[[], None]) -> None:
    """Sessions run plain with truncated, wrong, malicious and oversized files, and raise nothing."""
    cli("tune", "m.onnx", "--beside")
    path = shipped.shipped_path(model)
    good = path.read_text()
    clear()
    content = json.loads(good)
    damaged = [good[: len(good) // 2], "", "[]", "{}", "null", "[" * 100_000, '{"schema": "chrion.decisions/2"}']
    for at, key in [(0, "conditions"), (0, "shapes"), (0, "decision")]:
        for wrong in (None, 1, [], {}, "x"):
            changed = json.loads(good)
            if changed["decisions"][at][key] != wrong:
                changed["decisions"][at][key] = wrong
                damaged.append(json.dumps(changed))
    damaged += [json.dumps(content | {"decisions": wrong}) for wrong in (None, {}, [None], [1], [[]])]
    damaged.append(json.dumps(content | {"schema": "chrion.decisions/2"}))
    plan = json.loads(good)
    plan["decisions"][0]["decision"]["plan"]["digest"] = "another"
    damaged.append(json.dumps(plan))
    for text in damaged:
        path.write_text(text)
        assert not runs_plan(model), text[:200]
    path.write_text(good)
    assert runs_plan(model)
    path.write_text(good + (1 << 26) * " ")
    assert not runs_plan(model)
    path.unlink()
    path.mkdir()
    assert not runs_plan(model)


@pytest.mark.usefixtures("_empty_cache", "decide")
def test_decisions_of_other_machines_are_kept(cli: Chrion, model: Path) -> None:
    """A file for the same model grows by decisions for other conditions; one for another model is replaced."""
    cli("tune", "m.onnx", "--beside")
    path = shipped.shipped_path(model)
    content = json.loads(path.read_text())
    content["decisions"][0]["conditions"]["machine"] = "another"
    path.write_text(json.dumps(content))
    for _ in range(2):
        cli("tune", "m.onnx", "--beside")
        assert len(json.loads(path.read_text())["decisions"]) == 2
    path.write_text(json.dumps(content | {"model": "another"}))
    cli("tune", "m.onnx", "--beside")
    assert len(json.loads(path.read_text())["decisions"]) == 1


@pytest.mark.usefixtures("_empty_cache")
def test_several_shapes_are_tuned(
    cli: Chrion,
    free: Path,
    clear: Callable[[], None],
    decide: list[Graph],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Each set of shapes has a decision of its own, given by input or by dimension; other shapes run plain."""
    use_interpreter(monkeypatch, tmp_path / "python", "echo '[100.0, 1.0]'")  # measures the memory of plans
    code, out, err = cli("tune", "free.onnx", "--shape", "n=2", "--shape", "n=3", "--beside", "--json")
    assert code == 0, err
    rows = json.loads(out)["decisions"]
    assert [row["shapes"] for row in rows] == [{"x": [2, 4]}, {"x": [3, 4]}]
    assert [row["written"] for row in rows] == ["free.onnx.chrion.json"] * 2
    assert cli("tune", "free.onnx", "--shape", "x=3x4", "--shape", "x=5x4")[0] == 0
    assert len(decide) == 3  # the shape 3x4 is known
    clear()
    with HybridSession(free, tune="never") as session:
        for size in (2, 3, 6):
            feed = {"x": np.ones((size, 4), np.float32)}
            session.run(None, feed)
            assert session.wait_until_tuned(60)
            session.run(None, feed)
            assert (session.plan is not None) is (size < 6)


@pytest.mark.usefixtures("_empty_cache", "model", "free")
def test_bad_input_is_refused_before_anything_is_tuned(cli: Chrion, tmp_path: Path, decide: list[Graph]) -> None:
    """Each refusal is one line that says what is wrong."""
    assert_refused(cli("tune", "free.onnx"), "free dimensions in x[n x 4]")
    assert_refused(cli("tune", "m.onnx", "free.onnx", "--shape", "n=2"), "no input or free dimension 'n'")
    shapes = ["--shape", "n=2", "--shape", "n=3", "--shape", "x=2x4", "--shape", "x=3x4", "--shape", "x=5x4"]
    assert_refused(cli("tune", "free.onnx", *shapes), "2 values for 'n', but 3 for another name")
    assert_refused(cli("tune", "m.onnx", "missing.onnx"), "missing.onnx")
    assert_refused(cli("tune", "m.onnx", "--slo", "soon"), "soon")
    assert_refused(cli("tune", "m.onnx", "--accelerator", "abacus"), "abacus")
    assert_refused(cli("tune"), "MODEL")
    foreign = tmp_path / "m.onnx.chrion.json"
    foreign.write_text("mine")
    assert_refused(cli("tune", "m.onnx", "--beside"), "the file exists")
    assert decide == []
    assert cli("tune", "m.onnx", "--beside", "--force")[0] == 0
    assert json.loads(foreign.read_text())["schema"] == shipped.SCHEMA


@pytest.mark.usefixtures("_empty_cache")
def test_an_uncertain_decision_is_tried_again_and_not_shipped(
    cli: Chrion, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With interference in all attempts there is no file and the exit code is 1; with two bad attempts there is one."""
    left = [99]

    def decide(graph: Graph) -> Decision:
        left[0] -= 1
        return replace(alternate(graph), uncertain=left[0] >= 0)

    decide_by(monkeypatch, decide)
    code, _, err = cli("tune", "m.onnx", "--beside")
    assert (code, left[0]) == (1, 96)
    assert "since other processes or virtual machines used the cores" in err
    assert not shipped.shipped_path(model).exists()
    assert cli("tune", "m.onnx")[0] == 0
    left[0] = 2
    assert cli("tune", "m.onnx", "--beside", "--fresh")[0] == 0
    assert shipped.shipped_path(model).exists()


@pytest.mark.usefixtures("_empty_cache", "model")
def test_a_missed_slo_is_exit_code_3(cli: Chrion, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message is on stdout."""
    missed = "no candidate meets the SLO"
    decide_by(monkeypatch, lambda graph: replace(alternate(graph), missed=missed))
    code, out, _ = cli("tune", "m.onnx", "--slo", "1us")
    assert (code, missed in out) == (3, True)


@pytest.mark.usefixtures("_empty_cache", "decide")
def test_the_printed_call_creates_a_session_that_finds_the_decision(cli: Chrion, model: Path) -> None:
    """Arguments that the command was not given are not part of the call."""
    assert "for sessions created with: HybridSession(MODEL)\n" in cli("tune", "m.onnx")[1]
    code, out, _ = cli("tune", "m.onnx", "--slo", "60ms", "--cores", "1", "--alpha", "0.5", "--json")
    assert code == 0
    call = json.loads(out)["session"]
    assert call == "HybridSession(MODEL, slo=60.0, alpha=0.5, cores=1)"
    assert runs_plan(model, slo=60.0, alpha=0.5, cores=1)


@pytest.mark.usefixtures("_empty_cache", "decide", "model")
def test_the_command_waits_for_another_process(cli: Chrion, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so, and tunes when the lock is released."""
    lock = filelock.FileLock(cache_folder() / "tuning.lock", thread_local=False)
    lock.acquire()
    waited = []

    def wait(timeout_s: float, on_wait: Callable[[], None]) -> Any:
        def release() -> None:
            on_wait()
            waited.append(timeout_s)
            lock.release()

        return tuning_lock(timeout_s, release)

    replace_step(monkeypatch, "wait for other processes", wait)
    code, _, err = cli("tune", "m.onnx")
    assert (code, waited) == (0, [-1])
    assert "waiting for another process that tunes" in err


def test_without_a_file_the_model_is_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is not read, and nothing is logged."""
    caplog.set_level("INFO", "chrion")
    conditions = shipped.Conditions.of("machine", "software", "configuration")
    assert shipped.recall(OpenedModel(tmp_path / "missing.onnx"), conditions, shapes={}) is None
    assert not caplog.text
