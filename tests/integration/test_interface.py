"""Tests that HybridSession has the interface of InferenceSession: equal methods, arguments and refused calls."""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnxruntime.capi.onnxruntime_pybind11_state import Fail

from chrion import HybridSession, load
from chrion.runtime.interface import NOT_OFFERED
from chrion.runtime.iobinding import HybridIOBinding
from chrion.scheduler import fixed_plan
from helpers import (
    FLOAT,
    alternating_lanes,
    assert_equal,
    branches,
    free_branches,
    make_model,
    node,
    run_plain,
    value,
)
from seams.execution import fail, strictness

X = np.linspace(-2, 2, 8, dtype=np.float32).reshape(2, 4)
Session = ort.InferenceSession | HybridSession
#: Methods of onnxruntime's IOBinding that Chrion's does not have, with the reasons.
BINDING_NOT_OFFERED = {"get_outputs_as_ortvaluevector": "get_outputs gives the same values"}


def public(kind: type) -> list[str]:
    """Return public methods, including inherited ones."""
    return [name for name, _ in inspect.getmembers(kind, callable) if not name.startswith("_")]


def parameters(method: Callable[..., Any]) -> list[tuple[str, Any]]:
    """Return names and defaults; vendor ids are enumerations in one class and numbers in the other."""
    found = [p for p in inspect.signature(method).parameters.values() if p.kind is not p.KEYWORD_ONLY]
    return [(p.name, p.default) for p in found]


# Methods and arguments.


def test_every_method_is_offered_or_has_a_reason() -> None:
    """A method has the same arguments in the same order, or its AttributeError gives the reason for its absence."""
    with open_session("cut") as session:
        for name in public(ort.InferenceSession):
            if name not in NOT_OFFERED:
                assert parameters(getattr(HybridSession, name)) == parameters(getattr(ort.InferenceSession, name)), name
                continue
            assert not hasattr(HybridSession, name), f"{name} is offered after all"
            with pytest.raises(AttributeError, match=re.escape(NOT_OFFERED[name])):
                getattr(session, name)


def test_a_plain_session_offers_every_method() -> None:
    """While the model runs plain, every method is that of its plain session."""
    with open_session("plain") as session:
        assert session.plan is None
        assert [getattr(session, name).__name__ for name in NOT_OFFERED] == list(NOT_OFFERED)


def test_reasons_are_for_methods_that_exist() -> None:
    """Every method that is not offered exists in onnxruntime."""
    assert set(NOT_OFFERED) <= set(public(ort.InferenceSession))
    assert set(BINDING_NOT_OFFERED) <= set(public(ort.IOBinding))


def test_the_constructor_takes_the_same_arguments() -> None:
    """Arguments have the same order, and additional ones are keyword-only."""
    assert parameters(HybridSession.__init__) == parameters(ort.InferenceSession.__init__)


def test_every_method_of_a_binding_is_offered_or_has_a_reason() -> None:
    """A method of a binding has the same arguments, or its AttributeError gives the reason for its absence."""
    for name in public(ort.IOBinding):
        if name in BINDING_NOT_OFFERED:
            assert not hasattr(HybridIOBinding, name), f"{name} is offered after all"
        else:
            assert parameters(getattr(HybridIOBinding, name)) == parameters(getattr(ort.IOBinding, name)), name


# Invalid calls.


