"""Mixed placements on a real second device give what plain onnxruntime gives on the CPU."""

from __future__ import annotations

import threading
from random import Random

import numpy as np
import onnx
import pytest

from accelerator_plans import able, engine_of, mixed_plan, placed
from chrion import Graph, HybridSession, load
from chrion.benchmark.accuracy import largest_difference
from chrion.devices import Device
from chrion.zoo.recurrent import RecurrentSpec, build_recurrent
from helpers import FLOAT, assert_same_as_plain, branches, make_model, node, run_plain, value
from random_operators import random_model

X = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)


def cnn() -> onnx.ModelProto:
    """Two convolutional branches over one input, joined, pooled and classified.

    None of them is 1 x 1: after one such convolution onnxruntime 1.27's WebGPU miscomputes others in the same process,
    in plain sessions as well.
    """
    rng = np.random.default_rng(3)
    weights = {
        "w1": rng.standard_normal((4, 3, 3, 3)).astype(np.float32),
        "w2": rng.standard_normal((4, 3, 2, 2)).astype(np.float32),
        "w3": rng.standard_normal((8, 5)).astype(np.float32),
        "bias": rng.standard_normal(5).astype(np.float32),
    }
    nodes = [
        node("Conv", ["x", "w1"], ["a"], kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        node("Relu", ["a"], ["b"]),
        node("Conv", ["x", "w2"], ["c"], kernel_shape=[2, 2], pads=[0, 0, 1, 1]),
        node("Sigmoid", ["c"], ["d"]),
        node("Concat", ["b", "d"], ["e"], axis=1),
        node("MaxPool", ["e"], ["f"], kernel_shape=[2, 2], strides=[2, 2]),
        node("GlobalAveragePool", ["f"], ["g"]),
        node("Flatten", ["g"], ["h"]),
        node("Gemm", ["h", "w3", "bias"], ["i"]),
        node("Softmax", ["i"], ["y"]),
    ]
    return make_model(nodes, [value("x", FLOAT, [1, 3, 8, 8])], [value("y", FLOAT, [1, 5])], weights)


def lstm(chunk: int) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A stack of three layers over six steps in chunks, and an input."""
    model = build_recurrent(RecurrentSpec(layers=3, batch=1, io=8, seq=6, chunk=chunk))
    shape = [d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim]
    feed = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    return model, {model.graph.input[0].name: feed}


@pytest.mark.parametrize("chunk", [1, 2, 6])
@pytest.mark.parametrize("seed", range(3))
def test_lstms_over_both_sides(device: Device, chunk: int, seed: int) -> None:
    """Layers and steps on either side hand their states to and fro."""
    model, feed = lstm(chunk)
    graph = load(model)
    there = able(graph, device)
    assert any(graph.dag.op_types[i] == "LSTM" for i in there)
    with HybridSession(graph, plan=mixed_plan(graph, there, seed), strict=True) as session:
        for _ in range(2):
            assert_same_as_plain(session, model, feed)


@pytest.mark.parametrize("seed", range(4))
def test_a_cnn_over_both_sides(device: Device, seed: int) -> None:
    """Convolutions, pooling and a classifier, with branches."""
    graph = load(cnn())
    feed = {"x": np.random.default_rng(seed).standard_normal((1, 3, 8, 8)).astype(np.float32)}
    with HybridSession(graph, plan=mixed_plan(graph, able(graph, device), seed), strict=True) as session:
        assert_same_as_plain(session, cnn(), feed)


@pytest.mark.parametrize("seed", range(24))
def test_random_graphs_over_both_sides(device: Device, seed: int) -> None:
    """Whatever the device can run of a random model may be there, on one lane of it or on two.

    Its kernels approximate some functions, such as the error function, to three or four digits.
    """
    draft = random_model(Random(seed), 4 + seed % 12)
    model, feed = draft.model(), draft.feed()
    try:
        expected = run_plain(model, feed)
    except Exception:  # noqa: BLE001 - the generator knows less than onnxruntime
        pytest.skip("onnxruntime refuses this one")
    graph = load(model, {name: array.shape for name, array in feed.items()})
    plan = mixed_plan(graph, able(graph, device), seed, streams=1 + seed % 2)
    with HybridSession(graph, plan=plan, strict=True) as session:
        for _ in range(2):
            for ours, theirs in zip(session.run(None, feed), expected, strict=True):
                assert type(ours) is type(theirs)
                if isinstance(theirs, np.ndarray):
                    assert ours.dtype == theirs.dtype
                    assert largest_difference([ours], [theirs]) < 1e-3


def test_requests_at_once(device: Device) -> None:
    """Several threads share a session, with a frame each; nobody gets another's results."""
    graph = load(branches())
    assert able(graph, device) == {0, 1, 2, 3}
    wrong: list[str] = []
    with HybridSession(graph, plan=placed(graph, [0, 1, 0, 1]), strict=True) as session:

        def ask(at: int) -> None:
            x = np.full((2, 4), at, np.float32)
            expected = run_plain(branches(), {"x": x})
            found = [session.run(None, {"x": x}) for _ in range(10)]
            equal = [np.allclose(a, b, atol=1e-5) for ours in found for a, b in zip(ours, expected, strict=True)]
            wrong.extend([f"request {at}"] * equal.count(False))

        threads = [threading.Thread(target=ask, args=(at,)) for at in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_lanes_of_both_sides_and_of_copies_are_traced(device: Device) -> None:  # noqa: ARG001 - skipped without it
    """A trace has each segment once on its lane, and each copy once on the lane of its direction."""
    graph: Graph = load(branches())
    with HybridSession(graph, plan=placed(graph, [0, 1, 0, 1]), strict=True) as session:
        events = session.trace({"x": X})
        program = engine_of(session).program
    assert sorted(e.segment for e in events if not e.copied) == list(range(len(engine_of(session).segments)))
    assert len([e for e in events if e.copied]) == program.copies > 0
    assert {e.lane for e in events} == set(program.lanes)
    assert all(e.end_ms >= e.start_ms for e in events)
