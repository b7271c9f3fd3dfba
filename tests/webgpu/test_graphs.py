"""Tests of the numbering and replay of captured graphs; WebGPU captures none, so the requests for them are tested."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from accelerator_plans import fixed_webgpu_plan
from chrion import HybridSession, load
from chrion.devices import Device
from chrion.runtime.execution.accelerator import AcceleratorSessions
from helpers import FLOAT, INT64, assert_same_as_plain, branches, make_model, node, run_plain, value
from seams.execution import answer

X = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)


class Call(NamedTuple):
    """A run on the accelerator."""

    graph: int | None
    replayed: bool


@pytest.fixture
def calls(device: Device, monkeypatch: pytest.MonkeyPatch) -> list[Call]:  # noqa: ARG001 - skipped without it
    """Return the list of runs on the accelerator, with graphs requested."""
    found: list[Call] = []
    run = AcceleratorSessions.run

    def recorded(self: AcceleratorSessions, *args: Any, cuda_graph: int | None, replayed: bool, **more: Any) -> None:
        found.append(Call(cuda_graph, replayed))
        run(self, *args, cuda_graph=cuda_graph, replayed=replayed, **more)

    answer(monkeypatch, "want graphs", True)  # noqa: FBT003 - what the call returns
    monkeypatch.setattr(AcceleratorSessions, "run", recorded)
    return found


def test_each_segment_is_captured_before_the_first_request(calls: list[Call]) -> None:
    """Each frame captures its segments once, and its requests replay the same numbers."""
    graph = load(branches())
    with HybridSession(graph, plan=fixed_webgpu_plan(graph, [0, 1, 0, 1]), strict=True) as session:
        assert_same_as_plain(session, branches(), {"x": X})
        captured, first = calls[:2], calls[2:]
        assert [call.replayed for call in captured] == [True, True]
        assert len({call.graph for call in captured}) == 2
        assert sorted(first) == sorted(captured)
        calls.clear()
        assert_same_as_plain(session, branches(), {"x": -X})
        assert sorted(calls) == sorted(captured)


def test_buffers_of_the_caller_are_not_replayed(calls: list[Call]) -> None:
    """A segment that writes to a caller's buffer is run instead, since a graph uses the buffers of its capture."""
    graph = load(branches())
    with HybridSession(graph, plan=fixed_webgpu_plan(graph, [0, 1, 0, 1]), strict=True) as session:
        session.run(None, {"x": X})
        binding = session.io_binding()
        binding.bind_cpu_input("x", X)
        binding.bind_output("l", "webgpu")
        calls.clear()
        session.run_with_iobinding(binding)
        np.testing.assert_allclose(
            binding.copy_outputs_to_cpu()[0], run_plain(branches(), {"x": X}, ["l"])[0], rtol=1e-5, atol=1e-6
        )
        assert sorted(call.replayed for call in calls) == [False, True]
        assert all(call.graph is not None for call in calls)


def test_segments_that_read_host_memory_are_not_captured(calls: list[Call]) -> None:
    """A segment with indices of an unsupported type is run in each request."""
    nodes = [node("Relu", ["x"], ["a"]), node("Gather", ["a", "i"], ["y"], axis=1)]
    inputs = [value("x", FLOAT, [2, 4]), value("i", INT64, [2])]
    model: onnx.ModelProto = make_model(nodes, inputs, [value("y", FLOAT, [2, 2])])
    graph = load(model)
    with HybridSession(graph, plan=fixed_webgpu_plan(graph, [1, 0]), strict=True) as session:
        for index in ([0, 3], [1, 1]):
            assert_same_as_plain(session, model, {"x": X, "i": np.array(index)})
    assert [call.replayed for call in calls] == [False, False]


def test_run_options_do_not_replace_the_graphs_number(calls: list[Call]) -> None:
    """Runs of segments have the number of their graph even if the caller gives run options."""
    graph = load(branches())
    with HybridSession(graph, plan=fixed_webgpu_plan(graph, [0, 1, 0, 1]), strict=True) as session:
        options = ort.RunOptions()
        options.logid = "ours"
        assert len(session.run(None, {"x": X}, options)) == 2
    assert all(call.graph is not None for call in calls)
