"""Requests: the checks of a call's arguments, and the conversion of its inputs to what onnxruntime binds.

A request is checked once, with the exceptions that InferenceSession raises. :func:`check_arguments` checks the types of
a call's arguments when a method of the session is called. :func:`prepare_request` checks names, types and shapes
against the model when the request is served by lanes; a plain session has its own checks. :class:`FastPathMatcher`
recognises requests that pass all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime as ort
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument

from chrion.devices.host import numpy_dtype
from chrion.graph.model import TensorInfo

#: Types that onnxruntime accepts for no input.
_NOT_INPUTS = (str, bytes, int, float, complex, tuple, np.generic)


class MissingInputError(ValueError):
    """The request has no value for an input of the model."""


class FastPathMatcher:
    """Recognises the usual request: one contiguous array for each input, of its type and shape.

    Such a request passes every check of this module, and recognising it costs far less than the checks.

    Args:
        inputs: The inputs, of known shapes.
    """

    def __init__(self, inputs: Sequence[TensorInfo]) -> None:
        #: Type and shape by input. Inputs of types that numpy lacks are left out, so no request with them matches.
        self._expected = {i.name: (dtype, i.shape) for i in inputs if (dtype := numeric_dtype(i.type)) is not None}
        self._count = len(inputs)

    def matches(self, feed: Mapping[str, Any]) -> bool:
        """Return whether the inputs are a dictionary of contiguous numeric arrays of the expected types and shapes."""
        if type(feed) is not dict or len(feed) != self._count:
            return False
        for name, value in feed.items():
            if type(value) is not np.ndarray or self._expected.get(name) != (value.dtype, value.shape):
                return False
            if not value.flags.c_contiguous:
                return False
        return True


def check_arguments(
    output_names: Any,
    input_feed: Any,
    run_options: Any,
    *,
    options_error: type[Exception] = TypeError,
    ort_values: bool = False,
) -> None:
    """Raise if the arguments of a run have types that onnxruntime does not accept.

    Args:
        output_names: Names are accepted, and None.
        input_feed: A mapping of input names to values is accepted.
        run_options: RunOptions are accepted, and None.
        options_error: Exception for any other ``run_options``; InferenceSession's methods raise different ones.
        ort_values: Whether all inputs have to be OrtValues.

    Raises:
        AttributeError: ``input_feed`` is not a mapping, or ``ort_values`` is true and a value is not an OrtValue.
        TypeError: Names are not strings.
        RuntimeError: A value in ``input_feed`` is a bare number or text, or a tuple.
        Exception: Of type ``options_error``: ``run_options`` are neither RunOptions nor None.
    """
    if not hasattr(input_feed, "keys"):
        raise AttributeError(f"input_feed: expected values by input name, found {_type_of(input_feed)}")
    if output_names and (isinstance(output_names, str | bytes) or not all(isinstance(n, str) for n in output_names)):
        raise TypeError(f"output_names: expected a list of names or None, found {output_names!r}")
    for name in input_feed:
        if not isinstance(name, str):
            raise TypeError(f"input_feed: expected input names, found {name!r}")
    check_run_options(run_options, options_error)
    for name, value in input_feed.items():
        if ort_values:
            check_ort_value(name, value)
        elif isinstance(value, _NOT_INPUTS):
            message = f"Input {name!r}: expected an array, a list or an OrtValue, found {_type_of(value)}"
            raise RuntimeError(message)


def check_run_options(run_options: Any, error: type[Exception]) -> None:
    """Raise ``error`` if ``run_options`` is neither run options nor None."""
    if run_options is not None and not isinstance(run_options, ort.RunOptions):
        raise error(f"run_options: expected onnxruntime.RunOptions or None, found {_type_of(run_options)}")


def check_ort_value(name: str, value: Any) -> None:
    """Raise if a value is not an OrtValue.

    Raises:
        AttributeError: It is not; onnxruntime raises the same type.
    """
    if not isinstance(value, ort.OrtValue):
        raise AttributeError(f"{name!r}: expected an OrtValue, found {_type_of(value)}")  # noqa: TRY004 - as onnxruntime


def check_required(inputs: Sequence[str], feed: Mapping[str, Any]) -> None:
    """Raise if the request has no value for an input.

    Raises:
        MissingInputError: Inputs are missing; the message lists them.
    """
    missing = [name for name in inputs if name not in feed]
    if missing:
        raise MissingInputError(f"Required inputs ({missing}) are missing from input feed ({list(feed)}).")


def check_feed(inputs: Sequence[TensorInfo], feed: Mapping[str, Any]) -> dict[str, Any]:
    """Check the inputs of a request against the model.

    Returns:
        The same inputs, lists converted to arrays.

    Raises:
        MissingInputError: An input is missing.
        InvalidArgument: A name is not that of an input, or an input has a wrong element type, rank or dimension.
        RuntimeError: A list cannot be converted.
        Fail: A value is None.
    """
    known = {info.name: info for info in inputs}
    check_required(list(known), feed)
    checked = {}
    for name, value in feed.items():
        if name not in known:
            raise InvalidArgument(f"Invalid input name: {name}; the model's inputs are {', '.join(known) or 'none'}")
        checked[name] = _check_input(known[name], value)
    return checked


def prepare_request(
    inputs: Sequence[TensorInfo], outputs: Sequence[TensorInfo], names: Sequence[str] | None, feed: Mapping[str, Any]
) -> tuple[list[str], dict[str, ort.OrtValue]]:
    """Check a request against the model, and convert its inputs.

    Args:
        inputs: The model's inputs, of known shapes.
        outputs: Its outputs.
        names: Names of the requested outputs; None or empty for all.
        feed: Values by input name.

    Returns:
        Names of the outputs, and inputs that can be bound.

    Raises:
        Exception: As :func:`check_feed` and :func:`output_names`.
        ValueError: onnxruntime has no tensor type for an array.
    """
    chosen = output_names(outputs, names)
    return chosen, {name: _as_ort_value(name, value) for name, value in check_feed(inputs, feed).items()}


def output_names(outputs: Sequence[TensorInfo], names: Sequence[str] | None) -> list[str]:
    """Return the names of the requested outputs; all if ``names`` is None or empty.

    Raises:
        InvalidArgument: A name is not that of an output.
    """
    known = [info.name for info in outputs]
    for name in names or ():
        if name not in known:
            raise InvalidArgument(f"Invalid output name: {name}; the model's outputs are {', '.join(known)}")
    return list(names) if names else known


def shape_of(value: Any) -> tuple[int, ...]:
    """Return the shape of an array, list or OrtValue."""
    return tuple(value.shape()) if isinstance(value, ort.OrtValue) else np.shape(value)


def known_shape(value: Any) -> tuple[int, ...] | None:
    """Return the shape of an input; None if the input would have to be converted to an array first."""
    return shape_of(value) if isinstance(value, np.ndarray | ort.OrtValue) else None


def numeric_dtype(kind: str) -> np.dtype[Any] | None:
    """Return the numpy type of a tensor of numbers or booleans; None if numpy has none, or for a tensor of text."""
    try:
        dtype = numpy_dtype(kind)
    except TypeError:
        return None
    return dtype if dtype.kind in "biufc" else None


def _check_input(info: TensorInfo, value: Any) -> Any:
    """Check the type and shape of an input; return it, or an array if it is a list."""
    if isinstance(value, list):
        value = _as_array(info, value)
    elif value is None:
        raise Fail(f"Missing input: {info.name} is None, expected a {info.type}")
    if isinstance(value, ort.OrtValue):
        kind = value.data_type()
        fits = kind == info.type
    else:
        dtype = np.asarray(value).dtype
        kind = str(dtype)
        fits = dtype.kind in "OSU" if info.type == "tensor(string)" else _is_type(dtype, info.type)
    if not fits:
        raise InvalidArgument(f"Unexpected input data type for {info.name}. Actual: ({kind}), expected: ({info.type})")
    if info.shape is not None:
        _check_shape(info.name, info.shape, shape_of(value))
    return value


def _check_shape(name: str, expected: Sequence[int | str | None], actual: Sequence[int]) -> None:
    if len(actual) != len(expected):
        raise InvalidArgument(
            f"Invalid rank for input: {name} Got: {len(actual)} Expected: {len(expected)} Please fix either the "
            f"inputs/outputs or the model."
        )
    wrong = [at for at, (e, a) in enumerate(zip(expected, actual, strict=True)) if isinstance(e, int) and e != a]
    if wrong:
        details = " ".join(f"index: {at} Got: {actual[at]} Expected: {expected[at]}" for at in wrong)
        raise InvalidArgument(
            f"Got invalid dimensions for input: {name} for the following indices {details} Please fix either the "
            f"inputs/outputs or the model."
        )


def _as_array(info: TensorInfo, value: list[Any]) -> np.ndarray[Any, Any]:
    """Convert a list to an array of the input's type."""
    try:
        return np.asarray(value, numpy_dtype(info.type))
    except (ValueError, TypeError) as error:
        raise RuntimeError(f"Input {info.name!r}: the list cannot be converted to a {info.type}: {error}") from error


def _as_ort_value(name: str, value: Any) -> ort.OrtValue:
    """Wrap an array without copying it; text and arrays that are not contiguous are copied."""
    if isinstance(value, ort.OrtValue):
        return value
    if not isinstance(value, np.ndarray):
        value = np.asarray(value)
    if value.dtype.kind in "US":
        value = value.astype(object)
    try:
        return ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(value) if value.ndim else value)
    except Exception as error:
        raise ValueError(f"Input {name!r}: {value.dtype} arrays are not supported") from error


def _is_type(dtype: np.dtype[Any], kind: str) -> bool:
    """Return whether a numpy type is the element type of a tensor type such as ``tensor(float)``."""
    try:
        return numpy_dtype(kind) == dtype
    except TypeError:  # numpy lacks bfloat16 and the smaller floats
        return kind == f"tensor({dtype.name})"


def _type_of(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
