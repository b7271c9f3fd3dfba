"""Plans as annotations of the model: valid ONNX, the same results, and the same plan when they are read back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import chrion
from chrion import HybridSession, Plan
from chrion.errors import OptionError, PlanError
from chrion.scheduler import fixed_plan
from chrion.scheduler.annotation import LANE_KEY, SEGMENT_KEY, annotate, write_annotated
from chrion.scheduler.plan import PLAN_KEY
from chrion.zoo import build, write
from helpers import alternating_lanes, assert_equal, branches, conditional, run_plain


def annotated(path: Path, target: Path) -> tuple[Plan, onnx.ModelProto]:
    graph = chrion.load(path)
    plan = fixed_plan(graph, alternating_lanes(graph))
    write_annotated(graph, plan, target)
    return plan, onnx.load(target, load_external_data=False)


def metadata(node: onnx.NodeProto | onnx.ModelProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in node.metadata_props}


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("googlenet", {"resolution": 64, "width": 0.1, "classes": 7}),
        ("moe", {"seq": 2, "hidden": 16, "heads": 4, "kv_heads": 2, "inner": 24, "experts": 4}),
        ("lstm", {"layers": 2, "seq": 4, "chunk": 1}),
    ],
)
def test_an_annotated_model_is_valid_and_runs_as_before(name: str, parameters: dict[str, Any], tmp_path: Path) -> None:
    """ONNX's checker accepts it, onnxruntime gives the same results, and the plan that is read back is the same."""
    model = build(name, parameters)
    onnx.save(model, tmp_path / "m.onnx")
    plan, found = annotated(tmp_path / "m.onnx", tmp_path / "a.onnx")
    onnx.checker.check_model(found, full_check=True)
    assert found.ir_version == 11
    assert Plan.load(tmp_path / "a.onnx") == plan
    feed = {
        i.name: np.random.default_rng(1).standard_normal(
            [d.dim_value for d in i.type.tensor_type.shape.dim], np.float32
        )
        for i in model.graph.input
    }
    expected = run_plain(model, feed)
    assert_equal(run_plain(str(tmp_path / "a.onnx"), feed), expected)
    with HybridSession(tmp_path / "a.onnx", plan=Plan.load(tmp_path / "a.onnx")) as session:
        assert_equal(session.run(None, feed), expected)


def test_every_node_names_its_lane(tmp_path: Path) -> None:
    """The lanes in the metadata and in the device configuration are those of the plan, by operator name."""
    onnx.save(branches(size=2), tmp_path / "m.onnx")
    plan, found = annotated(tmp_path / "m.onnx", tmp_path / "a.onnx")
    (configuration,) = found.configuration
    assert list(configuration.device) == ["cpu1", "cpu2"]
    assert configuration.num_devices == 2
    lanes = {name: f"cpu{lane}" for name, lane in zip(plan.operators, plan.schedule.lanes, strict=True)}
    segments = {plan.operators[i]: str(at) for at, segment in enumerate(plan.segments) for i in segment}
    compared = 0
    for node in found.graph.node:
        (own,) = node.device_configurations
        assert {spec.tensor_name for spec in own.sharding_spec} == set(node.output)
        assert {configuration.device[d] for spec in own.sharding_spec for d in spec.device} == {
            metadata(node)[LANE_KEY]
        }
        if node.name in lanes:
            compared += 1
            assert (metadata(node)[LANE_KEY], metadata(node)[SEGMENT_KEY]) == (lanes[node.name], segments[node.name])
    assert compared


def test_merged_nodes_have_the_placement_of_their_reader() -> None:
    """A batch norm that is merged into a convolution, or a convolution into it, is where the result is computed."""
    weight = numpy_helper.from_array(np.ones((2, 1, 1, 1), np.float32), "w")
    vectors = [numpy_helper.from_array(np.ones(2, np.float32), name) for name in "sbmv"]
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], name="conv"),
        helper.make_node("BatchNormalization", ["c", "s", "b", "m", "v"], ["n"], name="norm"),
        helper.make_node("Relu", ["n"], ["y"], name="relu"),
    ]
    info = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, c, 4, 4]) for n, c in (("x", 1), ("y", 2))]
    graph = helper.make_graph(nodes, "g", info[:1], info[1:], [weight, *vectors])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    loaded = chrion.load(model)
    assert len(loaded.dag) < 3
    lanes = list(range(1, len(loaded.dag) + 1))
    annotate(model, loaded, fixed_plan(loaded, lanes))
    assert [metadata(node)[LANE_KEY] for node in model.graph.node][-1] == f"cpu{lanes[-1]}"
    assert metadata(model.graph.node[0])[LANE_KEY] == metadata(model.graph.node[1])[LANE_KEY] == "cpu1"


def test_the_bodies_of_control_flow_have_the_placement_of_their_node(tmp_path: Path) -> None:
    """Nodes in both branches of an If are annotated like the If; the model is valid, and the plan fits it."""
    onnx.save(conditional(), tmp_path / "m.onnx")
    plan, found = annotated(tmp_path / "m.onnx", tmp_path / "a.onnx")
    onnx.checker.check_model(found, full_check=True)
    own = metadata(found.graph.node[1])
    for attribute in found.graph.node[1].attribute:
        (inner,) = attribute.g.node
        assert metadata(inner) == own
        assert inner.device_configurations[0].sharding_spec[0].tensor_name == "b"
    assert Plan.load(tmp_path / "a.onnx") == plan
    assert plan.apply(chrion.load(tmp_path / "a.onnx")).dag.op_types == ("Relu", "If")
    feed = {"x": np.array([-1, 2], np.float32), "flag": np.array(1, bool)}
    assert_equal(run_plain(str(tmp_path / "a.onnx"), feed), run_plain(str(tmp_path / "m.onnx"), feed))


