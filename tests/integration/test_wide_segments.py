"""Segments on several cores: results, cores, parked lanes and errors, on native lanes and lane threads."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from chrion import HybridSession, Plan, load, partition, profile
from chrion.devices.intra_op import SPIN_US, set_threads
from chrion.graph import Graph
from chrion.machine.cores import physical_cores
from chrion.profiler import CopyCost, OperatorCost, Profile
from chrion.scheduler import fixed_plan
from chrion.zoo import build
from helpers import FLOAT, INT64, MACHINE, assert_same_as_plain, make_model, node, value
from seams.execution import cut_engine

pytestmark = pytest.mark.skipif(len(physical_cores()) < 2, reason="needs two cores")
LSTM = {"layers": 3, "batch": 2, "io": 32, "seq": 9, "chunk": 3}
FEED = {"X": np.random.default_rng(0).standard_normal((9, 2, 32)).astype(np.float32)}


def stretches(graph: Graph, *, first_wide: bool) -> Plan:
    """Return a plan that alternates between stretches on both cores and stretches of one core each."""
    order = graph.dag.topological_order
    lanes, widths = [1] * len(order), [1] * len(order)
    for at, i in enumerate(order):
        if (at // 5 % 2 == 0) == first_wide:
            widths[i] = 2
        else:
            lanes[i] = 1 + at % 2
    return fixed_plan(graph, lanes, order, widths=widths)


@pytest.mark.parametrize("first_wide", [True, False])
@pytest.mark.usefixtures("either_lanes")
def test_stretches_of_both_kinds_equal_plain_onnxruntime(*, first_wide: bool) -> None:
    """Results are those of a plain session for many requests in a row."""
    model = build("lstm", LSTM)
    graph = load(model)
    plan = stretches(graph, first_wide=first_wide)
    assert set(plan.schedule.widths) == {1, 2}
    with HybridSession(graph, plan=plan, strict=True) as session:
        for _ in range(10):
            assert_same_as_plain(session, model, FEED)


def test_a_plan_of_wide_segments_only_needs_one_lane_and_two_cores() -> None:
    """The second core has no lane of its own, but the plan describes what it does, and requests have one group."""
    model = build("lstm", LSTM)
    graph = load(model)
    n = len(graph.dag)
    order = graph.dag.topological_order
    halves = [order[: n // 2], order[n // 2 :]]
    plan = fixed_plan(graph, [1] * n, order, widths=[2] * n, segments=halves)
    with HybridSession(graph, plan=plan, strict=True) as session:
        engine = cut_engine(session)
        assert list(engine.program.lanes) == [1]
        assert engine.program.occupied == (1, 2)
        assert engine.capacity == 1
        assert session.explain().count("2 segments (2 on several cores)") == 2
        assert_same_as_plain(session, model, FEED)


def test_threads_of_wide_segments_are_pinned_to_the_other_core() -> None:
    """Every new thread may run on one core only, and both cores are used."""
    tasks = Path("/proc/self/task")
    if not tasks.is_dir():
        pytest.skip("needs Linux")
    graph = load(build("lstm", LSTM))
    before = {path.name for path in tasks.iterdir()}
    with HybridSession(graph, plan=stretches(graph, first_wide=True), strict=True) as session:
        session.run(None, FEED)
        added = {path.name for path in tasks.iterdir()} - before
        pinned = [os.sched_getaffinity(int(thread)) for thread in added]
        assert len(pinned) > 1
        assert {core for cores in pinned for core in cores} <= set(physical_cores())
        assert all(len(cores) == 1 for cores in pinned)


def test_a_failing_wide_segment_names_its_operators(tmp_path: Path) -> None:
    """The error of a wide segment ends all lanes, also the parked one, and names the operators."""
    nodes = [
        node("Relu", ["x"], ["a"], name="a"),
        node("Gather", ["a", "i"], ["b"], name="gather"),
        node("Neg", ["a"], ["c"], name="c"),
        node("Add", ["b", "c"], ["y"], name="y"),
    ]
    model = make_model(nodes, [value("x", FLOAT, [4]), value("i", INT64, [4])], [value("y", FLOAT, [4])])
    graph = load(model)
    names = list(graph.dag.names)
    lanes = [2 if name == "c" else 1 for name in names]
    widths = [2 if name == "gather" else 1 for name in names]
    plan = fixed_plan(graph, lanes, [names.index(n) for n in ("a", "gather", "c", "y")], widths=widths)
    plan.save(tmp_path / "plan.json")
    with HybridSession(model, plan=Plan.load(tmp_path / "plan.json"), strict=True) as session:
        x, good, bad = np.ones(4, np.float32), np.zeros(4, np.int64), np.full(4, 9)
        for _ in range(3):
            with pytest.raises(Exception, match="gather"):
                session.run(None, {"x": x, "i": bad})
            assert session.run(None, {"x": x, "i": good})[0].tolist() == [0.0] * 4


def test_threads_of_a_session_spin_briefly_and_during_runs_only() -> None:
    """Session options limit spinning, end it with each run, and pin all threads but the caller's."""
    options = ort.SessionOptions()
    set_threads(options, 2, physical_cores()[1:2])
    assert options.intra_op_num_threads == 2
    assert options.get_session_config_entry("session.force_spinning_stop") == "1"
    assert options.get_session_config_entry("session.intra_op.spin_duration_us") == str(SPIN_US)
    assert options.get_session_config_entry("session.intra_op_thread_affinities") == str(physical_cores()[1] + 1)


