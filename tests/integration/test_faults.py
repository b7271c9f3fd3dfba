"""Tests of faults of the accelerator: the session warns and continues without it, or raises if it is strict.

The CPU provider stands for the accelerator, and faults are injected into its calls.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnxruntime.capi import onnxruntime_pybind11_state as errors
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, RuntimeException

from chrion import Graph, HybridSession, Plan, Profile, load
from chrion.errors import ProviderError
from chrion.runtime.execution.cut_engine import CutEngine
from chrion.runtime.execution.plain_engine import PlainEngine
from chrion.scheduler import fixed_plan
from helpers import FLOAT, INT64, assert_same_as_plain, branches, make_model, node, value
from seams.execution import engine_of, fail, fail_provider, select_by

CPU = "CPUExecutionProvider"
X = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)
Session = Callable[..., HybridSession]


@pytest.fixture
def graph() -> Graph:
    """Return a graph of two branches."""
    return load(branches())


@pytest.fixture
def opened(graph: Graph) -> Iterator[Session]:
    """Return a function that creates sessions of a plan with one branch on the accelerator."""
    sessions: list[HybridSession] = []

    def make(**config: Any) -> HybridSession:
        plan = fixed_plan(graph, [0, 1, 0, 1], accelerator=CPU)
        sessions.append(HybridSession(graph, plan=plan, **config))
        return sessions[-1]

    yield make
    for session in sessions:
        session.close()


AT_LOAD = [
    RuntimeException("Failed to allocate memory for requested buffer of size 4096"),
    errors.NotImplemented("Could not find an implementation for Relu(14) node with name 'left'"),
    Fail("CUDA failure 100: no CUDA-capable device is detected"),
    ProviderError("the provider does not run all operators of its segments: 'left' on CPUExecutionProvider"),
]


@pytest.mark.parametrize("error", AT_LOAD, ids=["memory full", "kernel missing", "no device", "elsewhere"])
def test_a_fault_at_load(
    opened: Session, error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The CPU serves requests, and the warning and ``explain`` give the reason. A strict session raises the error."""
    fail(monkeypatch, "open on the accelerator", error)
    with pytest.raises(ProviderError, match=str(error)[:20]):
        opened(strict=True)
    with caplog.at_level(logging.WARNING):
        session = opened()
    assert str(error) in caplog.text
    assert str(error) in session.explain()
    for _ in range(2):
        assert_same_as_plain(session, branches(), {"x": X})


