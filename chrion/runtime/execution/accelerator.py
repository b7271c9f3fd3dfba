"""The accelerator as an engine uses it: its device, the streams of its lanes, and the sessions and runs on them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import onnxruntime as ort

from chrion.devices import Device
from chrion.devices.cuda import Stream, provider_options, run_entries, session_entries, wants_graphs
from chrion.devices.single_provider import open_on_one_provider


class Accelerator:
    """Opens and runs sessions on one provider.

    Args:
        provider: Its execution provider.
        options: The caller's options of it.
    """

    def __init__(self, provider: str, options: Mapping[str, Any]) -> None:
        self.device = Device(provider, options)
        self._options = dict(options)
        self._streams: dict[int, Stream] = {}
        #: Whether segments are to be captured as CUDA graphs.
        self.graphs = wants_graphs(provider, options)
        self._graph_ids = itertools.count(1)
        self._run_options: dict[tuple[bool, int | None, bool], ort.RunOptions] = {}

    def place(self, lane: int) -> int:
        """Segments of equal places may share a session: all lanes, unless each has a stream of its own."""
        return 0 if self._stream(lane).handle is None else lane

    def open(
        self, model: bytes, options: ort.SessionOptions, lane: int, *, graph: bool = False
    ) -> ort.InferenceSession:
        """A session wholly on the provider.

        Args:
            model: The model.
            options: The session's options.
            lane: The accelerator's lane that it runs on.
            graph: Whether it is to be captured as a CUDA graph.

        Raises:
            ProviderError: A node would run elsewhere.
            Exception: Whatever else onnxruntime raises.
        """
        provider = self.device.provider
        for key, value in session_entries(provider).items():
            options.add_session_config_entry(key, value)
        chosen = provider_options(provider, self._options, self._stream(lane).handle, graph=graph)
        with self.device.exclusive():
            return open_on_one_provider(model, options, provider, chosen)

    def new_graph(self) -> int:
        """A number for the CUDA graph of a segment with one set of buffers."""
        return next(self._graph_ids)

    def run(  # noqa: PLR0913 - what a run is made of
        self,
        session: ort.InferenceSession,
        binding: Any,
        run_options: ort.RunOptions | None,
        *,
        lane: int,
        complete: bool,
        graph: int | None = None,
        replayed: bool = False,
    ) -> None:
        """Run a segment.

        Args:
            session: Its session.
            binding: Its binding.
            run_options: The caller's; ours, which spare a synchronisation or name a CUDA graph, if missing.
            lane: The lane it runs on.
            complete: Return only when its results are there, also for other lanes.
            graph: Number of its CUDA graph, if there is one.
            replayed: Whether its buffers are those of that graph.
        """
        wait = complete or self._stream(lane).handle is None
        if run_options is None or graph is not None:
            run_options = self._own_options(wait, graph, replayed)
        with self.device.exclusive():
            session.run_with_iobinding(binding, run_options)
        if complete:
            self.device.fence()

    def _stream(self, lane: int) -> Stream:
        if lane not in self._streams:
            self._streams[lane] = Stream(self.device.provider, self.device.index)
        return self._streams[lane]

    def _own_options(self, wait: bool, graph: int | None, replayed: bool) -> ort.RunOptions | None:  # noqa: FBT001 - a key
        key = (wait, graph, replayed)
        if key not in self._run_options:
            options = ort.RunOptions()
            for name, value in run_entries(wait=wait, graph=graph, replayed=replayed).items():
                options.add_run_config_entry(name, value)
            self._run_options[key] = options
        return self._run_options[key]
