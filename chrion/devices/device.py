"""The memory of an execution provider: device buffers, copies to and from the host, and synchronisation.

onnxruntime's Python interface differs between providers and versions, so support is tested and not assumed. For each
element type, the ways to allocate a buffer are tried in turn with one element, which is copied to the device and back.
If none works, the device does not support the type; values of that type stay in host memory, from which sessions copy
them. A provider that works in host memory supports no type.

- Buffers come from onnxruntime itself (CUDA), from a session of the provider (onnxruntime 1.28 and later), or from the
  output of a session that casts zeros to the type (any version).
- Uploads use ``copy_tensors``, or ``update_inplace`` if onnxruntime has no such copy for the device.
- Downloads run a session of one Identity from the device's buffer to the host's, which releases the GIL while it waits
  for the device; ``copy_tensors`` does not. Types without an Identity kernel use ``copy_tensors``.

WebGPU runs asynchronously, and its sessions share one command queue that is not thread-safe. Therefore one thread at a
time uses it, and :meth:`Device.fence` waits for all work that was started.
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
from chrion.devices.host import allocate
from chrion.devices.providers import CPU_PROVIDER, DEVICE_NAMES
from chrion.devices.small_models import one_node_model, smallest_session
from chrion.graph.model import TensorInfo, element_code

log = logging.getLogger(__name__)

Allocator = Callable[[TensorInfo], ort.OrtValue]

#: Locks of the devices whose sessions only one thread at a time may use.
_LOCKS = {"webgpu": threading.RLock()}
#: The names of memory that has addresses; other providers give handles.
_HAVE_ADDRESSES = {"cuda", "cpu"}
_FLOAT = "tensor(float)"


class Device:
    """The memory of one provider's device.

    Args:
        provider: The execution provider.
        options: The provider's options, such as ``device_id``.
    """

    def __init__(self, provider: str, options: Mapping[str, Any] | None = None) -> None:
        self.provider = provider
        self._options = dict(options or {})
        #: The number of the device among several.
        self.index = int(self._options.get("device_id", 0))
        #: The name of its memory for IOBinding; ``cpu`` if the provider works in host memory.
        self.name = DEVICE_NAMES.get(provider, "cpu")
        self._allocators: dict[str, Allocator | None] = {}
        self._identities: dict[str, ort.InferenceSession | None] = {}
        self._casts: dict[str, ort.InferenceSession] = {}
        self._pinned = pinned_memory(provider, self.index)
        self._uploader = _copy

    def exclusive(self) -> contextlib.AbstractContextManager[Any]:
        """Return a reentrant lock to hold while a session of the device is bound or run.

        It excludes other threads only if the provider requires that. Binding counts as use of the device, since a
        session may copy a value when it is bound.
        """
        return _LOCKS.get(self.name) or contextlib.nullcontext()

    def supports(self, kind: str) -> bool:
        """Return whether buffers of a type such as ``tensor(float)`` can be allocated, and copied both ways."""
        if self.name == "cpu":
            return False
        if kind not in self._allocators:
            self._allocators[kind] = self._find_allocator(kind)
        return self._allocators[kind] is not None

    def allocate(self, info: TensorInfo) -> ort.OrtValue:
        """Allocate a buffer on the device for a tensor of known size.

        Raises:
            TypeError: The device does not support the tensor's type.
        """
        allocator = self._allocators[info.type] if self.supports(info.type) else None
        if allocator is None:
            raise TypeError(f"{self.provider} does not support buffers of {info.type}")
        return allocator(info)

    def host_buffer(self, info: TensorInfo) -> ort.OrtValue:
        """Allocate host memory for transfers: pinned if possible."""
        return allocate(info, self._pinned if self.has_pinned_memory else None)

    @cached_property
    def has_pinned_memory(self) -> bool:
        """True if :meth:`host_buffer` allocates pinned memory."""
        return (
            self._pinned is not None
            and self.supports(_FLOAT)
            and self.reads_updates(lambda i: allocate(i, self._pinned))
        )

    def reads_updates(self, host_memory: Allocator) -> bool:
        """Return whether a CPU session reads data that is copied into a kind of host memory after it was bound.

        If onnxruntime copies the memory when it is bound, as it does with memory that it attributes to a device, the
        session does not read later data.

        Args:
            host_memory: A function that allocates this kind of memory.
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
                self.downloader(_FLOAT).copy(self.to_device(info, np.array([number], np.float32)), source)
                session.run_with_iobinding(binding)
                seen.append(float(result.numpy()[0]))
        except Exception as error:  # noqa: BLE001 - pageable memory works as well
            log.info("%s: no pinned memory: %s", self.provider, error)
            return False
        return seen == [1.0, 2.0]

    @cached_property
    def has_views(self) -> bool:
        """True if :meth:`view` works: the memory has addresses, and parts of a buffer can be copied on their own."""
        return self.name in _HAVE_ADDRESSES and self.supports(_FLOAT) and self._try_views()

    @cached_property
    def _binder(self) -> ort.InferenceSession:
        return smallest_session(CPU_PROVIDER)

    @staticmethod
    def block(size: int) -> TensorInfo:
        """Return the type of a buffer of a size in bytes, a multiple of 4, for :meth:`view`."""
        return TensorInfo("block", _FLOAT, (size // 4,))

    def view(self, block: ort.OrtValue, offset: int, info: TensorInfo) -> ort.OrtValue:
        """Return a tensor in a part of a buffer on the device.

        onnxruntime makes tensors of memory that it does not own where they are bound, so one is bound, and returned
        without a run. It does not keep the memory alive.

        Args:
            block: The buffer, which has to outlive the tensor.
            offset: The tensor's position in bytes.
            info: Its type and shape.
        """
        binding = self._binder.io_binding()
        address = block.data_ptr() + offset
        binding.bind_output("y", self.name, self.index, element_code(info.type), list(info.fixed_dimensions), address)
        return binding.get_outputs()[0]

    def to_device(self, info: TensorInfo, array: np.ndarray[Any, Any]) -> ort.OrtValue:
        """Copy an array to the device.

        Returns:
            A value on the device, or in host memory if the array is empty or the device does not support its type.
        """
        host = ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array) if array.ndim else array)
        if not (array.size and self.supports(info.type)):
            return host
        buffer = self.allocate(info)
        self.upload(host, buffer)
        return buffer

    def upload(self, source: ort.OrtValue, target: ort.OrtValue) -> None:
        """Copy from host memory into a buffer of the device."""
        with self.exclusive():
            self._uploader(source, target)

    def downloader(self, kind: str) -> Downloader:
        """Return a copier of buffers of a type, such as ``tensor(float)``, to host memory."""
        if kind not in self._identities:
            self._identities[kind] = self._find_identity(kind)
        return Downloader(self, self._identities[kind])

    def fence(self) -> None:
        """Wait for all work that was started on the device; return at once if runs are synchronous."""
        if self.name in _LOCKS:
            self._fence_session()

    def _fence_session(self) -> None:
        with self.exclusive():
            session = self._identity(_FLOAT)
            binding = session.io_binding()
            binding.bind_cpu_input("x", np.zeros(1, np.float32))
            binding.bind_output("y")
            session.run_with_iobinding(binding)

    def _try_views(self) -> bool:
        """Return whether two views of one buffer keep different values."""
        info, step = TensorInfo("x", _FLOAT, (1,)), 256
        values = []
        try:
            block = self.allocate(self.block(2 * step))
            views = [self.view(block, offset, info) for offset in (0, step)]
            for number, view in enumerate(views):
                self.upload(ort.OrtValue.ortvalue_from_numpy(np.array([1.0 + number], np.float32)), view)
            for view in views:
                host = allocate(info)
                self.downloader(_FLOAT).copy(view, host)
                values.append(float(host.numpy()[0]))
        except Exception as error:  # noqa: BLE001 - whole buffers work as well
            log.info("%s: no views of buffers: %s", self.provider, error)
        return values == [1.0, 2.0]

    def _find_allocator(self, kind: str) -> Allocator | None:
        for allocator in (self._from_onnxruntime, self._from_session, self._from_cast):
            try:
                self._allocators[kind] = allocator
                self._try_copies(TensorInfo("x", kind, (1,)), allocator)
            except Exception as error:  # noqa: BLE001 - the next way may work
                log.debug("%s: no buffer of %s: %s", self.provider, kind, error)
            else:
                return allocator
        return None

    def _try_copies(self, info: TensorInfo, allocator: Allocator) -> None:
        buffer, host = allocator(info), allocate(info)
        try:
            self.upload(host, buffer)
        except Exception:  # noqa: BLE001 - not supported by this onnxruntime
            self._uploader = _update
            self.upload(host, buffer)
        self.downloader(info.type).copy(buffer, host)

    def _from_onnxruntime(self, info: TensorInfo) -> ort.OrtValue:
        return ort.OrtValue.ortvalue_from_shape_and_type(*self._request(info))

    def _from_session(self, info: TensorInfo) -> ort.OrtValue:
        return self._identity(_FLOAT).create_ortvalue_from_shape_and_type(*self._request(info))

    def _request(self, info: TensorInfo) -> tuple[list[int], int, str, int]:
        return list(info.fixed_dimensions), element_code(info.type), self.name, self.index

    def _from_cast(self, info: TensorInfo) -> ort.OrtValue:
        if info.type not in self._casts:
            node = helper.make_node("Cast", ["x"], ["y"], to=element_code(info.type))
            self._casts[info.type] = self._session(node, TensorProto.FLOAT, element_code(info.type))
        with self.exclusive():
            binding = self._casts[info.type].io_binding()
            binding.bind_cpu_input("x", np.zeros(list(info.fixed_dimensions), np.float32))
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

    def _session(self, node: Any, source: int, target: int) -> ort.InferenceSession:
        """Open a session of one node from x to y on the device, for any shape."""
        model = one_node_model(node, None, types=(source, target))
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 4
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        given = {"device_id": str(self.index)} if "device_id" in self._options else {}
        return ort.InferenceSession(model, options, providers=[(self.provider, given)], enable_fallback=0)


