"""Block chains compute what onnxruntime computes, bit for bit."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import chrion
from chrion.errors import ModelError, ShapeError
from chrion.graph.blocks import cut_blocks, cut_modules, split_into_blocks
from chrion.graph.extract import Extractor
from chrion.graph.loader import load_kernels
from chrion.graph.opened_model import OpenedModel
from chrion.runtime.block_chain import BlockChain, open_chain
from chrion.zoo import build


def plain(model: onnx.ModelProto) -> ort.InferenceSession:
    """Return a session with one thread."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def served(chain: BlockChain, feed: dict[str, Any]) -> list[Any]:
    """Run all blocks of one request."""
    run = chain.begin(chain.check(feed))
    for block in range(len(chain.block_ms)):
        run.run(block)
    outputs = run.outputs()
    chain.end(run)
    return outputs


SMALL = {"resolution": 64, "width": 0.25}
MODELS = {
    "googlenet": SMALL,
    "squeezenet": SMALL,
    "inception-v3": {"resolution": 96, "width": 0.25},
    "resnet-50": {"resolution": 64, "width": 0.1},
    "lstm": {"layers": 3, "seq": 8},
    "bert": {"layers": 2},
}


@pytest.mark.parametrize("name", MODELS)
def test_outputs_equal_those_of_the_whole_model(name: str) -> None:
    """Cut as finely as possible, a model gives the bits of a session with one thread, for several inputs."""
    model = build(name, MODELS[name])
    session = plain(model)
    chain = open_chain(model, 1e-3)
    assert len(chain.block_ms) > 1
    assert all(ms > 0 for ms in chain.block_ms)
    generator = np.random.default_rng(0)
    for _ in range(3):
        feed = {
            i.name: generator.random(i.shape).astype(np.float32)
            if i.type == "tensor(float)"
            else generator.integers(0, 2, i.shape, np.int64)
            for i in chain.inputs
        }
        for ours, theirs in zip(served(chain, feed), session.run(None, feed), strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_a_short_model_is_one_block() -> None:
    """A model within the limit is not cut."""
    assert len(open_chain(build("squeezenet", SMALL), 1e4).block_ms) == 1


def test_a_model_with_a_constant_output_is_one_block() -> None:
    """An output that no operator computes when the model runs, such as a folded shape, has no block."""
    text = "g (float[2, 4] x) => (float[2, 4] y, int64[2] s) { t = Relu(x) y = Neg(t) s = Shape(x) }"
    graph = onnx.parser.parse_graph(text)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    chain = open_chain(model, 1e-9)
    assert (len(chain.block_ms), chain.reason) == (1, "s: an output that is a constant")
    x = np.ones((2, 4), np.float32)
    for ours, theirs in zip(served(chain, {"x": x}), plain(model).run(None, {"x": x}), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_requests_in_flight_do_not_share_values() -> None:
    """Requests whose blocks alternate, and requests of several threads, have outputs of their own inputs."""
    model = build("squeezenet", SMALL)
    session, chain = plain(model), open_chain(model, 1e-3)
    feeds = [{"X": np.full((1, 3, 64, 64), value, np.float32)} for value in (0.1, 0.7)]
    expected = [session.run(None, feed)[0] for feed in feeds]
    flights = [chain.begin(chain.check(feed)) for feed in feeds]
    for block in range(len(chain.block_ms)):
        for run in flights:
            run.run(block)
    for run, right in zip(flights, expected, strict=True):
        np.testing.assert_array_equal(run.outputs()[0], right)
        chain.end(run)
    found: list[bool] = []

    def repeat(at: int) -> None:
        found.extend(np.array_equal(served(chain, feeds[at])[0], expected[at]) for _ in range(5))

    threads = [threading.Thread(target=repeat, args=(at,)) for at in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 10


def free_model() -> onnx.ModelProto:
    """Return a model with a free dimension."""
    graph = onnx.parser.parse_graph("g (float[n, 4] x) => (float[n, 4] y) { t = Relu(x) y = Neg(t) }")
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)


def test_a_model_with_free_dimensions_is_one_block_until_they_are_given() -> None:
    """Requests of any size run whole; with shapes it is cut, and takes these shapes only."""
    chain = open_chain(free_model(), 1e-9)
    assert len(chain.block_ms) == 1
    assert "free dimensions" in chain.reason
    for rows in (1, 3):
        x = np.arange(4 * rows, dtype=np.float32).reshape(rows, 4)
        np.testing.assert_array_equal(served(chain, {"x": x})[0], -x)
    fixed = open_chain(free_model(), 1e-9, {"n": 2})
    np.testing.assert_array_equal(served(fixed, {"x": np.ones((2, 4), np.float32)})[0], -np.ones((2, 4)))
    with pytest.raises(Exception, match="invalid dimensions"):
        fixed.check({"x": np.ones((3, 4), np.float32)})


def test_later_changes_of_an_input_have_no_effect() -> None:
    """An array may be used again as soon as the request is checked."""
    chain = open_chain(free_model(), 1.0)
    x = np.ones((1, 4), np.float32)
    run = chain.begin(chain.check({"x": x}))
    x[:] = 5
    run.run(0)
    np.testing.assert_array_equal(run.outputs()[0], -np.ones((1, 4)))


def test_wrong_models_are_refused(tmp_path: Path) -> None:
    """A missing file and a damaged one are errors with their path; so is a shape of no input."""
    with pytest.raises(ModelError, match="absent"):
        open_chain(tmp_path / "absent.onnx", 5.0)
    (tmp_path / "damaged.onnx").write_bytes(b"damaged")
    with pytest.raises(ModelError, match="damaged"):
        open_chain(tmp_path / "damaged.onnx", 5.0)
    with pytest.raises(ShapeError):
        open_chain(free_model(), 5.0, {"m": 2})


@pytest.mark.skipif(sys.platform != "linux", reason="reads the maps of the process")
def test_blocks_have_their_weights_in_memory(tmp_path: Path) -> None:
    """Only weights of 16 MB and more stay in the model's file, which onnxruntime maps into memory."""

    def mapped() -> set[str]:
        return {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}

    generator = np.random.default_rng(0)
    weights = [generator.standard_normal(shape, np.float32) for shape in ((256, 256), (256, 20_000))]
    graph = onnx.parser.parse_graph(
        "g (float[1, 256] x) => (float[1, 20000] y) { t = MatMul(x, small) u = Relu(t) y = MatMul(u, large) }"
    )
    named = zip(weights, ("small", "large"), strict=True)
    graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for array, name in named)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    x = generator.standard_normal((1, 256), np.float32)
    expected = plain(model).run(None, {"x": x})[0]
    path = tmp_path / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, location="model.data", size_threshold=0)
    before = mapped()
    chain = open_chain(path, 1e-9)
    assert len(chain.block_ms) > 1
    assert {Path(file).name for file in mapped() - before} <= {"model.data"}
    np.testing.assert_array_equal(served(chain, {"x": x})[0], expected)


