"""The accelerator of an engine: its device, the streams of its lanes, and the sessions that run on them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import onnxruntime as ort

from chrion.devices import Device
from chrion.devices.cuda import CudaStream, provider_options, run_entries, session_entries, wants_graphs
from chrion.devices.single_provider import open_on_one_provider
from chrion.runtime.options.terminable import TerminableRunOptions


class AcceleratorSessions:
    """Opens and runs sessions on one execution provider.

    Args:
        provider: The execution provider.
        options: The caller's options of the provider.

    Attributes:
        device: The device, which allocates and copies in the accelerator's memory.
        captures_graphs: Whether segments are captured as CUDA graphs, which a provider option enables.
    """

    def __init__(self, provider: str, options: Mapping[str, Any]) -> None:
        self.device = Device(provider, options)
        self.captures_graphs = wants_graphs(provider, options)
        self._options = dict(options)
        self._streams: dict[int, CudaStream] = {}
        self._cuda_graph_ids = itertools.count(1)
        self._run_options: dict[tuple[bool, int | None, bool], ort.RunOptions] = {}

    def sharing_group(self, lane: int) -> int:
        """Return the group of a lane: lanes of one group share sessions. With streams, each lane is its own group."""
        return 0 if self._stream(lane).handle is None else lane

    def open(
        self, model: bytes, options: ort.SessionOptions, lane: int, *, cuda_graph: bool = False
    ) -> ort.InferenceSession:
        """Open a session whose nodes all run on the provider.

        Args:
            model: The serialised model.
            options: The session's options; the entries that the provider requires are added to them.
            lane: The accelerator's lane that the session runs on.
            cuda_graph: Whether runs of the session will be captured as CUDA graphs.

        Raises:
            ProviderError: A node would run on another provider.
            Exception: Raised by onnxruntime for any other reason.
        """
        provider = self.device.provider
        for key, value in session_entries(provider).items():
            options.add_session_config_entry(key, value)
        chosen = provider_options(provider, self._options, self._stream(lane).handle, graph=cuda_graph)
        with self.device.exclusive():
            return open_on_one_provider(model, options, provider, chosen)

    def new_cuda_graph(self) -> int:
        """Return an unused number for a CUDA graph. Each frame has its own graph of each segment."""
        return next(self._cuda_graph_ids)

    def run(  # noqa: PLR0913 - the parts of a run
        self,
        session: ort.InferenceSession,
        binding: Any,
        run_options: ort.RunOptions | None,
        *,
        lane: int,
        complete: bool,
        cuda_graph: int | None = None,
        replayed: bool = False,
    ) -> None:
        """Run a segment.

        Args:
            session: The segment's session.
            binding: Binding of the segment's inputs and outputs.
            run_options: The caller's options, or None. If they are None or the segment has a CUDA graph, options that
                skip a synchronisation or name the graph are used instead; if they only terminate the request, options
                that do both.
            lane: The lane that runs it.
            complete: Whether to return only when the results are complete and other lanes may read them.
            cuda_graph: Number of the segment's CUDA graph, or None.
            replayed: Whether the graph may be captured or replayed, because the binding has the graph's buffers.
        """
        wait = complete or self._stream(lane).handle is None
        if run_options is None or cuda_graph is not None:
            run_options = self._own_options(wait, cuda_graph, replayed)
        elif isinstance(run_options, TerminableRunOptions) and (entries := run_entries(wait=wait)):
            run_options = run_options.derive(entries)
        with self.device.exclusive():
            session.run_with_iobinding(binding, run_options)
        if complete:
            self.device.fence()

    def _stream(self, lane: int) -> CudaStream:
        if lane not in self._streams:
            self._streams[lane] = CudaStream(self.device.provider, self.device.index)
        return self._streams[lane]

    def _own_options(self, wait: bool, cuda_graph: int | None, replayed: bool) -> ort.RunOptions | None:  # noqa: FBT001 - a key
        key = (wait, cuda_graph, replayed)
        if key not in self._run_options:
            options = ort.RunOptions()
            for name, value in run_entries(wait=wait, graph=cuda_graph, replayed=replayed).items():
                options.add_run_config_entry(name, value)
            self._run_options[key] = options
        return self._run_options[key]
