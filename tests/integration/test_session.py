"""HybridSession beside onnxruntime's InferenceSession."""

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
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument

from chrion import Graph, HybridSession, Plan, load, partition, profile
from chrion.errors import OptionError, PlanError, ProviderError
from chrion.runtime.execution.segments import SegmentFactory
from chrion.runtime.selection.guard import Comparison
from chrion.scheduler import fixed_plan
from chrion.zoo import RecurrentSpec, build_recurrent
from helpers import (
    BOOL,
    FLOAT,
    INT64,
    alternating_lanes,
    assert_equal,
    assert_same_as_plain,
    branches,
    lane_threads,
    make_model,
    node,
    remaining_lane_threads,
    run_plain,
    value,
)

pytestmark = pytest.mark.usefixtures("either_lanes")

X = np.linspace(-2, 2, 8, dtype=np.float32).reshape(2, 4)


def cut_session(model: onnx.ModelProto | Graph | str, **shapes: tuple[int, ...]) -> HybridSession:
    """A session whose operators take turns on two lanes."""
    graph = model if isinstance(model, Graph) else load(model, shapes)
    return HybridSession(graph, plan=fixed_plan(graph, alternating_lanes(graph)))


# What it has in common with InferenceSession.


def test_outputs_are_those_asked_for_in_that_order() -> None:
    """All by default, or by name, also repeated."""
    model = branches()
    y, left = run_plain(model, {"x": X})
    with cut_session(model) as session:
        assert_equal(session.run(None, {"x": X}), [y, left])
        assert_equal(session.run([], {"x": X}), [y, left])
        assert_equal(session.run(["l"], {"x": X}), [left])
        assert_equal(session.run(["l", "y", "l"], {"x": X}), [left, y, left])


def test_inputs_outputs_and_metadata_read_as_onnxruntime_has_them() -> None:
    """Names, types, shapes, and what the model says of itself."""
    model = make_model(
        [node("Relu", ["x"], ["r"]), node("Add", ["r", "s"], ["y"]), node("Not", ["b"], ["nb"])],
        [value("x", FLOAT, ["batch", 4]), value("s", FLOAT, []), value("b", BOOL, [2])],
        [value("y", FLOAT, ["batch", 4]), value("nb", BOOL, [2])],
        producer_name="somebody",
        doc_string="what it is",
    )
    onnx.helper.set_model_props(model, {"key": "value"})
    reference = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    with HybridSession(model) as session:
        for ours, theirs in (
            (session.get_inputs(), reference.get_inputs()),
            (session.get_outputs(), reference.get_outputs()),
        ):
            assert [(a.name, a.type, list(a.shape or ())) for a in ours] == [(a.name, a.type, a.shape) for a in theirs]
        assert session.get_providers() == ["CPUExecutionProvider"]
        ours, theirs = session.get_modelmeta(), reference.get_modelmeta()
        for field in ("producer_name", "graph_name", "domain", "description", "version", "custom_metadata_map"):
            assert getattr(ours, field) == getattr(theirs, field)


@pytest.mark.parametrize(
    "feed",
    [
        {},
        {"x": X, "z": X},
        {"x": X.astype(np.float64)},
        {"x": X.astype(np.int64)},
        {"x": X[0]},
        {"x": X[:, :3]},
        {"x": np.array([["a"] * 4] * 2)},
    ],
)
def test_bad_feeds_are_refused_as_onnxruntime_refuses_them(feed: dict[str, Any]) -> None:
    """The same kind of exception, and the session works afterwards."""
    model = branches()
    with pytest.raises((ValueError, InvalidArgument)) as theirs:
        run_plain(model, feed)
    with cut_session(model) as session:
        with pytest.raises(type(theirs.value)):
            session.run(None, feed)
        assert_same_as_plain(session, model, {"x": X})


def test_an_unknown_output_is_refused_as_onnxruntime_refuses_it() -> None:
    """The same kind of exception."""
    model = branches()
    with pytest.raises(InvalidArgument):
        run_plain(model, {"x": X}, ["none"])
    with cut_session(model) as session, pytest.raises(InvalidArgument, match="none"):
        session.run(["none"], {"x": X})


