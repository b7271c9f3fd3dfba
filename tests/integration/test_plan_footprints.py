"""Memory of plans of models with free dimensions: the limit, its measurement, and what engines keep."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from chrion import HybridSession, load
from chrion.graph.model import Graph
from chrion.runtime.execution.engine import CutEngine, Footprint
from chrion.runtime.selection import footprint, selector, shapes, tuning
from chrion.runtime.selection.configuration import SessionConfig
from chrion.runtime.selection.decisions import Decision
from chrion.runtime.selection.footprint import MeasurementError, can_measure, measure_footprint
from chrion.runtime.selection.tuning_process import NamedShapes
from chrion.runtime.selection.worker import Decider
from chrion.scheduler import fixed_plan
from helpers import alternating_lanes, assert_same_as_plain, branches, free_branches
from tuning_support import alternate, deciding_with

pytestmark = pytest.mark.usefixtures("background_tuning")

Tune = Callable[[Footprint], list[NamedShapes]]
needs_measurements = pytest.mark.skipif(not can_measure(), reason="only Linux reports the memory of a process")


@pytest.fixture(autouse=True)
def _frequent_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the tuning thread look for work all the time."""
    monkeypatch.setattr(tuning, "_POLL_S", 0.001)


@pytest.fixture
def tune(monkeypatch: pytest.MonkeyPatch) -> Tune:
    """Replace the tuning process by one that selects plans of a given memory."""

    def install(memory: Footprint) -> list[NamedShapes]:
        asked: list[NamedShapes] = []
        gate = threading.Event()
        gate.set()

        def decide(graph: Graph) -> Decision:
            return replace(alternate(graph), footprint=memory)

        monkeypatch.setattr(tuning, "TuningProcess", deciding_with(decide, asked, gate))
        return asked

    return install


def request(batch: int) -> dict[str, np.ndarray]:
    """Return a request of the model with free dimensions."""
    return {"x": np.arange(4.0 * batch, dtype=np.float32).reshape(batch, 4)}


def open_shapes(session: HybridSession) -> list[int]:
    """Return the batch sizes that have a plan."""
    engines = session._engines._by_shape
    return [shapes[0][0] for shapes, engine in engines.items() if isinstance(engine, CutEngine)]


def test_plans_are_opened_while_there_is_room(tune: Tune) -> None:
    """Of six shapes, two have plans, since three would exceed 1.3 times the plain session; all results are equal."""
    asked = tune(Footprint(100.0, 12.0))
    model = free_branches()
    with HybridSession(model) as session:
        for batch in (1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6):
            assert_same_as_plain(session, model, request(batch))
            assert session.wait_until_tuned(30)
        assert open_shapes(session) == [1, 2]
        assert "100.0 MB of the plain session" in session.explain()
    assert [named["x"][0] for named in asked] == [1, 2]  # further shapes are not tuned, since no plan has room


def test_a_plan_that_never_fits_is_not_opened(tune: Tune) -> None:
    """A model whose plan takes as much as the plain session runs plain, and its other shapes are not tuned."""
    asked = tune(Footprint(100.0, 100.0))
    model = free_branches()
    with HybridSession(model) as session:
        for batch in (1, 2, 3):
            assert_same_as_plain(session, model, request(batch))
            assert session.wait_until_tuned(30)
        assert not open_shapes(session)
        assert "a model with fixed shapes needs no plain session" in session.explain()
    assert len(asked) == 1


def test_the_plan_follows_the_requests(tune: Tune) -> None:
    """If requests change to other shapes, those receive the plan, and the former shapes run plain again."""
    tune(Footprint(100.0, 25.0))
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
    tune(Footprint(100.0, 12.0))
    model = free_branches()
    seen = set()
    with HybridSession(model) as session:
        for _ in range(100):
            for batch in range(1, 7):
                session.run(None, request(batch))
                session.wait_until_tuned(30)
            seen.add(tuple(sorted(open_shapes(session))))
    assert seen == {(1, 2)}


@pytest.mark.parametrize(("half_life", "expected"), [(64, [2]), (4096, [1])])
def test_old_requests_count_less(
    monkeypatch: pytest.MonkeyPatch, tune: Tune, half_life: int, expected: list[int]
) -> None:
    """300 requests of a plan long ago count less than 321 recent ones of other shapes, which receive the plan."""
    monkeypatch.setattr(shapes, "_HALF_LIFE", half_life)
    tune(Footprint(100.0, 25.0))
    with HybridSession(free_branches()) as session:
        for batch, count in ((1, 300), (2, 321)):
            for _ in range(count):
                session.run(None, request(batch))
                session.wait_until_tuned(30)
        assert open_shapes(session) == expected


