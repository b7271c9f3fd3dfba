"""A second memory without a second device: copies are made, and are all that is to see of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime as ort

from chrion.devices import Device
from chrion.devices.host import allocate
from chrion.graph.model import ELEMENT_BYTES, TensorInfo


class MirrorDevice(Device):
    """The CPU's provider with buffers of its own, so that programs for it have every kind of copy."""

    def supports(self, kind: str) -> bool:
        """All that has a size."""
        return kind in ELEMENT_BYTES

    def allocate(self, info: TensorInfo) -> ort.OrtValue:
        """Host memory that stands for the device's."""
        return allocate(info)

    def to_device(self, info: TensorInfo, array: np.ndarray[Any, Any]) -> ort.OrtValue:
        """A copy."""
        buffer = self.allocate(info)
        buffer.update_inplace(np.ascontiguousarray(array) if array.ndim else array)
        return buffer

    def upload(self, source: ort.OrtValue, target: ort.OrtValue) -> None:
        """Copy."""
        target.update_inplace(source.numpy())

    def download(self, kind: str) -> Any:
        """What copies back."""
        del kind
        return self

    def copy(self, source: ort.OrtValue, target: ort.OrtValue) -> None:
        """Copy back."""
        target.update_inplace(source.numpy())
