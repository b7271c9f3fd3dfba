"""Tests that the model runs plain after any exception of a library while it is loaded, profiled, planned or tuned."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnxruntime.capi.onnxruntime_pybind11_state import Fail

import chrion
from chrion import HybridSession, load
from chrion.errors import ModelError, PlanError
from chrion.scheduler import fixed_plan
from helpers import (
    FLOAT,
    INT64,
    alternating_lanes,
    assert_equal,
    branches,
    free_branches,
    make_model,
    node,
    run_plain,
    value,
)

X = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)
ERRORS = [
    RuntimeError("unexpected"),
    KeyError("unexpected"),
    AssertionError(),
    RecursionError("unexpected"),
    MemoryError(),
    Fail("unexpected"),
]
#: The function of each step, under the name by which the previous step calls it.
STEPS = {
    "read": "chrion.graph.reading._read",
    "optimise": "chrion.graph.loader.optimise_model",
    "infer types": "chrion.graph.loader.infer_types",
    "read captures": "chrion.graph.assemble.node_reads",
    "build the graph": "chrion.graph.loader.assemble",
    "read again": "chrion.runtime.selection.admission.read_model",
    "load": "chrion.runtime.selection.admission.load",
    "probe the options": "chrion.runtime.selection.admission.hidden_reason",
    "unroll": "chrion.profiler.measure_graph.chunk_choices",
    "describe the machine": "chrion.runtime.selection.selector.this_machine",
    "profile": "chrion.runtime.selection.selector.profile",
    "recall the decision": "chrion.runtime.selection.selector.DecisionCache.recall",
    "plan": "chrion.runtime.selection.selector.alternatives",
    "synthesise inputs": "chrion.runtime.selection.selector.synthetic_inputs",
    "tune": "chrion.runtime.selection.selector.compare",
    "keep the decision": "chrion.runtime.selection.selector.DecisionCache.keep",
}
#: The steps of opening a plan.
CUTS = {
    "extract": "chrion.graph.extract.Extractor.extract",
    "find transfers": "chrion.runtime.execution.engine.find_transfers",
    "build the program": "chrion.runtime.execution.engine.build_program",
    "choose cores": "chrion.runtime.execution.lane_groups.assign_cores",
    "open segments": "chrion.runtime.execution.engine.SegmentFactory.open",
    "start the lanes": "chrion.runtime.execution.engine.NativeExecutor",
}


def raising(error: Exception, calls: list[int] | None = None) -> Callable[..., Any]:
    """Return a function that raises an error and counts its calls."""

    def fail(*_: Any, **__: Any) -> None:
        if calls is not None:
            calls.append(1)
        raise error

    return fail


@pytest.fixture(autouse=True)
def _own_decisions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CHRION_CACHE", str(tmp_path))


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("free", [False, True], ids=["fixed", "free"])
def test_a_session_that_plans_runs_plain(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, step: str, error: Exception, *, free: bool
) -> None:
    """Outputs equal plain onnxruntime's, and the reason for the plain session names the error."""
    model = free_branches() if free else branches()
    monkeypatch.setattr(STEPS[step], raising(error))
    with caplog.at_level(logging.CRITICAL), HybridSession(model, ort.SessionOptions()) as session:
        assert_equal(session.run(None, {"x": X}), run_plain(model, {"x": X}))
        assert session.plan is None
        assert type(error).__name__ in session.explain()


@pytest.mark.parametrize("free", [False, True], ids=["fixed", "free"])
def test_a_model_that_cannot_be_loaded_again_for_its_shapes_runs_plain(
    monkeypatch: pytest.MonkeyPatch, *, free: bool
) -> None:
    """The model runs plain if loading it for the shapes of a request fails, although loading the model succeeded."""
    model = free_branches() if free else branches()
    with HybridSession(model) as session:
        monkeypatch.setattr("chrion.runtime.engines.load", raising(IndexError("unexpected")))
        assert_equal(session.run(None, {"x": X}), run_plain(model, {"x": X}))
        assert ("IndexError: unexpected" in session.explain()) == free


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("step", CUTS)
def test_a_session_whose_plan_cannot_be_opened_runs_plain(
    monkeypatch: pytest.MonkeyPatch, step: str, error: Exception
) -> None:
    """The model runs plain, also with a given plan; a strict session raises the error."""
    graph = load(branches())
    plan = fixed_plan(graph, alternating_lanes(graph))
    calls: list[int] = []
    monkeypatch.setattr(CUTS[step], raising(error, calls))
    with HybridSession(branches(), plan=plan) as session:
        assert_equal(session.run(None, {"x": X}), run_plain(branches(), {"x": X}))
        assert calls
        # Lane threads replace native lanes that onnxruntime refuses.
        stays = step == "start the lanes" and isinstance(error, RuntimeError)
        assert (session.plan is not None) == stays
        assert stays or type(error).__name__ in session.explain()
    if not stays:
        with pytest.raises(type(error)):
            HybridSession(branches(), plan=plan, strict=True)


