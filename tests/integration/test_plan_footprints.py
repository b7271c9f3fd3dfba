"""Memory of plans of models with free dimensions: the limit, its measurement, and what engines keep."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from chrion import HybridSession, load
from chrion.graph.model import Graph
from chrion.graph.opened_model import OpenedModel
from chrion.runtime.execution.cut_engine import CutEngine
from chrion.runtime.execution.engine import Footprint
from chrion.runtime.selection.configuration import SessionConfig
from chrion.runtime.selection.decisions import Decision
from chrion.runtime.selection.footprint import can_measure
from chrion.runtime.selection.selector import EngineSelector
from chrion.runtime.selection.tuning_process import NamedShapes
from chrion.runtime.selection.worker import Decider
from chrion.scheduler import fixed_plan
from helpers import assert_same_as_plain, branches, free_branches
from seams.sessions import (
    decide_by,
    engine_of,
    engines_by_shapes,
    halve_requests_after,
    replace_step,
    replace_tuning_process,
    use_interpreter,
)
from tuning_support import alternate

pytestmark = pytest.mark.usefixtures("background_tuning")

Tune = Callable[[Footprint], list[NamedShapes]]
CPU = "CPUExecutionProvider"
needs_measurements = pytest.mark.skipif(not can_measure(), reason="only Linux reports the memory of a process")


@pytest.fixture
def tune(monkeypatch: pytest.MonkeyPatch) -> Tune:
    """Replace the tuning process by one that selects plans of a given memory."""

    def install(memory: Footprint) -> list[NamedShapes]:
        return replace_tuning_process(monkeypatch, lambda graph: replace(alternate(graph), footprint=memory))

    return install


def request(batch: int) -> dict[str, np.ndarray]:
    """Return a request of the model with free dimensions."""
    return {"x": np.arange(4.0 * batch, dtype=np.float32).reshape(batch, 4)}


def open_shapes(session: HybridSession) -> list[int]:
    """Return the batch sizes that have a plan."""
    engines = engines_by_shapes(session)
    return [shapes[0][0] for shapes, engine in engines.items() if isinstance(engine, CutEngine)]


def test_plans_are_opened_while_there_is_room(tune: Tune) -> None:
    """Of six shapes, two have plans, since three would add over 30 % to the plain session; all results are equal."""
    asked = tune(Footprint(1000.0, 120.0))
    model = free_branches()
    with HybridSession(model) as session:
        for batch in (1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6):
            assert_same_as_plain(session, model, request(batch))
            assert session.wait_until_tuned(30)
        assert open_shapes(session) == [1, 2]
        assert "1000.0 MB of the plain session" in session.explain()
    assert [named["x"][0] for named in asked] == [1, 2]  # further shapes are not tuned, since no plan has room


def test_a_plan_that_never_fits_is_not_opened(tune: Tune) -> None:
    """A model whose plan takes as much as the plain session runs plain, and its other shapes are not tuned."""
    asked = tune(Footprint(1000.0, 1000.0))
    model = free_branches()
    with HybridSession(model) as session:
        for batch in (1, 2, 3):
            assert_same_as_plain(session, model, request(batch))
            assert session.wait_until_tuned(30)
        assert not open_shapes(session)
        assert "as long as requests have one set of shapes" in session.explain()
    assert len(asked) == 1


def test_the_plan_follows_the_requests(tune: Tune) -> None:
    """If requests change to other shapes, those receive the plan, and the former shapes run plain again."""
    tune(Footprint(1000.0, 250.0))
    model = free_branches()
    with HybridSession(model) as session:
        for batch, count in ((1, 20), (2, 100)):
            for _ in range(count):
                session.run(None, request(batch))
                session.wait_until_tuned(30)
            assert_same_as_plain(session, model, request(batch))
            assert open_shapes(session) == [batch]


def test_shapes_in_rotation_keep_their_plans(tune: Tune) -> None:
    """With equal numbers of requests no plan is replaced, however long the shapes rotate."""
    tune(Footprint(1000.0, 120.0))
    model = free_branches()
    seen = set()
    with HybridSession(model) as session:
        for _ in range(20):
            for batch in range(1, 7):
                session.run(None, request(batch))
                session.wait_until_tuned(30)
            seen.add(tuple(sorted(open_shapes(session))))
    assert seen == {(1, 2)}


@pytest.mark.parametrize(("half_life", "expected"), [(16, [2]), (4096, [1])])
def test_old_requests_count_less(
    monkeypatch: pytest.MonkeyPatch, tune: Tune, half_life: int, expected: list[int]
) -> None:
    """60 requests of a plan long ago count less than 90 recent ones of other shapes, which receive the plan."""
    halve_requests_after(monkeypatch, half_life)
    tune(Footprint(1000.0, 250.0))
    with HybridSession(free_branches()) as session:
        for batch, count in ((1, 60), (2, 90)):
            for _ in range(count):
                session.run(None, request(batch))
                session.wait_until_tuned(30)
        assert open_shapes(session) == expected


@needs_measurements
@pytest.mark.parametrize("second", ["plan", "plain"])
def test_a_session_that_tunes_now_keeps_one_plan_or_the_plain_session(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, second: str
) -> None:
    """With ``tune="now"`` a single shape runs by a plan; with a second one, the plain session serves both.

    The second one may have no room for its plan, or be faster without.
    """
    faster = Decision("plain", None, "fastest when timed")
    decide_by(monkeypatch, lambda g: faster if second == "plain" and g.inputs[0].shape[0] == 2 else alternate(g))
    use_interpreter(monkeypatch, tmp_path / "python", "echo '[100.0, 100.0]'")
    model = free_branches()
    with HybridSession(model, tune="now") as session:
        for batch, plans in ((1, [1]), (2, []), (1, []), (2, [])):
            assert_same_as_plain(session, model, request(batch))
            assert open_shapes(session) == plans


def config_of(model: onnx.ModelProto) -> SessionConfig:
    """Return the configuration of a session without arguments."""
    return SessionConfig(OpenedModel(model.SerializeToString()))


@needs_measurements
def test_a_plan_of_unknown_memory_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """If the measurement fails, a plan of a model with free dimensions is not selected."""
    decide_by(monkeypatch, alternate)
    graph = load(free_branches(), {"x": (2, 4)})
    failures = {
        "exit 1": "exit code 1 of the process",
        "echo 'a line\nMemoryError: full\n' >&2; exit 1": "MemoryError: full",
        "kill -9 $$": "exit code -9 of the process",
        "echo no numbers": "JSONDecodeError",
        "true": "IndexError",
        "echo [1]": "ValueError",
    }
    for number, (script, reason) in enumerate(failures.items()):
        use_interpreter(monkeypatch, tmp_path / "python", script)
        monkeypatch.setenv("CHRION_CACHE", str(tmp_path / str(number)))
        decision = EngineSelector(config_of(free_branches())).decide(graph)
        assert (decision.winner, decision.plan) == ("plain", None)
        assert decision.why.startswith(f"memory of the plan is not known: {reason}")


@needs_measurements
def test_the_memory_of_plans_beside_a_plain_session_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """That of plans for an accelerator, or for fixed shapes, which need no plain session, is not."""
    use_interpreter(monkeypatch, tmp_path / "python", "echo '[100.0, 12.0]'")
    decide_by(monkeypatch, alternate)
    free = EngineSelector(config_of(free_branches()))
    assert free.decide(load(free_branches(), {"x": (2, 4)})).footprint == Footprint(100.0, 12.0)
    assert EngineSelector(config_of(branches())).decide(load(branches())).footprint is None
    decide_by(monkeypatch, lambda graph: Decision("plan 1", fixed_plan(graph, [0, 1, 0, 1], accelerator=CPU), ""))
    assert free.decide(load(free_branches(), {"x": (3, 4)})).footprint is None


@needs_measurements
@pytest.mark.parametrize(("plain_mb", "heavy"), [(200.0, True), (240.0, False)])
def test_heavy_models_are_not_tuned(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, plain_mb: float, *, heavy: bool
) -> None:
    """A model with free dimensions whose weights of 67 MB alone exceed the limit runs plain without being profiled."""
    use_interpreter(monkeypatch, tmp_path / "python", f"echo '[{plain_mb}, 0.0]'")
    decided = decide_by(monkeypatch, lambda _: Decision("plain", None, "by the test"))
    model = free_branches(size=4096)
    decider = Decider(config_of(model))
    decision = decider.decide({"x": (2, 4096)})
    assert decision.winner == "plain"
    assert len(decided) == (0 if heavy else 1)
    assert decision.footprint == (Footprint(plain_mb, 4096**2 * 4 / 1e6) if heavy else None)
    assert ("of the plain session" in decision.why) is heavy
    use_interpreter(monkeypatch, tmp_path / "python", "exit 1")
    decider.decide({"x": (3, 4096)})
    assert len(decided) == (1 if heavy else 2), "a model of unknown memory is profiled"


@pytest.mark.parametrize("overwritten", [False, True])
@pytest.mark.usefixtures("tuned_shapes")
def test_an_engine_keeps_no_graph(
    monkeypatch: pytest.MonkeyPatch, gate: threading.Event, tmp_path: Path, *, overwritten: bool
) -> None:
    """The graph is freed once a plan runs on native lanes; other requests load the model again, or run plain."""
    graphs: list[weakref.ref[Graph]] = []
    load_model = SessionConfig.load

    def remember(*arguments: Any, **options: Any) -> Graph:
        graph = load_model(*arguments, **options)
        graphs.append(weakref.ref(graph))
        return graph

    replace_step(monkeypatch, "load", remember)
    gate.set()
    path = tmp_path / "model.onnx"
    onnx.save(branches(), path)
    with HybridSession(path) as session:
        assert session.wait_until_tuned(30)
        engine = engine_of(session)
        assert isinstance(engine, CutEngine)
        if "native lanes" not in engine.explain():
            pytest.skip("lane threads use the graph")
        expected = session.run(None, request(2))
        gc.collect()
        assert graphs
        assert not any(graph() for graph in graphs)
        if overwritten:
            path.write_bytes(b"")
            with pytest.raises(RuntimeError, match=r"cannot be loaded again"):
                _ = engine.graph
        else:
            np.testing.assert_array_equal(session.run(None, request(2), ort.RunOptions())[0], expected[0])
            assert session.plan is not None
        np.testing.assert_array_equal(session.run(None, request(2))[0], expected[0])
