"""Plans that shapes of a model share: the selector asks the evaluator, and sessions run them with equal results."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import onnx
import pytest

from chrion import HybridSession, load
from chrion.graph.model import Graph
from chrion.profiler import OperatorCost
from chrion.profiler.profiles import Profile
from chrion.runtime.selection import selector, tuning
from chrion.runtime.selection.configuration import SessionConfig
from chrion.runtime.selection.decisions import Decision
from chrion.runtime.selection.selector import EngineSelector
from chrion.runtime.selection.tuning_process import NamedShapes
from chrion.scheduler import partition
from chrion.scheduler.plan import Plan
from helpers import FLOAT, MACHINE, assert_same_as_plain, make_model, node, value
from tuning_support import alternate, deciding_with, wait_for

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


def measure(graph: Graph, *_: object) -> Profile:
    """Return a profile in which an operator takes 1 us for each row, and a handoff 20 us."""
    pairs = zip(graph.dag.signatures, graph.dag.output_bytes, strict=True)
    costs = {s: OperatorCost("MatMul", (ms, ms)) for s, size in pairs if (ms := size / (4 * WIDTH) * 1e-3)}
    return Profile(MACHINE, 2, None, costs, handoff_ms=2e-2)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """Replace measurements by invented ones; return the list of graphs that receive plans of their own."""
    graphs: list[Graph] = []

    def plan(graph: Graph, profile: Profile, *_: object, **__: object) -> list[Plan]:
        graphs.append(graph)
        return [partition(graph, profile)]

    monkeypatch.setattr(selector, "profile", measure)
    monkeypatch.setattr(selector, "alternatives", plan)
    return graphs


def selected(rows: int, chosen: EngineSelector, *, joined: bool = False) -> Plan:
    """Return the plan that a selector considers first, and keep it as the decision for its shapes."""
    graph = load(parallel_model(joined=joined), {"x": (rows, WIDTH)})
    chosen._profile = None  # costs of each shape are invented anew
    plan = chosen._plans(graph)[0]
    chosen._plan_cache(0).keep(Decision("plan 1", plan, "by the test"))
    return plan


def new_selector(**changes: Any) -> EngineSelector:
    """Return the selector of a session of the model."""
    arguments = {"slo_ms": None, "alpha": None} | changes
    source = parallel_model().SerializeToString()
    return EngineSelector(SessionConfig(source, None, None, None, None, cores=None, **arguments))


def test_near_shapes_reuse_a_plan_without_planning(planned: list[Graph]) -> None:
    """The plan for 64 rows is balanced for any number of rows, so further shapes, and further sessions, reuse it."""
    first = selected(64, new_selector())
    again = [selected(rows, new_selector()) for rows in (65, 100, 1000)]
    assert len(planned) == 1
    assert [plan.schedule for plan in again] == [first.schedule] * 3
    assert again[0].remarks[-1] == f"reuses the plan for x 64x{WIDTH}"
    assert [dict(plan.shapes) for plan in again] == [{"x": (rows, WIDTH)} for rows in (65, 100, 1000)]


@pytest.mark.parametrize(("rows", "reused"), [(60, True), (70, True), (1, False)])
def test_joined_branches_reuse_the_plan_of_near_shapes_only(planned: list[Graph], rows: int, *, reused: bool) -> None:
    """For one row a handoff takes longer than all branches, so the plan for 64 rows on two lanes does not suit it."""
    chosen = new_selector()
    first = selected(64, chosen, joined=True)
    plan = selected(rows, chosen, joined=True)
    assert len(planned) == 2  # the lower bound leaves room for a better plan
    assert (plan.schedule == first.schedule) == reused
    assert any(remark.startswith("reuses") for remark in plan.remarks) == reused


@pytest.mark.parametrize("changes", [{"slo_ms": 10.0}, {"alpha": 1.0}])
def test_plans_with_limits_are_not_reused(planned: list[Graph], changes: dict[str, float]) -> None:
    """An SLO or a price of memory may require another plan for each shape."""
    for rows in (64, 65):
        selected(rows, new_selector(**changes))
    assert len(planned) == 2


def test_a_reused_plan_has_the_results_of_plain_onnxruntime(planned: list[Graph]) -> None:
    """A session runs a reused plan on its new shapes."""
    chosen = new_selector()
    selected(64, chosen)
    for rows in (65, 7, 500):
        plan = selected(rows, chosen)
        with HybridSession(load(parallel_model(), {"x": (rows, WIDTH)}), plan=plan) as session:
            assert_same_as_plain(session, parallel_model(), request(rows))
            assert session.plan is plan
    assert planned


@pytest.mark.parametrize("slow", ["the tuning process", "opening a plan"])
def test_tuning_blocks_no_request_of_any_shape(
    monkeypatch: pytest.MonkeyPatch, gate: threading.Event, slow: str
) -> None:
    """While tuning does not get on, eight callers are served with forty shapes, some of them tuned already."""
    asked: list[NamedShapes] = []
    blocked = threading.Event()
    ready = gate if slow == "the tuning process" else threading.Event()
    ready.set()
    model = parallel_model()
    monkeypatch.setattr(tuning, "TuningProcess", deciding_with(alternate, asked, ready))
    with HybridSession(model) as session:
        session.run(None, request(1))
        assert session.wait_until_tuned(30)
        assert session.plan is not None
        gate.clear()
        if slow == "opening a plan":
            opened = EngineSelector.open

            def open_slowly(*arguments: Any) -> Any:
                blocked.set()
                gate.wait(30)
                return opened(*arguments)

            monkeypatch.setattr(EngineSelector, "open", open_slowly)
        session.run(None, request(2))
        wait_for(lambda: len(asked) == 2 and (blocked.is_set() or slow == "the tuning process"))

        def call(caller: int) -> None:
            for rows in range(1, 41):
                assert_same_as_plain(session, model, request(rows + caller % 3))

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(call, range(8)))
        assert not gate.is_set()
        assert not session.wait_until_tuned(0.0)
        gate.set()
        assert session.wait_until_tuned(60)
        for rows in range(1, 41):
            assert_same_as_plain(session, model, request(rows))


def request(rows: int) -> dict[str, np.ndarray[Any, Any]]:
    """Return a request with a number of rows."""
    return {"x": np.arange(rows * WIDTH, dtype=np.float32).reshape(rows, WIDTH)}
