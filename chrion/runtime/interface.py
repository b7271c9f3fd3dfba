"""What InferenceSession offers beside running: how each of its methods stands with HybridSession.

Methods that follow from others are here. Those that make sense for one onnxruntime session alone are that session's
while the model runs plain; otherwise they are not offered, and asking for one says why.
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

_MANY = "a request runs in several onnxruntime sessions"
_MEMORY = "inputs are taken from either memory, and outputs given in either: bind them where they are"

#: Methods of InferenceSession that HybridSession has only while the model runs plain, and why.
NOT_OFFERED: Mapping[str, str] = {
    "get_provider_graph_assignment_info": f"{_MANY}; plan and explain() say what runs where",
    "get_input_memory_infos": _MEMORY,
    "get_output_memory_infos": _MEMORY,
    "get_input_epdevices": _MEMORY,
    "get_tuning_results": f"{_MANY}, each with results of its own",
    "set_tuning_results": f"{_MANY}, each with results of its own",
    "set_ep_dynamic_options": f"{_MANY}; give provider options when the session is made",
    "release_captured_graph": "CUDA graphs belong to the buffers of a request; they go with the session",
    "run_with_ortvaluevector": "run_with_ort_values and run_with_iobinding do the same with OrtValues",
}


@dataclass(frozen=True, slots=True, eq=False)
class NodeArg:
    """An input, output or weight, as onnxruntime's class of the same name describes it."""

    name: str
    type: str
    #: Sizes; a name or None stands for a free dimension. Empty for a scalar and where the rank is unknown.
    shape: list[int | str | None]

    def __str__(self) -> str:
        return f"NodeArg(name={self.name!r}, type={self.type!r}, shape={self.shape!r})"


def node_args(infos: Sequence[TensorInfo]) -> list[NodeArg]:
    """Return new descriptions, which their receiver may change."""
    return [NodeArg(info.name, info.type, list(info.shape or ())) for info in infos]


#: Rare private attributes of InferenceSession, which a plain session answers for.
_OF_PLAIN = frozenset(
    {
        *("_enable_fallback", "_fallback_providers", "_read_config_from_model", "_captured_graph_bindings"),
        *("_input_meminfos", "_output_meminfos", "_input_epdevices", "_profiling_start_time_ns"),
    }
)


