"""HybridSession compared with onnxruntime's InferenceSession."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument

from chrion import HybridSession, Plan, load, partition
from chrion.errors import OptionError, PlanError, ProviderError
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
    cut_session,
    make_model,
    node,
    run_plain,
    value,
)
from seams.sessions import count_switches, crowd_at_two, decide_by, engines_of, record_calls, replace_step
from tuning_support import alternate, invented_profile

#: Run a test on native lanes and on lane threads.
on_lanes = pytest.mark.usefixtures("either_lanes")
#: Plan with costs that take no time to measure.
invented = pytest.mark.usefixtures("invented_costs")

X = np.linspace(-2, 2, 8, dtype=np.float32).reshape(2, 4)


@pytest.fixture
def invented_costs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Invent the costs of operators, and make decisions anew."""
    monkeypatch.setenv("CHRION_CACHE", str(tmp_path / "cache"))
    replace_step(monkeypatch, "profile", invented_profile)


# The interface of InferenceSession.


@on_lanes
def test_outputs_are_returned_in_the_order_of_the_names() -> None:
    """Without names all outputs are returned, and a repeated name is returned twice."""
    model = branches()
    y, left = run_plain(model, {"x": X})
    with cut_session(model) as session:
        assert_equal(session.run(None, {"x": X}), [y, left])
        assert_equal(session.run([], {"x": X}), [y, left])
        assert_equal(session.run(["l"], {"x": X}), [left])
        assert_equal(session.run(["l", "y", "l"], {"x": X}), [left, y, left])


@invented
def test_inputs_outputs_and_metadata_are_described_as_by_onnxruntime() -> None:
    """Names, types, shapes and metadata equal those of InferenceSession."""
    model = make_model(
        [node("Relu", ["x"], ["r"]), node("Add", ["r", "s"], ["y"]), node("Not", ["b"], ["nb"])],
        [value("x", FLOAT, ["batch", 4]), value("s", FLOAT, []), value("b", BOOL, [2])],
        [value("y", FLOAT, ["batch", 4]), value("nb", BOOL, [2])],
        producer_name="a producer",
        doc_string="a description",
    )
    onnx.helper.set_model_props(model, {"key": "value"})
    reference = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    with HybridSession(model) as session:
        for found, expected in (
            (session.get_inputs(), reference.get_inputs()),
            (session.get_outputs(), reference.get_outputs()),
        ):
            assert [(a.name, a.type, list(a.shape or ())) for a in found] == [
                (a.name, a.type, a.shape) for a in expected
            ]
        assert session.get_providers() == ["CPUExecutionProvider"]
        found, expected = session.get_modelmeta(), reference.get_modelmeta()
        for field in ("producer_name", "graph_name", "domain", "description", "version", "custom_metadata_map"):
            assert getattr(found, field) == getattr(expected, field)


@on_lanes
def test_invalid_feeds_raise_what_onnxruntime_raises() -> None:
    """The exception has InferenceSession's type, and the session works afterwards."""
    model = branches()
    feeds: list[dict[str, Any]] = [
        {},
        {"x": X, "z": X},
        {"x": X.astype(np.float64)},
        {"x": X.astype(np.int64)},
        {"x": X[0]},
        {"x": X[:, :3]},
        {"x": np.array([["a"] * 4] * 2)},
    ]
    with cut_session(model) as session:
        for feed in feeds:
            with pytest.raises((ValueError, InvalidArgument)) as expected:
                run_plain(model, feed)
            with pytest.raises(type(expected.value)):
                session.run(None, feed)
            assert_same_as_plain(session, model, {"x": X})


@on_lanes
def test_an_unknown_output_raises_what_onnxruntime_raises() -> None:
    """The exception has InferenceSession's type."""
    model = branches()
    with pytest.raises(InvalidArgument):
        run_plain(model, {"x": X}, ["none"])
    with cut_session(model) as session, pytest.raises(InvalidArgument, match="none"):
        session.run(["none"], {"x": X})


