"""A device of the CPU provider with separate buffers, so that transfers take place without an accelerator."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime as ort

from chrion.devices import Device
from chrion.devices.host import allocate
from chrion.graph.model import ELEMENT_BYTES, TensorInfo


class MirrorDevice(Device):
    """The CPU provider with separate buffers: programs for it contain every kind of transfer."""

    def supports(self, kind: str) -> bool:
        """Return whether elements of the type have a fixed size."""
        return kind in ELEMENT_BYTES

    def allocate(self, info: TensorInfo) -> ort.OrtValue:
        """Allocate host memory in place of device memory."""
        return allocate(info)

    def to_device(self, info: TensorInfo, array: np.ndarray[Any, Any]) -> ort.OrtValue:
        """Copy an array to a new buffer."""
        buffer = self.allocate(info)
        buffer.update_inplace(np.ascontiguousarray(array) if array.ndim else array)
        return buffer

    def upload(self, source: ort.OrtValue, target: ort.OrtValue) -> None:
        """Copy to the device."""
        target.update_inplace(source.numpy())

    def downloader(self, kind: str) -> Any:
        """Return the object that copies to host memory."""
        del kind
        return self

    def release(self) -> None:
        """Do nothing: no buffer is kept between copies."""

    def copy(self, source: ort.OrtValue, target: ort.OrtValue) -> None:
        """Copy to host memory."""
        target.update_inplace(source.numpy())
