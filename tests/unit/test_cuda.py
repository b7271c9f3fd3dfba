"""CUDA's options of sessions and runs, without a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import onnxruntime as ort
import pytest

from chrion.devices import cuda
from chrion.devices.cuda import CUDA_PROVIDER


def test_the_callers_options_take_precedence() -> None:
    """The arena grows as requested by default; the stream is given by its address as text."""
    defaults = cuda.provider_options(CUDA_PROVIDER, {"device_id": "1"}, 4096, graph=False)
    assert defaults == {"arena_extend_strategy": "kSameAsRequested", "device_id": "1", "user_compute_stream": "4096"}
    callers = {"arena_extend_strategy": "kNextPowerOfTwo", "user_compute_stream": "7"}
    assert cuda.provider_options(CUDA_PROVIDER, callers, 4096, graph=False) == callers
    assert "user_compute_stream" not in cuda.provider_options(CUDA_PROVIDER, {}, None, graph=False)


def test_cuda_graphs_are_enabled_per_segment() -> None:
    """The caller's option for the whole model applies only to segments that can be captured."""
    given = {"enable_cuda_graph": "1"}
    assert cuda.wants_graphs(CUDA_PROVIDER, given)
    assert cuda.wants_graphs(CUDA_PROVIDER, {"enable_cuda_graph": True})
    assert not cuda.wants_graphs(CUDA_PROVIDER, {"enable_cuda_graph": "0"})
    assert not cuda.wants_graphs("WebGpuExecutionProvider", given)
    assert cuda.provider_options(CUDA_PROVIDER, given, None, graph=True)["enable_cuda_graph"] == "1"
    assert "enable_cuda_graph" not in cuda.provider_options(CUDA_PROVIDER, given, None, graph=False)


def test_other_providers_get_the_callers_options() -> None:
    """Options, streams and pinned memory of CUDA are for CUDA only."""
    assert cuda.provider_options("WebGpuExecutionProvider", {"a": "b"}, None, graph=False) == {"a": "b"}
    assert cuda.session_entries("WebGpuExecutionProvider") == {}
    assert cuda.session_entries(CUDA_PROVIDER) == {"session.use_device_allocator_for_initializers": "1"}
    assert cuda.CudaStream("WebGpuExecutionProvider").handle is None
    assert cuda.pinned_memory("WebGpuExecutionProvider") is None


@pytest.mark.parametrize(
    ("given", "entries"),
    [
        ({"wait": True}, {}),
        ({"wait": False}, {"disable_synchronize_execution_providers": "1"}),
        ({"wait": True, "graph": 3}, {"gpu_graph_id": "3"}),
        ({"wait": True, "graph": 3, "replayed": False}, {"gpu_graph_id": "-1"}),
        ({"wait": False, "graph": 2}, {"disable_synchronize_execution_providers": "1", "gpu_graph_id": "2"}),
    ],
)
def test_run_options(given: dict[str, object], entries: dict[str, str]) -> None:
    """A run waits if its results are read next; graph -1 skips capture and replay."""
    assert cuda.run_entries(**given) == entries  # type: ignore[arg-type]


class FakeGpu:
    """onnxruntime's description of a GPU."""

    ep_name = CUDA_PROVIDER

    def __init__(self, number: int) -> None:
        self.number = number

    def create_sync_stream(self) -> SimpleNamespace:
        return SimpleNamespace(get_handle=lambda: 1000 + self.number)

    def memory_info(self, kind: object) -> tuple[str, object]:
        return "pinned", kind


def test_streams_and_pinned_memory_belong_to_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number selects the GPU; a missing GPU has neither."""
    devices = [SimpleNamespace(ep_name="CPUExecutionProvider"), FakeGpu(0), FakeGpu(1)]
    monkeypatch.setattr(ort, "get_ep_devices", lambda: devices)
    monkeypatch.setattr(ort, "OrtDeviceMemoryType", SimpleNamespace(HOST_ACCESSIBLE="host"), raising=False)
    assert cuda.CudaStream(CUDA_PROVIDER, 1).handle == 1001
    assert cuda.pinned_memory(CUDA_PROVIDER, 0) == ("pinned", "host")
    assert cuda.CudaStream(CUDA_PROVIDER, 2).handle is None
    assert cuda.pinned_memory(CUDA_PROVIDER, 2) is None


def test_a_gpu_without_streams_is_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a stream cannot be created, each session has its own."""

    class Refusing(FakeGpu):
        def create_sync_stream(self) -> SimpleNamespace:
            raise RuntimeError("no")

        def memory_info(self, kind: object) -> tuple[str, object]:  # noqa: ARG002 - the real signature
            raise RuntimeError("no")

    monkeypatch.setattr(ort, "get_ep_devices", lambda: [Refusing(0)])
    assert cuda.CudaStream(CUDA_PROVIDER).handle is None
    assert cuda.pinned_memory(CUDA_PROVIDER) is None