def test_errors_of_the_caller_are_raised(tmp_path: Path) -> None:
    """A plan for another model is refused, and an exception of the caller's planning function is raised."""
    other = load(make_model([node("Relu", ["x"], ["y"])], [value("x", FLOAT, [2])], [value("y", FLOAT, [2])]))
    with pytest.raises(PlanError):
        HybridSession(branches(), plan=fixed_plan(other, [1]))
    with pytest.raises(ZeroDivisionError):
        HybridSession(branches(), plan=raising(ZeroDivisionError("mine")))
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(PlanError):
        HybridSession(branches(), plan=tmp_path / "plan.json")


@pytest.mark.parametrize("shape", [[], [2, 4]], ids=["scalar", "matrix"])
def test_default_session_options_on_a_model_of_one_operator(shape: list[int]) -> None:
    """A model that cannot be cut runs with default session options."""
    model = make_model([node("Exp", ["x"], ["y"])], [value("x", FLOAT, shape)], [value("y", FLOAT, shape)])
    x = np.full(shape, 0.5, np.float32)
    with HybridSession(model, ort.SessionOptions(), providers=["CPUExecutionProvider"]) as session:
        assert_equal(session.run(None, {"x": x}), run_plain(model, {"x": x}))
        assert "one segment" in session.explain()


def test_scalar_inputs_are_measured() -> None:
    """Operators that read a scalar input, such as a temperature, have costs, and candidates are timed with it."""
    nodes = [node("Mul", ["x", "t"], ["a"], name="a"), node("Exp", ["x"], ["b"], name="b"), node("Add", "ab", ["y"])]
    model = make_model(nodes, [value("x", FLOAT, [2, 4]), value("t", FLOAT, [])], [value("y", FLOAT, [2, 4])])
    graph = load(model)
    assert set(chrion.profile(graph).operators) >= set(graph.dag.signatures)
    feed = {"x": X, "t": np.array(0.5, np.float32)}
    with HybridSession(model) as session:
        assert_equal(session.run(None, feed), run_plain(model, feed))
        assert "could be timed" not in session.explain()


def test_unsuitable_synthetic_inputs_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """If no candidate runs with the synthetic inputs, the reason says so."""
    monkeypatch.setattr(
        "chrion.runtime.selection.selector.synthetic_inputs", lambda _: {"x": np.zeros((9, 9), np.float32)}
    )
    monkeypatch.setattr(
        "chrion.runtime.selection.selector.alternatives",
        lambda graph, *_, **__: (fixed_plan(graph, alternating_lanes(graph)),),
    )
    with HybridSession(branches()) as session:
        assert_equal(session.run(None, {"x": X}), run_plain(branches(), {"x": X}))
        assert "no candidate could be timed on synthetic inputs (InvalidArgument" in session.explain()


def zip_map() -> onnx.ModelProto:
    """Return a classifier whose output is a sequence of maps, as most converters of classical models write it."""
    scores = onnx.ValueInfoProto(name="p")
    kind = scores.type.sequence_type.elem_type.map_type
    kind.key_type, kind.value_type.tensor_type.elem_type = INT64, FLOAT
    nodes = [
        node("Softmax", ["x"], ["s"]),
        node("ZipMap", ["s"], ["p"], domain="ai.onnx.ml", classlabels_int64s=[3, 5, 7, 9]),
    ]
    model = make_model(nodes, [value("x", FLOAT, ["n", 4])], [scores])
    model.opset_import.add(domain="ai.onnx.ml", version=1)
    return model


def test_sequences_of_maps_run_plain() -> None:
    """A model with an output of maps runs plain, and loading it as a graph raises an error that names the output."""
    (expected,) = run_plain(zip_map(), {"x": X})
    with HybridSession(zip_map()) as session:
        assert session.run(None, {"x": X}) == [expected]
        assert "value 'p' is a seq(map(int64,tensor(float)))" in session.explain()
    with pytest.raises(ModelError, match=r"seq\(map\(int64"):
        load(zip_map())


def test_sequences_of_maps_are_copied_from_a_binding() -> None:
    """A sequence of maps is copied from a binding as by plain onnxruntime."""
    (expected,) = run_plain(zip_map(), {"x": X})
    with HybridSession(zip_map()) as session:
        binding = session.io_binding()
        binding.bind_cpu_input("x", X)
        binding.bind_output("p")
        session.run_with_iobinding(binding)
        assert binding.copy_outputs_to_cpu() == [expected]