def test_lists_scalars_and_strided_arrays_are_taken() -> None:
    """What onnxruntime converts, the session converts; what lies scattered in memory is gathered."""
    model = branches()
    wide = np.arange(32, dtype=np.float32).reshape(4, 8)[::2, ::2]
    with cut_session(model) as session:
        assert_equal(session.run(None, {"x": X.tolist()}), run_plain(model, {"x": X.tolist()}))
        assert_same_as_plain(session, model, {"x": wide})
        assert_same_as_plain(session, model, {"x": np.asfortranarray(X)})
        as_value = session.run(None, {"x": ort.OrtValue.ortvalue_from_numpy(X)})
        assert_equal(as_value, run_plain(model, {"x": X}))


def test_a_request_may_bring_weights_of_its_own() -> None:
    """A weight that is also an input can be given another value, in a run or bound; the next run has the old one."""
    model = branches()
    model.graph.input.append(value("w", FLOAT, [4, 4]))
    other = {"x": X, "w": np.eye(4, dtype=np.float32)}
    with cut_session(model) as session:
        assert [i.name for i in session.get_inputs()] == ["x"]
        assert [(i.name, i.type, i.shape) for i in session.get_overridable_initializers()] == [
            ("w", "tensor(float)", [4, 4])
        ]
        assert_same_as_plain(session, model, other)
        assert_same_as_plain(session, model, {"x": X})
        binding = session.io_binding()
        for name, array in other.items():
            binding.bind_cpu_input(name, array)
        binding.bind_output("y")
        session.run_with_iobinding(binding)
        assert_equal(binding.copy_outputs_to_cpu(), run_plain(model, other, ["y"]))
        with pytest.raises(InvalidArgument):
            session.run(None, {"x": X, "w": np.eye(3, dtype=np.float32)})
        assert session.plan is not None
        assert len(session.trace({"x": X})) > 1


def test_sequences_beside_free_dimensions_run_plain() -> None:
    """Inputs that are no tensors are onnxruntime's business, whatever the shapes of the others."""
    model = make_model(
        [node("SequenceAt", ["s", "at"], ["first"]), node("Add", ["first", "x"], ["y"])],
        [
            onnx.helper.make_tensor_sequence_value_info("s", FLOAT, None),
            value("x", FLOAT, ["n", 4]),
            value("at", INT64, []),
        ],
        [value("y", FLOAT, ["n", 4])],
    )
    feed = {"s": [X, X[:1]], "x": X, "at": np.array(0)}
    with HybridSession(model) as session:
        assert "'s'" in session.explain()
        assert_same_as_plain(session, model, feed)


def test_a_constant_text_as_an_output_runs_plain() -> None:
    """Beside operators that could be cut."""
    model = branches()
    model.graph.initializer.append(onnx.helper.make_tensor("t", onnx.TensorProto.STRING, [2], [b"a", b"b"]))
    model.graph.output.append(value("t", onnx.TensorProto.STRING, [2]))
    with cut_session(model) as session:
        assert "text" in session.explain()
        assert_same_as_plain(session, model, {"x": X})


def test_run_options_reach_the_segments() -> None:
    """A run that is told to terminate does, and the next one is whole."""
    options = ort.RunOptions()
    options.terminate = True
    with cut_session(branches()) as session:
        with pytest.raises(Exception, match=r"(?i)terminat"):
            session.run(None, {"x": X}, options)
        assert_same_as_plain(session, branches(), {"x": X})


@pytest.mark.parametrize("kind", ["path", "Path", "bytes", "proto", "graph"])
def test_models_come_in_many_forms(tmp_path: Path, kind: str) -> None:
    """A path, bytes, a proto, a loaded graph."""
    model = branches()
    path = tmp_path / "m.onnx"
    onnx.save(model, path)
    source: Any = {
        "path": str(path),
        "Path": path,
        "bytes": model.SerializeToString(),
        "proto": model,
        "graph": load(path),
    }[kind]
    with HybridSession(source, cores=1) as session:
        assert_same_as_plain(session, model, {"x": X})


# Buffers.


