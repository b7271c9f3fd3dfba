"""Sessions and commands that multiply in bfloat16."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from chrion import Graph, HybridSession, Plan, Profile, load, partition, profile
from chrion.errors import OptionError
from chrion.graph.opened_model import OpenedModel
from chrion.native import bfloat16_available
from chrion.profiler import Machine, OperatorCost
from chrion.profiler.machine import this_machine
from chrion.profiler.precision import relative_error
from chrion.runtime.selection.configuration import SessionConfig
from chrion.scheduler import fixed_plan
from chrion.zoo import RecurrentSpec, build_recurrent
from helpers import FLOAT, alternating_lanes, make_model, node, run_plain, value
from seams.sessions import replace_step

needs_bfloat16 = pytest.mark.skipif(not bfloat16_available(), reason="the processor does not multiply bfloat16")
LAYERS, ERROR = 3, 0.003


def stack(layers: int = LAYERS) -> onnx.ModelProto:
    """Return a small stack of recurrent layers."""
    return build_recurrent(RecurrentSpec(cell="LSTM", layers=layers, batch=1, io=32, seq=8, chunk=8))


def recurrent(graph: Graph) -> tuple[str, ...]:
    """Return the names of the recurrent operators of a graph."""
    return tuple(name for name, kind in zip(graph.dag.names, graph.dag.op_types, strict=True) if kind == "LSTM")


def made_profile(graph: Graph, native: float = 0.5, machine: Machine | None = None) -> Profile:
    """Return a profile in bfloat16, whose kernels take a multiple of the time of onnxruntime's."""
    costs = {
        signature: OperatorCost(kind, (1.0, 1.0), native_ms=(native, native), native_error=ERROR)
        if kind == "LSTM"
        else OperatorCost(kind, (0.01, 0.01))
        for signature, kind in zip(graph.dag.signatures, graph.dag.op_types, strict=True)
    }
    return Profile(machine or Machine("a CPU", 2, 1000.0, "a system", "1.0"), 2, None, costs, precision="bf16")


def rounded_plan(graph: Graph) -> Plan:
    """Return a plan of two lanes in bfloat16."""
    plan = fixed_plan(graph, alternating_lanes(graph))
    return replace(plan, native=recurrent(graph), precision="bf16", expected_error=ERROR)


