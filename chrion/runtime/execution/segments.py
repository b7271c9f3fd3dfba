"""Segments: sub-models with their onnxruntime sessions. Segments that compute the same function share one session."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
import onnxruntime as ort

from chrion.common.lane_numbers import is_accelerator_lane
from chrion.devices import CPU_PROVIDER
from chrion.devices.intra_op import set_threads
from chrion.graph.extract import Extractor
from chrion.graph.model import TensorInfo
from chrion.graph.native_operators import with_native_operators
from chrion.graph.rewrite import NATIVE, RewriteError
from chrion.native import NativeSession, register_operators
from chrion.runtime.execution.accelerator import AcceleratorSessions
from chrion.runtime.options.session_options import inherit

log = logging.getLogger(__name__)
#: A segment has an arena of its own if the values that it computes take more than this many bytes. The arena of a
#: session takes 40 kB at least, and a plan has dozens of sessions. Blocks of less than 128 KiB are allocated as fast by
#: the C library, which does not return them to the system.
_ARENA_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment that can run: its session, and the graph's values that the session's inputs and outputs stand for.

    The session is an ``InferenceSession`` or a :class:`chrion.native.NativeSession`.
    """

    session: Any
    #: (name in the session, name in the graph) of each input and output.
    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]
    #: Names of the operators, for messages.
    operators: tuple[str, ...]
    #: Whether the segment runs on the accelerator.
    on_device: bool = False
    #: Whether it is captured as a CUDA graph.
    cuda_graph: bool = False
    #: The number of its operators if all are native ones that native lanes may call on one thread; 0 otherwise.
    calls: int = 0
    #: Further outputs of the session: what such operators compute for each other, or for none.
    inner: tuple[TensorInfo, ...] = ()

    def __str__(self) -> str:
        if len(self.operators) == 1:
            return f"operator {self.operators[0]!r}"
        return f"operators {self.operators[0]!r} to {self.operators[-1]!r}"


