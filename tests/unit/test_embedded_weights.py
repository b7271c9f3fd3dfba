"""Large weights that are moved out of a model before it is parsed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from onnx import numpy_helper

from chrion import HybridSession, load
from chrion.errors import ModelError
from chrion.graph.embedded_weights import LARGE_BYTES, split
from chrion.graph.weights_folder import WeightsFolder
from chrion.scheduler import fixed_plan
from helpers import FLOAT, make_model, node, value
from property_tests import examples

LARGE = LARGE_BYTES // 4


def tensor(name: str, size: int, *, raw: bool = True, seed: int = 0) -> onnx.TensorProto:
    """Return a weight with random values, as bytes or as numbers."""
    values = np.random.default_rng(seed).standard_normal(size).astype(np.float32)
    found = numpy_helper.from_array(values, name)
    if not raw:
        found = onnx.helper.make_tensor(name, FLOAT, [size], values)
    found.doc_string = "a field after the data"
    return found


def model_of(*tensors: onnx.TensorProto) -> onnx.ModelProto:
    """Return a model with these weights, and fields before and after them."""
    model = make_model([node("Identity", ["x"], ["y"])], [value("x", FLOAT, [1])], [value("y", FLOAT, [1])], {})
    model.graph.initializer.extend(tensors)
    model.producer_name = "a producer"
    model.metadata_props.add(key="key", value="value")
    return model


def restored(rest: bytes, folder: WeightsFolder, moved: list[tuple[int, Path, int]]) -> onnx.ModelProto:
    """Return the model with the moved weights inside again."""
    model = onnx.ModelProto.FromString(rest)
    for index, file, length in moved:
        assert file.parent == folder.path
        model.graph.initializer[index].raw_data = file.read_bytes()
        assert len(model.graph.initializer[index].raw_data) == length
    return model


@examples(30)
@given(
    sizes=st.lists(st.tuples(st.sampled_from([0, 3, 5000, LARGE - 1, LARGE, LARGE + 7]), st.booleans()), max_size=5),
    located=st.booleans(),
    graphs=st.integers(1, 2),
)
def test_no_data_is_lost(sizes: list[tuple[int, bool]], *, located: bool, graphs: int) -> None:
    """The rest and the moved weights are the model, also if its graph comes in two parts, which protobuf joins."""
    weights = [tensor(f"w{at}", size, raw=raw, seed=at) for at, (size, raw) in enumerate(sizes)]
    for weight in weights if located else ():  # as the onnx library writes weights that were external
        weight.data_location = onnx.TensorProto.DEFAULT
    content = model_of(*weights).SerializeToString()
    if graphs == 2:
        second = onnx.ModelProto()
        second.graph.initializer.append(tensor("last", LARGE))
        content += second.SerializeToString()
    folder = WeightsFolder()
    rest, moved = split(content, folder)
    large = [at for at, (size, raw) in enumerate(sizes) if raw and size >= LARGE]
    assert [index for index, _, _ in moved] == [*large, *([len(sizes)] if graphs > 1 else [])]
    if moved:
        assert len(rest) < sum(4 * size for size, _ in sizes) + 10_000
        assert restored(rest, folder, moved) == onnx.ModelProto.FromString(content)


def test_a_file_is_split_as_its_bytes_are(tmp_path: Path) -> None:
    """The path of a file gives what its content gives."""
    path, folders = tmp_path / "model.onnx", (WeightsFolder(), WeightsFolder())
    onnx.save(model_of(tensor("small", 3), tensor("large", LARGE)), path)
    (of_file, _), (of_bytes, _) = split(str(path), folders[0]), split(path.read_bytes(), folders[1])
    assert of_file == of_bytes
    assert [file.read_bytes() for file in folders[0].path.iterdir()] == [tensor("large", LARGE).raw_data]


@examples(100)
@given(st.floats(0, 1), st.binary(max_size=4))
def test_what_is_no_model_is_left_to_the_library(share: float, junk: bytes) -> None:
    """Of a model that is cut off or damaged, either nothing is moved, or the rest is what the whole is."""
    content = model_of(tensor("large", LARGE), tensor("small", 3)).SerializeToString()
    damaged = content[: int(share * len(content))] + junk
    folder = WeightsFolder()
    rest, moved = split(damaged, folder)
    assert bool(rest) == bool(moved)
    assert len(list(folder.path.iterdir())) == len(moved)
    try:
        whole = onnx.ModelProto.FromString(damaged)
    except DecodeError:
        with pytest.raises(ModelError):
            load(damaged)
    else:
        assert not moved or restored(rest, folder, moved) == whole


@pytest.mark.parametrize("width", [600, 2100])
def test_weights_of_the_same_name(width: int) -> None:
    """Of several weights with a name, which ONNX does not permit, the one counts that counts in onnxruntime."""
    w = np.eye(width, dtype=np.float32)
    ends = [value("x", FLOAT, [1, width])], [value("y", FLOAT, [1, width])]
    nodes = [node("MatMul", ["x", "w"], ["h"]), node("Tanh", ["h"], ["y"])]
    model = make_model(nodes, *ends, {"w": w})
    model.graph.initializer.append(numpy_helper.from_array(2 * w, "w"))
    feed = {"x": np.full((1, width), 0.5, np.float32)}
    graph = load(model)
    with HybridSession(graph, plan=fixed_plan(graph, [1, 2])) as session:
        (found,), (expected,) = (
            one.run(None, feed) for one in (session, ort.InferenceSession(model.SerializeToString()))
        )
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_external_weights_beside_embedded_ones(tmp_path: Path) -> None:
    """A model with both is loaded as it is."""
    w = np.random.default_rng(0).standard_normal((LARGE // 512, 512)).astype(np.float32)
    nodes = [node("MatMul", ["x", "a"], ["h"]), node("MatMul", ["h", "b"], ["y"])]
    width = w.shape[0]
    ends = [value("x", FLOAT, [1, width])], [value("y", FLOAT, [1, width])]
    model = make_model(nodes, *ends, {"a": w, "b": np.ascontiguousarray(w.T)})
    onnx.external_data_helper.set_external_data(model.graph.initializer[0], "a.bin")
    onnx.save(model, tmp_path / "model.onnx")
    assert (tmp_path / "a.bin").exists()
    graph = load(tmp_path / "model.onnx")
    assert np.array_equal(graph.constant(next(n for n in graph.weight_names if n.endswith("b"))), w.T)


@pytest.mark.parametrize("source", ["file", "bytes"])
@pytest.mark.parametrize("width", [600, 2100])
def test_plans_compute_with_moved_weights(tmp_path: Path, source: str, width: int) -> None:
    """Outputs are those of onnxruntime; weights of 16 MB and more are not read while the model is optimised."""
    rng, path = np.random.default_rng(0), tmp_path / "model.onnx"
    w = {name: (rng.standard_normal((width, width)) / width).astype(np.float32) for name in "abc"}
    nodes = [node("MatMul", ["x", "a"], ["h"]), node("Add", ["h", "c"], ["i"]), node("MatMul", ["i", "b"], ["y"])]
    model = make_model(nodes, [value("x", FLOAT, [width, width])], [value("y", FLOAT, [width, width])], w)
    onnx.save(model, path)
    feed = {"x": rng.standard_normal((width, width)).astype(np.float32)}
    graph = load(path if source == "file" else model.SerializeToString())
    with HybridSession(graph, plan=fixed_plan(graph, [1 + at % 2 for at in range(len(graph.dag.names))])) as session:
        assert session.plan
        (found,), (expected,) = session.run(None, feed), ort.InferenceSession(str(path)).run(None, feed)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    assert bool(list(graph.folder.path.glob("moved-*"))) is (width > 2048)