@on_lanes
def test_lists_ort_values_and_strided_arrays_are_accepted() -> None:
    """Lists and OrtValues are converted as by onnxruntime, and strided arrays are made contiguous."""
    model = branches()
    wide = np.arange(32, dtype=np.float32).reshape(4, 8)[::2, ::2]
    with cut_session(model) as session:
        assert_equal(session.run(None, {"x": X.tolist()}), run_plain(model, {"x": X.tolist()}))
        assert_same_as_plain(session, model, {"x": wide})
        assert_same_as_plain(session, model, {"x": np.asfortranarray(X)})
        as_value = session.run(None, {"x": ort.OrtValue.ortvalue_from_numpy(X)})
        assert_equal(as_value, run_plain(model, {"x": X}))


@on_lanes
def test_a_request_may_override_weights() -> None:
    """A weight that is also an input takes the value that is passed or bound; the next run uses the original one."""
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


@invented
def test_sequences_beside_free_dimensions_run_plain() -> None:
    """A model with a sequence as an input runs plain, whatever the shapes of its other inputs."""
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


def test_a_constant_string_as_an_output_runs_plain() -> None:
    """The model runs plain, although its other operators could be cut."""
    model = branches()
    model.graph.initializer.append(onnx.helper.make_tensor("t", onnx.TensorProto.STRING, [2], [b"a", b"b"]))
    model.graph.output.append(value("t", onnx.TensorProto.STRING, [2]))
    with cut_session(model) as session:
        assert "text" in session.explain()
        assert_same_as_plain(session, model, {"x": X})


@on_lanes
def test_run_options_reach_the_segments() -> None:
    """A run with ``terminate`` set raises, and the next one succeeds."""
    options = ort.RunOptions()
    options.terminate = True
    with cut_session(branches()) as session:
        with pytest.raises(Exception, match=r"(?i)terminat"):
            session.run(None, {"x": X}, options)
        assert_same_as_plain(session, branches(), {"x": X})


