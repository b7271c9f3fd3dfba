"""Native lanes: the same results and errors as lane threads, and the release of all resources."""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from chrion import HybridSession, load
from chrion.native import (
    NativeBinding,
    NativeError,
    NativeFrame,
    NativeLanes,
    NativeProgram,
    NativeSession,
    available,
)
from chrion.native.bindings import RUN, SIGNAL, WAIT
from chrion.scheduler import fixed_plan
from helpers import (
    FLOAT,
    INT64,
    alternating_lanes,
    assert_equal,
    branches,
    cut_session,
    make_model,
    node,
    remaining_lane_threads,
    run_plain,
    value,
)
from seams.execution import cut_engine

# A deadlock is a failure.
pytestmark = [pytest.mark.timeout(120, method="thread"), pytest.mark.usefixtures("uncrowded")]
compiled = pytest.mark.skipif(not available(), reason="lanes are not compiled here")

STEPS, ROWS, WIDTH = 6, 5, 3


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("cc") is None, reason="no C compiler, or not Linux")
def test_lanes_are_compiled() -> None:
    """The installation compiles native lanes on Linux if there is a C compiler."""
    assert available()


def picks() -> onnx.ModelProto:
    """Return a model that sums rows of a table, each selected by an input; an index out of range fails one segment."""
    nodes, total = [], "pick0"
    for step in range(STEPS):
        nodes.append(node("Gather", ["table", f"i{step}"], [f"pick{step}"], name=f"pick{step}"))
        if step:
            nodes.append(node("Add", [total, f"pick{step}"], [f"sum{step}"], name=f"sum{step}"))
            total = f"sum{step}"
    table = np.arange(ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH)
    inputs = [value(f"i{step}", INT64, [1]) for step in range(STEPS)]
    return make_model(nodes, inputs, [value(total, FLOAT, [1, WIDTH])], {"table": table})


def feed_of(caller: int, wrong: int | None = None) -> dict[str, Any]:
    """Return a request of one caller; ``wrong`` is an input with an index out of range."""
    rows = [(caller + 2 * step) % ROWS for step in range(STEPS)]
    return {f"i{step}": np.array([99 if step == wrong else row]) for step, row in enumerate(rows)}


def first_beside(session: HybridSession, operator: str) -> str:
    """Return the first operator of another operator's segment, which error messages name."""
    assert runs_native(session)
    return next(segment.operators[0] for segment in cut_engine(session).segments if operator in segment.operators)


def runs_native(session: HybridSession) -> bool:
    return "native lanes" in cut_engine(session).explain()


@compiled
@pytest.mark.parametrize("wrong", range(STEPS))
def test_a_segment_that_fails_among_other_requests(wrong: int) -> None:
    """The request gets an error with the operator's name and onnxruntime's message; all others succeed."""
    model = picks()
    with pytest.raises(Exception, match="indices element out of data bounds"):
        run_plain(model, feed_of(0, wrong))
    expected = [run_plain(model, feed_of(caller)) for caller in range(4)]
    raised: list[str] = []
    graph = load(model)
    with HybridSession(graph, plan=fixed_plan(graph, alternating_lanes(graph)), strict=True) as session:
        first = first_beside(session, f"pick{wrong}")

        def call(caller: int) -> None:
            for turn in range(12):
                fails = caller == 0 and turn % 3 == 1
                try:
                    found = session.run(None, feed_of(caller, wrong if fails else None))
                except RuntimeError as error:
                    assert fails
                    raised.append(str(error))
                else:
                    assert not fails
                    assert_equal(found, expected[caller])

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(call, range(4)))
    assert len(raised) == 4
    assert all(f"'{first}'" in message and "out of data bounds" in message for message in raised)


@compiled
def test_requests_that_native_lanes_do_not_serve() -> None:
    """Sizes that depend on the data, and run options, give the results of plain onnxruntime."""
    x = np.array([[0, 1, 0, 2], [3, 0, 0, 4]], np.float32)
    nodes = [node("Relu", ["x"], ["a"]), node("NonZero", ["a"], ["y"]), node("Neg", ["x"], ["b"])]
    model = make_model(nodes, [value("x", FLOAT, [2, 4])], [value("y", INT64, [2, "n"]), value("b", FLOAT, [2, 4])])
    with cut_session(model) as session:
        assert not runs_native(session)
        assert_equal(session.run(None, {"x": x}), run_plain(model, {"x": x}))
    model, options = branches(), ort.RunOptions()
    with cut_session(model) as session:
        assert runs_native(session)
        assert_equal(session.run(None, {"x": x}, options), run_plain(model, {"x": x}))
        options.terminate = True
        with pytest.raises(Exception, match="terminate"):
            session.run(None, {"x": x}, options)
        assert_equal(session.run(None, {"x": x}), run_plain(model, {"x": x}))
    assert not remaining_lane_threads()


@compiled
@pytest.mark.parametrize("size", [4, 600])
def test_values_in_and_out(size: int) -> None:
    """Each request has its own results for small and large arrays, OrtValues, and the caller's outputs."""
    model = branches(size=size)
    rng = np.random.default_rng(0)
    feeds = [{"x": rng.standard_normal((2, size)).astype(np.float32)} for _ in range(3)]
    expected = [run_plain(model, feed) for feed in feeds]
    with cut_session(model) as session:
        assert runs_native(session)
        results = [session.run(None, feed) for feed in feeds]
        values = [
            session.run_with_ort_values(None, {"x": ort.OrtValue.ortvalue_from_numpy(feed["x"])}) for feed in feeds
        ]
        for found, found_values, right in zip(results, values, expected, strict=True):
            assert_equal(found, right)
            assert_equal([v.numpy() for v in found_values], right)
        binding = session.io_binding()
        target = np.zeros((2, size), np.float32)
        binding.bind_cpu_input("x", feeds[0]["x"])
        binding.bind_output("y", "cpu", 0, np.float32, target.shape, target.ctypes.data)
        session.run_with_iobinding(binding)
        assert_equal([target], expected[0][:1])
        assert_equal(results[1], expected[1])  # unchanged