def test_outputs_belong_to_the_caller() -> None:
    """Neither a later run, nor the end of the session, nor memory allocated meanwhile changes what was returned."""
    model = branches()
    feeds = [{"x": X * factor} for factor in range(1, 6)]
    expected = [run_plain(model, feed) for feed in feeds]
    session = cut_session(model)
    found = [session.run(None, feed) for feed in feeds]
    session.close()
    del session
    gc.collect()
    clutter = [np.full((2, 4), 7.0, np.float32) for _ in range(1000)]
    for ours, theirs in zip(found, expected, strict=True):
        assert_equal(ours, theirs)
    assert len(clutter) == 1000


def by_arrays(session: HybridSession, feed: dict[str, Any]) -> list[Any]:
    return session.run(None, feed)


def by_ort_values(session: HybridSession, feed: dict[str, Any]) -> list[Any]:
    values = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in feed.items()}
    return [value.numpy() for value in session.run_with_ort_values(None, values)]


def by_binding(session: HybridSession, feed: dict[str, Any]) -> list[Any]:
    binding = session.io_binding()
    for name, array in feed.items():
        binding.bind_cpu_input(name, array)
    outputs = [np.empty_like(next(iter(feed.values()))) for _ in session.get_outputs()]
    for info, array in zip(session.get_outputs(), outputs, strict=True):
        binding.bind_output(info.name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
    session.run_with_iobinding(binding)
    return outputs


@pytest.mark.parametrize("size", [6, 50_000])
def test_all_ways_to_call_one_session_in_turn(size: int) -> None:
    """Small values, which are copied, and large ones, which are bound: nothing of one call is left to another."""
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
                given[-1]["x"][:] = np.nan  # the caller's to write to once the call has returned
    for ours, theirs in zip(kept, expected, strict=True):
        assert_equal(ours, theirs)


def test_an_output_that_is_an_input_or_a_weight_is_a_copy() -> None:
    """Writing into it changes neither the caller's input nor the model."""
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


def test_inputs_are_not_written_to() -> None:
    """A feed is the same after the run."""
    x = X.copy()
    with cut_session(branches()) as session:
        session.run(None, {"x": x})
    np.testing.assert_array_equal(x, X)


def test_a_result_of_unknown_size_that_nobody_reads() -> None:
    """It is made all the same, of another size in each run."""
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
    """Segments that make both give each to whom it belongs."""
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
    """To an OrtValue and to an address; an output without a buffer gets a new one every run."""
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
    """A cleared input is missing; an unknown output is refused when it is bound."""
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
    """The same calls, one onnxruntime session behind them."""
    model = make_model([node("Relu", ["x"], ["y"])], [value("x", FLOAT, [2, 4])], [value("y", FLOAT, [2, 4])])
    with HybridSession(model) as session:
        assert session.plan is None
        binding = session.io_binding()
        binding.bind_cpu_input("x", X)
        binding.bind_output("y")
        session.run_with_iobinding(binding)
        assert_equal(binding.copy_outputs_to_cpu(), run_plain(model, {"x": X}))


# Failures.


def failing() -> onnx.ModelProto:
    """Raises where ``i`` is out of range, in an operator named ``picky``, far from the others."""
    nodes = [
        node("Relu", ["x"], ["a"], name="left"),
        node("Gather", ["x", "i"], ["b"], name="picky"),
        node("Neg", ["a"], ["c"], name="more"),
        node("Add", ["c", "b"], ["y"], name="sum"),
    ]
    return make_model(nodes, [value("x", FLOAT, [2, 4]), value("i", INT64, [2])], [value("y", FLOAT, [2, 4])])


@pytest.mark.parametrize("lane", [1, 2])
def test_a_failure_names_its_operator_and_leaves_the_session_whole(lane: int) -> None:
    """Whether it happens on the caller's thread or on another lane; onnxruntime's own words follow."""
    graph = load(failing())
    placed = [lane if name == "picky" else 3 - lane for name in graph.dag.names]
    good, bad = {"x": X, "i": np.array([1, 0])}, {"x": X, "i": np.array([7, 0])}
    with HybridSession(graph, plan=fixed_plan(graph, placed), strict=True) as session:
        for _ in range(5):
            with pytest.raises(Exception, match=r"operator.*picky.*out of data bounds"):
                session.run(None, bad)
            assert_same_as_plain(session, failing(), good)


def test_one_plain_session_serves_all_shapes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where no plan wins, no shape opens a session of its own; their weights would add up."""
    monkeypatch.setenv("CHRION_CACHE", str(tmp_path))
    monkeypatch.setattr(
        "chrion.runtime.selection.selector.compare", lambda candidates, _: Comparison(candidates[0].name, ())
    )
    model = branches()
    for info in (*model.graph.input, *model.graph.output):
        info.type.tensor_type.shape.dim[0].dim_param = "batch"
    with HybridSession(model) as session:
        for batch in (2, 1, 3, 2, 5):
            assert_same_as_plain(session, model, {"x": np.ones((batch, 4), np.float32)})
        assert len(session._engines._by_shape) == 4
        assert len({id(engine.session) for engine in session._engines._by_shape.values() if not session.plan}) == 1


def test_a_request_at_fault_raises_what_inference_session_raises() -> None:
    """The same type and message, from each way to run; the session stays cut for the requests after it."""
    good, bad = {"x": X, "i": np.array([1, 0])}, {"x": X, "i": np.array([7, 0])}
    theirs = ort.InferenceSession(failing().SerializeToString(), providers=["CPUExecutionProvider"])

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
                call(theirs)
            with pytest.raises(type(expected.value)) as found:
                call(session)
            assert (type(found.value), str(found.value)) == (type(expected.value), str(expected.value))
            assert session.plan is not None
            assert_same_as_plain(session, failing(), good)


def test_a_plan_that_fails_where_plain_onnxruntime_does_not_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The request is served, a warning says why, and later requests run plain; a strict session raises."""

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("no such luck")

    for strict in (False, True):
        graph = load(branches())
        with HybridSession(graph, plan=fixed_plan(graph, alternating_lanes(graph)), strict=strict) as session:
            for way in ("run", "run_fast_path"):
                monkeypatch.setattr(f"chrion.runtime.execution.engine.CutEngine.{way}", fails)
            if strict:
                with pytest.raises(RuntimeError, match="no such luck"):
                    session.run(None, {"x": X})
                continue
            assert_same_as_plain(session, branches(), {"x": X})
            assert "a segment failed: no such luck" in caplog.text
            assert session.plan is None
            assert "a segment failed: no such luck" in session.explain()
            assert_same_as_plain(session, branches(), {"x": X})


def test_failures_of_some_callers_do_not_touch_the_others() -> None:
    """Good and bad requests at once, many times."""
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


def test_many_threads_may_call_one_session() -> None:
    """Each gets the outputs of its own inputs."""
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


def test_a_closed_session_refuses_and_stops_its_lanes() -> None:
    """Closing twice does no harm; runs and bindings are refused."""
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


def test_a_closed_plain_session_refuses_too() -> None:
    """Also where there is nothing to stop."""
    model = make_model([node("Relu", ["x"], ["y"])], [value("x", FLOAT, [2, 4])], [value("y", FLOAT, [2, 4])])
    with HybridSession(model) as session:
        session.run(None, {"x": X})
    with pytest.raises(RuntimeError, match="closed"):
        session.run(None, {"x": X})


def test_closing_while_others_run() -> None:
    """Runs that have begun end well, later ones are refused; nothing hangs."""
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


def test_a_session_that_nobody_holds_stops_its_lanes() -> None:
    """Collecting it is enough, also right after a run."""
    session = cut_session(branches())
    session.run(None, {"x": X})
    assert lane_threads()
    del session
    gc.collect()
    assert not remaining_lane_threads()


# Plans, shapes, providers.


def test_a_plan_may_be_a_file(tmp_path: Path) -> None:
    """By path, as text or Path."""
    graph = load(branches())
    fixed_plan(graph, alternating_lanes(graph)).save(tmp_path / "p.json")
    for path in (tmp_path / "p.json", str(tmp_path / "p.json")):
        with HybridSession(graph, plan=path) as session:
            assert session.plan == Plan.load(path)
            assert_same_as_plain(session, branches(), {"x": X})


def test_a_plan_of_another_model_is_refused() -> None:
    """The error says what differs."""
    graph, other = load(branches()), load(branches(size=5))
    with pytest.raises(PlanError, match="different shapes or attributes"):
        HybridSession(other, plan=fixed_plan(graph, alternating_lanes(graph)))
    with pytest.raises(PlanError, match="in the model"):
        HybridSession(failing(), plan=fixed_plan(graph, alternating_lanes(graph)))


def test_a_plan_whose_segments_wait_backwards_is_refused() -> None:
    """Such lanes would wait for each other forever."""
    graph = load(branches())
    plan = fixed_plan(graph, alternating_lanes(graph))
    object.__setattr__(plan, "segments", plan.segments[::-1])
    with pytest.raises(PlanError, match="depends on"):
        HybridSession(graph, plan=plan)


def test_a_plan_for_more_cores_than_there_are_is_refused() -> None:
    """It is not run on fewer."""
    graph = load(branches())
    with pytest.raises(PlanError, match="999 cores"):
        HybridSession(graph, plan=fixed_plan(graph, [1, 2, 1, 999]))


def test_a_plan_for_a_missing_accelerator_is_refused_by_strict_sessions() -> None:
    """A given plan is a promise; without its provider it cannot be kept."""
    graph = load(branches())
    plan = fixed_plan(graph, [0, 1, 0, 1], accelerator="NoSuchExecutionProvider")
    with pytest.raises(ProviderError, match="NoSuchExecutionProvider"):
        HybridSession(graph, plan=plan, strict=True)
    with HybridSession(graph, plan=plan) as session:
        assert_same_as_plain(session, branches(), {"x": X})


@pytest.mark.parametrize("goal", [{"slo": "fast"}, {"slo": 0}, {"alpha": -1.0}, {"cores": 0}, {"cores": 10_000}])
def test_bad_goals_are_refused(goal: dict[str, Any]) -> None:
    """Options that are not taken raise, they are not passed over."""
    with pytest.raises(OptionError):
        HybridSession(branches(), **goal)


def test_the_cpus_provider_may_be_the_accelerator() -> None:
    """A lane of its own, in the CPU's memory, gives equal results: by hand and by a plan of its profile."""
    model = branches()
    graph = load(model)
    for placed in ([0, 1, 0, 1], [1, 0, 1, 0], [0, 0, 1, 1]):
        plan = fixed_plan(graph, placed, accelerator="CPUExecutionProvider")
        with HybridSession(graph, plan=plan) as session:
            assert_same_as_plain(session, model, {"x": X})
    plan = partition(graph, profile(graph, 1, "cpu"), alpha=0.0)
    with HybridSession(graph, plan=plan) as session:
        assert_same_as_plain(session, model, {"x": X})


def free() -> onnx.ModelProto:
    """A batch of any size, through two branches."""
    nodes = [node("Relu", ["x"], ["a"]), node("Neg", ["x"], ["b"]), node("Add", ["a", "b"], ["y"])]
    return make_model(nodes, [value("x", FLOAT, ["batch", 4])], [value("y", FLOAT, ["batch", 4])])


def test_free_dimensions_are_fixed_by_the_feed() -> None:
    """Any shape is run, those used before and new ones, also an empty batch."""
    with HybridSession(free()) as session:
        assert session.get_inputs()[0].shape == ["batch", 4]
        for batch in (1, 3, 0, 1, *range(2, 12), 3):
            feed = {"x": np.random.default_rng(batch).standard_normal((batch, 4)).astype(np.float32)}
            assert_same_as_plain(session, free(), feed)
        with pytest.raises(InvalidArgument):
            session.run(None, {"x": np.zeros((2, 5), np.float32)})


def test_free_dimensions_are_fixed_by_shapes() -> None:
    """A graph loaded with shapes is planned and cut; other shapes run plain."""
    for shapes in ({"x": (2, 4)}, {"batch": (2,)}):
        graph = load(free(), shapes)
        assert not graph.free_dimensions
        with cut_session(graph) as session:
            assert session.plan is not None
            assert_same_as_plain(session, free(), {"x": X})
            assert_same_as_plain(session, free(), {"x": np.ones((3, 4), np.float32)})
            assert_same_as_plain(session, free(), {"x": X})


def test_an_input_without_any_shape() -> None:
    """Its rank comes with the feed."""
    model = make_model(
        [node("Relu", ["x"], ["a"]), node("Neg", ["a"], ["y"])], [value("x", FLOAT, None)], [value("y", FLOAT, None)]
    )
    assert load(model).free_dimensions == ("x[?]",)
    with HybridSession(model) as session:
        for x in (X, X[0], np.array(2.0, np.float32)):
            assert_same_as_plain(session, model, {"x": x})


def test_a_result_whose_rank_depends_on_the_data() -> None:
    """An If whose branches differ in rank keeps its readers with it."""

    def branch(op_type: str, inputs: list[str]) -> onnx.GraphProto:
        return onnx.helper.make_graph(
            [node(op_type, inputs, ["o" + op_type])], "g", [], [value("o" + op_type, FLOAT, None)]
        )

    nodes = [
        node("If", ["c"], ["v"], then_branch=branch("Identity", ["x"]), else_branch=branch("Reshape", ["x", "flat"])),
        node("Relu", ["v"], ["y"]),
        node("Neg", ["x"], ["n"]),
        node("Abs", ["n"], ["m"]),
    ]
    inputs = [value("c", BOOL, []), value("x", FLOAT, [2, 4])]
    outputs = [value("y", FLOAT, None), value("m", FLOAT, [2, 4])]
    model = make_model(nodes, inputs, outputs, {"flat": np.array([-1])})
    with cut_session(model) as session:
        for c in (True, False):
            assert_same_as_plain(session, model, {"c": np.array(c), "x": X})


# What runs plain, and why.


def test_inputs_that_cannot_be_bound_run_plain() -> None:
    """Sequences and text: the session says why, and gives what onnxruntime gives."""
    sequence = make_model(
        [node("SequenceAt", ["s", "i"], ["v"]), node("Relu", ["v"], ["y"])],
        [onnx.helper.make_tensor_sequence_value_info("s", FLOAT, None), value("i", INT64, [])],
        [value("y", FLOAT, None)],
    )
    with HybridSession(sequence) as session:
        assert "seq(tensor(float))" in session.explain()
        assert_same_as_plain(session, sequence, {"s": [X, X[0]], "i": np.array(1)})
    text = make_model(
        [node("Identity", ["t"], ["u"]), node("Relu", ["x"], ["a"]), node("Neg", ["a"], ["y"])],
        [value("t", onnx.TensorProto.STRING, [2]), value("x", FLOAT, [2, 4])],
        [value("u", onnx.TensorProto.STRING, [2]), value("y", FLOAT, [2, 4])],
    )
    with HybridSession(text) as session:
        assert "tensor(string)" in session.explain()
        assert_same_as_plain(session, text, {"t": np.array(["a", "b"], object), "x": X})


def test_a_sequence_output_runs_plain() -> None:
    """It is not a tensor."""
    model = make_model(
        [node("Relu", ["x"], ["a"]), node("SequenceConstruct", ["a", "x"], ["s"])],
        [value("x", FLOAT, [2, 4])],
        [onnx.helper.make_tensor_sequence_value_info("s", FLOAT, None)],
    )
    with HybridSession(model) as session:
        assert "seq(tensor(float))" in session.explain()
        assert_same_as_plain(session, model, {"x": X})


def test_a_model_of_one_operator_or_none_runs_plain() -> None:
    """There is nothing to run at once."""
    one = make_model([node("Relu", ["x"], ["y"])], [value("x", FLOAT, [2, 4])], [value("y", FLOAT, [2, 4])])
    constant = onnx.numpy_helper.from_array(X, "c")
    none = make_model([node("Constant", [], ["y"], value=constant)], [], [value("y", FLOAT, [2, 4])])
    for model, feed in ((one, {"x": X}), (none, {})):
        with HybridSession(model) as session:
            assert session.plan is None
            assert "one segment" in session.explain()
            assert_same_as_plain(session, model, feed)


def test_what_no_one_can_open_raises_what_onnxruntime_raises() -> None:
    """A session is refused where InferenceSession is."""
    model = make_model([node("NoSuchOperator", ["x"], ["y"])], [value("x", FLOAT, [1])], [value("y", FLOAT, [1])])
    with pytest.raises(Exception, match="NoSuchOperator") as theirs:
        ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    with pytest.raises(type(theirs.value), match="NoSuchOperator"):
        HybridSession(model)


def test_an_accelerator_that_does_not_work_is_done_without() -> None:
    """As InferenceSession falls back to the CPU."""
    with HybridSession(branches(), providers=["CUDAExecutionProvider", "CPUExecutionProvider"]) as session:
        assert "CPUExecutionProvider" in session.get_providers()
        assert_same_as_plain(session, branches(), {"x": X})


# What it adds.


def test_equal_segments_share_a_session() -> None:
    """An unfolded stack opens one session a layer and kind, not one a step; its weights are held once."""
    spec = RecurrentSpec(layers=2, batch=1, io=8, seq=6)
    graph = load(build_recurrent(spec))
    placed = [1 + ("l1" in name) for name in graph.dag.names]
    order = graph.dag.topological_order
    plan = fixed_plan(graph, placed, order)
    opened: list[tuple[int, ...]] = []
    original = SegmentFactory.open

    def counted(self: SegmentFactory, operators: Any, lane: int) -> Any:
        opened.append(tuple(operators))
        return original(self, operators, lane)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SegmentFactory, "open", counted)
        session = HybridSession(graph, plan=plan)
    with session:
        count = int(session.explain().split(" sessions")[0].split(", ")[-1])
        assert len(opened) == len(plan.segments) >= 12
        assert count == 4  # Split with the first step, steps of each layer, and the Concat at the end
        x = np.random.default_rng(0).standard_normal((6, 1, 8)).astype(np.float32)
        assert_same_as_plain(session, build_recurrent(spec), {"X": x})


