"""Annotated models in another tool: onnx-ir reads the placement, and Chrion the plan from what onnx-ir writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest

import chrion
from chrion import HybridSession, Plan
from chrion.profiler.synthetic_inputs import synthetic_inputs
from chrion.scheduler import fixed_plan
from chrion.scheduler.annotation import LANE_KEY, SEGMENT_KEY, write_annotated
from chrion.zoo import build, write
from helpers import alternating_lanes, assert_equal, conditional, run_plain

ir = pytest.importorskip("onnx_ir", "1.0", reason="onnx-ir: pip install 'onnx-ir>=1.0'")


MODELS = {
    "GoogLeNet": lambda: build("googlenet", {"resolution": 64, "width": 0.1, "classes": 7}),
    "experts": lambda: build("moe", {"seq": 2, "hidden": 16, "heads": 4, "kv_heads": 2, "inner": 24, "experts": 4}),
    "LSTM": lambda: build("lstm", {"layers": 2, "seq": 4, "chunk": 1}),
    "If": conditional,
}


def annotated(model: Path, target: Path) -> Plan:
    """Write a model with a plan that alternates between two cores."""
    graph = chrion.load(model)
    plan = fixed_plan(graph, alternating_lanes(graph))
    write_annotated(graph, plan, target)
    return plan


@pytest.fixture(scope="module", params=MODELS)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Plan]:
    """Return the files of a model and of the annotated one, and the plan."""
    model, target = (tmp_path_factory.mktemp("models") / name for name in ("m.onnx", "a.onnx"))
    onnx.save(MODELS[request.param](), model)
    return model, target, annotated(model, target)


def test_onnx_ir_reads_the_lane_and_the_segment_of_every_node(models: tuple[Path, Path, Plan]) -> None:
    """Each node, in bodies too, has one configuration that places all its outputs on the lane in its metadata."""
    _, path, plan = models
    model = ir.load(path)
    (configuration,) = model.device_configurations
    assert (configuration.name, configuration.num_devices) == ("chrion", 2)
    assert configuration.device_names == ("cpu1", "cpu2")
    segment_of = {plan.operators[i]: str(at) for at, segment in enumerate(plan.segments) for i in segment}
    lane_of = {name: f"cpu{lane}" for name, lane in zip(plan.operators, plan.schedule.lanes, strict=True)}
    operators, lanes = 0, set()
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        (own,) = node.device_configurations
        assert own.configuration is configuration
        outputs = [value for value in node.outputs if value.name]
        assert [spec.value for spec in own.sharding_specs] == outputs
        (lane,) = {configuration.device_names[device] for spec in own.sharding_specs for device in spec.device}
        assert lane == node.metadata_props[LANE_KEY]
        lanes.add(lane)
        if node.name and node.name in lane_of:
            operators += 1
            assert lane == lane_of[node.name]
            assert node.metadata_props[SEGMENT_KEY] == segment_of[node.name]
    assert operators > 0
    assert lanes == {"cpu1", "cpu2"}


def test_the_plan_is_read_from_the_model_that_onnx_ir_writes(models: tuple[Path, Path, Plan], tmp_path: Path) -> None:
    """It is the same plan, it fits the written model, and a session that follows it gives onnxruntime's results."""
    original, path, plan = models
    written = tmp_path / "written.onnx"
    ir.save(ir.load(path), written)
    assert Plan.load(written) == plan
    onnx.checker.check_model(onnx.load(written), full_check=True)
    feed: dict[str, Any] = synthetic_inputs(chrion.load(original))
    with HybridSession(written, plan=Plan.load(written)) as session:
        assert_equal(session.run(None, feed), run_plain(str(original), feed))


def test_external_weights_may_be_written_anew(tmp_path: Path) -> None:
    """The plan still fits if onnx-ir moves all weights to another file and another folder."""
    write("dlrm", tmp_path / "m.onnx", {"rows": 200})
    plan = annotated(tmp_path / "m.onnx", tmp_path / "a.onnx")
    (tmp_path / "moved").mkdir()
    ir.save(ir.load(tmp_path / "a.onnx"), tmp_path / "moved" / "w.onnx", external_data="w.data")
    read = Plan.load(tmp_path / "moved" / "w.onnx")
    assert read == plan
    assert read.apply(chrion.load(tmp_path / "moved" / "w.onnx")).dag.names == plan.operators