class InferenceInterface:
    """Methods of InferenceSession in terms of others."""

    _serve_arrays: Callable[..., list[Any]]
    get_providers: Callable[[], Sequence[str]]
    get_provider_options: Callable[[], Mapping[str, Mapping[str, str]]]
    get_session_options: Callable[[], ort.SessionOptions]
    close: Callable[[], None]
    _engines: Engines
    #: The model's file, or its bytes.
    _source: str | bytes

    def get_inputs(self) -> list[NodeArg]:
        """Return name, type and shape of each input that a run requires."""
        described = self._engines.description
        return node_args(described.inputs) if described else self._engines.plain().session.get_inputs()

    def get_outputs(self) -> list[NodeArg]:
        """Return name, type and shape of each output."""
        described = self._engines.description
        return node_args(described.outputs) if described else self._engines.plain().session.get_outputs()

    def get_overridable_initializers(self) -> list[NodeArg]:
        """Return the weights that a request may replace; such a request runs plain."""
        described = self._engines.description
        if described is None:
            return list(self._engines.plain().session.get_overridable_initializers())
        return node_args(described.overridable)

    def get_modelmeta(self) -> ModelMetadata:
        """Return the metadata of the model."""
        described = self._engines.description
        return described.metadata if described else self._engines.plain().session.get_modelmeta()

    def run_async(
        self,
        output_names: Sequence[str] | None,
        input_feed: Mapping[str, Any],
        callback: Callable[[list[Any], Any, str], object],
        user_data: Any,
        run_options: ort.RunOptions | None = None,
    ) -> None:
        """Run the model in a thread of its own, and hand the outputs to a callback there.

        Args:
            output_names: Outputs to return; None or empty for all.
            input_feed: Arrays (or OrtValues) by input name.
            callback: Called with the outputs, ``user_data`` and an empty text; or no outputs, and what went wrong.
            user_data: For the callback.
            run_options: Handed to onnxruntime.

        Raises:
            ValueError: An input is missing.
            TypeError: The callback cannot be called; see also :meth:`run`.
        """
        check_arguments(output_names, input_feed, run_options, options_error=RuntimeError)
        check_required([info.name for info in self.get_inputs()], input_feed)
        if not callable(callback):
            raise TypeError(f"callback: expected something to call, found {callback!r}")

        def deliver() -> None:
            try:
                outputs, problem = self._serve_arrays(output_names, input_feed, run_options), ""
            except Exception as error:  # noqa: BLE001 - passed to the callback
                outputs, problem = [], str(error) or type(error).__name__
            callback(outputs, user_data, problem)

        threading.Thread(target=deliver, name="chrion-run-async", daemon=True).start()

    def create_ortvalue_from_shape_and_type(
        self,
        shape: Sequence[int],
        element_type: Any,
        device_type: str,
        device_id: int = 0,
        vendor_id: int = -1,
    ) -> ort.OrtValue:
        """Memory for a tensor, for :meth:`run_with_iobinding`; any session may use it."""
        return ort.OrtValue.ortvalue_from_shape_and_type(shape, element_type, device_type, device_id, vendor_id)

    def end_profiling(self) -> str:
        """End profiling, and return the profile's file; empty if ``enable_profiling`` was not set.

        With that option the model runs plain. :meth:`HybridSession.trace` tells when each segment of a plan ran.
        """
        session = self._plain_session()
        return str(session.end_profiling()) if session else ""

    def get_profiling_start_time_ns(self) -> int:
        """Return when profiling began, in ns of ``time.monotonic_ns()``; 0 if ``enable_profiling`` was not set."""
        session = self._plain_session()
        return int(session.get_profiling_start_time_ns()) if session else 0

    def _plain_session(self) -> ort.InferenceSession | None:
        """Return the one session that the model runs in, or None while it is cut."""
        engines = self.__dict__.get("_engines")
        return engines and getattr(engines.current, "session", None)

    # Attributes of InferenceSession that other libraries read, though their names are private.

    @property
    def _sess(self) -> Any:
        """Session object of onnxruntime; while the model is cut, that of a plain session which is opened for it."""
        return self._engines.whole_session()._sess  # noqa: SLF001 - this is what is asked for

    @_sess.setter
    def _sess(self, value: None) -> None:
        """Close the session, as dropping InferenceSession's object does."""
        if value is not None:
            raise AttributeError("_sess: expected None, which closes the session")
        self.close()

    @property
    def _model_path(self) -> str | None:
        return self._source if isinstance(self._source, str) else None

    @property
    def _model_bytes(self) -> bytes | None:
        return self._source if isinstance(self._source, bytes) else None

    @property
    def _providers(self) -> list[str]:
        return list(self.get_providers())

    @property
    def _provider_options(self) -> Mapping[str, Mapping[str, str]]:
        return self.get_provider_options()

    @property
    def _sess_options(self) -> ort.SessionOptions:
        return self.get_session_options()

    _sess_options_initial = _sess_options

    @property
    def _inputs_meta(self) -> list[Any]:
        return list(self.get_inputs())

    @property
    def _outputs_meta(self) -> list[Any]:
        return list(self.get_outputs())

    @property
    def _overridable_initializers(self) -> list[Any]:
        return list(self.get_overridable_initializers())

    @property
    def _model_meta(self) -> Any:
        return self.get_modelmeta()

    def __getattr__(self, name: str) -> Any:
        if name in _OF_PLAIN:
            return getattr(self._engines.whole_session(), name)
        reason = f": {NOT_OFFERED[name]}" if name in NOT_OFFERED else ""
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{reason}")


class _Delegated:
    """A method of InferenceSession that is there only while the model runs plain."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, session: InferenceInterface | None, kind: type) -> Any:
        whole = session and session._plain_session()  # noqa: SLF001 - this is a part of that class
        if not whole:
            raise AttributeError(f"type object {kind.__name__!r} has no attribute {self._name!r}")
        return getattr(whole, self._name)


for _name in NOT_OFFERED:
    setattr(InferenceInterface, _name, _Delegated(_name))
