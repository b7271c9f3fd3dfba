"""Requests of a HybridSession: memory, bindings, failures, threads and closing."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from chrion import HybridSession, load
from chrion.runtime.execution.plain_engine import PlainEngine
from chrion.runtime.process_hooks import in_flight
from chrion.runtime.selection.decisions import Decision
from chrion.scheduler import fixed_plan
from helpers import (
    FLOAT,
    INT64,
    alternating_lanes,
    assert_equal,
    assert_same_as_plain,
    branches,
    cut_session,
    free_branches,
    lane_threads,
    make_model,
    node,
    remaining_lane_threads,
    run_plain,
    value,
)
from seams.sessions import before_step, decide_by, engines_by_shapes, engines_of, fail_segments

pytestmark = pytest.mark.usefixtures("either_lanes")

X = np.linspace(-2, 2, 8, dtype=np.float32).reshape(2, 4)


# Memory of inputs and outputs.


def test_outputs_belong_to_the_caller() -> None:
    """Outputs are not changed by later runs, by the end of the session, or by memory allocated afterwards."""
    model = branches()
    feeds = [{"x": X * factor} for factor in range(1, 6)]
    expected = [run_plain(model, feed) for feed in feeds]
    session = cut_session(model)
    found = [session.run(None, feed) for feed in feeds]
    session.close()
    del session
    gc.collect()
    clutter = [np.full((2, 4), 7.0, np.float32) for _ in range(1000)]
    for outputs, expected_outputs in zip(found, expected, strict=True):
        assert_equal(outputs, expected_outputs)
    assert len(clutter) == 1000


def by_arrays(session: HybridSession, feed: dict[str, Any]) -> list[Any]:
    """Run on arrays."""
    return session.run(None, feed)


def by_ort_values(session: HybridSession, feed: dict[str, Any]) -> list[Any]:
    """Run on OrtValues."""
    values = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in feed.items()}
    return [value.numpy() for value in session.run_with_ort_values(None, values)]


def by_binding(session: HybridSession, feed: dict[str, Any]) -> list[Any]:
    """Run on a binding with buffers of the caller."""
    binding = session.io_binding()
    for name, array in feed.items():
        binding.bind_cpu_input(name, array)
    outputs = [np.empty_like(next(iter(feed.values()))) for _ in session.get_outputs()]
    for info, array in zip(session.get_outputs(), outputs, strict=True):
        binding.bind_output(info.name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
    session.run_with_iobinding(binding)
    return outputs


@pytest.mark.parametrize("size", [6, 5_000])
def test_run_methods_may_alternate(size: int) -> None:
    """No call affects another one, whether values are small and copied or large and bound."""
    nodes = [node("Relu", ["x"], ["a"]), node("Neg", ["x"], ["b"]), node("Sub", ["a", "b"], ["y"])]
    outputs = [value(name, FLOAT, [size]) for name in ("a", "y")]
    model = make_model(nodes, [value("x", FLOAT, [size])], outputs)
    random = np.random.default_rng(1)
    calls, given, kept, expected = [by_arrays, by_ort_values, by_binding], [], [], []
    with cut_session(model) as session:
        assert session.plan is not None
        for first, second in itertools.product(calls, repeat=2):
            for call in (first, second, second):
                given.append({"x": random.normal(size=size).astype(np.float32)})
                kept.append(call(session, given[-1]))
                expected.append(run_plain(model, {"x": given[-1]["x"].copy()}))
                given[-1]["x"][:] = np.nan  # the caller may overwrite inputs once the call has returned
    for outputs, expected_outputs in zip(kept, expected, strict=True):
        assert_equal(outputs, expected_outputs)


def test_an_output_that_is_an_input_or_a_weight_is_a_copy() -> None:
    """Writing to such an output changes neither the caller's input nor the model."""
    model = make_model(
        [node("Relu", ["x"], ["a"]), node("Neg", ["x"], ["b"]), node("Add", ["a", "b"], ["y"])],
        [value("x", FLOAT, [2, 4])],
        [value("x", FLOAT, [2, 4]), value("w", FLOAT, [3]), value("y", FLOAT, [2, 4])],
        {"w": np.array([1, 2, 3], np.float32)},
    )
    x = X.copy()
    with cut_session(model) as session:
        for _ in range(2):
            found = session.run(None, {"x": x})
            assert_equal(found, run_plain(model, {"x": X}))
            found[0][:] = 99
            found[1][:] = 99