def _copy(source: ort.OrtValue, target: ort.OrtValue) -> None:
    ort.copy_tensors([source], [target])


def _update(source: ort.OrtValue, target: ort.OrtValue) -> None:
    target.update_inplace(source.numpy())


class Downloader:
    """A copier of buffers of one type from a device to host memory. It is not thread-safe."""

    def __init__(self, device: Device, session: ort.InferenceSession | None) -> None:
        self._device = device
        self._session = session
        self._binding = None if session is None else session.io_binding()
        self._bound: tuple[ort.OrtValue, ort.OrtValue] | None = None

    def copy(self, source: ort.OrtValue, target: ort.OrtValue) -> None:
        """Copy a buffer of the device to host memory, after the work that fills the buffer."""
        with self._device.exclusive():
            if self._binding is None or self._session is None:
                _copy(source, target)
                return
            if self._bound is None or self._bound[0] is not source or self._bound[1] is not target:
                self._binding.bind_ortvalue_input("x", source)
                self._binding.bind_ortvalue_output("y", target)
                self._bound = source, target
            self._session.run_with_iobinding(self._binding)

    def release(self) -> None:
        """Keep neither buffer of the last copy alive."""
        if self._binding is not None and self._bound is not None:
            self._bound = None
            self._binding.clear_binding_inputs()
            self._binding.clear_binding_outputs()
