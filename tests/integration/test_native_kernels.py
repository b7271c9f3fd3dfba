"""Plans whose recurrent operators run on native kernels."""

from __future__ import annotations

import ctypes
import gc
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from chrion import Graph, HybridSession, Plan, Profile, load, partition, profile
from chrion.native import operators_available
from chrion.native.library import path_of
from chrion.profiler import Machine, OperatorCost
from chrion.runtime.selection.proposals import split_plan
from chrion.scheduler import fixed_plan
from chrion.scheduler.limits import Limits
from chrion.scheduler.plan_options import PlanOptions
from chrion.scheduler.planner import Planner
from chrion.zoo import RecurrentSpec, build_recurrent
from helpers import FLOAT, alternating_lanes, node, run_plain, value
from mirror_device import MirrorDevice
from recurrent_cells import Cell
from seams.execution import use_device

pytestmark = pytest.mark.skipif(not operators_available(), reason="native operators are not compiled")
LAYERS = 3


def stack(cell: str = "LSTM", chunk: int = 8) -> onnx.ModelProto:
    """Return a small stack of recurrent layers over 8 steps."""
    return build_recurrent(RecurrentSpec(cell=cell, layers=LAYERS, batch=1, io=24, seq=8, chunk=chunk))


def recurrent(graph: Graph) -> tuple[str, ...]:
    """Return the names of the recurrent operators of a graph."""
    kinds = {"LSTM", "GRU", "RNN"}
    return tuple(name for name, kind in zip(graph.dag.names, graph.dag.op_types, strict=True) if kind in kinds)


def packed_bytes() -> int:
    """Return the bytes of the packed weights of native operators in this process."""
    gc.collect()
    count = ctypes.CDLL(str(path_of("operators"))).chrion_packed_bytes
    count.restype = ctypes.c_size_t
    return int(count())


def native_plan(graph: Graph) -> Plan:
    """Return a plan of two lanes whose recurrent operators run on native kernels."""
    return replace(fixed_plan(graph, alternating_lanes(graph)), native=recurrent(graph))


def made_profile(graph: Graph, native: float, wide: float | None = None) -> Profile:
    """Return a profile in which native kernels take a multiple of the time of onnxruntime's, perhaps on both cores."""
    two = () if wide is None else (wide,)
    costs = {
        signature: OperatorCost(
            kind, (1.0, 1.0), native_ms=(native, native), wide_ms=two and (0.9,), native_wide_ms=two
        )
        if kind == "LSTM"
        else OperatorCost(kind, (1.0, 1.0))
        for signature, kind in zip(graph.dag.signatures, graph.dag.op_types, strict=True)
    }
    return Profile(Machine("a CPU", 2, 1000.0, "a system", "1.0"), 2, None, costs)


@pytest.mark.parametrize("chunk", [8, 3])
@pytest.mark.parametrize("cell", ["LSTM", "GRU", "RNN"])
def test_a_plan_with_native_kernels_computes_the_same(cell: str, chunk: int) -> None:
    """Its packed weights are one object for all chunks of a layer, and are freed with the session."""
    model = stack(cell, chunk)
    graph = load(model)
    x = np.random.default_rng(1).standard_normal(graph.inputs[0].shape).astype(np.float32)
    before = packed_bytes()
    with HybridSession(graph, plan=native_plan(graph)) as session:
        [result], [expected] = session.run(None, {"X": x}), run_plain(model, {"X": x})
        np.testing.assert_allclose(result, expected, atol=2e-6)
        gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[cell]
        weights = LAYERS * gates * 24 * 48 * 4
        assert weights <= packed_bytes() - before < 2.5 * weights
    del session
    assert packed_bytes() == before