def test_inputs_are_not_changed() -> None:
    """An input is equal after the run."""
    x = X.copy()
    with cut_session(branches()) as session:
        session.run(None, {"x": x})
    np.testing.assert_array_equal(x, X)


def test_an_unused_result_of_unknown_size() -> None:
    """A result that is not read and differs in size between runs does not affect outputs."""
    model = make_model(
        [node("Relu", ["x"], ["a"]), node("NonZero", ["a"], ["unread"]), node("Neg", ["x"], ["y"])],
        [value("x", FLOAT, [2, 4])],
        [value("y", FLOAT, [2, 4])],
    )
    graph = load(model, optimise=False)
    with HybridSession(graph, plan=fixed_plan(graph, alternating_lanes(graph))) as session:
        for x in (X, -np.abs(X), np.abs(X), X):
            assert_same_as_plain(session, model, {"x": x})


def test_a_result_of_unknown_size_beside_one_of_known_size() -> None:
    """A segment that produces both results passes each to its readers."""
    nodes = [
        node("Relu", ["x"], ["a"], name="a"),
        node("NonZero", ["a"], ["where"], name="where"),
        node("Cast", ["where"], ["float"], name="cast", to=FLOAT),
        node("ReduceSum", ["float"], ["total"], name="total", keepdims=0),
        node("Add", ["x", "total"], ["y"], name="y"),
    ]
    model = make_model(
        nodes, [value("x", FLOAT, [2, 4])], [value("where", INT64, [2, None]), value("y", FLOAT, [2, 4])]
    )
    with cut_session(model) as session:
        for x in (X, -X, np.zeros_like(X), np.ones_like(X)):
            assert_same_as_plain(session, model, {"x": x})


# IOBinding.


def test_bound_outputs_are_written_in_place() -> None:
    """Outputs are written to an OrtValue or an address; an output without a buffer gets a new one in every run."""
    model = branches()
    y, left = run_plain(model, {"x": X})
    with cut_session(model) as session:
        binding = session.io_binding()
        binding.bind_cpu_input("x", X)
        target = ort.OrtValue.ortvalue_from_numpy(np.zeros((2, 4), np.float32))
        binding.bind_ortvalue_output("y", target)
        binding.bind_output("l")
        session.run_with_iobinding(binding)
        assert_equal([target.numpy()], [y])
        first = binding.get_outputs()[1].numpy()
        assert_equal(binding.copy_outputs_to_cpu(), [y, left])
        memory = np.zeros((2, 4), np.float32)
        source = np.ascontiguousarray(X * 2)
        binding.bind_input("x", "cpu", 0, np.float32, X.shape, source.ctypes.data)
        binding.bind_output("y", "cpu", 0, np.float32, memory.shape, memory.ctypes.data)
        session.run_with_iobinding(binding)
        y2, left2 = run_plain(model, {"x": source})
        assert_equal([memory, binding.get_outputs()[1].numpy()], [y2, left2])
        assert_equal([target.numpy(), first], [y, left])


def test_bindings_can_be_cleared_and_are_checked() -> None:
    """A cleared input counts as missing; an unknown output raises when it is bound."""
    with cut_session(branches()) as session:
        binding = session.io_binding()
        binding.bind_cpu_input("x", X)
        binding.clear_binding_inputs()
        binding.bind_output("y")
        with pytest.raises(RuntimeError, match="missing"):
            session.run_with_iobinding(binding)
        with pytest.raises(RuntimeError, match="none"):
            binding.bind_output("none")
        with pytest.raises(ValueError, match="bind an OrtValue"):
            binding.bind_input("x", "cuda", 0, np.float32, (2, 4), 0)


def test_bindings_work_on_a_model_that_runs_plain() -> None:
    """Bindings give the plain session's outputs."""
    model = branches()
    with HybridSession(model, tune="never") as session:
        assert session.plan is None
        binding = session.io_binding()
        binding.bind_cpu_input("x", X)
        for name in ("y", "l"):
            binding.bind_output(name)
        session.run_with_iobinding(binding)
        assert_equal(binding.copy_outputs_to_cpu(), run_plain(model, {"x": X}))


# Failures.