@compiled
def test_empty_tensors() -> None:
    """A tensor without elements has no memory, and is passed between lanes as well."""
    nodes = [node("Relu", ["x"], ["a"]), node("Neg", ["a"], ["b"]), node("Concat", ["b", "w"], ["y"], axis=0)]
    weights = {"w": np.ones((2, 4), np.float32)}
    model = make_model(
        nodes, [value("x", FLOAT, [0, 4])], [value("y", FLOAT, [2, 4]), value("b", FLOAT, [0, 4])], weights
    )
    feed = {"x": np.zeros((0, 4), np.float32)}
    with cut_session(model) as session:
        assert runs_native(session)
        assert_equal(session.run(None, feed), run_plain(model, feed))


@compiled
def test_a_trace_has_the_times_of_segments() -> None:
    """A segment starts after the segments whose results it reads have ended."""
    graph = load(branches())
    session = HybridSession(graph, plan=fixed_plan(graph, alternating_lanes(graph)))
    with session:
        assert runs_native(session)
        events = {e.segment: e for e in session.trace({"x": np.ones((2, 4), np.float32)})}
        assert session.plan is not None
        segments = session.plan.segments
    assert sorted(events) == list(range(len(segments)))
    where = {i: at for at, members in enumerate(segments) for i in members}
    for i, producers in enumerate(graph.dag.predecessors):
        for producer in producers:
            if where[producer] != where[i]:
                assert events[where[producer]].end_ms <= events[where[i]].start_ms
    assert all(0 <= e.start_ms <= e.end_ms < 1e3 for e in events.values())


# The library alone.


def adder() -> NativeSession:
    """Return a session that adds one."""
    add = node("Add", ["x", "one"], ["y"])
    model = make_model([add], [value("x", FLOAT, [1])], [value("y", FLOAT, [1])], {"one": np.ones(1, np.float32)})
    return NativeSession(model.SerializeToString(), ort.SessionOptions())


def relay(rounds: int) -> tuple[NativeLanes, NativeFrame, list[ort.OrtValue]]:
    """Return two lanes that add one to a number in turn, a frame of them, and the numbers."""
    session = adder()
    values = [ort.OrtValue.ortvalue_from_numpy(np.zeros(1, np.float32)) for _ in range(rounds + 1)]
    bindings = [NativeBinding(session) for _ in range(rounds)]
    steps: list[list[tuple[int, int, int]]] = [[], []]
    for turn, binding in enumerate(bindings):
        binding.bind_ortvalue_input("x", values[turn])
        binding.bind_ortvalue_output("y", values[turn + 1])
        if turn:
            steps[turn % 2].append((WAIT, 1 - turn % 2, (turn + 1) // 2))
        steps[turn % 2] += [(RUN, turn, 0), (SIGNAL, turn // 2 + 1, 0)]
    program = NativeProgram(steps)
    return NativeLanes(program, [None, None]), NativeFrame(program, [session] * rounds, bindings), values


@compiled
def test_lanes_alternate() -> None:
    """Each lane reads what the other has written, request after request."""
    lanes, frame, numbers = relay(rounds=501)
    for _ in range(5):
        for number in numbers:
            number.numpy()[...] = 0
        lanes.run(frame)
        assert [float(number.numpy()[0]) for number in numbers] == list(range(502))
    lanes.close()
    lanes.close()
    assert not remaining_lane_threads()


@compiled
def test_errors_of_onnxruntime() -> None:
    """A wrong model, name and shape raise onnxruntime's message."""
    with pytest.raises(NativeError, match=r"(?i)protobuf|model"):
        NativeSession(b"no model", ort.SessionOptions())
    lanes, frame, numbers = relay(rounds=1)
    session = adder()
    with pytest.raises(NativeError, match="z"):
        NativeBinding(session).bind_ortvalue_input("z", numbers[1])
    binding = NativeBinding(session)
    binding.bind_ortvalue_input("x", ort.OrtValue.ortvalue_from_numpy(np.zeros((2, 2), np.float32)))
    binding.bind_ortvalue_output("y", numbers[1])
    wrong = NativeFrame(frame.program, [session], [binding])
    with pytest.raises(NativeError, match="x"):
        lanes.run(wrong)
    lanes.run(frame)


@compiled
def test_lanes_without_references_stop() -> None:
    """Lanes that are not closed stop when they and their frames have been collected."""
    lanes, frame, _ = relay(rounds=3)
    lanes.run(frame)
    del lanes, frame
    assert not remaining_lane_threads()


@compiled
def test_many_sessions_from_many_threads() -> None:
    """Options that one thread registers are not used by another."""
    model = branches()
    feeds: list[Mapping[str, Any]] = [{"x": np.full((2, 4), at, np.float32)} for at in range(8)]
    expected = [run_plain(model, feed) for feed in feeds]
    graph = load(model)
    plan = fixed_plan(graph, alternating_lanes(graph))
    start = threading.Barrier(8)

    def make(at: int) -> None:
        start.wait()
        for _ in range(2):
            with HybridSession(graph, plan=plan) as session:
                assert_equal(session.run(None, feeds[at]), expected[at])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(make, range(8)))
