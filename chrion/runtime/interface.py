"""Methods and attributes of InferenceSession, apart from those that run a model, as HybridSession provides them.

Methods that follow from others are defined in :class:`InferenceInterface`. Methods that only make sense for a single
onnxruntime session are taken from that session while the model runs plain; otherwise they do not exist, and the
AttributeError gives the reason.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnxruntime as ort

from chrion.graph.model import ModelMetadata, TensorInfo
from chrion.runtime.engines import Engines
from chrion.runtime.requests import check_arguments, check_required

_SEVERAL = "a request runs in several onnxruntime sessions"
_MEMORY = "inputs and outputs may be in the memory of host or device: bind them where they are"

#: Methods of InferenceSession that HybridSession has only while the model runs plain, with the reason.
NOT_OFFERED: Mapping[str, str] = {
    "get_provider_graph_assignment_info": f"{_SEVERAL}; plan and explain() describe the placement",
    "get_input_memory_infos": _MEMORY,
    "get_output_memory_infos": _MEMORY,
    "get_input_epdevices": _MEMORY,
    "get_tuning_results": f"{_SEVERAL}, each of which has its own results",
    "set_tuning_results": f"{_SEVERAL}, each of which has its own results",
    "set_ep_dynamic_options": f"{_SEVERAL}; pass provider options when the session is created",
    "release_captured_graph": "CUDA graphs belong to the buffers of a request, and are released with the session",
    "run_with_ortvaluevector": "run_with_ort_values and run_with_iobinding do the same with OrtValues",
}


@dataclass(frozen=True, slots=True, eq=False)
class NodeArg:
    """Description of an input, output or weight, with the attributes of onnxruntime's class of the same name."""

    name: str
    type: str
    #: Sizes of the dimensions; a name or None is a free one. Empty for a scalar, and if the rank is unknown.
    shape: list[int | str | None]

    def __str__(self) -> str:
        return f"NodeArg(name={self.name!r}, type={self.type!r}, shape={self.shape!r})"


def node_args(infos: Sequence[TensorInfo]) -> list[NodeArg]:
    """Return new descriptions, which the caller may modify."""
    return [NodeArg(info.name, info.type, list(info.shape or ())) for info in infos]


#: Rarely used private attributes of InferenceSession, which are taken from a plain session.
_PLAIN_ATTRIBUTES = frozenset(
    {
        *("_enable_fallback", "_fallback_providers", "_read_config_from_model", "_captured_graph_bindings"),
        *("_input_meminfos", "_output_meminfos", "_input_epdevices", "_profiling_start_time_ns"),
    }
)


#: Private attributes of InferenceSession that libraries read, and the methods that return the same.
_RESULTS = {
    "_providers": "get_providers",
    "_provider_options": "get_provider_options",
    "_sess_options": "get_session_options",
    "_sess_options_initial": "get_session_options",
    "_inputs_meta": "get_inputs",
    "_outputs_meta": "get_outputs",
    "_overridable_initializers": "get_overridable_initializers",
    "_model_meta": "get_modelmeta",
}


class InferenceInterface:
    """Methods of InferenceSession that are defined in terms of others."""

    close: Callable[[], None]
    _engines: Engines

    def get_inputs(self) -> list[NodeArg]:
        """Return name, type and shape of each input that a run requires."""
        return node_args(self._engines.description.inputs)

    def get_outputs(self) -> list[NodeArg]:
        """Return name, type and shape of each output."""
        return node_args(self._engines.description.outputs)

    def get_overridable_initializers(self) -> list[NodeArg]:
        """Return the weights that a request may replace; such a request runs plain."""
        return node_args(self._engines.description.overridable)

    def get_modelmeta(self) -> ModelMetadata:
        """Return the metadata of the model."""
        return self._engines.description.metadata

    def run_async(
        self,
        output_names: Sequence[str] | None,
        input_feed: Mapping[str, Any],
        callback: Callable[[list[Any], Any, str], object],
        user_data: Any,
        run_options: ort.RunOptions | None = None,
    ) -> None:
        """Run the model in a new thread, which passes the outputs to a callback.

        Args:
            output_names: Outputs to return; None or empty for all.
            input_feed: Arrays (or OrtValues) by input name.
            callback: Called with the outputs, ``user_data`` and an empty message; after an error, with no outputs and
                the message of the error.
            user_data: Passed to the callback.
            run_options: Passed to onnxruntime.

        Raises:
            ValueError: An input is missing.
            TypeError: ``callback`` is not callable.
            Exception: An argument has a wrong type; see :func:`chrion.runtime.requests.check_arguments`.
        """
        check_arguments(output_names, input_feed, run_options, options_error=RuntimeError)
        check_required([info.name for info in self.get_inputs()], input_feed)
        if not callable(callback):
            raise TypeError(f"callback: expected a callable, found {callback!r}")

        def deliver() -> None:
            try:
                outputs, message = self._engines.run(output_names, input_feed, run_options), ""
            except Exception as error:  # noqa: BLE001 - passed to the callback
                outputs, message = [], str(error) or type(error).__name__
            callback(outputs, user_data, message)

        threading.Thread(target=deliver, name="chrion-run-async", daemon=True).start()

    def create_ortvalue_from_shape_and_type(
        self, shape: Sequence[int], element_type: Any, device_type: str, device_id: int = 0, vendor_id: int = -1
    ) -> ort.OrtValue:
        """Allocate a tensor for :meth:`run_with_iobinding`. It can be used with any session."""
        return ort.OrtValue.ortvalue_from_shape_and_type(shape, element_type, device_type, device_id, vendor_id)

    def end_profiling(self) -> str:
        """End profiling and return the profile's file name; empty if ``enable_profiling`` was not set.

        With that option the model runs plain. :meth:`HybridSession.trace` returns the times of a plan's segments.
        """
        session = self._plain_session()
        return str(session.end_profiling()) if session else ""

    def get_profiling_start_time_ns(self) -> int:
        """Return the start of profiling in ns, as ``time.monotonic_ns()`` counts; 0 without ``enable_profiling``."""
        session = self._plain_session()
        return int(session.get_profiling_start_time_ns()) if session else 0

    def _plain_session(self) -> ort.InferenceSession | None:
        """Return the session in which the whole model runs; None while the model is cut."""
        engines = self.__dict__.get("_engines")
        return engines and getattr(engines.current, "session", None)

    # Private attributes of InferenceSession that libraries read.

    @property
    def _sess(self) -> Any:
        """The session object of onnxruntime's C++ code; a plain session is opened for it while the model is cut."""
        return self._engines.whole_session()._sess  # noqa: SLF001 - the attribute that the caller reads

    @_sess.setter
    def _sess(self, value: None) -> None:
        """Close the session, as dropping the object of an InferenceSession does."""
        if value is not None:
            raise AttributeError("_sess: expected None, which closes the session")
        self.close()

    def __getattr__(self, name: str) -> Any:
        if name in _RESULTS:
            return getattr(self, _RESULTS[name])()
        if name in _PLAIN_ATTRIBUTES:
            return getattr(self._engines.whole_session(), name)
        reason = f": {NOT_OFFERED[name]}" if name in NOT_OFFERED else ""
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{reason}")


class _Delegated:
    """A method of InferenceSession that exists only while the model runs plain."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, session: InferenceInterface | None, kind: type) -> Any:
        whole = session and session._plain_session()  # noqa: SLF001 - part of that class
        if not whole:
            raise AttributeError(f"type object {kind.__name__!r} has no attribute {self._name!r}")
        return getattr(whole, self._name)


for _name in NOT_OFFERED:
    setattr(InferenceInterface, _name, _Delegated(_name))