def failing() -> onnx.ModelProto:
    """Return a model whose operator ``picky`` raises if ``i`` is out of range."""
    nodes = [
        node("Relu", ["x"], ["a"], name="left"),
        node("Gather", ["x", "i"], ["b"], name="picky"),
        node("Neg", ["a"], ["c"], name="more"),
        node("Add", ["c", "b"], ["y"], name="sum"),
    ]
    return make_model(nodes, [value("x", FLOAT, [2, 4]), value("i", INT64, [2])], [value("y", FLOAT, [2, 4])])


@pytest.mark.parametrize("lane", [1, 2])
def test_a_failure_names_its_operator_and_leaves_the_session_usable(lane: int) -> None:
    """An error in the caller's thread or on another lane names the operator, followed by onnxruntime's message."""
    graph = load(failing())
    placed = [lane if name == "picky" else 3 - lane for name in graph.dag.names]
    good, bad = {"x": X, "i": np.array([1, 0])}, {"x": X, "i": np.array([7, 0])}
    with HybridSession(graph, plan=fixed_plan(graph, placed), strict=True) as session:
        for _ in range(5):
            with pytest.raises(Exception, match=r"operator.*picky.*out of data bounds"):
                session.run(None, bad)
            assert_same_as_plain(session, failing(), good)


def test_one_plain_session_serves_all_shapes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """If no plan is selected, no shape opens a session of its own, which would hold the weights once more."""
    monkeypatch.setenv("CHRION_CACHE", str(tmp_path))
    decided = decide_by(monkeypatch, lambda _: Decision("plain", None, "by the test"))
    model = free_branches()
    with HybridSession(model) as session:
        for batch in (2, 1, 3, 2, 5):
            assert_same_as_plain(session, model, {"x": np.ones((batch, 4), np.float32)})
        engines = engines_by_shapes(session)
        assert list(engines) == [((batch, 4),) for batch in (1, 3, 2, 5)]
        assert len({id(engine.session) for engine in engines.values() if isinstance(engine, PlainEngine)}) == 1
    assert len(decided) == 4


def test_an_invalid_request_raises_what_inference_session_raises() -> None:
    """Type and message of the error are InferenceSession's for each method; later requests run on the plan."""
    good, bad = {"x": X, "i": np.array([1, 0])}, {"x": X, "i": np.array([7, 0])}
    reference = ort.InferenceSession(failing().SerializeToString(), providers=["CPUExecutionProvider"])

    def by_values(session: Any) -> None:
        session.run_with_ort_values(None, {n: ort.OrtValue.ortvalue_from_numpy(v) for n, v in bad.items()})

    def by_binding(session: Any) -> None:
        binding = session.io_binding()
        for name, array in bad.items():
            binding.bind_cpu_input(name, array)
        binding.bind_output("y")
        session.run_with_iobinding(binding)

    with cut_session(failing()) as session:
        for call in (lambda s: s.run(None, bad), lambda s: s.run(["y"], bad), by_values, by_binding):
            with pytest.raises(Exception, match="out of data bounds") as expected:
                call(reference)
            with pytest.raises(type(expected.value)) as found:
                call(session)
            assert (type(found.value), str(found.value)) == (type(expected.value), str(expected.value))
            assert session.plan is not None
            assert_same_as_plain(session, failing(), good)


@pytest.mark.parametrize("strict", [False, True])
def test_a_plan_that_fails_is_replaced_by_the_plain_session(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, strict: bool
) -> None:
    """The request is served, a warning has the reason, and later requests run plain; a strict session raises."""
    graph = load(branches())
    with HybridSession(graph, plan=fixed_plan(graph, alternating_lanes(graph)), strict=strict) as session:
        fail_segments(monkeypatch, RuntimeError("a broken segment"))
        if strict:
            with pytest.raises(RuntimeError, match="a broken segment") as raised:
                session.run(None, {"x": X})
            assert raised.value.__cause__ is not raised.value
            return
        assert_same_as_plain(session, branches(), {"x": X})
        assert "a segment failed: a broken segment" in caplog.text
        assert session.plan is None
        assert "a segment failed: a broken segment" in session.explain()
        assert_same_as_plain(session, branches(), {"x": X})


def test_failures_of_some_callers_do_not_affect_other_callers() -> None:
    """If valid and invalid requests are in flight at once, the valid ones succeed."""
    with cut_session(failing()) as session:
        expected = run_plain(failing(), {"x": X, "i": np.array([1, 0])})

        def call(at: int) -> None:
            for _ in range(20):
                if at % 2:
                    with pytest.raises(Exception, match="picky"):
                        session.run(None, {"x": X, "i": np.array([9, 0])})
                else:
                    assert_equal(session.run(None, {"x": X, "i": np.array([1, 0])}), expected)

        with ThreadPoolExecutor(6) as pool:
            list(pool.map(call, range(6)))


