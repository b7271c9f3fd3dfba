"""Tests of models and requests that are stored without their large arrays."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import cases
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from sample import read_sample, sample_names, write_sample
from seeding import Recipe, restore, seedable, strip

from helpers import FLOAT, make_model, node, value

NUMBERS = np.random.default_rng(0)
VARIANCE = NUMBERS.uniform(0.5, 1.5, 512).astype(np.float32)
TABLE = NUMBERS.standard_normal((64, 8)).astype(np.float16)
CODES = NUMBERS.integers(-100, 100, 4096).astype(np.int8)
INDICES = NUMBERS.permutation(512).astype(np.int64)
MASK = np.triu(np.full((32, 32), -np.inf, np.float32), 1)


def weighted_model() -> onnx.ModelProto:
    """Return a model with weights in an initialiser, a constant and a branch, and with an exporter's notes."""
    branch = helper.make_graph(
        [helper.make_node("Constant", [], ["inner"], value=numpy_helper.from_array(VARIANCE, "inner"))],
        "branch",
        [],
        [value("inner", FLOAT, None)],
    )
    nodes = [
        node("Add", ["x", "variance"], ["a"], name="sum", doc_string="line 12"),
        node("Constant", [], ["table"], value=numpy_helper.from_array(TABLE)),
        node("If", ["flag"], ["b"], then_branch=branch, else_branch=branch),
        node("Mul", ["a", "b"], ["y"]),
    ]
    kept = {"indices": INDICES, "mask": MASK, "flag": np.array(1, bool), "small": VARIANCE[:8]}
    model = make_model(
        nodes, [value("x", FLOAT, [512])], [value("y", FLOAT, [512])], {"variance": VARIANCE, "codes": CODES, **kept}
    )
    model.graph.node[0].metadata_props.add(key="stack", value="line 12")
    model.metadata_props.add(key="author", value="somebody")
    model.graph.value_info.append(value("a", FLOAT, [512]))
    return model


def test_a_stripped_model_is_restored() -> None:
    """Names, types and shapes are equal, large weights resemble the original ones, and all other values are equal."""
    model = weighted_model()
    stripped = strip(model)
    restored = restore(onnx.load_from_string(stripped.SerializeToString()))
    assert stripped.ByteSize() < model.ByteSize() / 1.5
    onnx.checker.check_model(restored)
    before, after = ({t.name: numpy_helper.to_array(t) for t in m.graph.initializer} for m in (model, restored))
    for name, array in before.items():
        assert (after[name].dtype, after[name].shape) == (array.dtype, array.shape)
        assert np.array_equal(after[name], array) == (name not in {"variance", "codes"})
        assert array.min() <= after[name].min()
        assert after[name].max() <= array.max()
    assert after["variance"].mean() == pytest.approx(VARIANCE.mean(), abs=0.05)
    assert after["variance"].std() == pytest.approx(VARIANCE.std(), rel=0.2)
    assert restored.SerializeToString() == restore(stripped).SerializeToString()
    assert model.SerializeToString() == weighted_model().SerializeToString(), "the original was changed"


def test_constants_in_nodes_and_branches_are_restored() -> None:
    """Weights are drawn again in Constant nodes and in inner graphs."""
    stripped = strip(weighted_model())
    assert not stripped.graph.node[1].attribute[0].t.raw_data
    restored = restore(stripped)
    table = numpy_helper.to_array(restored.graph.node[1].attribute[0].t)
    assert (table.dtype, table.shape) == (TABLE.dtype, TABLE.shape)
    for attribute in restored.graph.node[2].attribute:
        inner = numpy_helper.to_array(attribute.g.node[0].attribute[0].t)
        assert (inner.shape, inner.min() > 0.4) == (VARIANCE.shape, True)


def test_exporters_notes_are_stripped() -> None:
    """Notes at nodes are removed; the model's metadata and the types of its values are kept."""
    stripped = strip(weighted_model())
    assert not stripped.graph.node[0].doc_string
    assert not stripped.graph.node[0].metadata_props
    assert [entry.value for entry in stripped.metadata_props] == ["somebody"]
    assert [info.name for info in stripped.graph.value_info] == ["a"]


def test_only_arrays_that_can_be_drawn_are_replaced() -> None:
    """Masks, indices, text, small arrays and arrays that compress well are kept."""
    assert all(map(seedable, (VARIANCE, TABLE, CODES)))
    assert not any(map(seedable, (MASK, INDICES, VARIANCE[:8], np.zeros(4096, np.float32), CODES.astype(str))))


@pytest.mark.parametrize("kind", [TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.BFLOAT16, TensorProto.UINT8])
def test_a_recipe_keeps_type_and_range(kind: int) -> None:
    """Arrays of every type are drawn within the range of the original."""
    array = (NUMBERS.uniform(3, 200, (16, 32))).astype(helper.tensor_dtype_to_np_dtype(kind))
    recipe = Recipe.from_json(json.loads(json.dumps(Recipe.of(array, "name").to_json())))
    drawn = recipe.draw()
    assert (drawn.dtype, drawn.shape) == (array.dtype, array.shape)
    assert (drawn.min() >= array.min(), drawn.max() <= array.max()) == (True, True)
    assert np.array_equal(drawn, recipe.draw())


def test_a_case_is_written_and_read(tmp_path: Path) -> None:
    """Requests keep names, types and shapes; small arrays and text keep their values."""
    folder = tmp_path / "case"
    folder.mkdir()
    model = weighted_model()
    onnx.save(model, folder / "model.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0)
    feed: dict[str, Any] = {
        "ids": NUMBERS.integers(0, 30000, (4, 128)),
        "x": VARIANCE,
        "mask": np.ones((1, 3), np.int64),
        "words": np.array([["a", "b"]], object),
        "half": np.array([0.5, 1.5], np.float16),
        "items": [VARIANCE[:3], VARIANCE],
    }
    cases.write_feeds(folder, [feed, {"x": VARIANCE[:4]}])
    case = cases.Case("family/model-a", "onnx.helper", "1", 0.01, 0.02)
    (folder / "case.json").write_text(json.dumps(asdict(case)))
    written = write_sample(folder, tmp_path / "sample")
    assert sample_names(tmp_path / "sample") == ["family-model-a"]
    assert written == sum(path.stat().st_size for path in (tmp_path / "sample").iterdir())
    restored = read_sample("family-model-a", tmp_path, tmp_path / "sample")
    assert restored.case == case
    assert len(onnx.load(restored.model).graph.initializer) == len(weighted_model().graph.initializer)
    found = restored.feeds[0]
    assert [(name, np.asarray(v).dtype) for name, v in found.items() if name != "items"] == [
        (name, v.dtype) for name, v in feed.items() if name != "items"
    ]
    for name in ("mask", "words", "half"):
        assert np.array_equal(found[name], feed[name])
    assert found["ids"].max() < 30000
    assert [item.shape for item in found["items"]] == [(3,), (512,)]
    assert np.array_equal(restored.feeds[1]["x"], VARIANCE[:4])
