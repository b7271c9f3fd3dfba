"""Bindings of inputs and outputs for sessions that are cut into several onnxruntime sessions."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime as ort

from chrion.devices.host import numpy_dtype, to_host
from chrion.runtime.requests import check_ort_value


class HybridIOBinding:
    """Bound inputs and outputs for :meth:`HybridSession.run_with_iobinding`, with the methods of ``SessionIOBinding``.

    Outputs that are bound without a buffer are allocated by each run, in the memory of the device they are bound to.

    Args:
        owner: The session that the binding is for.
        inputs: Names of the model's inputs.
        outputs: Names of its outputs.

    Attributes:
        inputs: Bound inputs by name.
        outputs: Buffers by output name; None for an output that each run allocates.
        devices: Device type and number, by name, of the outputs that each run allocates on a device.
        results: Outputs of the last run, in the order of binding.
    """

    def __init__(self, owner: object, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        self.owner = owner
        self._known = {"input": inputs, "output": outputs}
        self.inputs: dict[str, ort.OrtValue] = {}
        self.outputs: dict[str, ort.OrtValue | None] = {}
        self.devices: dict[str, tuple[str, int]] = {}
        self.results: list[ort.OrtValue] = []
        #: Binding of the plain session, if the last run was plain.
        self._plain: Any = None

    def bind_cpu_input(self, name: str, arr_on_cpu: np.ndarray[Any, Any]) -> None:
        """Bind an input to an array in the host's memory."""
        self._check("input", name)
        if not isinstance(arr_on_cpu, np.ndarray):
            raise RuntimeError(f"{name!r}: expected an array, found a {type(arr_on_cpu).__name__}")  # noqa: TRY004 - as onnxruntime
        self.inputs[name] = ort.OrtValue.ortvalue_from_numpy(np.asarray(arr_on_cpu, order="C"))

    def bind_input(  # noqa: PLR0913, PLR0917 - SessionIOBinding's own
        self, name: str, device_type: str, device_id: int, element_type: Any, shape: Sequence[int], buffer_ptr: int
    ) -> None:
        """Bind an input to memory at an address, which is not copied; the caller keeps it alive."""
        self._check("input", name)
        self.inputs[name] = _at_address(name, device_type, device_id, element_type, shape, buffer_ptr)

    def bind_ortvalue_input(self, name: str, ortvalue: ort.OrtValue) -> None:
        """Bind an input to an OrtValue."""
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
        """Bind an output to memory at an address, or let each run allocate it."""
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
        """Unbind all inputs."""
        self.inputs.clear()

    def clear_binding_outputs(self) -> None:
        """Unbind all outputs."""
        self.outputs.clear()
        self.devices.clear()
        self.results.clear()
        self._plain = None

    def get_outputs(self) -> list[ort.OrtValue]:
        """Return the outputs of the last run, in the order in which they were bound."""
        return list(self.results)

    def copy_outputs_to_cpu(self) -> list[Any]:
        """Return copies of the last run's outputs: arrays, and sequences and maps as onnxruntime copies them."""
        if self._plain is not None and not all(value.is_tensor() for value in self.results):
            return list(self._plain.copy_outputs_to_cpu())
        return [to_host(value).numpy().copy() for value in self.results]

    def synchronize_inputs(self) -> None:
        """Do nothing: inputs are complete when they are bound."""

    def synchronize_outputs(self) -> None:
        """Do nothing: outputs are complete when a run returns."""

    def run_plain(self, session: ort.InferenceSession, run_options: ort.RunOptions | None) -> list[ort.OrtValue]:
        """Run a plain session on the bound inputs; return the outputs in the order in which they were bound."""
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

    def _check(self, kind: str, name: Any) -> None:
        """Raise if the model has no input or output of a name.

        Args:
            kind: ``input`` or ``output``.
            name: The name.

        Raises:
            TypeError: The name is not a string.
            RuntimeError: The model has no such input or output.
        """
        if not isinstance(name, str):
            raise TypeError(f"expected the name of an {kind}, found {name!r}")
        if name not in self._known[kind]:
            known = ", ".join(self._known[kind]) or "none"
            raise RuntimeError(f"Invalid {kind} name: {name}; the model's {kind}s are {known}")


def _at_address(  # noqa: PLR0913, PLR0917 - SessionIOBinding's own
    name: str, device_type: str, device_id: int, element_type: Any, shape: Sequence[int], buffer_ptr: int
) -> ort.OrtValue:
    if device_type != "cpu" or device_id:
        raise ValueError(f"{name}: memory of {device_type}:{device_id} cannot be bound by address; bind an OrtValue")
    if isinstance(element_type, int):  # ONNX's number of the type
        from onnx.helper import tensor_dtype_to_np_dtype  # noqa: PLC0415 - few callers need it

        dtype = tensor_dtype_to_np_dtype(element_type)
    else:
        dtype = np.dtype(element_type) if not isinstance(element_type, str) else numpy_dtype(element_type)
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    memory = memoryview((ctypes.c_byte * size).from_address(buffer_ptr))
    return ort.OrtValue.ortvalue_from_numpy(np.frombuffer(memory, dtype).reshape(tuple(shape)))