@pytest.fixture(scope="module")
def reference() -> ort.InferenceSession:
    """Return a plain session with two threads, without which it has no ``run_async``."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 2
    return ort.InferenceSession(branches().SerializeToString(), options, providers=["CPUExecutionProvider"])


def open_session(kind: str) -> HybridSession:
    """Return a session that is cut over two lanes, runs plain, or has a dimension that the feed fixes."""
    graph = load(branches())
    if kind == "cut":
        return HybridSession(graph, plan=fixed_plan(graph, alternating_lanes(graph)))
    if kind == "plain":
        return HybridSession(graph, plan=fixed_plan(graph, [1] * len(graph.dag)))
    free = load(free_branches())
    return HybridSession(free, plan=fixed_plan(load(free_branches(), {"batch": (2,)}), alternating_lanes(graph)))


@pytest.fixture(scope="module", params=["cut", "plain", "free"])
def hybrid(request: pytest.FixtureRequest) -> Iterator[HybridSession]:
    """Return a session of each kind."""
    with open_session(request.param) as session:
        assert (session.plan is not None) == (request.param == "cut")
        yield session


def as_value(thing: Any) -> Any:
    return ort.OrtValue.ortvalue_from_numpy(thing) if isinstance(thing, np.ndarray) else thing


def by_run(session: Session, names: Any, feed: Any, options: Any) -> None:
    session.run(names, feed, options)


def by_ort_values(session: Session, names: Any, feed: Any, options: Any) -> None:
    values = {n: as_value(v) for n, v in feed.items()} if isinstance(feed, Mapping) else feed
    session.run_with_ort_values(names, values, options)


def by_binding(session: Session, names: Any, feed: Any, options: Any) -> None:
    binding = session.io_binding()
    for name, thing in feed.items():
        binding.bind_ortvalue_input(name, as_value(thing))
    for name in names or ["y"]:
        binding.bind_output(name)
    session.run_with_iobinding(binding, options)


def by_bound_arrays(session: Session, names: Any, feed: Any, options: Any) -> None:
    binding = session.io_binding()
    for name, thing in feed.items():
        binding.bind_cpu_input(name, thing)
    for name in names or ["y"]:
        binding.bind_output(name)
    session.run_with_iobinding(binding, options)


def by_async(session: Session, names: Any, feed: Any, options: Any) -> None:
    """Run asynchronously, and raise the error that the callback receives."""
    received: list[tuple[Any, Any, str]] = []
    done = threading.Event()

    def callback(outputs: Any, user_data: Any, problem: str) -> None:
        received.append((outputs, user_data, problem))
        done.set()

    session.run_async(names, feed, callback, "mine", options)
    assert done.wait(30)
    outputs, user_data, problem = received[0]
    assert user_data == "mine"
    assert bool(problem) == (len(outputs) == 0)
    if problem:
        raise AsyncError(problem)


class AsyncError(Exception):
    """The error that a callback received."""


def terminating() -> ort.RunOptions:
    options = ort.RunOptions()
    options.terminate = True
    return options


WAYS = [by_run, by_ort_values, by_binding, by_bound_arrays, by_async]
#: Invalid calls: outputs, feed and run options, and the text that an error message must contain.
WRONG: dict[str, tuple[Any, Any, Any, str]] = {
    "missing input": (None, {}, None, "x"),
    "unknown input": (None, {"x": X, "zed": X}, None, "zed"),
    "element type": (None, {"x": X.astype(np.float64)}, None, r"x.*float64|x.*double"),
    "rank": (None, {"x": X[0]}, None, "x.*1.*2"),
    "dimension": (None, {"x": X[:, :3].copy()}, None, "x.*3.*4"),
    "unknown output": (["none"], {"x": X}, None, "none"),
    "output names of another type": ([1], {"x": X}, None, "1"),
    "run options of another type": (None, {"x": X}, "fast", ""),
    "terminated": (None, {"x": X}, terminating, "terminate"),
    "no feed": (None, None, None, "None"),
    "a feed without names": (None, [X], None, "list"),
    "a text for an array": (None, {"x": "abc"}, None, "x|array|str"),
    "a number for an array": (None, {"x": 3}, None, "x|array|int"),
    "a tuple for an array": (None, {"x": ((1.0,) * 4,) * 2}, None, "x|array|tuple"),
    "nothing for an array": (None, {"x": None}, None, "x|Missing"),
}


@pytest.mark.parametrize("way", WAYS)
def test_invalid_calls_raise_the_same(
    reference: ort.InferenceSession, hybrid: HybridSession, way: Callable[..., None]
) -> None:
    """Both sessions raise the same type with a message that names the cause, and can be used afterwards."""
    outputs = run_plain(branches(), {"x": X})
    for wrong, (names, feed, options, named) in WRONG.items():
        given = options() if callable(options) else options
        with pytest.raises(Exception) as expected:  # noqa: PT011 - the type is compared below
            way(reference, names, feed, given)
        with pytest.raises(Exception) as caught:  # noqa: PT011 - the type is compared below
            way(hybrid, names, feed, given)
        assert isinstance(caught.value, type(expected.value)), f"{wrong}: {caught.value!r}"
        assert re.search(f"(?s){named}", str(caught.value)), f"{wrong}: {caught.value}"
        assert_equal(hybrid.run(None, {"x": X}), outputs)


@pytest.mark.parametrize("way", WAYS)
def test_valid_calls_are_served(hybrid: HybridSession, way: Callable[..., None]) -> None:
    """Every way to call a session succeeds with valid arguments."""
    way(hybrid, None, {"x": X}, None)
    way(hybrid, ["l"], {"x": X}, ort.RunOptions())


def test_a_closed_session_refuses_every_call() -> None:
    """Every way to call a closed session raises an error that says so."""
    session = open_session("cut")
    session.close()
    for way in WAYS:
        with pytest.raises((RuntimeError, AsyncError), match="closed"):
            way(session, None, {"x": X}, None)


def test_a_binding_of_another_session_is_refused(reference: ort.InferenceSession, hybrid: HybridSession) -> None:
    """A binding of another HybridSession and one of onnxruntime's are refused."""
    with open_session("cut") as other:
        with pytest.raises(ValueError, match="session that created it"):
            hybrid.run_with_iobinding(other.io_binding())
        with pytest.raises(ValueError, match="session that created it"):
            hybrid.run_with_iobinding(reference.io_binding())
    with pytest.raises(ValueError, match="session that created it"):
        reference.run_with_iobinding(ort.InferenceSession(branches().SerializeToString()).io_binding())


