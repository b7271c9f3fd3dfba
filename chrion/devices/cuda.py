"""CUDA: options of sessions and runs, and the streams that accelerator lanes compute on.

This module builds dictionaries for onnxruntime and creates streams; it does not use a GPU by itself. The caller's
options take precedence over those of this module.

Synchronisation: by default a CUDA session waits for its stream at the end of every run. Sessions of one accelerator
lane share a stream, which preserves their order, so only the last run before another lane or the caller reads a result
has to wait. If onnxruntime cannot create a stream (some versions do not list CUDA devices), each session has a stream
of its own and every run waits.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import onnxruntime as ort

CUDA_PROVIDER = "CUDAExecutionProvider"
#: The arena grows by the requested size instead of doubling, so that no more memory is held than needed.
_ARENA = {"arena_extend_strategy": "kSameAsRequested"}
#: Weights are allocated outside the arena, which would round up their sizes.
_SESSION = {"session.use_device_allocator_for_initializers": "1"}
_NO_SYNC = ("disable_synchronize_execution_providers", "1")
_GRAPH_ID = "gpu_graph_id"
#: The graph id that skips capture and replay.
_NO_GRAPH = "-1"

log = logging.getLogger(__name__)


def provider_options(provider: str, given: Mapping[str, Any], stream: int | None, *, graph: bool) -> dict[str, Any]:
    """Return the provider options of a segment's session.

    Args:
        provider: The execution provider; for any other than CUDA the caller's options are returned.
        given: The caller's options, which take precedence, except for CUDA graphs: those are enabled per segment.
        stream: The handle of the lane's stream, or None if the session has a stream of its own.
        graph: Capture the segment as a CUDA graph.
    """
    if provider != CUDA_PROVIDER:
        return dict(given)
    options = {**_ARENA, **given}
    options.pop("enable_cuda_graph", None)
    if stream is not None:
        options.setdefault("user_compute_stream", str(stream))
    return options | ({"enable_cuda_graph": "1"} if graph else {})


def session_entries(provider: str) -> dict[str, str]:
    """Return the session configuration entries that a provider needs."""
    return dict(_SESSION) if provider == CUDA_PROVIDER else {}


def wants_graphs(provider: str, given: Mapping[str, Any]) -> bool:
    """Return whether the caller's provider options enable CUDA graphs."""
    return provider == CUDA_PROVIDER and str(given.get("enable_cuda_graph", "0")).lower() in {"1", "true"}


def run_entries(*, wait: bool, graph: int | None = None, replayed: bool = True) -> dict[str, str]:
    """Return the run configuration entries of a segment.

    Args:
        wait: Wait for the stream at the end of the run, because another lane or the caller reads the results next.
        graph: The number of the CUDA graph of the segment and its buffers; None for a session without CUDA graphs.
        replayed: False to run without capture and replay in a session with CUDA graphs, because the buffers are new.
    """
    entries = {} if wait else dict([_NO_SYNC])
    if graph is not None:
        entries[_GRAPH_ID] = str(graph) if replayed else _NO_GRAPH
    return entries


class CudaStream:
    """A CUDA stream for the sessions of one accelerator lane, which it must outlive.

    Args:
        provider: The lane's execution provider.
        index: The number of the GPU.
    """

    def __init__(self, provider: str, index: int = 0) -> None:
        self._stream = _new_stream(index) if provider == CUDA_PROVIDER else None
        #: The address for ``user_compute_stream``; None if there is no stream.
        self.handle: int | None = None if self._stream is None else int(self._stream.get_handle())


def pinned_memory(provider: str, index: int = 0) -> Any:
    """Return onnxruntime's description of pinned (page-locked) host memory, or None if it is not supported."""
    if provider != CUDA_PROVIDER:
        return None
    device = _ep_device(index)
    try:
        return None if device is None else device.memory_info(ort.OrtDeviceMemoryType.HOST_ACCESSIBLE)
    except Exception as error:  # noqa: BLE001 - pageable memory works as well
        log.info("no pinned memory: %s", error)
        return None


def _new_stream(index: int) -> Any:
    device = _ep_device(index)
    try:
        return None if device is None else device.create_sync_stream()
    except Exception as error:  # noqa: BLE001 - each session then has its own stream
        log.info("no stream: %s", error)
        return None


def _ep_device(index: int) -> Any:
    """Return onnxruntime's description of a GPU, or None if this version does not list it."""
    gpus = [d for d in ort.get_ep_devices() if d.ep_name == CUDA_PROVIDER]
    return gpus[index] if index < len(gpus) else None
