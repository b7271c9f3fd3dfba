"""IOBinding for a session that has no single onnxruntime session behind it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import helper

from chrion.devices.host import numpy_dtype, to_host
from chrion.runtime.interface import NodeArg
from chrion.runtime.requests import check_ort_value


class HybridIOBinding:
    """Inputs and outputs bound for :meth:`HybridSession.run_with_iobinding`; the methods of ``SessionIOBinding``.

    An output bound without a buffer gets a new one in each run, in the accelerator's memory if it was bound to that.
    """

    def __init__(self, owner: object, inputs: Sequence[NodeArg], outputs: Sequence[NodeArg]) -> None:
        #: The session that it is for.
        self.owner = owner
        self._known = {"input": [i.name for i in inputs], "output": [o.name for o in outputs]}
        self.inputs: dict[str, ort.OrtValue] = {}
        #: Buffers by output name; None where each run makes a new one.
        self.outputs: dict[str, ort.OrtValue | None] = {}
        #: Device type and number of outputs that are to stay on a device, where each run makes a new one.
        self.devices: dict[str, tuple[str, int]] = {}
        #: What the last run gave, in the order of binding.
        self.results: list[ort.OrtValue] = []
        #: The plain session's binding, where the last run was plain.
        self._plain: Any = None

    def bind_cpu_input(self, name: str, arr_on_cpu: np.ndarray[Any, Any]) -> None:
        """Bind an array on the CPU."""
        self._check("input", name)
        if not isinstance(arr_on_cpu, np.ndarray):
            raise RuntimeError(f"{name!r}: expected an array, found a {type(arr_on_cpu).__name__}")  # noqa: TRY004 - onnxruntime's
        self.inputs[name] = ort.OrtValue.ortvalue_from_numpy(np.asarray(arr_on_cpu, order="C"))

    def bind_input(  # noqa: PLR0913, PLR0917 - SessionIOBinding's own
        self, name: str, device_type: str, device_id: int, element_type: Any, shape: Sequence[int], buffer_ptr: int
    ) -> None:
        """Bind memory at an address, without copying it; the caller keeps it alive."""
        self._check("input", name)
        self.inputs[name] = _at_address(name, device_type, device_id, element_type, shape, buffer_ptr)

    def bind_ortvalue_input(self, name: str, ortvalue: ort.OrtValue) -> None:
        """Bind an OrtValue."""
        self._check("input", name)
        check_ort_value(name, ortvalue)
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
        self._check("output", name)
        self.devices.pop(name, None)
        if buffer_ptr is None:
            self.outputs[name] = None
            if device_type != "cpu":
                self.devices[name] = device_type, device_id
        else:
            self.outputs[name] = _at_address(name, device_type, device_id, element_type, shape or (), buffer_ptr)

    def bind_ortvalue_output(self, name: str, ortvalue: ort.OrtValue) -> None:
        """Bind an output to an OrtValue."""
        self._check("output", name)
        check_ort_value(name, ortvalue)
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
        self._plain = None

    def get_outputs(self) -> list[ort.OrtValue]:
        """Outputs of the last run, in the order they were bound."""
        return list(self.results)

    def copy_outputs_to_cpu(self) -> list[Any]:
        """Outputs of the last run as arrays of their own; sequences and maps as onnxruntime copies them."""
        if self._plain is not None and not all(value.is_tensor() for value in self.results):
            return list(self._plain.copy_outputs_to_cpu())
        return [to_host(value).numpy().copy() for value in self.results]

    def synchronize_inputs(self) -> None:
        """Wait until inputs are where they belong; nothing to do for memory of the CPU."""

    def synchronize_outputs(self) -> None:
        """Wait until outputs are complete; they are when a run returns."""

    def run_plain(self, session: ort.InferenceSession, run_options: ort.RunOptions | None) -> list[ort.OrtValue]:
        """What a plain session makes of the inputs, in the order in which outputs were bound."""
        binding = session.io_binding()
        for name, value in self.inputs.items():
            binding.bind_ortvalue_input(name, value)
        for name, target in self.outputs.items():
            if target is None:
                binding.bind_output(name, *self.devices.get(name, ("cpu", 0)))
            else:
                binding.bind_ortvalue_output(name, target)
        session.run_with_iobinding(binding, run_options)
        self._plain = binding
        return list(binding.get_outputs())

    def _check(self, side: str, name: Any) -> None:
        """Refuse a name that is none of the model's, as onnxruntime does: at once, or when it runs."""
        if not isinstance(name, str):
            raise TypeError(f"expected the name of an {side}, found {name!r}")
        if name not in self._known[side]:
            raise RuntimeError(f"Invalid {side} name: {name}; the model's are {', '.join(self._known[side]) or 'none'}")


def _at_address(  # noqa: PLR0913, PLR0917 - SessionIOBinding's own
    name: str, device_type: str, device_id: int, element_type: Any, shape: Sequence[int], buffer_ptr: int
) -> ort.OrtValue:
    if device_type != "cpu" or device_id:
        raise ValueError(f"{name}: memory of {device_type}:{device_id} cannot be bound by address; bind an OrtValue")
    if isinstance(element_type, int):  # ONNX's number of the type
        dtype = helper.tensor_dtype_to_np_dtype(element_type)
    else:
        dtype = np.dtype(element_type) if not isinstance(element_type, str) else numpy_dtype(element_type)
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    memory = memoryview((ctypes.c_byte * size).from_address(buffer_ptr))
    return ort.OrtValue.ortvalue_from_numpy(np.frombuffer(memory, dtype).reshape(tuple(shape)))