@pytest.fixture
def without_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test as on a processor that does not multiply bfloat16."""
    monkeypatch.setattr("chrion.native.bfloat16_available", lambda: False)


def test_a_plan_states_precision_and_error(tmp_path: Path) -> None:
    """The errors of layers add up as independent ones do; a file keeps both, and an older one is in float32."""
    graph = load(stack())
    plan = partition(graph, made_profile(graph))
    assert plan.precision == "bf16"
    assert plan.expected_error == pytest.approx(ERROR * LAYERS**0.5)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    content = plan.to_json()
    del content["precision"], content["expected_error"]
    older = Plan.from_json(content)
    assert (older.precision, older.expected_error, older.native) == ("float32", 0.0, plan.native)


def test_a_plan_without_a_gain_says_so() -> None:
    """A model without such operators, and one whose operators are slower in bfloat16, stay in float32."""
    graph = load(stack())
    other = load(make_model([node("Relu", ["x"], ["y"], "relu")], [value("x", FLOAT, [4])], [value("y", FLOAT, [4])]))
    for model, costs in ((graph, made_profile(graph, native=2.0)), (other, made_profile(other))):
        plan = partition(model, costs)
        assert (plan.precision, plan.expected_error) == ("float32", 0.0)
        assert "bf16 changes nothing" in " ".join(plan.remarks)


def test_a_profile_file_keeps_the_precision(tmp_path: Path) -> None:
    """An older one is in float32."""
    measured = made_profile(load(stack()))
    measured.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == measured
    content = json.loads(measured.to_json())
    del content["precision"]
    (tmp_path / "older.json").write_text(json.dumps(content))
    assert Profile.load(tmp_path / "older.json").precision == "float32"


@needs_bfloat16
def test_a_plan_in_bfloat16_computes_with_its_error() -> None:
    """Its outputs are not those of float32, but near; explain() states it, and another machine runs float32."""
    model = stack()
    graph = load(model)
    x = np.random.default_rng(1).standard_normal(graph.inputs[0].shape).astype(np.float32)
    expected = run_plain(model, {"X": x})
    with HybridSession(graph, plan=rounded_plan(graph)) as session:
        assert 0 < relative_error(session.run(None, {"X": x}), expected) < 0.02
        assert "bf16: 3 of" in session.explain()
    plan = rounded_plan(graph)
    with HybridSession(graph, plan=replace(plan, machine=replace(plan.machine, cpu="another"))) as session:
        assert relative_error(session.run(None, {"X": x}), expected) == 0
        assert "bf16: not on this machine" in session.explain()


@needs_bfloat16
def test_a_plan_of_one_segment_runs_on_native_kernels() -> None:
    """A single layer gains from the kernel alone."""
    model = stack(layers=1)
    graph = load(model)
    plan = replace(fixed_plan(graph, [1] * len(graph.dag)), native=recurrent(graph), precision="bf16")
    assert len(plan.segments) == 1
    x = np.ones(graph.inputs[0].shape, np.float32)
    with HybridSession(graph, plan=plan, strict=True) as session:
        assert session.plan == plan
        assert 0 < relative_error(session.run(None, {"X": x}), run_plain(model, {"X": x})) < 0.02


@needs_bfloat16
def test_both_precisions_are_measured_apart() -> None:
    """The cache of measurements does not mix them."""
    graph = load(stack())
    rounded, exact = profile(graph, precision="bf16"), profile(graph)
    assert (rounded.precision, exact.precision) == ("bf16", "float32")
    for signature, cost in rounded.operators.items():
        assert (0 < cost.native_error < 0.02) == (cost.op_type == "LSTM"), signature
        assert not exact.operators[signature].native_error


@pytest.mark.usefixtures("without_instructions")
def test_a_machine_without_instructions_stays_in_float32() -> None:
    """The plan says why."""
    graph = load(stack())
    measured = profile(graph, precision="bf16")
    assert measured.precision == "float32"
    plan = partition(graph, measured)
    assert plan.precision == "float32"
    assert "float32 instead of bf16: this processor has no AVX512-BF16" in " ".join(plan.remarks)


@needs_bfloat16
@pytest.mark.parametrize("limit", [1e-7, 0.05])
def test_a_limit_of_the_error(limit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans beyond it are replaced by those in float32, for the reason that explain() gives."""

    def measure(graph: Graph, *_: object, precision: str, **__: object) -> Profile:
        made = made_profile(graph, 0.01 if precision == "bf16" else 2.0, this_machine())
        return made if precision == "bf16" else replace(made, precision="float32")

    replace_step(monkeypatch, "profile", measure)
    with HybridSession(stack(layers=6), tune="now", precision="bf16", max_error=limit) as session:
        session.run(None, {"X": np.zeros((8, 1, 32), np.float32)})
        explanation = session.explain()
        assert session.plan is None or session.plan.precision == ("float32" if limit < 1e-6 else "bf16")
    assert "error of bf16 0." in explanation
    assert ("float32 in place of bf16" in explanation) == (limit < 1e-6)


def test_a_limit_of_the_error_is_decided_for_each_model() -> None:
    """The error depends on the values of weights: a retrained model has the same decisions, but not with a limit."""
    first, second = stack(), stack()
    weight = max(second.graph.initializer, key=lambda tensor: len(tensor.raw_data))
    weight.CopyFrom(numpy_helper.from_array(2 * numpy_helper.to_array(weight), weight.name))
    models = [OpenedModel(model.SerializeToString()) for model in (first, first, second)]
    assert len({model.digest for model in models}) == 1
    for limit, decisions in ((None, 1), (0.05, 2)):
        keys = {SessionConfig(model, precision="bf16", max_error=limit).decision_key for model in models}
        assert len(keys) == decisions


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"precision": "fp8"}, "precision: expected float32 or bf16, found 'fp8'"),
        ({"max_error": 0.1}, "max_error: not allowed without precision bf16"),
        ({"precision": "bf16", "max_error": 0.0}, "max_error: expected a share of the largest output, such as"),
        (
            {"precision": "bf16", "max_error": float("nan")},
            "max_error: expected a share of the largest output, such as",
        ),
    ],
)
def test_wrong_arguments(arguments: dict[str, object], message: str) -> None:
    """They are refused before a session is opened."""
    with pytest.raises(OptionError, match=message):
        HybridSession(stack(), **arguments)


def test_the_error_is_relative_to_the_largest_output() -> None:
    """It is infinite where only one side is finite; integers do not count."""
    right = np.array([1.0, -4.0, np.nan, np.inf])
    assert relative_error([[*right[:1], -3.0, *right[2:]], np.array([1])], [right, np.array([2])]) == 0.25
    assert relative_error([np.ones(4)], [right]) == np.inf
    assert relative_error([np.zeros(2)], [np.zeros(2)]) == 0
    assert relative_error([np.ones(2)], [np.zeros(2)]) == np.inf
    assert relative_error([np.array([-np.inf])], [np.array([np.inf])]) == np.inf
    assert relative_error([np.array([np.nan])], [np.ones(1)]) == np.inf
