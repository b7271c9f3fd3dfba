"""Run options whose requests another thread can terminate, also on native lanes and on an accelerator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeGuard

import onnxruntime as ort

from chrion.native import NativeRunOptions


class TerminableRunOptions(ort.RunOptions):  # type: ignore[misc]
    """Run options of one request of a session, which :meth:`end` terminates.

    Other run options do not reach native lanes, which belong to onnxruntime's C API, so that requests with them are
    served by lane threads and further sessions. Those that set anything but ``terminate`` are not for this class.

    Guarantees: after :meth:`end`, every run of the request ends at its next operator, and one that has not begun does
    not begin. A single operator cannot be interrupted.
    """

    def __init__(self) -> None:
        super().__init__()
        self._native: NativeRunOptions | None = None
        self._derived: list[ort.RunOptions] = []

    def end(self) -> None:
        """Terminate the request. Any thread may call it, at any time. Idempotent."""
        # The flag is set first: options that are made meanwhile see it, and those that were made before are ended here.
        self.terminate = True
        if (native := self._native) is not None:
            native.terminate()
        for options in self._derived.copy():
            options.terminate = True

    def native(self) -> NativeRunOptions:
        """Return the options for native lanes."""
        if self._native is None:
            self._native = NativeRunOptions()
        if self.terminate:
            self._native.terminate()
        return self._native

    def derive(self, entries: Mapping[str, str]) -> ort.RunOptions:
        """Return the options of one run with configuration entries, which ends with the request."""
        options = ort.RunOptions()
        for name, value in entries.items():
            options.add_run_config_entry(name, value)
        self._derived.append(options)
        if self.terminate:
            options.terminate = True
        return options


def fits_native_lanes(options: ort.RunOptions | None) -> TypeGuard[TerminableRunOptions | None]:
    """Return whether requests with these options may run on native lanes."""
    return options is None or isinstance(options, TerminableRunOptions)
