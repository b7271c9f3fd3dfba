"""Options of CUDA's sessions and runs, as onnxruntime's documentation has them; nothing here needs a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import onnxruntime as ort
import pytest

from chrion.devices import cuda
from chrion.devices.cuda import CUDA_PROVIDER


def test_the_arena_grows_as_requested_unless_the_caller_wants_otherwise() -> None:
    """The caller's options win over ours; the stream is handed over by its address, as text."""
    ours = cuda.provider_options(CUDA_PROVIDER, {"device_id": "1"}, 4096, graph=False)
    assert ours == {"arena_extend_strategy": "kSameAsRequested", "device_id": "1", "user_compute_stream": "4096"}
    theirs = {"arena_extend_strategy": "kNextPowerOfTwo", "user_compute_stream": "7"}
    assert cuda.provider_options(CUDA_PROVIDER, theirs, 4096, graph=False) == theirs
    assert "user_compute_stream" not in cuda.provider_options(CUDA_PROVIDER, {}, None, graph=False)


def test_graphs_are_taken_segment_by_segment() -> None:
    """What the caller asks for as a whole is asked for only where a segment can be captured."""
    asked = {"enable_cuda_graph": "1"}
    assert cuda.wants_graphs(CUDA_PROVIDER, asked)
    assert cuda.wants_graphs(CUDA_PROVIDER, {"enable_cuda_graph": True})
    assert not cuda.wants_graphs(CUDA_PROVIDER, {"enable_cuda_graph": "0"})
    assert not cuda.wants_graphs("WebGpuExecutionProvider", asked)
    assert cuda.provider_options(CUDA_PROVIDER, asked, None, graph=True)["enable_cuda_graph"] == "1"
    assert "enable_cuda_graph" not in cuda.provider_options(CUDA_PROVIDER, asked, None, graph=False)


def test_other_providers_get_what_they_are_given() -> None:
    """No option of CUDA's strays."""
    assert cuda.provider_options("WebGpuExecutionProvider", {"a": "b"}, None, graph=False) == {"a": "b"}
    assert cuda.session_entries("WebGpuExecutionProvider") == {}
    assert cuda.session_entries(CUDA_PROVIDER) == {"session.use_device_allocator_for_initializers": "1"}
    assert cuda.Stream("WebGpuExecutionProvider").handle is None
    assert cuda.pinned_memory("WebGpuExecutionProvider") is None


@pytest.mark.parametrize(
    ("asked", "entries"),
    [
        ({"wait": True}, {}),
        ({"wait": False}, {"disable_synchronize_execution_providers": "1"}),
        ({"wait": True, "graph": 3}, {"gpu_graph_id": "3"}),
        ({"wait": True, "graph": 3, "replayed": False}, {"gpu_graph_id": "-1"}),
        ({"wait": False, "graph": 2}, {"disable_synchronize_execution_providers": "1", "gpu_graph_id": "2"}),
    ],
)
def test_run_options(asked: dict[str, object], entries: dict[str, str]) -> None:
    """Only the run that somebody looks at waits; -1 skips a session's graphs."""
    assert cuda.run_entries(**asked) == entries  # type: ignore[arg-type]


class FakeGpu:
    """onnxruntime's description of a GPU."""

    ep_name = CUDA_PROVIDER

    def __init__(self, number: int) -> None:
        self.number = number

    def create_sync_stream(self) -> SimpleNamespace:
        return SimpleNamespace(get_handle=lambda: 1000 + self.number)

    def memory_info(self, kind: object) -> tuple[str, object]:
        return "pinned", kind


def test_streams_and_pinned_memory_of_the_right_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the number of the GPU; where onnxruntime lists none, there is neither."""
    devices = [SimpleNamespace(ep_name="CPUExecutionProvider"), FakeGpu(0), FakeGpu(1)]
    monkeypatch.setattr(ort, "get_ep_devices", lambda: devices)
    monkeypatch.setattr(ort, "OrtDeviceMemoryType", SimpleNamespace(HOST_ACCESSIBLE="host"), raising=False)
    assert cuda.Stream(CUDA_PROVIDER, 1).handle == 1001
    assert cuda.pinned_memory(CUDA_PROVIDER, 0) == ("pinned", "host")
    assert cuda.Stream(CUDA_PROVIDER, 2).handle is None
    assert cuda.pinned_memory(CUDA_PROVIDER, 2) is None


def test_a_gpu_that_refuses_a_stream_is_used_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each session has its own then."""

    class Refusing(FakeGpu):
        def create_sync_stream(self) -> SimpleNamespace:
            raise RuntimeError("no")

        def memory_info(self, kind: object) -> tuple[str, object]:  # noqa: ARG002 - as the real one
            raise RuntimeError("no")

    monkeypatch.setattr(ort, "get_ep_devices", lambda: [Refusing(0)])
    assert cuda.Stream(CUDA_PROVIDER).handle is None
    assert cuda.pinned_memory(CUDA_PROVIDER) is None
