"""Frames on a device of separate memory: what they hold, and results while values share buffers."""

from __future__ import annotations

import random
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from chrion import Graph, HybridSession, load
from chrion.graph.model import TensorInfo
from chrion.runtime.execution.device_frame import DeviceFrame
from chrion.scheduler import fixed_plan
from chrion.scheduler.evaluation.packing import ALIGNMENT
from chrion.zoo import RecurrentSpec, build_recurrent
from helpers import FLOAT, INT64, assert_equal, make_model, node, run_plain, value
from mirror_device import MirrorDevice
from random_cases import random_case
from seams.execution import Call, answer, buffers_of, cut_engine, idle_frames, lane_threads_of, note, use_device

pytestmark = [pytest.mark.timeout(120, method="thread"), pytest.mark.usefixtures("uncrowded")]
CPU = "CPUExecutionProvider"


def held_bytes(frame: DeviceFrame) -> int:
    """Return the bytes between the first and the last address that a frame uses on the device.

    Constants do not count, and the alignment of the last value does.
    """
    spans = [
        (value.data_ptr(), value.data_ptr() + value.tensor_size_in_bytes())
        for key, value in buffers_of(frame).items()
        if key.on_device
    ]
    used = max((end for _, end in spans), default=0) - min((start for start, _ in spans), default=0)
    return -(-used // ALIGNMENT) * ALIGNMENT


@dataclass
class Held:
    """The frames of a device of separate memory."""

    calls: list[Call]

    @property
    def frames(self) -> list[DeviceFrame]:
        """Return the frames that have been made."""
        return [call.given[0] for call in self.calls]

    @property
    def bytes(self) -> list[int]:
        """Return the bytes that each frame uses on the device."""
        return [held_bytes(frame) for frame in self.frames]


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    """Use a device of separate memory as accelerator; return the frames that are made."""
    use_device(monkeypatch, MirrorDevice)
    return Held(note(monkeypatch, "make a device frame"))


def chain(length: int, side: int) -> onnx.ModelProto:
    """Build a chain of element-wise operators."""
    nodes = [node("Sin" if i % 2 else "Cos", [f"v{i}"], [f"v{i + 1}"], name=f"n{i}") for i in range(length)]
    shape = [side, side]
    return make_model(nodes, [value("v0", FLOAT, shape)], [value(f"v{length}", FLOAT, shape)])


@pytest.mark.parametrize("period", [2, 3])
def test_a_chain_in_turns_holds_two_values(held: Held, period: int) -> None:
    """A frame holds two of the values that the accelerator and a core hand over in turns, as predicted, not all."""
    model = chain(20, 64)
    graph = load(model)
    plan = fixed_plan(graph, [int(i % period == 0) for i in range(20)], accelerator=CPU)
    x = {"v0": np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)}
    with HybridSession(graph, plan=plan, strict=True) as session:
        assert_equal(session.run(None, x), run_plain(model, x))
        assert held.bytes == [2 * 64 * 64 * 4] == [round(plan.predicted.frame_mb * 1e6)]
        assert re.search(r"each request in flight holds .* between segments", cut_engine(session).explain())


def test_every_request_in_flight_has_a_frame(held: Held) -> None:
    """Requests at the same time hold as many frames of the predicted size, and do not disturb each other."""
    model = chain(7, 16)
    graph = load(model)
    barrier = threading.Barrier(3)
    rng = np.random.default_rng(1)
    plan = fixed_plan(graph, [0, 1, 0, 1, 0, 1, 0], accelerator=CPU)
    feeds = [{"v0": rng.standard_normal((16, 16)).astype(np.float32)} for _ in range(3)]
    with HybridSession(graph, plan=plan, strict=True) as session:

        def call(caller: int) -> None:
            barrier.wait()
            for _ in range(10):
                assert_equal(session.run(None, feeds[caller]), run_plain(model, feeds[caller]))

        with ThreadPoolExecutor(3) as pool:
            list(pool.map(call, range(3)))
    assert 1 <= len(held.frames) <= 3
    assert set(held.bytes) == {round(plan.predicted.frame_mb * 1e6)}


def test_recurrent_chunks_share_buffers(held: Held) -> None:
    """Chunks of two layers pass their states on in few buffers, including final states that nothing reads."""
    model = build_recurrent(RecurrentSpec(layers=2, batch=1, io=64, seq=12, chunk=1))
    graph = load(model)
    lanes = [int("l1" in name) for name in graph.dag.names]
    plan = fixed_plan(graph, lanes, accelerator=CPU)
    (info,) = graph.inputs
    feed = {info.name: np.random.default_rng(2).standard_normal(info.shape).astype(np.float32)}
    with HybridSession(graph, plan=plan, strict=True) as session:
        assert_equal(session.run(None, feed), run_plain(model, feed))
        (frame,) = held.frames
        values = [value for key, value in buffers_of(frame).items() if key.on_device]
        assert frame.device_bytes < 0.6 * sum(value.tensor_size_in_bytes() for value in values)


def delayed(pick: Random) -> type[MirrorDevice]:
    """Return a device whose copies wait at random before and after their work."""

    def wait() -> None:
        time.sleep(pick.choice([0, 0, 0.001]))

    class DelayedDevice(MirrorDevice):
        def upload(self, source: ort.OrtValue, target: ort.OrtValue) -> None:
            wait()
            super().upload(source, target)
            wait()

        def copy(self, source: ort.OrtValue, target: ort.OrtValue) -> None:
            wait()
            super().copy(source, target)
            wait()

    return DelayedDevice