def test_explain_tells_who_runs_what() -> None:
    """Operators, segments, lanes and the policy."""
    with cut_session(branches()) as session:
        text = session.explain()
    assert "4 operators in" in text  # one product and the sum have become one operator
    assert "cpu1: 2 operators" in text
    assert "cpu2: 2 operators" in text
    assert "policy fixed placement" in text


def test_a_trace_has_every_segment_once_and_in_order() -> None:
    """Segments of one lane do not overlap, and none starts before what it waits for has ended."""
    graph = load(branches())
    plan = fixed_plan(graph, alternating_lanes(graph))
    with HybridSession(graph, plan=plan) as session:
        events = session.trace({"x": X})
    assert sorted(e.segment for e in events) == list(range(len(plan.segments)))
    ends = {i: e.end_ms for e in events for i in plan.segments[e.segment]}
    for event in events:
        assert 0 <= event.start_ms <= event.end_ms
        assert event.lane == plan.schedule.lanes[plan.segments[event.segment][0]]
        inside = plan.segments[event.segment]
        waits = {m for i in inside for m in graph.dag.predecessors[i]} - set(inside)
        assert all(ends[m] <= event.start_ms for m in waits)
    for lane in (1, 2):
        own = sorted((e.start_ms, e.end_ms) for e in events if e.lane == lane)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(own))