def test_a_provider_that_does_not_start(
    graph: Graph, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The warning contains the provider's reason and what to install, and the given plan is not executed."""
    fail_provider(monkeypatch, "libcudart.so.13: cannot open shared object file")
    plan = fixed_plan(graph, [0, 1, 0, 1], accelerator="CUDAExecutionProvider")
    with pytest.raises(ProviderError, match=r"libcudart.*chrion\[cuda\]"):
        HybridSession(graph, plan=plan, strict=True)
    with caplog.at_level(logging.WARNING), HybridSession(graph, plan=plan) as session:
        assert session.plan is None
        assert_same_as_plain(session, branches(), {"x": X})
    assert "libcudart" in caplog.text


def test_a_plan_of_one_segment_needs_its_accelerator(
    graph: Graph, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A plan with the whole model on an accelerator that is missing is refused like any other plan for it."""
    fail_provider(monkeypatch, "no driver")
    plan = fixed_plan(graph, [0] * 4, accelerator="CUDAExecutionProvider")
    assert len(plan.segments) == 1
    with pytest.raises(ProviderError, match="CUDAExecutionProvider does not work on this machine: no driver"):
        HybridSession(graph, plan=plan, strict=True)
    with caplog.at_level(logging.WARNING), HybridSession(graph, plan=plan) as session:
        assert "no driver" in session.explain()
        assert_same_as_plain(session, branches(), {"x": X})
    assert "no driver" in caplog.text


AT_RUN = [
    (RuntimeException("CUDA failure 2: out of memory"), 0),
    (Fail("device lost"), 3),
    (RuntimeError("device lost"), 0),
]


@pytest.mark.parametrize(("error", "after"), AT_RUN, ids=["memory full", "lost later", "lost otherwise"])
def test_a_fault_during_a_run(
    opened: Session, error: Exception, after: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The CPU serves the request, and all later ones without another attempt on the accelerator."""
    session, strict = opened(), opened(strict=True)
    fail(monkeypatch, "run on the accelerator", error, after)
    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            assert_same_as_plain(session, branches(), {"x": X})
    assert caplog.text.count("the model runs on the CPU") == 1
    assert str(error) in session.explain()
    assert session.get_providers() == [CPU]
    with pytest.raises(type(error), match=f"operator.*{error}"):
        strict.run(None, {"x": X})


def test_a_fault_while_buffers_are_allocated(opened: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed allocation during a request is a fault of the accelerator."""
    session, strict = opened(), opened(strict=True)
    fail(monkeypatch, "keep a buffer", RuntimeException("out of memory"))
    with pytest.raises(RuntimeException, match="out of memory"):
        strict.run(None, {"x": X})
    assert_same_as_plain(session, branches(), {"x": X})
    assert "out of memory" in session.explain()


def test_a_fault_with_bound_outputs(opened: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU serves ``run_with_iobinding``, too, and writes to the caller's buffer."""
    session = opened()
    fail(monkeypatch, "run on the accelerator", Fail("device lost"))
    target = ort.OrtValue.ortvalue_from_numpy(np.zeros((2, 4), np.float32))
    binding = session.io_binding()
    binding.bind_cpu_input("x", X)
    binding.bind_ortvalue_output("y", target)
    session.run_with_iobinding(binding)
    expected = ort.InferenceSession(branches().SerializeToString(), providers=[CPU]).run(["y"], {"x": X})[0]
    np.testing.assert_allclose(target.numpy(), expected, rtol=1e-5)


def gather() -> onnx.ModelProto:
    """Return a model whose caller chooses indices."""
    nodes = [node("Relu", ["x"], ["a"]), node("Gather", ["a", "i"], ["y"], axis=1)]
    return make_model(nodes, [value("x", FLOAT, [2, 4]), value("i", INT64, [2])], [value("y", FLOAT, [2, 2])])


def test_an_invalid_request_is_not_a_fault_of_the_accelerator(caplog: pytest.LogCaptureFixture) -> None:
    """An index out of range raises, as in plain onnxruntime, and the next request is served by the plan."""
    graph = load(gather())
    with HybridSession(graph, plan=fixed_plan(graph, [1, 0], accelerator=CPU)) as session:
        with pytest.raises(RuntimeError, match="indices element out of data bounds"):
            session.run(None, {"x": X, "i": np.array([0, 9])})
        assert isinstance(engine_of(session), CutEngine)
        assert_same_as_plain(session, gather(), {"x": X, "i": np.array([0, 3])})
        assert isinstance(engine_of(session), CutEngine)
    assert not caplog.text


@pytest.mark.usefixtures("short_planning")
def test_a_session_that_made_its_plan_plans_again_on_the_cpu(
    graph: Graph, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """The guard selects again among the candidates on the CPU, with the costs that were measured."""
    monkeypatch.setenv("CHRION_CACHE", str(tmp_path))
    select_by(monkeypatch, planned)
    with HybridSession(graph, providers=[CPU]) as session:
        assert session.plan is not None
        assert session.plan.accelerator == CPU
        fail(monkeypatch, "run on the accelerator", Fail("device lost"))
        assert_same_as_plain(session, branches(), {"x": X})
        assert session.plan is not None
        assert session.plan.accelerator is None
        assert "device lost" in session.explain()
        assert_same_as_plain(session, branches(), {"x": X})


def planned(graph: Graph, profile: Profile) -> Plan:
    """Return a plan on the accelerator if the profile has one."""
    lanes = [2, 1, 2, 1] if profile.accelerator is None else [0, 1, 0, 1]
    return fixed_plan(graph, lanes, accelerator=profile.accelerator)


def test_a_plain_session_on_an_accelerator_falls_back(graph: Graph) -> None:
    """After a fault of a model that runs plain on the accelerator, the CPU serves all requests."""
    with HybridSession(graph, plan=fixed_plan(graph, [1, 1, 1, 1])) as session:
        plain = engine_of(session)
        assert isinstance(plain, PlainEngine)
        plain.accelerated, plain.session = True, Broken()
        for _ in range(2):
            assert_same_as_plain(session, branches(), {"x": X})
        assert "device lost" in session.explain()


class Broken:
    """Stands for a session whose device has failed."""

    def run(self, *_: object) -> None:
        raise Fail("device lost")


def test_a_strict_session_raises_if_its_plan_cannot_be_opened(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ``strict``, the model runs plain, as ``test_library_errors.py`` tests."""
    fail(monkeypatch, "open segments", Fail("no"))
    with pytest.raises(Fail, match="no"):
        HybridSession(graph, plan=fixed_plan(graph, [1, 2, 1, 2]), strict=True)