class SegmentFactory:
    """Opens the segments of one graph.

    Args:
        extractor: Extractor of the graph.
        base: The caller's session options, or None.
        accelerator: Opens the segments of accelerator lanes; None to open all segments on the CPU.
        native: Whether to open the segments of CPU lanes for native lanes.
        cores: The logical CPU of each lane, for the threads of segments on several cores.
        native_operators: Names of the operators of CPU lanes that run on Chrion's native kernels.
        bfloat16: Whether these multiply in bfloat16.
    """

    def __init__(  # noqa: PLR0913 - optional arguments are keyword-only
        self,
        extractor: Extractor,
        base: ort.SessionOptions | None,
        accelerator: AcceleratorSessions | None = None,
        *,
        native: bool = False,
        cores: Mapping[int, int | None] | None = None,
        native_operators: Collection[str] = (),
        bfloat16: bool = False,
    ) -> None:
        self._extractor = extractor
        self._cores = cores or {}
        self._base = base
        self._accelerator = accelerator
        self._native = native
        self._native_operators = native_operators
        self._bfloat16 = bfloat16
        #: Sessions by what they compute, the accelerator's sharing group, the other lanes, and their native operators.
        self._opened: dict[
            tuple[str, int | None, range, tuple[int, ...]],
            tuple[Any, tuple[str, ...], tuple[str, ...], tuple[int, tuple[TensorInfo, ...]]],
        ] = {}

    @property
    def session_count(self) -> int:
        """Number of sessions that have been opened."""
        return len(self._opened)

    def open(self, operators: Sequence[int], lane: int, width: int = 1) -> Segment:
        """Open a segment for a lane; it shares the session of any earlier segment that computes the same function.

        Segments of a ``width`` of 2 or more have a session with a thread on each of the next lanes' cores, which they
        share with segments on the same lanes.
        """
        others = range(lane + 1, lane + width)
        sub = self._extractor.extract(operators)
        accelerator = self._accelerator if is_accelerator_lane(lane) else None
        cuda_graph = accelerator is not None and accelerator.captures_graphs and not _has_control_flow(sub.model)
        group = accelerator.sharing_group(lane) if accelerator else None
        names = [node.name for node in sub.model.graph.node]
        kernels = () if accelerator else tuple(at for at, n in enumerate(names) if n in self._native_operators)
        key = (sub.key, group, others, kernels)
        if key not in self._opened:
            options = self._options(sub.options, others)
            model = self._with_kernels(sub.model, {names[at] for at in kernels}, options, 1 + len(others))
            called = self._expose_values(model) if self._native and not others else (0, ())
            content = model.SerializeToString()
            if accelerator is None and (called[0] or self._is_small(sub.model)):
                options.enable_cpu_mem_arena = False
            if accelerator:
                session: Any = accelerator.open(content, options, lane, cuda_graph=cuda_graph)
            elif self._native:
                session = NativeSession(content, options)
            else:
                session = ort.InferenceSession(content, options, [CPU_PROVIDER], enable_fallback=0)
            self._opened[key] = (session, sub.inputs, sub.outputs, called)
        session, inputs, outputs, (calls, inner) = self._opened[key]
        operator_names = self._extractor.graph.dag.names
        return Segment(
            session=session,
            inputs=tuple(zip(inputs, sub.inputs, strict=True)),
            outputs=tuple(zip(outputs, sub.outputs, strict=True)),
            operators=tuple(operator_names[i] for i in operators),
            on_device=accelerator is not None,
            cuda_graph=cuda_graph,
            calls=calls,
            inner=inner,
        )

    def _with_kernels(
        self, model: onnx.ModelProto, names: Collection[str], options: ort.SessionOptions, width: int
    ) -> onnx.ModelProto:
        """Return a segment's model with native kernels for some nodes, or as it is if they do not compute the same."""
        if names:
            try:
                model = with_native_operators(model, names, bfloat16=self._bfloat16, split=width)
                register_operators(options)
            except RewriteError as refusal:
                log.warning("a segment runs on onnxruntime's kernels: %s", refusal)
        return model

    def _expose_values(self, model: onnx.ModelProto) -> tuple[int, tuple[TensorInfo, ...]]:
        """If all operators of a model are native ones, make all values that they compute outputs, in place.

        Then the memory of all of them is bound, as :class:`chrion.native.NativeCalls` needs it.

        Returns:
            The number of operators, 0 if any is not a native one, and the values that were no outputs.
        """
        nodes, values = model.graph.node, self._extractor.graph.values
        results = {result.name for result in model.graph.output}
        inner = [name for node in nodes for name in node.output if name and name not in results]
        if any(node.domain != NATIVE for node in nodes) or any(values[name].bytes is None for name in inner):
            return 0, ()
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in inner)
        return len(nodes), tuple(values[name] for name in inner)

    def _is_small(self, model: onnx.ModelProto) -> bool:
        """Return whether the values that a segment computes need no arena."""
        values = self._extractor.graph.values
        sizes = [values[name].bytes if name in values else None for node in model.graph.node for name in node.output]
        return sum(size for size in sizes if size is not None) <= _ARENA_BYTES and None not in sizes

    def _options(self, entries: Mapping[str, str], others: range) -> ort.SessionOptions:
        options = ort.SessionOptions()
        inherit(self._base, options)
        cores = [core for lane in others if (core := self._cores.get(lane)) is not None]
        set_threads(options, 1 + len(others), cores)
        for key, value in entries.items():
            options.add_session_config_entry(key, value)
        return options


def _has_control_flow(model: onnx.ModelProto) -> bool:
    subgraphs = {onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS}
    return any(attribute.type in subgraphs for node in model.graph.node for attribute in node.attribute)


def locate_error(error: Exception, where: object) -> Exception:
    """Return an error of the same type whose message begins with the operators that it concerns."""
    message = f"{where}: {error}"
    make: Callable[[str], Exception] = type(error)
    try:
        return make(message)
    except Exception:  # noqa: BLE001 - the type cannot be created from a message alone
        return RuntimeError(message)
