"""Block chains: a model on one core in blocks of a few milliseconds, between which the core may do something else.

The model is optimised as a whole and cut where few bytes cross (:mod:`chrion.graph.blocks`); every block is a session,
and the values between blocks are in buffers that are bound once for each request in flight. The results are bit for bit
those of a session of the whole model with one thread. A model that cannot be cut is one block, which is such a session.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort

from chrion.devices import CPU_PROVIDER
from chrion.devices.host import copied
from chrion.devices.intra_op import set_threads
from chrion.errors import ChrionError, ShapeError, UnsafeModelError
from chrion.graph.blocks import ModuleChain, cut_chain
from chrion.graph.extract import Extractor
from chrion.graph.loader import load_kernels
from chrion.graph.model import Graph, TensorInfo
from chrion.graph.opened_model import OpenedModel
from chrion.graph.ort_sessions import first_line
from chrion.profiler.plain_latency import measure_node_times
from chrion.profiler.synthetic_inputs import synthetic_array
from chrion.runtime.execution.host_frame import HostFrame
from chrion.runtime.execution.segments import Segment, SegmentFactory, locate_error
from chrion.runtime.requests import check_arguments, check_feed, numeric_dtype
from chrion.runtime.selection.configuration import open_model
from chrion.runtime.shared_arena import use_shared_arena

log = logging.getLogger(__name__)

#: Runs of a chain to measure the times of its blocks, after one that warms up.
_RUNS = 7


class BlockRun(ABC):
    """One request in flight; a failed one cannot be used further."""

    @abstractmethod
    def begin(self, feed: Mapping[str, Any]) -> None:
        """Take the inputs of a request."""

    @abstractmethod
    def run(self, block: int, options: ort.RunOptions | None = None) -> None:
        """Run a block, after those before it; with the options, another thread can terminate it."""

    @abstractmethod
    def outputs(self) -> list[Any]:
        """Return the outputs after the last block; they belong to the caller."""

    @abstractmethod
    def clear(self) -> None:
        """Release the values of the request."""


class BlockChain:
    """A model as a chain of blocks; see :func:`open_chain`.

    Requests in flight have buffers of their own, of which those that are not in use are kept for later requests. All
    methods may be called from any number of threads.

    Attributes:
        inputs: The model's inputs.
        output_names: The names of its outputs.
        block_ms: The measured time of each block alone on a core.
        reason: Why the model is one block; empty if it is cut or if it is short.
        modules: Its modules, the pieces of which are the blocks; every block is a module unless it was cut into them.
    """

    def __init__(
        self,
        inputs: Sequence[TensorInfo],
        output_names: Sequence[str],
        open_run: Callable[[], BlockRun],
        count: int,
        reason: str,
    ) -> None:
        self.inputs, self.output_names, self.reason = tuple(inputs), tuple(output_names), reason
        self.modules = ModuleChain.straight(count)
        self._open_run = open_run
        self._lock = threading.Lock()
        self._idle: list[BlockRun] = []
        self.block_ms: tuple[float, ...] = (0.0,) * count

    def check(self, feed: Mapping[str, Any]) -> dict[str, Any]:
        """Check the inputs of a request and return copies of them, which the caller cannot change.

        Raises:
            Exception: As InferenceSession does for wrong inputs.
        """
        check_arguments(None, feed, None)
        return {name: copied(value) for name, value in check_feed(self.inputs, feed).items()}

    def begin(self, feed: Mapping[str, Any]) -> BlockRun:
        """Return a request in flight.

        Args:
            feed: Inputs as :meth:`check` returns them.
        """
        with self._lock:
            run = self._idle.pop() if self._idle else None
        run = run or self._open_run()
        run.begin(feed)
        return run

    def end(self, run: BlockRun) -> None:
        """Take back a request in flight, of which no block has failed."""
        run.clear()
        with self._lock:
            self._idle.append(run)

    def run(self, feed: Mapping[str, Any], options: ort.RunOptions | None = None) -> dict[str, Any]:
        """Run all blocks of a request, and return its outputs by name.

        Args:
            feed: Inputs as :meth:`check` returns them.
            options: With them, another thread can terminate the request.
        """
        run = self.begin(feed)
        for block in range(len(self.block_ms)):
            run.run(block, options)
        outputs = dict(zip(self.output_names, run.outputs(), strict=True))
        self.end(run)
        return outputs

    def measure(self, feed: Mapping[str, Any] | None = None) -> None:
        """Measure the times of the blocks: the least of several runs, since interference only adds time.

        Args:
            feed: Inputs; synthetic ones if None.
        """
        feed = feed or {info.name: synthetic_array(info) for info in self.inputs}
        samples = [self._timed(self.check(feed)) for _ in range(_RUNS + 1)][1:]
        self.block_ms = tuple(min(own) for own in zip(*samples, strict=True))

    def _timed(self, feed: Mapping[str, Any]) -> list[float]:
        times = []
        run = self.begin(feed)
        for block in range(len(self.block_ms)):
            begin = time.perf_counter()
            run.run(block)
            times.append((time.perf_counter() - begin) * 1e3)
        self.end(run)
        return times


class _CutRun(BlockRun):
    def __init__(self, tensors: Any, segments: Sequence[Segment]) -> None:
        self._frame = HostFrame(tensors, segments)
        self._segments = segments
        self._names = [info.name for info in tensors.outputs]

    def begin(self, feed: Mapping[str, Any]) -> None:
        self._frame.begin(feed, {}, arrays=True)

    def run(self, block: int, options: ort.RunOptions | None = None) -> None:
        segment = self._segments[block]
        try:
            segment.session.run_with_iobinding(self._frame.bindings[block], options)
        except Exception as error:
            raise locate_error(error, segment) from error

    def outputs(self) -> list[Any]:
        return [self._frame.array(name) for name in self._names]

    def clear(self) -> None:
        self._frame.release()


class _WholeRun(BlockRun):
    def __init__(self, session: ort.InferenceSession) -> None:
        self._session = session
        self._feed: Mapping[str, Any] = {}
        self._outputs: list[Any] = []

    def begin(self, feed: Mapping[str, Any]) -> None:
        self._feed = feed

    def run(self, block: int, options: ort.RunOptions | None = None) -> None:
        del block  # the only one
        self._outputs = self._session.run(None, self._feed, options)

    def outputs(self) -> list[Any]:
        return self._outputs

    def clear(self) -> None:
        self._feed, self._outputs = {}, []


def open_chain(
    source: str | Path | bytes | onnx.ModelProto | OpenedModel,
    limit_ms: float,
    shapes: Mapping[str, int | Sequence[int]] | None = None,
    accelerator: str = "",
    *,
    modules: bool = False,
) -> BlockChain:
    """Open a model as a chain of blocks, and measure their times on this machine.

    Args:
        source: A model file, its bytes, a ModelProto, or an opened model.
        limit_ms: The limit of a block's time; an operator that takes longer is a block of its own.
        shapes: Shapes of inputs with free dimensions, as for :func:`chrion.load`. Without them such a model is one
            block, of which the time is measured with free dimensions of 1.
        accelerator: An execution provider that works, on which the model runs as one block; the CPU if empty.
        modules: Cut the model into the pieces of its modules instead, whatever their time. Pieces of a module that do
            not read from each other may run at the same time.

    Raises:
        ModelError: The model cannot be read, or onnxruntime refuses it.
        ShapeError: A shape names no input or free dimension, or contradicts the model.
        UnsafeModelError: The model names files outside of its folder, or its trees would end the process.
    """
    opened = source if isinstance(source, OpenedModel) else open_model(source)
    if accelerator:
        return _whole(opened, "", accelerator)
    try:
        graph = load_kernels(opened, shapes)
    except (ShapeError, UnsafeModelError):
        raise
    except ChrionError as error:
        try:
            return _whole(opened, str(error))
        except Exception:  # noqa: BLE001 - the first error names the cause
            raise error from None
    if reason := why_whole(graph):
        return _whole(opened, reason)
    try:
        feed = {info.name: synthetic_array(info) for info in graph.inputs}
        times_ms = measure_node_times(graph, feed, _options())
    except Exception as error:  # noqa: BLE001 - the model may refuse synthetic inputs
        return _whole(opened, f"it does not run on synthetic inputs: {first_line(error)}")
    return _cut(graph, feed, *cut_chain(graph.dag, times_ms, limit_ms, modules=modules))


def why_whole(graph: Graph) -> str:
    """Return why a graph cannot be cut; empty if it may be."""
    if graph.free_dimensions:
        return f"free dimensions in {', '.join(graph.free_dimensions)}"
    if others := [info.name for info in (*graph.inputs, *graph.outputs) if numeric_dtype(info.type) is None]:
        return f"{', '.join(others)}: no tensor of a numeric type that numpy has"
    nodes = graph.model.graph.node
    known = {info.name for info in graph.inputs} | {
        name for own in graph.nodes for n in own for name in nodes[n].output
    }
    if constant := [info.name for info in graph.outputs if info.name not in known]:
        return f"{', '.join(constant)}: an output that is a constant"
    return "" if len(graph.dag) else "it has no operators"


def _cut(graph: Graph, feed: Mapping[str, Any], blocks: Sequence[Sequence[int]], modules: ModuleChain) -> BlockChain:
    """Return the chain of a graph that is cut into blocks."""
    factory = SegmentFactory(Extractor(graph), _options())
    segments = [factory.open(block, 1) for block in blocks]
    tensors = graph.select(name for s in segments for _, name in (*s.inputs, *s.outputs))
    names = [info.name for info in graph.outputs]
    chain = BlockChain(graph.inputs, names, lambda: _CutRun(tensors, segments), len(blocks), "")
    chain.modules = modules
    chain.measure(feed)
    return chain


def _whole(opened: OpenedModel, reason: str, provider: str = CPU_PROVIDER) -> BlockChain:
    """Return a model as one block."""
    options = ort.SessionOptions()
    options.log_severity_level = 4  # errors are raised
    set_threads(options, 1)
    if provider == CPU_PROVIDER:
        use_shared_arena(options)
    providers = dict.fromkeys([provider, CPU_PROVIDER])
    session = opened.use(lambda content: ort.InferenceSession(content, options, [*providers]))
    session.disable_fallback()
    inputs = [TensorInfo(i.name, i.type, tuple(i.shape)) for i in session.get_inputs()]
    names = [o.name for o in session.get_outputs()]
    chain = BlockChain(inputs, names, lambda: _WholeRun(session), 1, reason)
    try:
        chain.measure()
    except Exception as error:  # noqa: BLE001 - the first requests show whether it runs
        log.info("the time of a model is unknown, since it does not run on synthetic inputs: %s", error)
    return chain


def _options() -> ort.SessionOptions:
    """Return the options of sessions of a graph that is optimised already."""
    options = ort.SessionOptions()
    options.log_severity_level = 3  # not warnings that the optimised graph has initializers without use
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    set_threads(options, 1)
    use_shared_arena(options)
    return options