@pytest.mark.parametrize("seed", range(12))
def test_random_models_on_two_streams(held: Held, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random placements over two streams and a core give the outputs of plain onnxruntime, whatever the timing.

    The models have control flow, empty tensors, values of unknown size, several types, outputs that operators read,
    and operators whose results nothing reads.
    """
    pick = Random(seed)
    case = random_case(pick, 4 + seed % 12, least_operators=2) or pytest.skip("refused by onnxruntime, or one operator")
    plan = draw_plan(case.graph, pick)
    use_device(monkeypatch, delayed(pick))
    with HybridSession(case.graph, plan=plan, strict=True) as session:
        for _ in range(3):
            assert_equal(session.run(None, case.feed), case.expected)
    assert set(held.bytes) <= {round(plan.predicted.frame_mb * 1e6)}


def draw_plan(graph: Graph, pick: random.Random) -> Any:
    """Return a random plan over two streams of the accelerator and a core."""
    lanes = [pick.choice([0, -1, 1]) for _ in graph.dag.names]
    lanes[pick.randrange(len(lanes))] = 0
    segments = None if pick.random() < 0.5 else [[i] for i in graph.dag.topological_order]
    return fixed_plan(graph, lanes, accelerator=CPU, segments=segments)


def test_values_that_the_caller_supplies_on_the_device(held: Held) -> None:
    """A target in any memory takes the place of the frame's buffer for one request."""
    model = chain(3, 8)
    graph = load(model)
    x = np.random.default_rng(3).standard_normal((8, 8)).astype(np.float32)
    (expected,) = run_plain(model, {"v0": x})
    with HybridSession(graph, plan=fixed_plan(graph, [0, 1, 0], accelerator=CPU), strict=True) as session:
        binding = session.io_binding()
        target = ort.OrtValue.ortvalue_from_shape_and_type([8, 8], np.float32)
        binding.bind_cpu_input("v0", x)
        binding.bind_ortvalue_output("v3", target)
        for _ in range(2):
            session.run_with_iobinding(binding)
            np.testing.assert_array_equal(target.numpy(), expected)
    assert set(held.bytes) == {2 * 8 * 8 * 4}


@pytest.mark.usefixtures("held")
def test_a_captured_segment_reads_no_values_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture copies nothing, so indices that share memory with numbers of another segment must be zeros."""
    answer(monkeypatch, "want graphs", True)  # noqa: FBT003 - what the call returns
    nodes = [
        node("Add", ["x", "ones"], ["a"], name="add"),
        node("Cast", ["a"], ["i"], to=INT64, name="cast"),
        node("Gather", ["table", "i"], ["y"], name="gather"),
    ]
    weights = {"ones": np.ones((32, 4), np.float32), "table": np.arange(32, dtype=np.float32).reshape(16, 2)}
    model = make_model(nodes, [value("x", FLOAT, [4])], [value("y", FLOAT, [32, 4, 2])], weights)
    graph = load(model)
    x = {"x": np.arange(4, dtype=np.float32)}
    with HybridSession(graph, plan=fixed_plan(graph, [0, 1, 0], accelerator=CPU), strict=True) as session:
        assert_equal(session.run(None, x), run_plain(model, x))


class HandleDevice(MirrorDevice):
    """A device whose buffers have no addresses."""

    @property
    def has_views(self) -> bool:  # type: ignore[override] # a constant in place of a test
        """Return False, as for WebGPU."""
        return False


@pytest.fixture
def handles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a device whose buffers have no addresses, and predict for it."""
    use_device(monkeypatch, HandleDevice, views=False)


@pytest.mark.usefixtures("handles")
def test_whole_buffers_have_one_type_and_shape() -> None:
    """Without addresses, values of equal size but another shape or type do not share a buffer."""
    nodes = [
        node("Cast", ["x"], ["a"], to=6, name="cast"),  # int32, as large as float
        node("Cast", ["a"], ["b"], to=FLOAT, name="back"),
        node("Flatten", ["b"], ["c"], name="flat", axis=0),
        node("Neg", ["c"], ["d"], name="neg"),
        node("Transpose", ["d"], ["y"], name="turn", perm=[1, 0]),
    ]
    model = make_model(nodes, [value("x", FLOAT, [4, 4])], [value("y", FLOAT, [16, 1])])
    graph = load(model)
    x = {"x": np.arange(16, dtype=np.float32).reshape(4, 4)}
    plan = fixed_plan(graph, [i % 2 for i in range(len(graph.dag))], accelerator=CPU)
    with HybridSession(graph, plan=plan, strict=True) as session:
        assert_equal(session.run(None, x), run_plain(model, x))
        (frame,) = idle_frames(lane_threads_of(session))
    for key, kept in buffers_of(frame).items():
        info: TensorInfo = graph.values[key.name]
        assert (info.type, list(info.shape or ())) == (kept.data_type(), list(kept.shape()))


@pytest.mark.usefixtures("handles")
@pytest.mark.parametrize("seed", range(20, 26))
def test_random_models_in_whole_buffers(seed: int) -> None:
    """Without addresses, random placements give the outputs of plain onnxruntime, too."""
    pick = Random(seed)
    case = random_case(pick, 4 + seed % 12, least_operators=2) or pytest.skip("refused by onnxruntime, or one operator")
    with HybridSession(case.graph, plan=draw_plan(case.graph, pick), strict=True) as session:
        for _ in range(2):
            assert_equal(session.run(None, case.feed), case.expected)