def test_a_session_may_be_called_by_many_threads() -> None:
    """Each thread receives the outputs for its own inputs."""
    model = branches(size=16)
    feeds = [{"x": np.random.default_rng(seed).standard_normal((2, 16)).astype(np.float32)} for seed in range(8)]
    expected = [run_plain(model, feed) for feed in feeds]
    with cut_session(model) as session:

        def call(at: int) -> None:
            for _ in range(50):
                assert_equal(session.run(None, feeds[at]), expected[at])

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(call, range(8)))


# Closing.


def test_a_closed_session_refuses_requests_and_stops_its_lanes() -> None:
    """Closing a second time has no effect; runs and bindings raise."""
    session = cut_session(branches())
    assert lane_threads()
    session.run(None, {"x": X})
    session.close()
    session.close()
    assert not remaining_lane_threads()
    with pytest.raises(RuntimeError, match="closed"):
        session.run(None, {"x": X})
    with pytest.raises(RuntimeError, match="closed"):
        session.run_with_iobinding(session.io_binding())


def test_a_closed_plain_session_refuses_requests() -> None:
    """A plain session, which has no lanes to stop, raises after it has been closed."""
    with HybridSession(branches(), tune="never") as session:
        session.run(None, {"x": X})
    with pytest.raises(RuntimeError, match="closed"):
        session.run(None, {"x": X})


def test_a_session_that_is_closed_at_exit_waits_for_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request in flight may finish until then, and later ones are refused; so are they of sessions closed before."""
    begun, proceed, results = threading.Event(), threading.Event(), []

    def wait() -> None:
        begun.set()
        assert proceed.wait(30)

    session, expected = cut_session(branches()), run_plain(branches(), {"x": X})
    before_step(monkeypatch, "begin a request", wait)
    caller = threading.Thread(target=lambda: results.append(session.run(None, {"x": X})))
    caller.start()
    assert begun.wait(30)
    engines_of(session).close_at_exit(time.monotonic() + 0.05)
    assert not results
    with pytest.raises(RuntimeError, match="this session is closed"):
        session.run(None, {"x": X})
    proceed.set()
    engines_of(session).close_at_exit(time.monotonic() + 30)
    caller.join(30)
    assert_equal(results[0], expected)
    assert not remaining_lane_threads()


def test_a_session_refuses_requests_in_a_child_without_its_lanes() -> None:
    """A child process is told why; a plain session is refused only if requests were in flight at the fork."""
    with cut_session(branches()) as session:
        engines_of(session).refuse_in_child()
        with pytest.raises(RuntimeError, match="was forked, and its lanes do not exist in the child: create a session"):
            session.run(None, {"x": X})
    with HybridSession(branches(), tune="never") as session:
        assert session.wait_until_tuned(30)
        engines_of(session).refuse_in_child()
        assert session.wait_until_tuned(0)
        assert_same_as_plain(session, branches(), {"x": X})
        in_flight.append(None)
        try:
            engines_of(session).refuse_in_child()
        finally:
            in_flight.pop()
        with pytest.raises(RuntimeError, match="was forked, and requests were in flight then"):
            session.run(None, {"x": X})


def test_closing_during_requests_of_other_threads() -> None:
    """Requests in flight are served and later ones raise; none of them hangs."""
    model = branches(size=64)
    feed = {"x": np.ones((2, 64), np.float32)}
    expected = run_plain(model, feed)
    session = cut_session(model)
    started = threading.Barrier(5)
    outcomes: list[str] = []

    def call() -> None:
        started.wait()
        for _ in range(100_000):
            try:
                found = session.run(None, feed)
            except RuntimeError as error:
                outcomes.append(str(error))
                return
            assert_equal(found, expected)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    started.wait()
    session.run(None, feed)
    session.close()
    for thread in threads:
        thread.join(60)
    assert outcomes == ["this session is closed"] * 4
    assert not remaining_lane_threads()


def test_a_collected_session_stops_its_lanes() -> None:
    """Lanes stop when the session is collected right after a run, without being closed."""
    session = cut_session(branches())
    session.run(None, {"x": X})
    assert lane_threads()
    del session
    gc.collect()
    assert not remaining_lane_threads()