@pytest.mark.parametrize("call", ["run", "ort values", "binding"])
@pytest.mark.parametrize("cut", [True, False])
def test_crowded_requests_are_served_by_one_thread_each(call: str, *, cut: bool) -> None:
    """Outputs are right before, during and after the crowd; a single caller returns to the plan."""
    graph = load(branches(size=64))
    plan = fixed_plan(graph, alternating_lanes(graph)) if cut else None
    expected = run_plain(branches(size=64), {"x": np.ones((2, 64), np.float32)})
    wrong: list[object] = []
    with HybridSession(graph if cut else branches(size=64), plan=plan, tune="now") as session:

        def once() -> list[Any]:
            x = np.ones((2, 64), np.float32)
            if call == "run":
                return session.run(None, {"x": x})
            if call == "ort values":
                found = session.run_with_ort_values(None, {"x": ort.OrtValue.ortvalue_from_numpy(x)})
                return [output.numpy() for output in found]
            binding = session.io_binding()
            binding.bind_cpu_input("x", x)
            for name in ("y", "l"):
                binding.bind_output(name)
            session.run_with_iobinding(binding)
            return list(binding.copy_outputs_to_cpu())

        def client() -> None:
            try:
                end = time.monotonic() + 20
                while session._engines.crowding._engine is None and time.monotonic() < end:
                    assert_equal(once(), expected)
                for _ in range(50):
                    assert_equal(once(), expected)
            except BaseException as error:  # noqa: BLE001 - reported below
                wrong.append(error)

        threads = [threading.Thread(target=client) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert session._engines.crowding._engine is not None
        time.sleep(0.2)
        once()
        assert not session._engines.crowding.active
        assert (session.plan is not None) is cut
        assert_equal(once(), expected)