def test_a_constant_that_only_bodies_read_has_the_placement_of_their_node() -> None:
    """The optimisation makes the constant a weight; the If whose branches capture it is on the second core."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "xy")
    flag = helper.make_tensor_value_info("flag", TensorProto.BOOL, [])
    result = helper.make_tensor_value_info("b", TensorProto.FLOAT, [2])
    arms = {
        f"{name}_branch": helper.make_graph([helper.make_node(op, ["r", "c"], ["b"])], name, [], [result])
        for name, op in (("then", "Add"), ("else", "Mul"))
    }
    constant = helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(np.ones(2, np.float32)))
    nodes = [helper.make_node("Relu", ["x"], ["r"]), constant, helper.make_node("If", ["flag"], ["y"], **arms)]
    graph = helper.make_graph(nodes, "g", [x, flag], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    loaded = chrion.load(model)
    assert loaded.dag.op_types == ("Relu", "If")
    annotate(model, loaded, fixed_plan(loaded, [1, 2]))
    assert [metadata(node)[LANE_KEY] for node in model.graph.node] == ["cpu1", "cpu2", "cpu2"]


def test_a_model_that_another_tool_has_changed_is_refused_with_the_difference(tmp_path: Path) -> None:
    """The plan of a model with other names or operators does not fit; the message names the first difference."""
    onnx.save(branches(size=2), tmp_path / "m.onnx")
    plan, found = annotated(tmp_path / "m.onnx", tmp_path / "a.onnx")
    for at, node in enumerate(found.graph.node):
        node.name = f"renamed{at}"
    onnx.save(found, tmp_path / "renamed.onnx")
    read = Plan.load(tmp_path / "renamed.onnx")
    assert read == plan
    with pytest.raises(PlanError, match=r"the plan's operator '.*' is 'renamed\d+' in the model"):
        read.apply(chrion.load(tmp_path / "renamed.onnx"))
    found.graph.node.add(op_type="Neg", input=[found.graph.output[0].name], output=["more"])
    found.graph.output.add().CopyFrom(helper.make_tensor_value_info("more", TensorProto.FLOAT, None))
    onnx.save(found, tmp_path / "longer.onnx")
    with pytest.raises(PlanError, match=r"the plan has \d+ operators, the model \d+"):
        Plan.load(tmp_path / "longer.onnx").apply(chrion.load(tmp_path / "longer.onnx"))


def test_annotating_again_replaces_the_annotation(tmp_path: Path) -> None:
    """A model has the annotations of the last plan only."""
    onnx.save(branches(size=2), tmp_path / "m.onnx")
    annotated(tmp_path / "m.onnx", tmp_path / "a.onnx")
    _, again = annotated(tmp_path / "a.onnx", tmp_path / "b.onnx")
    assert len(again.configuration) == 1
    assert all(len(node.device_configurations) == 1 for node in again.graph.node)
    assert len(again.metadata_props) == 1


def test_weights_of_old_models_stay_constant(tmp_path: Path) -> None:
    """Weights that IR version 3 lists among the inputs are not replaceable in the annotated model."""
    info = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [2]) for n in "xwy"]
    weight = numpy_helper.from_array(np.ones(2, np.float32), "w")
    nodes = [helper.make_node("Add", ["x", "w"], ["a"]), helper.make_node("Relu", ["a"], ["y"])]
    graph = helper.make_graph(nodes, "old", info[:2], info[2:], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 8)], ir_version=3)
    onnx.save(model, tmp_path / "m.onnx")
    _, found = annotated(tmp_path / "m.onnx", tmp_path / "a.onnx")
    assert [i.name for i in found.graph.input] == ["x"]
    onnx.checker.check_model(found)


def test_external_weights_stay_where_they_are(tmp_path: Path) -> None:
    """The annotated model refers to the same file of weights, so it has to be in the same folder."""
    write("dlrm", tmp_path / "m.onnx", {"rows": 20_000})
    _, found = annotated(tmp_path / "m.onnx", tmp_path / "a.onnx")
    assert any(tensor.external_data for tensor in found.graph.initializer)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.onnx", "m.onnx", "m.onnx.data"]
    chrion.load(tmp_path / "a.onnx")
    (tmp_path / "other").mkdir()
    with pytest.raises(OptionError, match="another folder"):
        annotated(tmp_path / "m.onnx", tmp_path / "other" / "a.onnx")


@pytest.mark.parametrize("text", [None, "{", "[]", "{}", '{"schema": "chrion.plan/1"}', "[" * 100_000])
def test_a_model_without_a_valid_plan_is_refused(text: str | None, tmp_path: Path) -> None:
    """A missing or damaged annotation is one error."""
    model = branches(size=2)
    if text is not None:
        model.metadata_props.add(key=PLAN_KEY, value=text)
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(PlanError, match=r"m\.onnx"):
        Plan.load(tmp_path / "m.onnx")