@pytest.mark.parametrize(("name", "points", "modules"), [("inception-v3", 26, 13), ("googlenet", 22, 11)])
def test_published_networks_have_their_modules(name: str, points: int, modules: int) -> None:
    """Inception-v3 has the 13 modules of its publication; GoogLeNet nine, what is before them, and the classifier."""
    graph = chrion.load(build(name, {"width": 0.25}))
    assert (len(split_into_blocks(graph.dag)), len(cut_modules(graph.dag))) == (points, modules)


@pytest.mark.parametrize("name", MODELS)
def test_each_weight_is_in_the_blocks_that_read_it(name: str) -> None:
    """Of blocks as fine as possible, equal ones of which share a session, one has each weight above a kilobyte."""
    graph = load_kernels(OpenedModel(build(name, MODELS[name]).SerializeToString()))
    extractor = Extractor(graph)
    parts = [extractor.extract(block) for block in cut_blocks(graph.dag, [1.0] * len(graph.dag), 1e-3)]
    found: Counter[str] = Counter()
    for part in {part.key: part.model.graph for part in parts}.values():
        assert {weight.name for weight in part.initializer} <= {name for node in part.node for name in node.input}
        found.update(weight.name for weight in part.initializer)
    shared = [graph.constant(name) for name, count in found.items() if count > 1]
    assert found
    assert all(weight is not None and weight.nbytes <= 1024 for weight in shared)
