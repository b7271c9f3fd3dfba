"""What is particular to CUDA: options of its sessions and runs, and the streams that accelerator lanes compute on.

Nothing here touches a GPU by itself: dictionaries for onnxruntime, and one call for a stream. A caller's own options
win over ours.

Synchronisation. A CUDA session ends every run by waiting for its stream. Sessions of one accelerator lane share a
stream, which keeps order by itself, so only the last run before somebody else looks has to wait. Where no stream can
be had (an onnxruntime that does not offer CUDA's devices), each session has its own and every run waits.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import onnxruntime as ort

CUDA_PROVIDER = "CUDAExecutionProvider"
#: The arena takes what is asked for instead of doubling, so that what is held is what is needed.
_ARENA = {"arena_extend_strategy": "kSameAsRequested"}
#: Weights are allocated by themselves, not from the arena, which would round them up.
_SESSION = {"session.use_device_allocator_for_initializers": "1"}
_NO_SYNC = ("disable_synchronize_execution_providers", "1")
_GRAPH_ID = "gpu_graph_id"
#: The graph id that skips capture and replay.
_NO_GRAPH = "-1"

log = logging.getLogger(__name__)


def provider_options(provider: str, given: Mapping[str, Any], stream: int | None, *, graph: bool) -> dict[str, Any]:
    """Options of a segment's session.

    Args:
        provider: Its execution provider; any other than CUDA gets what is given.
        given: The caller's options, which win, but for CUDA graphs: those are taken segment by segment.
        stream: Handle of the lane's stream, or None where the session has its own.
        graph: Whether the segment is to be captured as a CUDA graph.
    """
    if provider != CUDA_PROVIDER:
        return dict(given)
    options = {**_ARENA, **given}
    options.pop("enable_cuda_graph", None)
    if stream is not None:
        options.setdefault("user_compute_stream", str(stream))
    return options | ({"enable_cuda_graph": "1"} if graph else {})


def session_entries(provider: str) -> dict[str, str]:
    """Session options beside those of any provider."""
    return dict(_SESSION) if provider == CUDA_PROVIDER else {}


def wants_graphs(provider: str, given: Mapping[str, Any]) -> bool:
    """Whether the caller's provider options ask for CUDA graphs."""
    return provider == CUDA_PROVIDER and str(given.get("enable_cuda_graph", "0")).lower() in {"1", "true"}


def run_entries(*, wait: bool, graph: int | None = None, replayed: bool = True) -> dict[str, str]:
    """Run options of a segment.

    Args:
        wait: Whether the run has to wait for its stream, since another lane or the caller looks next.
        graph: Number of the CUDA graph that the segment and its buffers have; None for a session without.
        replayed: False for a run of a session with graphs that is not to be captured: its buffers are new ones.
    """
    entries = {} if wait else dict([_NO_SYNC])
    if graph is not None:
        entries[_GRAPH_ID] = str(graph) if replayed else _NO_GRAPH
    return entries


class Stream:
    """A CUDA stream for the sessions of one accelerator lane; keep it as long as they live.

    Args:
        provider: The lane's execution provider.
        index: Number of the GPU.
    """

    def __init__(self, provider: str, index: int = 0) -> None:
        self._stream = _new_stream(index) if provider == CUDA_PROVIDER else None
        #: Its address, for ``user_compute_stream``; None where there is none.
        self.handle: int | None = None if self._stream is None else int(self._stream.get_handle())


def pinned_memory(provider: str, index: int = 0) -> Any:
    """Page-locked host memory, as ``ortvalue_from_shape_and_type`` wants it described; None where there is none."""
    if provider != CUDA_PROVIDER or not hasattr(ort, "OrtDeviceMemoryType"):
        return None
    device = _ep_device(index)
    try:
        return None if device is None else device.memory_info(ort.OrtDeviceMemoryType.HOST_ACCESSIBLE)
    except Exception as error:  # noqa: BLE001 - pageable memory works, too
        log.info("no pinned memory: %s", error)
        return None


def _new_stream(index: int) -> Any:
    device = _ep_device(index)
    try:
        return None if device is None else device.create_sync_stream()
    except Exception as error:  # noqa: BLE001 - sessions have streams of their own then
        log.info("no stream: %s", error)
        return None


def _ep_device(index: int) -> Any:
    """Onnxruntime's description of a GPU, where this version offers it."""
    if not hasattr(ort, "get_ep_devices"):
        return None
    found = [d for d in ort.get_ep_devices() if d.ep_name == CUDA_PROVIDER]
    return found[index] if index < len(found) else None