def test_a_callback_that_is_not_callable_is_refused(reference: ort.InferenceSession, hybrid: HybridSession) -> None:
    """Both sessions raise immediately if the callback is not callable."""
    for session in (reference, hybrid):
        with pytest.raises(TypeError):
            session.run_async(None, {"x": X}, 5, None)


# The rest of the interface.


def test_outputs_of_the_other_run_methods(hybrid: HybridSession) -> None:
    """OrtValues and the outputs that a callback receives equal plain onnxruntime's outputs."""
    y, left = run_plain(branches(), {"x": X})
    found = hybrid.run_with_ort_values(["l", "y"], {"x": ort.OrtValue.ortvalue_from_numpy(X)})
    assert_equal([v.numpy() for v in found], [left, y])
    done = threading.Event()
    received: list[Any] = []
    hybrid.run_async(["l", "y"], {"x": X}, lambda *given: (received.extend(given), done.set()), 7)
    assert done.wait(30)
    assert_equal(received[0], [left, y])
    assert received[1:] == [7, ""]


def test_options_read_as_they_were_given(hybrid: HybridSession, reference: ort.InferenceSession) -> None:
    """Session options, provider options and the fallback can be read as they were given."""
    assert isinstance(hybrid.get_session_options(), ort.SessionOptions)
    assert hybrid.get_provider_options() == reference.get_provider_options()
    memory = hybrid.create_ortvalue_from_shape_and_type([2, 4], np.float32, "cpu")
    memory.update_inplace(X)
    assert_equal(
        [v.numpy() for v in hybrid.run_with_ort_values(["l"], {"x": memory})], run_plain(branches(), {"x": X}, ["l"])
    )
    hybrid.disable_fallback()
    assert strictness(hybrid) == {True}
    hybrid.enable_fallback()
    assert strictness(hybrid) == {False}


def test_a_terminated_run_raises_what_onnxruntime_raises(hybrid: HybridSession) -> None:
    """A terminated run raises ``Fail``, which is not a RuntimeError."""
    with pytest.raises(Fail, match="terminate"):
        hybrid.run(None, {"x": X}, terminating())


# Attributes that libraries read.


#: Attributes that InferenceSession has by private names, and how to compare them.
PRIVATE: dict[str, Callable[[Any], Any]] = {
    "_model_path": lambda value: value,
    "_model_bytes": lambda value: value,
    "_providers": list,
    "_provider_options": sorted,
    "_inputs_meta": lambda value: [(i.name, i.type, i.shape) for i in value],
    "_outputs_meta": lambda value: [(o.name, o.type, o.shape) for o in value],
    "_overridable_initializers": lambda value: [w.name for w in value],
    "_model_meta": lambda value: value.graph_name,
    "_sess_options": type,
    "_sess": lambda value: (type(value), [i.name for i in value.inputs_meta]),
}


@pytest.mark.parametrize("kind", ["cut", "plain"])
@pytest.mark.parametrize("in_memory", [False, True])
def test_private_attributes_are_those_of_inference_session(tmp_path: Path, kind: str, *, in_memory: bool) -> None:
    """Private attributes are equal for a model in a file and for one in memory."""
    onnx.save(branches(), tmp_path / "model.onnx")
    source: Any = branches().SerializeToString() if in_memory else str(tmp_path / "model.onnx")
    graph, options = load(branches()), ort.SessionOptions()
    plan = fixed_plan(graph, alternating_lanes(graph) if kind == "cut" else [1] * len(graph.dag))
    plain = ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    with HybridSession(source, options, ["CPUExecutionProvider"], plan=plan) as session:
        assert isinstance(session, ort.InferenceSession)
        for name, content in PRIVATE.items():
            assert content(getattr(session, name)) == content(getattr(plain, name)), name
            assert (session.plan is not None) == (kind == "cut"), f"after {name}"


def test_every_private_attribute_can_be_read(hybrid: HybridSession, reference: ort.InferenceSession) -> None:
    """Every attribute that InferenceSession's constructor sets can be read from a HybridSession."""
    assert [name for name in vars(reference) if not hasattr(hybrid, name)] == []