def test_wide_operators_are_measured() -> None:
    """Operators of 20 us or more have a time for both cores; smaller ones gain nothing."""
    graph = load(build("lstm", {"layers": 1, "batch": 1, "io": 128, "seq": 8, "chunk": 8}))
    measured = profile(graph, 2)
    times = [cost for cost in measured.operators.values() if cost.op_type == "LSTM"]
    assert all(len(cost.wide_ms) == (cost.cpu_ms[0] > 0.04) or cost.cpu_ms[0] < 0.04 for cost in times)
    assert any(cost.wide_ms for cost in times)
    assert measured.wake_ms >= 0
    assert measured.costs(graph.dag).widths == (2,)


def products(count: int = 6, side: int = 64) -> onnx.ModelProto:
    """Build a chain of matrix products, each with a weight of its own."""
    rng = np.random.default_rng(0)
    nodes = [node("MatMul", [f"v{i}", f"w{i}"], [f"v{i + 1}"], name=f"product{i}") for i in range(count)]
    weights = {f"w{i}": (rng.standard_normal((side, side)) / 8).astype(np.float32) for i in range(count)}
    ends = [value(name, FLOAT, [4, side]) for name in ("v0", f"v{count}")]
    return make_model(nodes, ends[:1], ends[1:], weights)


def test_a_hybrid_plan_has_wide_lanes_on_its_cpu_side() -> None:
    """The weights of two products fit the accelerator; the other four run on both cores, and results are the same.

    The CPU provider stands in for the accelerator. A product takes 4 ms on a core, 2 on two and 0.4 on the accelerator.
    """
    model = products()
    graph = load(model)
    cost = OperatorCost("MatMul", (4.0, 4.0), 0.4, wide_ms=(2.0,))
    copy = CopyCost(0.01, 1e-9)
    operators = dict.fromkeys(graph.dag.signatures, cost)
    measured = Profile(MACHINE, 2, "CPUExecutionProvider", operators, copy, copy, handoff_ms=0.01, dispatch_ms=0.01)
    room_mb = (2.5 * max(graph.dag.weight_bytes) + 2 * 4 * 64 * 4) / 1e6
    plan = partition(graph, measured, gpu_budget=room_mb)
    placed = sorted(zip(plan.schedule.lanes, plan.schedule.widths, strict=True))
    assert placed == [(0, 1)] * 2 + [(1, 2)] * 4
    assert "operators on several cores at once: 4 on 2" in plan.remarks
    assert plan.predicted.latency_ms == pytest.approx(4 * 2.0 + 2 * 0.4, rel=0.02)
    with HybridSession(graph, plan=plan, strict=True) as session:
        assert session.explain().count("(1 on several cores)") == 2
        feed = {"v0": np.random.default_rng(1).standard_normal((4, 64)).astype(np.float32)}
        for _ in range(5):
            assert_same_as_plain(session, model, feed)
