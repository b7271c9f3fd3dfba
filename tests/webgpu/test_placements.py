"""Tests that placements on the CPU and a second device give the outputs of plain onnxruntime on the CPU."""

from __future__ import annotations

import threading
from random import Random

import numpy as np
import onnx
import pytest

from accelerator_plans import draw_mixed_plan, find_supported_operators, fixed_webgpu_plan
from chrion import Graph, HybridSession, load
from chrion.devices import Device
from chrion.report.benchmark.accuracy import largest_difference
from chrion.zoo.recurrent import RecurrentSpec, build_recurrent
from helpers import FLOAT, assert_same_as_plain, branches, make_model, node, run_plain, value
from random_cases import random_case
from seams.execution import cut_engine

X = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)


def cnn() -> onnx.ModelProto:
    """Build two convolutional branches over one input, joined, pooled and classified.

    No convolution is 1 x 1: after one such convolution, WebGPU of onnxruntime 1.27 miscomputes others in the same
    process, in plain sessions, too.
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
    """Build a stack of three layers over six steps in chunks, and an input."""
    model = build_recurrent(RecurrentSpec(layers=3, batch=1, io=8, seq=6, chunk=chunk))
    shape = [d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim]
    feed = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    return model, {model.graph.input[0].name: feed}


@pytest.mark.parametrize("chunk", [1, 2, 6])
@pytest.mark.parametrize("seed", range(3))
def test_lstms_on_both_devices(device: Device, chunk: int, seed: int) -> None:
    """Chunks of LSTM layers on both devices exchange their states and give correct outputs."""
    model, feed = lstm(chunk)
    graph = load(model)
    supported = find_supported_operators(graph, device)
    assert any(graph.dag.op_types[i] == "LSTM" for i in supported)
    with HybridSession(graph, plan=draw_mixed_plan(graph, supported, seed), strict=True) as session:
        for _ in range(2):
            assert_same_as_plain(session, model, feed)


@pytest.mark.parametrize("seed", range(4))
def test_a_cnn_on_both_devices(device: Device, seed: int) -> None:
    """Convolutions, pooling and a classifier on both devices give correct outputs."""
    graph = load(cnn())
    feed = {"x": np.random.default_rng(seed).standard_normal((1, 3, 8, 8)).astype(np.float32)}
    with HybridSession(
        graph, plan=draw_mixed_plan(graph, find_supported_operators(graph, device), seed), strict=True
    ) as session:
        assert_same_as_plain(session, cnn(), feed)


@pytest.mark.parametrize("seed", range(24))
def test_random_graphs_on_both_devices(device: Device, seed: int) -> None:
    """Random placements of random models on the CPU and one or two lanes of the device give correct outputs.

    WebGPU's kernels approximate some functions, such as the error function, to three or four digits.
    """
    case = random_case(Random(seed), 4 + seed % 12) or pytest.skip("onnxruntime refuses this model")
    graph = case.graph
    plan = draw_mixed_plan(graph, find_supported_operators(graph, device), seed, streams=1 + seed % 2)
    with HybridSession(graph, plan=plan, strict=True) as session:
        for _ in range(2):
            for ours, theirs in zip(session.run(None, case.feed), case.expected, strict=True):
                assert type(ours) is type(theirs)
                if isinstance(theirs, np.ndarray):
                    assert ours.dtype == theirs.dtype
                    assert largest_difference([ours], [theirs]) < 1e-3


def test_concurrent_requests(device: Device) -> None:
    """Each of several threads that share a session gets the outputs of its own requests."""
    graph = load(branches())
    assert find_supported_operators(graph, device) == {0, 1, 2, 3}
    wrong: list[str] = []
    with HybridSession(graph, plan=fixed_webgpu_plan(graph, [0, 1, 0, 1]), strict=True) as session:

        def run_requests(at: int) -> None:
            x = np.full((2, 4), at, np.float32)
            expected = run_plain(branches(), {"x": x})
            found = [session.run(None, {"x": x}) for _ in range(10)]
            equal = [np.allclose(a, b, atol=1e-5) for ours in found for a, b in zip(ours, expected, strict=True)]
            wrong.extend([f"request {at}"] * equal.count(False))

        threads = [threading.Thread(target=run_requests, args=(at,)) for at in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_a_trace_contains_segments_and_copies(device: Device) -> None:  # noqa: ARG001 - skipped without it
    """A trace has each segment once on its lane, and each copy once on the lane of its direction."""
    graph: Graph = load(branches())
    with HybridSession(graph, plan=fixed_webgpu_plan(graph, [0, 1, 0, 1]), strict=True) as session:
        events = session.trace({"x": X})
        program = cut_engine(session).program
    assert sorted(e.segment for e in events if not e.copied) == list(range(len(cut_engine(session).segments)))
    assert len([e for e in events if e.copied]) == program.copies > 0
    assert {e.lane for e in events} == set(program.lanes)
    assert all(e.end_ms >= e.start_ms for e in events)