@pytest.mark.parametrize("chunk", [8, 3])
@pytest.mark.parametrize("cell", ["LSTM", "GRU", "RNN"])
def test_core_lanes_beside_an_accelerator_use_native_kernels(
    cell: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layer on the accelerator, which the plan names as well, stays onnxruntime's: its weights are not packed."""
    model = stack(cell, chunk)
    graph = load(model)
    x = np.random.default_rng(1).standard_normal(graph.inputs[0].shape).astype(np.float32)
    before = packed_bytes()
    with HybridSession(graph, plan=native_plan(graph)):
        of_all_layers = packed_bytes() - before
    use_device(monkeypatch, MirrorDevice)
    lanes = [1 if "l0" in name else 2 if "l2" in name else 0 for name in graph.dag.names]
    plan = fixed_plan(graph, lanes, accelerator="CPUExecutionProvider")
    assert {lane for lane, kind in zip(lanes, graph.dag.op_types, strict=True) if kind == cell} == {0, 1, 2}
    gc.collect()
    before = packed_bytes()
    with HybridSession(graph, plan=replace(plan, native=recurrent(graph)), strict=True) as session:
        assert packed_bytes() - before == of_all_layers * 2 // 3
        for _ in range(2):
            np.testing.assert_allclose(session.run(None, {"X": x})[0], run_plain(model, {"X": x})[0], atol=2e-6)


@pytest.mark.parametrize("change", ["machine", "kernels"])
def test_other_plans_run_on_the_kernels_of_onnxruntime(change: str) -> None:
    """Those that were made for another machine, and those without native kernels."""
    model = stack(chunk=3)
    graph = load(model)
    plan = native_plan(graph)
    other = {"machine": {"machine": replace(plan.machine, cpu="another")}, "kernels": {"native": ()}}
    before, x = packed_bytes(), np.ones(graph.inputs[0].shape, np.float32)
    with HybridSession(graph, plan=replace(plan, **other[change])) as session:
        np.testing.assert_array_equal(session.run(None, {"X": x})[0], run_plain(model, {"X": x})[0])
        assert packed_bytes() == before


def test_what_native_kernels_refuse_runs_on_those_of_onnxruntime(caplog: pytest.LogCaptureFixture) -> None:
    """A plan file may name an operator whose weights are inputs; a warning names it."""
    cell = Cell("GRU", optional="")
    weights = cell.weights()
    model = cell.model(weights)
    [tensor] = [t for t in model.graph.initializer if t.name == "R"]
    model.graph.initializer.remove(tensor)
    del model.graph.input[:], model.graph.output[:]
    shapes = {"X": [3, 2, 5], "R": [1, 18, 6]}
    model.graph.input.extend(value(name, FLOAT, shape) for name, shape in shapes.items())
    model.graph.node.append(node("Relu", ["Y"], ["y"], "relu"))
    model.graph.output.append(value("y", FLOAT, [3, 1, 2, 6]))
    graph, feed = load(model), cell.feed(3, 2) | {"R": weights["R"]}
    with HybridSession(graph, plan=native_plan(graph)) as session:
        np.testing.assert_array_equal(session.run(None, feed)[0], run_plain(model, feed)[0])
    assert "GRU 'cell' has no constant R" in caplog.text


def test_a_plan_file_keeps_the_kernels(tmp_path: Path) -> None:
    """Files of plans without them have none."""
    graph = load(stack())
    plan = native_plan(graph)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").native == plan.native == recurrent(graph)
    content = plan.to_json()
    del content["native"]
    assert Plan.from_json(content).native == ()


@pytest.mark.parametrize("native", [0.5, 0.99, 2.0])
def test_the_faster_kernel_is_chosen(native: float) -> None:
    """The plan is predicted with it; the whole model without a plan runs on onnxruntime's."""
    graph = load(stack(chunk=2))
    measured = made_profile(graph, native)
    plain = partition(graph, made_profile(graph, 2.0))
    plan = partition(graph, measured)
    assert plan.cpu_only == plain.cpu_only
    if native == 0.5:
        assert set(plan.native) == set(recurrent(plan.apply(graph)))
        assert plan.predicted.latency_ms < plain.predicted.latency_ms
    else:
        assert plan.native == ()
        assert plan.predicted == plain.predicted


@pytest.mark.parametrize(
    ("native_ms", "chosen"), [((0.9, 0.9), True), ((0.9, 1.1), False), ((1.1, 0.9), False), ((), False)]
)
def test_a_kernel_is_faster_however_many_cores_are_busy(native_ms: tuple[float, ...], *, chosen: bool) -> None:
    """Lanes run beside each other, and one measurement alone may be disturbed."""
    assert OperatorCost("LSTM", (1.0, 1.0), native_ms=native_ms).is_native == chosen


@pytest.mark.parametrize(("native", "wide"), [(2.0, 0.5), (0.9, 0.5), (0.5, 0.9)])
def test_units_are_divided_among_cores_where_that_is_faster(native: float, wide: float) -> None:
    """The native kernel of a layer runs on both cores if that takes the least time, and computes the same."""
    model = stack()
    graph = load(model)
    plan = partition(graph, made_profile(graph, native, wide))
    names = {name: i for i, name in enumerate(plan.operators)}
    widths = {plan.schedule.width(names[name]) for name in plan.native}
    assert set(plan.native) == set(recurrent(plan.apply(graph)))
    assert widths == {2 if wide < native else 1}
    plan = replace(plan, machine=native_plan(graph).machine)
    x = np.random.default_rng(1).standard_normal(graph.inputs[0].shape).astype(np.float32)
    with HybridSession(graph, plan=plan, strict=True) as session:
        for _ in range(5):
            np.testing.assert_allclose(session.run(None, {"X": x})[0], run_plain(model, {"X": x})[0], atol=2e-6)


@pytest.mark.parametrize(("share", "wide", "proposed"), [(0.9, 0.5, True), (0.88, 0.5, False), (0.9, 0.89, False)])
def test_a_plan_on_all_cores_is_timed_beside_narrow_lanes(share: float, wide: float, *, proposed: bool) -> None:
    """If these are predicted at most 13 % faster, and the native kernels are faster on both cores."""
    graph = load(stack())
    measured = made_profile(graph, 0.9, wide)
    split = Planner(graph, measured).on_all_cores(Limits())
    assert split
    assert set(split.schedule.widths) == {2}
    assert len(split.segments) == 1
    narrow = partition(graph, made_profile(graph, 0.9))
    predicted = replace(narrow.predicted, latency_ms=share * split.predicted.latency_ms)
    found = split_plan(graph, measured, PlanOptions(), [replace(narrow, predicted=predicted)])
    assert found == (split if proposed else None)
    assert split_plan(graph, measured, PlanOptions(), [split]) is None


def test_a_profile_file_keeps_the_times(tmp_path: Path) -> None:
    """Also for chunks of lengths between those that were measured."""
    measured = made_profile(load(stack()), 0.5, 0.25)
    measured.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == measured


def test_both_kernels_are_measured() -> None:
    """For each number of busy cores, and for all chunk lengths of a plan."""
    graph = load(stack())
    measured = profile(graph, fresh=True)
    for signature, cost in measured.operators.items():
        assert len(cost.native_ms) == (measured.cores if cost.op_type == "LSTM" else 0), signature
        assert all(ms > 0 for ms in cost.native_ms + cost.native_wide_ms)
