"""Large external weights: they are neither read nor copied, and the loaded graph is the same."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto

import chrion
from chrion import HybridSession
from chrion.errors import ModelError
from chrion.scheduler import fixed_plan
from chrion.zoo import build
from external_weights import embedding
from helpers import alternating_lanes, assert_equal, run_plain
from seams.execution import limit

#: Models whose weights may be hidden from the optimisation, and some whose weights may not.
MODELS: dict[str, dict[str, Any]] = {
    "dlrm": {"batch": 2, "rows": 20, "embedding": 4, "hidden": 16},
    "llama": {"layers": 2, "hidden": 16, "heads": 4, "kv_heads": 2, "inner": 24, "seq": 6, "vocabulary": 20},
    "moe": {"seq": 3, "hidden": 16, "heads": 4, "kv_heads": 2, "inner": 24, "experts": 4},
    "bert": {"layers": 2, "hidden": 16, "heads": 2, "inner": 32, "seq": 6, "vocabulary": 20},
    "t5": {"layers": 2, "hidden": 16, "heads": 2, "inner": 32, "seq": 6, "target": 5, "vocabulary": 20},
    "googlenet": {"resolution": 64, "width": 0.1, "classes": 7},
    "lstm": {"layers": 2, "seq": 4, "chunk": 4},
}


def save_external(model: onnx.ModelProto, folder: Path) -> Path:
    """Save a model with all weights but the smallest in a file of their own."""
    onnx.save_model(
        model,
        folder / "m.onnx",
        save_as_external_data=True,
        location="m.data",
        size_threshold=256,
        convert_attribute=False,
    )
    return folder / "m.onnx"


def request_of(model: onnx.ModelProto) -> dict[str, np.ndarray[Any, Any]]:
    pick = np.random.default_rng(1)
    feed: dict[str, np.ndarray[Any, Any]] = {}
    for info in model.graph.input:
        shape = [d.dim_value for d in info.type.tensor_type.shape.dim]
        integers = info.type.tensor_type.elem_type == TensorProto.INT64
        feed[info.name] = pick.integers(0, 2, shape) if integers else pick.standard_normal(shape).astype(np.float32)
    return feed


@pytest.mark.parametrize("name", MODELS)
def test_hidden_weights_change_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph has the same operators and weights, and gives the results of plain onnxruntime."""
    model = build(name, MODELS[name])
    path = save_external(model, tmp_path)
    copied = chrion.load(path)
    limit(monkeypatch, "bytes of a weight that is read", 1)
    graph = chrion.load(path)
    assert sorted(graph.dag.signatures) == sorted(copied.dag.signatures)
    assert sorted(graph.dag.weight_bytes) == sorted(copied.dag.weight_bytes)
    assert [i.name for i in graph.inputs] == [i.name for i in graph.declared_inputs] == [i.name for i in copied.inputs]
    if name in {"dlrm", "llama", "moe"}:
        assert graph.folder.root != graph.folder.path
    feed = request_of(model)
    with HybridSession(graph, plan=fixed_plan(graph, alternating_lanes(graph))) as session:
        assert_equal(session.run(None, feed), run_plain(str(path), feed))


def test_a_file_that_changed_is_not_read(tmp_path: Path) -> None:
    """Segments of one session never have weights of two versions of a file."""
    graph = chrion.load(embedding(tmp_path, 1 << 16))
    assert graph.weights_folder in (tmp_path / "w.bin").resolve().parents
    assert not any(path.stat().st_size > 1e6 for path in graph.folder.path.iterdir())
    os.utime(tmp_path / "w.bin", ns=(1, 1))
    with pytest.raises(ModelError, match=r"w\.bin: changed since"):
        graph.constant(graph.model.graph.initializer[0].name)
    (tmp_path / "w.bin").unlink()
    with pytest.raises(ModelError, match=r"w\.bin: .*cannot be read"):
        _ = graph.weights_folder


def test_a_file_with_several_names_is_copied(tmp_path: Path) -> None:
    """The ONNX library refuses to read files with several hard links, so their weights are copied as before."""
    path = embedding(tmp_path, 1 << 16)
    os.link(tmp_path / "w.bin", tmp_path / "other.bin")
    graph = chrion.load(path)
    assert graph.weights_folder == graph.folder.path
    assert graph.constant(graph.model.graph.initializer[0].name) is not None


def test_a_file_that_is_too_short_is_an_error(tmp_path: Path) -> None:
    """Onnxruntime reports what is wrong with the file, as for a small weight."""
    path = embedding(tmp_path, 1 << 16)
    os.truncate(tmp_path / "w.bin", 1000)
    with pytest.raises(ModelError, match=r"m\.onnx: onnxruntime refuses"):
        chrion.load(path)