def test_descriptions_can_be_kept_in_sets_and_changed(hybrid: HybridSession) -> None:
    """Descriptions of inputs are hashable, and a caller's change does not affect the session."""
    (info,) = hybrid.get_inputs()
    assert len({info, *hybrid.get_outputs()}) == 3
    info.shape.append(7)
    assert hybrid.get_inputs()[0].shape[-1] == 4


@pytest.mark.parametrize("kind", ["cut", "plain", "free"])
def test_a_closed_session_opens_no_session(kind: str) -> None:
    """Private attributes, ``set_providers`` and onnxruntime's IOBinding are refused after closing."""
    session = open_session(kind)
    binding = ort.IOBinding(session)
    binding.bind_cpu_input("x", X)
    binding.bind_output("y")
    session.close()
    for refused in (
        lambda: attrgetter("_sess")(session),  # which libraries read of an InferenceSession
        lambda: session.set_providers(["CPUExecutionProvider"]),
        lambda: session.run_with_iobinding(binding),
    ):
        with pytest.raises(RuntimeError, match="closed"):
            refused()


def test_arguments_that_inference_session_ignores(caplog: pytest.LogCaptureFixture) -> None:
    """Unknown keyword arguments are ignored with a warning, also if internal arguments have their names."""
    rest = {"options": None, "reason": "none", "source": b""}
    with HybridSession(branches(), ort.SessionOptions(), cores=1, **rest) as session:
        assert_equal(session.run(None, {"x": X}), run_plain(branches(), {"x": X}))
    assert all(repr(name) in caplog.text for name in rest)


def test_a_segments_failure_is_served_without_provider_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    """``enable_fallback=0`` concerns providers only; only ``strict`` raises the error of a segment."""
    graph = load(branches())
    plan = fixed_plan(graph, alternating_lanes(graph))
    for options in ({"enable_fallback": 0}, {"strict": True}):
        with HybridSession(graph, plan=plan, **options) as session, monkeypatch.context() as patch:
            fail(patch, "run a plan", RuntimeError("injected"))
            if "strict" in options:
                with pytest.raises(RuntimeError, match="injected"):
                    session.run(None, {"x": X})
            else:
                assert_equal(session.run(None, {"x": X}), run_plain(branches(), {"x": X}))


def test_invalid_models_and_options_are_refused_with_a_type_error() -> None:
    """Both sessions raise TypeError for invalid models and options."""
    wrong: list[tuple[Any, ...]] = [(bytearray(b"x"),), (None,), (3,), (branches().SerializeToString(), {"a": 1})]
    for arguments in wrong:
        for kind in (ort.InferenceSession, HybridSession):
            with pytest.raises(TypeError):
                kind(*arguments)


def test_a_binding_without_outputs_is_refused(hybrid: HybridSession, reference: ort.InferenceSession) -> None:
    """Both sessions refuse a binding without outputs."""
    for session in (hybrid, reference):
        binding = session.io_binding()
        binding.bind_cpu_input("x", X)
        with pytest.raises(RuntimeError, match="At least one output should be requested"):
            session.run_with_iobinding(binding)


def test_a_binding_of_onnxruntimes_class_is_run(hybrid: HybridSession, reference: ort.InferenceSession) -> None:
    """A binding of ``onnxruntime.IOBinding(session)`` is run; one of another session is refused."""
    binding = ort.IOBinding(hybrid)
    binding.bind_cpu_input("x", X)
    binding.bind_output("y")
    for _ in range(2):
        hybrid.run_with_iobinding(binding)
        assert_equal(binding.copy_outputs_to_cpu(), run_plain(branches(), {"x": X}, ["y"]))
    with pytest.raises(ValueError, match="session that created it"):
        hybrid.run_with_iobinding(ort.IOBinding(reference))


@pytest.mark.parametrize("kind", ["cut", "plain"])
def test_scalars_are_bound_as_scalars(kind: str) -> None:
    """An array without dimensions keeps its rank, bound as an array and by address."""
    nodes = [node("Mul", ["x", "t"], ["a"]), node("Exp", ["a"], ["y"])]
    model = make_model(nodes, [value("x", FLOAT, [2]), value("t", FLOAT, [])], [value("y", FLOAT, [2])])
    graph = load(model)
    x, t = np.array([1, 2], np.float32), np.array(0.5, np.float32)
    with HybridSession(graph, plan=fixed_plan(graph, [1, 2] if kind == "cut" else [1, 1])) as session:
        for by_address in (False, True):
            binding = session.io_binding()
            binding.bind_cpu_input("x", x)
            if by_address:
                binding.bind_input("t", "cpu", 0, np.float32, [], t.ctypes.data)
            else:
                binding.bind_cpu_input("t", t)
            binding.bind_output("y")
            session.run_with_iobinding(binding)
            assert_equal(binding.copy_outputs_to_cpu(), run_plain(model, {"x": x, "t": t}))
