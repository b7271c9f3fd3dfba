"""The memory of an execution provider: buffers there, copies to it and from it, and waiting for it.

onnxruntime's Python interface offers this differently for every provider and version; so nothing is assumed. For each
element type, ways to get a buffer are tried in turn on one element, with a copy there and back; a type for which none
works is not held by the device, and values of it stay in the host's memory, whence sessions fetch them by themselves.
A provider that works in the host's memory holds no type.

- Buffers come from onnxruntime itself (CUDA), from a session of the provider (onnxruntime 1.28 and later), or are taken
  from the output of a session that casts zeros to the type (any version).
- Uploads are ``copy_tensors``, or ``update_inplace`` where an onnxruntime has no such copy for the device.
- Downloads run a session of one Identity, from the device's buffer to the host's: that gives the interpreter lock away
  while it waits for the device, which ``copy_tensors`` does not. Types without that kernel use ``copy_tensors``.

WebGPU runs asynchronously, and its sessions share one command queue that is not safe for threads: so they take turns,
and :meth:`Device.fence` waits for what has been begun.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper

from chrion.devices.cuda import pinned_memory
from chrion.devices.host import allocate, fixed_shape
from chrion.devices.probe import smallest_session
from chrion.devices.providers import CPU_PROVIDER, DEVICE_NAMES
from chrion.graph.model import TensorInfo, element_code

log = logging.getLogger(__name__)

Maker = Callable[[TensorInfo], ort.OrtValue]

#: Held while something is done on a device whose sessions cannot be used by several threads at once.
_TURNS = {"webgpu": threading.RLock()}
_FLOAT = "tensor(float)"


class Device:
    """The memory of one provider's device.

    Args:
        provider: Its execution provider.
        options: The provider's options, ``device_id`` among them.
    """

    def __init__(self, provider: str, options: Mapping[str, Any] | None = None) -> None:
        self.provider = provider
        self._options = dict(options or {})
        #: Number of the device, where there are several.
        self.index = int(self._options.get("device_id", 0))
        #: The kind of memory, as IOBinding calls it; ``cpu`` where the provider works in the host's.
        self.name = DEVICE_NAMES.get(provider, "cpu")
        self._makers: dict[str, Maker | None] = {}
        self._identities: dict[str, ort.InferenceSession | None] = {}
        self._casts: dict[str, ort.InferenceSession] = {}
        self._pinned = pinned_memory(provider, self.index)
        self._uploader = _copy

    def exclusive(self) -> contextlib.AbstractContextManager[Any]:
        """Hold this while a session of the device is bound or run; one thread at a time where the provider needs that.

        Binding counts, since a session may copy what is bound to it there and then. A thread may take it repeatedly.
        """
        return _TURNS.get(self.name) or contextlib.nullcontext()

    def supports(self, kind: str) -> bool:
        """Whether buffers of an element type (``tensor(float)``) can be had there, and copied both ways."""
        if self.name == "cpu":
            return False
        if kind not in self._makers:
            self._makers[kind] = self._find_maker(kind)
        return self._makers[kind] is not None

    def allocate(self, info: TensorInfo) -> ort.OrtValue:
        """A buffer on the device for a tensor of known size and of a type that it holds."""
        maker = self._makers[info.type] if self.supports(info.type) else None
        if maker is None:
            raise TypeError(f"{self.provider} holds no {info.type}")
        return maker(info)

    def host_buffer(self, info: TensorInfo) -> ort.OrtValue:
        """Host memory that is quick to copy from and to: pinned where that can be had."""
        return allocate(info, self._pinned if self.has_pinned_memory else None)

    @cached_property
    def has_pinned_memory(self) -> bool:
        """Whether :meth:`host_buffer` gives pinned memory."""
        return (
            self._pinned is not None
            and self.supports(_FLOAT)
            and self.reads_updates(lambda i: allocate(i, self._pinned))
        )

    def reads_updates(self, host_memory: Maker) -> bool:
        """Whether a session on the CPU sees what is copied into a kind of host memory after that was bound.

        It must not have copied the memory when it was bound; onnxruntime does that with memory it takes for a device's.
        """
        info = TensorInfo("x", _FLOAT, (1,))
        try:
            source, result = host_memory(info), allocate(info)
            session = smallest_session(CPU_PROVIDER)
            binding = session.io_binding()
            binding.bind_ortvalue_input("x", source)
            binding.bind_ortvalue_output("y", result)
            seen = []
            for number in (1.0, 2.0):
                self.download(_FLOAT).copy(self.to_device(info, np.array([number], np.float32)), source)
                session.run_with_iobinding(binding)
                seen.append(float(result.numpy()[0]))
        except Exception as error:  # noqa: BLE001 - plain memory does as well
            log.info("%s: no pinned memory: %s", self.provider, error)
            return False
        return seen == [1.0, 2.0]

    def to_device(self, info: TensorInfo, array: np.ndarray[Any, Any]) -> ort.OrtValue:
        """An array's values on the device, or in the host's memory where the device does not hold their type."""
        host = ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array) if array.ndim else array)
        if not (array.size and self.supports(info.type)):
            return host
        buffer = self.allocate(info)
        self.upload(host, buffer)
        return buffer

    def upload(self, source: ort.OrtValue, target: ort.OrtValue) -> None:
        """Copy from the host's memory into a buffer of the device."""
        with self.exclusive():
            self._uploader(source, target)

    def download(self, kind: str) -> Download:
        """What copies buffers of a type to the host's memory."""
        if kind not in self._identities:
            self._identities[kind] = self._find_identity(kind)
        return Download(self, self._identities[kind])

    def fence(self) -> None:
        """Wait until everything begun on the device has been done; nothing where runs wait by themselves."""
        if self.name in _TURNS:
            self._fence_session()

    def _fence_session(self) -> None:
        with self.exclusive():
            session = self._identity(_FLOAT)
            binding = session.io_binding()
            binding.bind_cpu_input("x", np.zeros(1, np.float32))
            binding.bind_output("y")
            session.run_with_iobinding(binding)

    def _find_maker(self, kind: str) -> Maker | None:
        for maker in (self._from_onnxruntime, self._from_session, self._from_cast):
            try:
                self._makers[kind] = maker
                self._try_copies(TensorInfo("x", kind, (1,)), maker)
            except Exception as error:  # noqa: BLE001 - whatever is missing, the next way may do
                log.debug("%s: no buffer of %s: %s", self.provider, kind, error)
            else:
                return maker
        return None

    def _try_copies(self, info: TensorInfo, maker: Maker) -> None:
        buffer, host = maker(info), allocate(info)
        try:
            self.upload(host, buffer)
        except Exception:  # noqa: BLE001 - not in this onnxruntime
            self._uploader = _update
            self.upload(host, buffer)
        self.download(info.type).copy(buffer, host)

    def _from_onnxruntime(self, info: TensorInfo) -> ort.OrtValue:
        return ort.OrtValue.ortvalue_from_shape_and_type(
            fixed_shape(info), element_code(info.type), self.name, self.index
        )

    def _from_session(self, info: TensorInfo) -> ort.OrtValue:
        session = self._identity(_FLOAT)
        return session.create_ortvalue_from_shape_and_type(
            fixed_shape(info), element_code(info.type), self.name, self.index
        )

    def _from_cast(self, info: TensorInfo) -> ort.OrtValue:
        if info.type not in self._casts:
            node = helper.make_node("Cast", ["x"], ["y"], to=element_code(info.type))
            self._casts[info.type] = self._session(node, TensorProto.FLOAT, element_code(info.type))
        with self.exclusive():
            binding = self._casts[info.type].io_binding()
            binding.bind_cpu_input("x", np.zeros(fixed_shape(info), np.float32))
            binding.bind_output("y", self.name, self.index)
            self._casts[info.type].run_with_iobinding(binding)
            return binding.get_outputs()[0]

    def _find_identity(self, kind: str) -> ort.InferenceSession | None:
        try:
            return self._identity(kind)
        except Exception:  # noqa: BLE001 - no such kernel
            return None

    def _identity(self, kind: str) -> ort.InferenceSession:
        session = self._identities.get(kind)
        if session is None:
            session = self._session(helper.make_node("Identity", ["x"], ["y"]), element_code(kind), element_code(kind))
            self._identities[kind] = session
        return session

    def _session(self, node: Any, taken: int, made: int) -> ort.InferenceSession:
        """A session of one node on the device, for any shape."""
        ends = [helper.make_tensor_value_info(n, code, None) for n, code in (("x", taken), ("y", made))]
        graph = helper.make_graph([node], "copy", ends[:1], ends[1:])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 4
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        given = {"device_id": str(self.index)} if "device_id" in self._options else {}
        return ort.InferenceSession(
            model.SerializeToString(), options, providers=[(self.provider, given)], enable_fallback=0
        )


def _copy(source: ort.OrtValue, target: ort.OrtValue) -> None:
    ort.copy_tensors([source], [target])


def _update(source: ort.OrtValue, target: ort.OrtValue) -> None:
    target.update_inplace(source.numpy())


class Download:
    """Copies buffers of one type from a device to the host's memory; for one thread at a time."""

    def __init__(self, device: Device, session: ort.InferenceSession | None) -> None:
        self._device = device
        self._session = session
        self._binding = None if session is None else session.io_binding()
        self._bound: tuple[ort.OrtValue, ort.OrtValue] | None = None

    def copy(self, source: ort.OrtValue, target: ort.OrtValue) -> None:
        """Copy a buffer of the device into the host's memory, once what has been begun to fill it has ended."""
        with self._device.exclusive():
            if self._binding is None or self._session is None:
                _copy(source, target)
                return
            if self._bound is None or self._bound[0] is not source or self._bound[1] is not target:
                self._binding.bind_ortvalue_input("x", source)
                self._binding.bind_ortvalue_output("y", target)
                self._bound = source, target
            self._session.run_with_iobinding(self._binding)