def test_models_are_accepted_in_many_forms(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A model may be a path, bytes, a proto or a loaded graph."""
    monkeypatch.setenv("CHRION_CACHE", str(tmp_path / "cache"))
    decided = decide_by(monkeypatch, alternate)
    model, path = branches(), tmp_path / "m.onnx"
    onnx.save(model, path)
    sources: list[Any] = [str(path), path, model.SerializeToString(), model, load(path)]
    for source in sources:
        with HybridSession(source) as session:
            assert session.plan is not None
            assert_same_as_plain(session, model, {"x": X})
    assert len(decided) == 1  # they are the same graph


# Plans, shapes, providers.


def test_a_plan_may_be_a_file(tmp_path: Path) -> None:
    """The plan's path is text or a Path."""
    graph = load(branches())
    fixed_plan(graph, alternating_lanes(graph)).save(tmp_path / "p.json")
    for path in (tmp_path / "p.json", str(tmp_path / "p.json")):
        with HybridSession(graph, plan=path) as session:
            assert session.plan == Plan.load(path)
            assert_same_as_plain(session, branches(), {"x": X})


def test_a_plan_of_another_model_is_refused() -> None:
    """The error names the difference between the plan and the model."""
    graph, other = load(branches()), load(branches(size=5))
    with pytest.raises(PlanError, match="different shapes or attributes"):
        HybridSession(other, plan=fixed_plan(graph, alternating_lanes(graph)))
    names = ["x", "a", "b", "c", "y"]
    kinds = zip(("Relu", "Neg", "Abs", "Exp"), itertools.pairwise(names), strict=True)
    nodes = [node(kind, [before], [after], name=kind) for kind, (before, after) in kinds]
    chain = make_model(nodes, [value("x", FLOAT, [2, 4])], [value("y", FLOAT, [2, 4])])
    with pytest.raises(PlanError, match="in the model"):
        HybridSession(chain, plan=fixed_plan(graph, alternating_lanes(graph)))


def test_a_plan_whose_segments_are_out_of_order_is_refused() -> None:
    """The plan is refused, since its lanes would wait for each other forever."""
    graph = load(branches())
    plan = fixed_plan(graph, alternating_lanes(graph))
    object.__setattr__(plan, "segments", plan.segments[::-1])
    with pytest.raises(PlanError, match="depends on"):
        HybridSession(graph, plan=plan)


def test_a_plan_for_more_cores_than_available_is_refused() -> None:
    """The plan is refused and not executed on fewer cores."""
    graph = load(branches())
    with pytest.raises(PlanError, match="999 cores"):
        HybridSession(graph, plan=fixed_plan(graph, [1, 2, 1, 999]))


def test_a_plan_for_a_missing_accelerator_is_refused_by_strict_sessions() -> None:
    """Sessions that are not strict fall back to the CPU."""
    graph = load(branches())
    plan = fixed_plan(graph, [0, 1, 0, 1], accelerator="NoSuchExecutionProvider")
    with pytest.raises(ProviderError, match="NoSuchExecutionProvider"):
        HybridSession(graph, plan=plan, strict=True)
    with HybridSession(graph, plan=plan) as session:
        assert_same_as_plain(session, branches(), {"x": X})


@pytest.mark.parametrize("tune", ["now", "background", "never"])
def test_invalid_goals_are_refused(tune: str) -> None:
    """An invalid SLO, alpha, memory or number of cores raises an OptionError when the session is created."""
    goals: list[dict[str, Any]] = [
        {"slo": "fast"},
        {"slo": 0},
        {"alpha": -1.0},
        {"alpha": float("nan")},
        {"alpha": "cheap"},
        {"memory": "total"},
        {"cores": 0},
        {"cores": 10_000},
    ]
    for goal in goals:
        with pytest.raises(OptionError):
            HybridSession(branches(), tune=tune, **goal)


def test_the_cpus_provider_may_be_the_accelerator() -> None:
    """The accelerator's lane uses host memory; plans by hand and a plan of its profile give equal results."""
    model = branches()
    graph = load(model)
    for placed in ([0, 1, 0, 1], [0, 0, 1, 1]):
        plan = fixed_plan(graph, placed, accelerator="CPUExecutionProvider")
        with HybridSession(graph, plan=plan) as session:
            assert_same_as_plain(session, model, {"x": X})
    plan = partition(graph, invented_profile(graph, accelerator="CPUExecutionProvider"), alpha=0.0)
    with HybridSession(graph, plan=plan) as session:
        assert_same_as_plain(session, model, {"x": X})


def free() -> onnx.ModelProto:
    """Return a model of two branches with a free batch size."""
    nodes = [node("Relu", ["x"], ["a"]), node("Neg", ["x"], ["b"]), node("Add", ["a", "b"], ["y"])]
    return make_model(nodes, [value("x", FLOAT, ["batch", 4])], [value("y", FLOAT, ["batch", 4])])


def test_free_dimensions_are_fixed_by_each_request() -> None:
    """Requests of earlier and of new shapes are served, including an empty batch."""
    with HybridSession(free()) as session:
        assert session.get_inputs()[0].shape == ["batch", 4]
        for batch in (1, 3, 0, 1, *range(2, 12), 3):
            feed = {"x": np.random.default_rng(batch).standard_normal((batch, 4)).astype(np.float32)}
            assert_same_as_plain(session, free(), feed)
        for wrong in ({"x": np.zeros((2, 5), np.float32)}, {"x": X, "z": X}, {}, {"x": None}):
            with pytest.raises(Exception, match=r".") as expected:
                run_plain(free(), wrong)
            with pytest.raises(type(expected.value)):
                session.run(None, wrong)


@on_lanes
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


def test_a_plan_of_another_model_is_refused_if_the_model_has_free_dimensions() -> None:
    """It is refused when the session is created, whether the plan has no shapes or shapes of other inputs."""
    fixed = load(branches())
    other = make_model([node("Relu", ["z"], ["y"])], [value("z", FLOAT, ["n", 4])], [value("y", FLOAT, ["n", 4])])
    shaped = load(other, {"n": 2})
    for plan, difference in (
        (fixed_plan(fixed, alternating_lanes(fixed)), r"free dimensions that the plan does not fix: x\[batch x 4\]"),
        (fixed_plan(shaped, [1]), "no input or free dimension 'n'"),
    ):
        for strict in (False, True):
            with pytest.raises(PlanError, match=f"does not fit model .*{difference}"):
                HybridSession(free(), plan=plan, strict=strict)


@on_lanes
def test_a_given_plan_serves_its_shapes_again_after_its_engine_was_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only requests of other shapes run plain for that reason, and explanations name the shapes."""
    monkeypatch.setattr("chrion.runtime.engine_table._MAX_SHAPES", 1)
    graph = load(free(), {"batch": 2})
    with HybridSession(free(), plan=fixed_plan(graph, alternating_lanes(graph))) as session:
        for batch in (3, 2, 3):
            assert_same_as_plain(session, free(), {"x": np.ones((batch, 4), np.float32)})
            assert (session.plan is None) == (batch == 3)
            assert ("the plan is for other shapes, x=2x4" in session.explain()) == (batch == 3)


@on_lanes
def test_explanations_name_the_shapes_if_several_have_engines() -> None:
    """The first line begins with the shapes of the last request; the last one counts the other engines."""
    graph = load(free(), {"batch": 2})
    with HybridSession(free(), plan=fixed_plan(graph, alternating_lanes(graph))) as session:
        assert not session.explain().startswith("x=")
        for batch, others in ((3, "1 with a plan, 0 plain"), (2, "0 with a plan, 1 plain")):
            assert_same_as_plain(session, free(), {"x": np.ones((batch, 4), np.float32)})
            lines = session.explain().splitlines()
            assert lines[0].startswith(f"x={batch}x4: ")
            assert lines[-1] == f"other shapes: {others}"


@invented
def test_an_input_without_any_shape() -> None:
    """The rank of the input may differ from request to request."""
    model = make_model(
        [node("Relu", ["x"], ["a"]), node("Neg", ["a"], ["y"])], [value("x", FLOAT, None)], [value("y", FLOAT, None)]
    )
    assert load(model).free_dimensions == ("x[?]",)
    with HybridSession(model) as session:
        for x in (X, X[0], np.array(2.0, np.float32)):
            assert_same_as_plain(session, model, {"x": x})


@on_lanes
def test_a_result_whose_rank_depends_on_the_data() -> None:
    """An If whose branches differ in rank is in one segment with its readers."""

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


# Models that run plain.


@invented
def test_inputs_that_cannot_be_bound_run_plain() -> None:
    """Sequences and strings have a reason in the explanation, and outputs equal to onnxruntime's."""
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


@invented
def test_a_sequence_output_runs_plain() -> None:
    """The explanation names the type of the output as the reason."""
    model = make_model(
        [node("Relu", ["x"], ["a"]), node("SequenceConstruct", ["a", "x"], ["s"])],
        [value("x", FLOAT, [2, 4])],
        [onnx.helper.make_tensor_sequence_value_info("s", FLOAT, None)],
    )
    with HybridSession(model) as session:
        assert "seq(tensor(float))" in session.explain()
        assert_same_as_plain(session, model, {"x": X})


@invented
def test_a_model_of_one_operator_or_none_runs_plain() -> None:
    """The model runs plain, since no two operators could run in parallel."""
    one = make_model([node("Relu", ["x"], ["y"])], [value("x", FLOAT, [2, 4])], [value("y", FLOAT, [2, 4])])
    constant = onnx.numpy_helper.from_array(X, "c")
    none = make_model([node("Constant", [], ["y"], value=constant)], [], [value("y", FLOAT, [2, 4])])
    for model, feed in ((one, {"x": X}), (none, {})):
        with HybridSession(model) as session:
            assert session.plan is None
            assert "one segment" in session.explain()
            assert_same_as_plain(session, model, feed)


def test_a_model_that_onnxruntime_cannot_open_raises_its_error() -> None:
    """The exception has InferenceSession's type."""
    model = make_model([node("NoSuchOperator", ["x"], ["y"])], [value("x", FLOAT, [1])], [value("y", FLOAT, [1])])
    with pytest.raises(Exception, match="NoSuchOperator") as expected:
        ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    with pytest.raises(type(expected.value), match="NoSuchOperator"):
        HybridSession(model)


@invented
def test_an_accelerator_that_does_not_work_is_not_used() -> None:
    """The session falls back to the CPU, as InferenceSession does."""
    with HybridSession(branches(), providers=["CUDAExecutionProvider", "CPUExecutionProvider"]) as session:
        assert "CPUExecutionProvider" in session.get_providers()
        assert_same_as_plain(session, branches(), {"x": X})
        asked = "the accelerator was requested and is not available: "
        assert session.explain().splitlines()[-1].startswith(asked)
        assert "CUDAExecutionProvider" in session.explain().splitlines()[-1]
    with HybridSession(branches(), providers=["CPUExecutionProvider"]) as session:
        assert "requested" not in session.explain()


# Methods beyond those of InferenceSession.


@on_lanes
def test_equal_segments_share_a_session() -> None:
    """An unrolled stack opens one session for each layer and kind of segment, not for each step."""
    spec = RecurrentSpec(layers=2, batch=1, io=8, seq=6)
    graph = load(build_recurrent(spec))
    placed = [1 + ("l1" in name) for name in graph.dag.names]
    order = graph.dag.topological_order
    plan = fixed_plan(graph, placed, order)
    assert len(plan.segments) >= 12
    with HybridSession(graph, plan=plan) as session:
        count = int(session.explain().split(" sessions")[0].split(", ")[-1])
        assert count == 4  # Split with the first step, steps of each layer, and the Concat at the end
        x = np.random.default_rng(0).standard_normal((6, 1, 8)).astype(np.float32)
        assert_same_as_plain(session, build_recurrent(spec), {"X": x})


@on_lanes
def test_an_explanation_lists_operators_by_lane() -> None:
    """The explanation also has the number of operators and the policy."""
    with cut_session(branches()) as session:
        text = session.explain()
    assert "4 operators in" in text  # one product and the sum have become one operator
    assert "cpu1: 2 operators" in text
    assert "cpu2: 2 operators" in text
    assert "policy fixed placement" in text


@on_lanes
def test_a_trace_has_every_segment_once_and_in_order() -> None:
    """Segments of one lane do not overlap, and none starts before its predecessors have ended."""
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


def call_session(session: HybridSession, call: str, x: np.ndarray[Any, Any]) -> list[Any]:
    """Run the model of :func:`branches` by one of three methods; return its outputs as arrays."""
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


CALLS = ("run", "ort values", "binding")


def call_from_threads(count: int, call: Callable[[], object]) -> None:
    """Call a function in several threads, and raise an exception of one of them."""
    with ThreadPoolExecutor(count) as pool:
        for called in [pool.submit(call) for _ in range(count)]:
            called.result()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("call", CALLS)
def test_requests_that_contend_for_the_arena_get_a_session_without_one(
    call: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs are correct before and after; the caller's own session of one thread is also replaced in a crowd."""
    switches = itertools.count(step=100)
    count_switches(monkeypatch, lambda: next(switches))
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    if threads > 1:
        crowd_at_two(monkeypatch)
    source, x = branches(size=64), np.ones((2, 64), np.float32)
    expected = run_plain(source, {"x": x})
    with HybridSession(source, options, tune="never") as session:
        one_thread, served = engines_of(session).diversion.one_thread, list[None]()

        def replaced() -> bool:
            engine = one_thread.get() if one_thread.is_open else None
            return engine is not None and not engine.session.get_session_options().enable_cpu_mem_arena

        def call_until(condition: Callable[[], bool]) -> None:
            end_s = time.monotonic() + 60
            while not condition():
                assert_equal(call_session(session, call, x), expected)
                assert time.monotonic() < end_s

        call_from_threads(4, lambda: call_until(replaced))
        assert not one_thread.arena
        other = one_thread.get()
        assert other is not None
        record_calls(monkeypatch, other.session, served)
        call_from_threads(4, lambda: call_until(lambda: len(served) >= 20))


@pytest.mark.parametrize("cut", [True, False])
def test_crowded_requests_are_served_by_one_thread_each(*, cut: bool) -> None:
    """Outputs are correct before, during and after the crowd; a single caller returns to the plan."""
    graph, x = load(branches(size=64)), np.ones((2, 64), np.float32)
    plan = fixed_plan(graph, alternating_lanes(graph)) if cut else None
    expected = run_plain(branches(size=64), {"x": x})
    # Tuning on a busy machine may choose one thread, and then nothing is diverted.
    with HybridSession(graph if cut else branches(size=64), plan=plan, tune="never") as session:
        diversion = engines_of(session).diversion
        for call in CALLS:

            def crowd(call: str = call) -> None:
                end_s = time.monotonic() + 60
                while not diversion.one_thread.is_open:
                    assert_equal(call_session(session, call, x), expected)
                    assert time.monotonic() < end_s
                for _ in range(20):
                    assert_equal(call_session(session, call, x), expected)

            call_from_threads(8, crowd)
            assert diversion.one_thread.is_open
            time.sleep(0.11)
            assert_equal(call_session(session, call, x), expected)
            assert not diversion.crowding.active
            assert (session.plan is not None) is cut
    assert not diversion.one_thread.is_open