def test_a_session_that_tunes_now_keeps_one_plan_or_the_plain_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``tune="now"`` a single shape runs by a plan; with a second one, the plain session serves both."""
    monkeypatch.setattr(
        selector.EngineSelector,
        "_decide_anew",
        lambda _, graph: replace(alternate(graph), footprint=Footprint(100.0, 100.0)),
    )
    model = free_branches()
    with HybridSession(model, tune="now") as session:
        for batch, plans in ((1, [1]), (2, []), (1, []), (2, [])):
            assert_same_as_plain(session, model, request(batch))
            assert open_shapes(session) == plans


@needs_measurements
def test_the_footprint_is_that_of_a_new_process() -> None:
    """A plan takes memory beside the plain session, and more so if its weights are large."""
    found = {}
    for size in (4, 1024):
        model = branches(size=size)
        for info in (*model.graph.input, *model.graph.output):
            info.type.tensor_type.shape.dim[0].dim_param = "batch"
        content = model.SerializeToString()
        graph = load(content, {"x": (2, size)})
        config = SessionConfig(content, None, None, None, None, None, None, None)
        found[size] = measure_footprint(config, graph, fixed_plan(graph, alternating_lanes(graph)))
        weights_mb = sum(graph.dag.weight_bytes) / 1e6
        assert found[size].plan_mb > 0.9 * weights_mb
        assert found[size].plain_mb > 1.0 + 0.9 * weights_mb
    assert found[1024].plan_mb > found[4].plan_mb


@needs_measurements
def test_heavy_models_are_not_tuned() -> None:
    """A model with free dimensions whose weights alone exceed the limit runs plain without being profiled."""
    model = branches(size=2048)
    for info in (*model.graph.input, *model.graph.output):
        info.type.tensor_type.shape.dim[0].dim_param = "batch"
    decider = Decider(SessionConfig(model.SerializeToString(), None, None, None, None, None, None, None))
    decider._selector = None  # type: ignore[assignment] # must not be used
    decision = decider.decide({"x": (2, 2048)})
    assert decision.winner == "plain"
    assert decision.footprint is not None
    assert "of the plain session" in decision.why


def test_a_plan_of_unknown_memory_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the measurement fails, a plan of a model with free dimensions is not selected."""

    def fail(*_: object) -> None:
        raise MeasurementError("no process")

    monkeypatch.setattr(selector, "measure_footprint", fail)
    monkeypatch.setattr(selector, "can_measure", lambda: True)
    config = SessionConfig(free_branches().SerializeToString(), None, None, None, None, None, None, None)
    graph = load(free_branches(), {"x": (2, 4)})
    weighed = selector.EngineSelector(config)._weighed(graph, alternate(graph))
    assert (weighed.winner, weighed.plan, weighed.why) == ("plain", None, "no process")


def test_the_measuring_process_reports_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that cannot be started is an error of the measurement."""
    monkeypatch.setattr(footprint.sys, "executable", "/nowhere/python")
    config = SessionConfig(branches().SerializeToString(), None, None, None, None, None, None, None)
    with pytest.raises(MeasurementError, match=r"memory of the plan is not known"):
        measure_footprint(config, load(branches()), None)


@pytest.mark.parametrize("deleted", [False, True])
@pytest.mark.usefixtures("tuned_shapes")
def test_an_engine_keeps_no_graph(gate: threading.Event, tmp_path: Path, *, deleted: bool) -> None:
    """The graph is freed once a plan runs on native lanes; other requests load the model again, or run plain."""
    gate.set()
    path = tmp_path / "model.onnx"
    onnx.save(branches(), path)
    with HybridSession(path) as session:
        assert session.wait_until_tuned(30)
        engine = session._engines.current
        assert isinstance(engine, CutEngine)
        if not engine.native:
            pytest.skip("lane threads use the graph")
        expected = session.run(None, request(2))
        assert engine._held() is None
        if deleted:
            path.unlink()
            with pytest.raises(RuntimeError, match=r"cannot be loaded again"):
                _ = engine.graph
        else:
            np.testing.assert_array_equal(session.run(None, request(2), ort.RunOptions())[0], expected[0])
            assert session.plan is not None
        np.testing.assert_array_equal(session.run(None, request(2))[0], expected[0])
