"""Sessions of a device for several threads, and options of their runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnxruntime as ort

from chrion.devices import CPU_PROVIDER, Device
from chrion.errors import ModelError
from chrion.graph.ort_sessions import first_line

_FATAL = 4


class DeviceSession(ort.InferenceSession):  # type: ignore[misc]
    """A session that runs while no other one uses the device, if the provider requires that.

    Two batches in flight use the device from two threads. WebGPU's sessions share one command queue, which is not
    thread-safe.

    Args:
        model: The model or its file.
        options: The options of the session.
        providers: Its execution providers.
    """

    def __init__(self, model: str | bytes, options: ort.SessionOptions, providers: Sequence[str]) -> None:
        super().__init__(model, options, providers=list(providers))
        self._device = Device(next((name for name in providers if name != CPU_PROVIDER), CPU_PROVIDER))

    def run(self, names: Sequence[str] | None, feed: Mapping[str, Any], options: Any = None) -> list[Any]:
        """Run the session."""
        with self._device.exclusive():
            results: list[Any] = super().run(names, feed, options)
        return results


def run_options() -> ort.RunOptions:
    """Return options of runs that can be ended from another thread, by ``terminate``.

    Errors of runs are raised, so onnxruntime does not print them as well.
    """
    options = ort.RunOptions()
    options.log_severity_level = _FATAL
    # The default. onnxruntime 1.31 asks for it before every run with a binding, and raises an exception where it is
    # not set, only to handle it, which takes a tenth of the time of a small model.
    options.add_run_config_entry("gpu_graph_id", "0")
    return options


def open_for_threads(
    name: str, model: str | bytes, options: ort.SessionOptions, providers: Sequence[str]
) -> ort.InferenceSession:
    """Return a session that several threads may run at a time.

    Args:
        name: The name of the model in errors.
        model: The model or its file.
        options: The options of the session.
        providers: Its execution providers.

    Raises:
        ModelError: onnxruntime refuses the model.
    """
    try:
        if all(provider == CPU_PROVIDER for provider in providers):
            return ort.InferenceSession(model, options, providers=list(providers))
        return DeviceSession(model, options, providers)
    except Exception as error:  # onnxruntime raises many types
        raise ModelError(f"{name}: onnxruntime refuses the model: {first_line(error)}") from error
