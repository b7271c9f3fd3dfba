"""Tests that the model runs plain after any exception of a library while it is loaded, profiled, planned or tuned."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnxruntime.capi.onnxruntime_pybind11_state import Fail

import chrion
from chrion import HybridSession, load
from chrion.errors import ModelError, PlanError
from chrion.runtime.selection.decisions import Decision
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
from seams.sessions import OPENING_STEPS, SELECTION_STEPS, decide_by, fail_at, replace_step
from tuning_support import alternate, invented_profile

X = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)
ERRORS = [
    RuntimeError("unexpected"),
    KeyError("unexpected"),
    AssertionError(),
    RecursionError("unexpected"),
    MemoryError(),
    Fail("unexpected"),
]
#: Each step with two of the errors.
PAIRS = [(step, ERRORS[(at + shift) % len(ERRORS)]) for at, step in enumerate(SELECTION_STEPS) for shift in (0, 3)]


@pytest.fixture(autouse=True)
def _own_decisions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CHRION_CACHE", str(tmp_path))


@pytest.mark.parametrize(
    ("step", "error"), PAIRS, ids=lambda given: given if isinstance(given, str) else type(given).__name__
)
def test_a_session_that_plans_runs_plain(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, step: str, error: Exception
) -> None:
    """Outputs equal plain onnxruntime's, and the reason for the plain session names the error."""
    if step != "unroll":  # a step of the profile
        replace_step(monkeypatch, "profile", invented_profile)
    options = ort.SessionOptions() if step in {"read again", "probe the options"} else None
    calls = fail_at(monkeypatch, step, error)
    model = free_branches() if PAIRS.index((step, error)) % 2 else branches()
    with caplog.at_level(logging.CRITICAL), HybridSession(model, options) as session:
        assert_equal(session.run(None, {"x": X}), run_plain(model, {"x": X}))
        assert session.plan is None
        assert type(error).__name__ in session.explain()
    assert calls


@pytest.mark.parametrize("free", [False, True], ids=["fixed", "free"])
def test_a_model_that_cannot_be_loaded_again_for_its_shapes_runs_plain(
    monkeypatch: pytest.MonkeyPatch, *, free: bool
) -> None:
    """The model runs plain if loading it for the shapes of a request fails, although loading the model succeeded."""
    model = free_branches() if free else branches()
    decide_by(monkeypatch, lambda _: Decision("plain", None, "by the test"))
    with HybridSession(model) as session:
        fail_at(monkeypatch, "load", IndexError("unexpected"))
        assert_equal(session.run(None, {"x": X}), run_plain(model, {"x": X}))
        assert ("IndexError: unexpected" in session.explain()) == free


def test_a_session_whose_plan_cannot_be_opened_runs_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model runs plain, also with a given plan; a strict session raises the error."""
    graph = load(branches())
    plan = fixed_plan(graph, alternating_lanes(graph))
    expected = run_plain(branches(), {"x": X})
    # Lane threads replace native lanes that onnxruntime refuses.
    refused = [("start the lanes", error) for error in ERRORS if isinstance(error, RuntimeError)]
    for step, error in [
        *zip(OPENING_STEPS, ERRORS, strict=True),
        ("start the lanes", KeyError("unexpected")),
        *refused,
    ]:
        case = f"{type(error).__name__} at: {step}"
        stays = (step, error) in refused
        with monkeypatch.context() as patch:
            calls = fail_at(patch, step, error)
            with HybridSession(branches(), plan=plan) as session:
                assert_equal(session.run(None, {"x": X}), expected)
                assert calls, case
                assert (session.plan is not None) is stays, case
                assert stays or type(error).__name__ in session.explain(), case
            if not stays:
                with pytest.raises(type(error)):
                    HybridSession(branches(), plan=plan, strict=True)


def test_errors_of_the_caller_are_raised(tmp_path: Path) -> None:
    """A plan for another model is refused, and an exception of the caller's planning function is raised."""
    other = load(make_model([node("Relu", ["x"], ["y"])], [value("x", FLOAT, [2])], [value("y", FLOAT, [2])]))
    with pytest.raises(PlanError):
        HybridSession(branches(), plan=fixed_plan(other, [1]))
    with pytest.raises(ZeroDivisionError):
        HybridSession(branches(), plan=lambda _: 1 / 0)  # type: ignore[arg-type,return-value]
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(PlanError):
        HybridSession(branches(), plan=tmp_path / "plan.json")


@pytest.mark.parametrize("shape", [[], [2, 4]], ids=["scalar", "matrix"])
def test_default_session_options_on_a_model_of_one_operator(monkeypatch: pytest.MonkeyPatch, shape: list[int]) -> None:
    """A model that cannot be cut runs with default session options."""
    replace_step(monkeypatch, "profile", invented_profile)
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
    replace_step(monkeypatch, "synthesise inputs", lambda _: {"x": np.zeros((9, 9), np.float32)})
    replace_step(monkeypatch, "profile", invented_profile)
    replace_step(monkeypatch, "plan", lambda graph, *_, **__: (alternate(graph).plan,))
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
