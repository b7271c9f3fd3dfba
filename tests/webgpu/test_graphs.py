"""How captured graphs are numbered and replayed. WebGPU captures nothing here: what is tested is who asks for what."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from accelerator_plans import placed
from chrion import HybridSession, load
from chrion.devices import Device
from chrion.runtime.execution import accelerator as module
from chrion.runtime.execution.accelerator import Accelerator
from helpers import FLOAT, INT64, assert_same_as_plain, branches, make_model, node, run_plain, value

X = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)


class Call(NamedTuple):
    """A run on the accelerator."""

    graph: int | None
    replayed: bool


@pytest.fixture
def calls(device: Device, monkeypatch: pytest.MonkeyPatch) -> list[Call]:  # noqa: ARG001 - skipped without it
    """Runs on the accelerator, with graphs asked for."""
    found: list[Call] = []
    run = Accelerator.run

    def noted(self: Accelerator, *args: Any, graph: int | None, replayed: bool, **more: Any) -> None:
        found.append(Call(graph, replayed))
        run(self, *args, graph=graph, replayed=replayed, **more)

    monkeypatch.setattr(module, "wants_graphs", lambda *_: True)
    monkeypatch.setattr(Accelerator, "run", noted)
    return found


def test_each_segment_is_captured_before_the_first_request(calls: list[Call]) -> None:
    """Once for a frame, on buffers of its own; then the same numbers come again and again."""
    graph = load(branches())
    with HybridSession(graph, plan=placed(graph, [0, 1, 0, 1]), strict=True) as session:
        assert_same_as_plain(session, branches(), {"x": X})
        captured, first = calls[:2], calls[2:]
        assert [call.replayed for call in captured] == [True, True]
        assert len({call.graph for call in captured}) == 2
        assert sorted(first) == sorted(captured)
        calls.clear()
        assert_same_as_plain(session, branches(), {"x": -X})
        assert sorted(calls) == sorted(captured)


def test_buffers_of_the_caller_are_not_replayed(calls: list[Call]) -> None:
    """A graph would read and write where it was captured; such runs skip it."""
    graph = load(branches())
    with HybridSession(graph, plan=placed(graph, [0, 1, 0, 1]), strict=True) as session:
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


def test_segments_that_fetch_from_the_host_are_not_captured(calls: list[Call]) -> None:
    """Indices that the device does not hold are bound anew in each run."""
    nodes = [node("Relu", ["x"], ["a"]), node("Gather", ["a", "i"], ["y"], axis=1)]
    inputs = [value("x", FLOAT, [2, 4]), value("i", INT64, [2])]
    model: onnx.ModelProto = make_model(nodes, inputs, [value("y", FLOAT, [2, 2])])
    graph = load(model)
    with HybridSession(graph, plan=placed(graph, [1, 0]), strict=True) as session:
        for index in ([0, 3], [1, 1]):
            assert_same_as_plain(session, model, {"x": X, "i": np.array(index)})
    assert [call.replayed for call in calls] == [False, False]


def test_the_callers_run_options_are_those_of_segments(calls: list[Call]) -> None:
    """Where there are graphs they give way: the number of the graph has to be right."""
    graph = load(branches())
    with HybridSession(graph, plan=placed(graph, [0, 1, 0, 1]), strict=True) as session:
        options = ort.RunOptions()
        options.logid = "ours"
        assert len(session.run(None, {"x": X}, options)) == 2
    assert all(call.graph is not None for call in calls)
