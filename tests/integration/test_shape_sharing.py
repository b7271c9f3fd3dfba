"""Plans that shapes of a model share: the selector asks the evaluator, and sessions run them with equal results."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from chrion import HybridSession, load
from chrion.graph.model import Graph
from chrion.graph.opened_model import OpenedModel
from chrion.profiler import OperatorCost
from chrion.profiler.profiles import Profile
from chrion.runtime.selection.configuration import SessionConfig
from chrion.runtime.selection.decisions import Decision
from chrion.runtime.selection.guard import Comparison
from chrion.runtime.selection.selector import EngineSelector
from chrion.scheduler import partition
from chrion.scheduler.plan import Plan
from helpers import FLOAT, MACHINE, assert_equal, assert_same_as_plain, make_model, node, run_plain, value
from seams.sessions import before_step, replace_step, replace_tuning_process, use_interpreter
from tuning_support import alternate, wait_for

pytestmark = pytest.mark.usefixtures("background_tuning")

WIDTH = 8


def parallel_model(*, joined: bool = False) -> onnx.ModelProto:
    """Build eight branches on one input with a free number of rows; return their results, or their sum."""
    weights = {f"w{at}": np.full((WIDTH, WIDTH), at + 1.0, np.float32) for at in range(8)}
    nodes = [node("MatMul", ["x", f"w{at}"], [f"y{at}"], name=f"product_{at}") for at in range(8)]
    outputs = [value(f"y{at}", FLOAT, ["rows", WIDTH]) for at in range(8)]
    if joined:
        nodes.append(node("Sum", [f"y{at}" for at in range(8)], ["y"], name="sum"))
        outputs = [value("y", FLOAT, ["rows", WIDTH])]
    return make_model(nodes, [value("x", FLOAT, ["rows", WIDTH])], outputs, weights)


def measure(graph: Graph, *_: object, **__: bool) -> Profile:
    """Return a profile in which an operator takes 1 us for each row, and a handoff 20 us."""
    pairs = zip(graph.dag.signatures, graph.dag.output_bytes, strict=True)
    costs = {s: OperatorCost("MatMul", (ms, ms)) for s, size in pairs if (ms := size / (4 * WIDTH) * 1e-3)}
    return Profile(MACHINE, 2, None, costs, handoff_ms=2e-2)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Graph]:
    """Replace measurements by invented ones and select plans; return the graphs that receive plans of their own."""
    graphs: list[Graph] = []

    def plan(graph: Graph, profile: Profile, *_: object, **__: object) -> list[Plan]:
        graphs.append(graph)
        return [partition(graph, profile)]

    replace_step(monkeypatch, "profile", measure)
    replace_step(monkeypatch, "plan", plan)
    replace_step(monkeypatch, "compare", lambda *_: Comparison("plan 1", ()))
    use_interpreter(monkeypatch, tmp_path / "python", "echo '[100.0, 1.0]'")  # measures the memory of plans
    return graphs


def selected(rows: int, *, joined: bool = False, **changes: Any) -> Plan:
    """Return the plan that a new session of the model selects, given changes of its configuration."""
    plan = decide(rows, joined=joined, **changes).plan
    assert plan is not None
    return plan


def decide(rows: int, *, joined: bool, **changes: Any) -> Decision:
    """Return the decision of a new session of the model."""
    model = parallel_model(joined=joined)
    arguments = {"slo_ms": None, "alpha": None} | changes
    config = SessionConfig(OpenedModel(model.SerializeToString()), **arguments)
    return EngineSelector(config).decide(load(model, {"x": (rows, WIDTH)}))


def test_near_shapes_reuse_a_plan_without_planning(planned: list[Graph]) -> None:
    """The plan for 64 rows is balanced for any number of rows, so further shapes, and further sessions, reuse it."""
    first = selected(64)
    again = [selected(rows) for rows in (65, 100, 1000)]
    assert len(planned) == 1
    assert [plan.schedule for plan in again] == [first.schedule] * 3
    assert again[0].remarks[-1] == f"reuses the plan for x 64x{WIDTH}"
    assert [dict(plan.shapes) for plan in again] == [{"x": (rows, WIDTH)} for rows in (65, 100, 1000)]


def test_joined_branches_reuse_the_plan_of_near_shapes_only(planned: list[Graph]) -> None:
    """For one row a handoff takes longer than all branches, so the plan for 64 rows on two lanes does not suit it."""
    first = selected(64, joined=True)
    for count, rows in ((2, 60), (3, 70)):
        plan = selected(rows, joined=True)
        assert len(planned) == count  # the lower bound leaves room for a better plan
        assert plan.schedule == first.schedule
        assert any(remark.startswith("reuses") for remark in plan.remarks)
    assert decide(1, joined=True).plan is None, "the plan for these shapes is one segment"


@pytest.mark.parametrize("changes", [{"slo_ms": 10.0}, {"alpha": 1.0}])
def test_plans_with_limits_are_not_reused(planned: list[Graph], changes: dict[str, float]) -> None:
    """An SLO or a price of memory may require another plan for each shape."""
    for rows in (64, 65):
        selected(rows, **changes)
    assert len(planned) == 2


def test_a_reused_plan_has_the_results_of_plain_onnxruntime(planned: list[Graph]) -> None:
    """A session runs a reused plan on its new shapes."""
    selected(64)
    for rows in (65, 7, 500):
        plan = selected(rows)
        with HybridSession(load(parallel_model(), {"x": (rows, WIDTH)}), plan=plan) as session:
            assert_same_as_plain(session, parallel_model(), request(rows))
            assert session.plan is plan
    assert planned


@pytest.mark.parametrize("slow", ["the tuning process", "opening a plan"])
def test_tuning_blocks_no_request_of_any_shape(
    monkeypatch: pytest.MonkeyPatch, gate: threading.Event, slow: str
) -> None:
    """While tuning does not get on, four callers are served with twenty shapes, some of them tuned already."""
    blocked = threading.Event()
    asked = replace_tuning_process(monkeypatch, alternate, gate if slow == "the tuning process" else None)
    gate.set()
    model = parallel_model()
    feeds = [request(rows) for rows in range(1, 23)]
    expected = [run_plain(model, feed) for feed in feeds]
    with HybridSession(model) as session:
        session.run(None, request(1))
        assert session.wait_until_tuned(30)
        assert session.plan is not None
        gate.clear()
        if slow == "opening a plan":

            def block() -> None:
                blocked.set()
                gate.wait(30)

            before_step(monkeypatch, "open the engine", block)
        session.run(None, request(2))
        wait_for(lambda: len(asked) == 2 and (blocked.is_set() or slow == "the tuning process"))

        def call(caller: int) -> None:
            for at in range(20):
                assert_equal(session.run(None, feeds[at + caller % 3]), expected[at + caller % 3])

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(call, range(4)))
        assert not gate.is_set()
        assert not session.wait_until_tuned(0.0)
        gate.set()
        assert session.wait_until_tuned(60)
        for feed, outputs in zip(feeds, expected, strict=True):
            assert_equal(session.run(None, feed), outputs)


def request(rows: int) -> dict[str, np.ndarray[Any, Any]]:
    """Return a request with a number of rows."""
    return {"x": np.arange(rows * WIDTH, dtype=np.float32).reshape(rows, WIDTH)}
