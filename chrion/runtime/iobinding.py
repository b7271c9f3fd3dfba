"""IOBinding for a session that has no single onnxruntime session behind it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime as ort

from chrion.devices.host import numpy_dtype, to_host
from chrion.graph.model import TensorInfo
from chrion.runtime.values import check_outputs


class HybridIOBinding:
    """Inputs and outputs bound for :meth:`HybridSession.run_with_iobinding`; the methods of ``SessionIOBinding``.

    An output bound without a buffer gets a new one in each run, in the accelerator's memory if it was bound to that.
    """

    def __init__(self, inputs: Sequence[TensorInfo], outputs: Sequence[TensorInfo]) -> None:
        self._input_infos = {i.name: i for i in inputs}
        self._output_infos = outputs
        self.inputs: dict[str, ort.OrtValue] = {}
        #: Buffers by output name; None where each run makes a new one.
        self.outputs: dict[str, ort.OrtValue | None] = {}
        #: Device type and number of outputs that are to stay on a device, where each run makes a new one.
        self.devices: dict[str, tuple[str, int]] = {}
        #: What the last run gave, in the order of binding.
        self.results: list[ort.OrtValue] = []

    def bind_cpu_input(self, name: str, arr_on_cpu: np.ndarray[Any, Any]) -> None:
        """Bind an array on the CPU."""
        self.inputs[name] = ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(arr_on_cpu))

    def bind_input(  # noqa: PLR0913, PLR0917 - SessionIOBinding's own
        self, name: str, device_type: str, device_id: int, element_type: Any, shape: Sequence[int], buffer_ptr: int
    ) -> None:
        """Bind memory at an address, without copying it; the caller keeps it alive."""
        self.inputs[name] = _at_address(name, device_type, device_id, element_type, shape, buffer_ptr)

    def bind_ortvalue_input(self, name: str, ortvalue: ort.OrtValue) -> None:
        """Bind an OrtValue."""
        self.inputs[name] = ortvalue

    def bind_output(  # noqa: PLR0913, PLR0917 - SessionIOBinding's own
        self,
        name: str,
        device_type: str = "cpu",
        device_id: int = 0,
        element_type: Any = None,
        shape: Sequence[int] | None = None,
        buffer_ptr: int | None = None,
    ) -> None:
        """Bind an output to memory at an address, or to whatever each run allocates."""
        check_outputs(self._output_infos, [name])
        self.devices.pop(name, None)
        if buffer_ptr is None:
            self.outputs[name] = None
            if device_type != "cpu":
                self.devices[name] = device_type, device_id
        else:
            self.outputs[name] = _at_address(name, device_type, device_id, element_type, shape or (), buffer_ptr)

    def bind_ortvalue_output(self, name: str, ortvalue: ort.OrtValue) -> None:
        """Bind an output to an OrtValue."""
        check_outputs(self._output_infos, [name])
        self.devices.pop(name, None)
        self.outputs[name] = ortvalue

    def clear_binding_inputs(self) -> None:
        """Forget all inputs."""
        self.inputs.clear()

    def clear_binding_outputs(self) -> None:
        """Forget all outputs."""
        self.outputs.clear()
        self.devices.clear()
        self.results.clear()

    def get_outputs(self) -> list[ort.OrtValue]:
        """Outputs of the last run, in the order they were bound."""
        return list(self.results)

    def copy_outputs_to_cpu(self) -> list[Any]:
        """Outputs of the last run as arrays of their own."""
        return [to_host(value).numpy().copy() for value in self.results]

    def synchronize_inputs(self) -> None:
        """Wait until inputs are where they belong; nothing to do for memory of the CPU."""

    def synchronize_outputs(self) -> None:
        """Wait until outputs are complete; they are when a run returns."""


def _at_address(  # noqa: PLR0913, PLR0917 - SessionIOBinding's own
    name: str, device_type: str, device_id: int, element_type: Any, shape: Sequence[int], buffer_ptr: int
) -> ort.OrtValue:
    if device_type != "cpu" or device_id:
        raise ValueError(f"{name}: memory of {device_type}:{device_id} cannot be bound by address; bind an OrtValue")
    dtype = np.dtype(element_type) if not isinstance(element_type, str) else numpy_dtype(element_type)
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    memory = memoryview((ctypes.c_byte * size).from_address(buffer_ptr))
    return ort.OrtValue.ortvalue_from_numpy(np.frombuffer(memory, dtype).reshape(tuple(shape)))
