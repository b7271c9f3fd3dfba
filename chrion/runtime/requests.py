"""Between what callers hand over and what onnxruntime binds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime as ort
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument

from chrion.devices.host import numpy_dtype
from chrion.graph.model import TensorInfo

#: What onnxruntime takes for no input, whatever its type.
_NO_VALUES = (str, bytes, int, float, complex, tuple, np.generic)


def as_ort_value(name: str, value: Any) -> ort.OrtValue:
    """Wrap a caller's array without copying it (text and non-contiguous arrays are copied).

    Raises:
        ValueError: onnxruntime has no tensor type for it.
    """
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


def as_array(info: TensorInfo, value: list[Any]) -> np.ndarray[Any, Any]:
    """An array of a list, of the type that the input has."""
    try:
        return np.asarray(value, numpy_dtype(info.type))
    except (ValueError, TypeError) as error:
        raise RuntimeError(f"Input {info.name!r}: no {info.type} can be made of the given list: {error}") from error


class FastPathMatcher:
    """Tells the feed that nearly every request brings, an array as it should be for each input, from all others.

    It passes every check below, and telling costs far less than they do.

    Args:
        inputs: The inputs, of known shapes.
    """

    def __init__(self, inputs: Sequence[TensorInfo]) -> None:
        #: Without inputs that numpy has no type for, so that a feed with them is not among the usual ones.
        self._expected = {i.name: (dtype, i.shape) for i in inputs if (dtype := numeric_dtype(i.type)) is not None}
        self._count = len(inputs)

    def matches(self, feed: Mapping[str, Any]) -> bool:
        """Whether the feed is a dictionary of contiguous arrays of numbers, one for each input and of its size."""
        if type(feed) is not dict or len(feed) != self._count:
            return False
        for name, value in feed.items():
            if type(value) is not np.ndarray or self._expected.get(name) != (value.dtype, value.shape):
                return False
            if not value.flags.c_contiguous:
                return False
        return True


class MissingInputError(ValueError):
    """An input that the model needs was not given."""


def check_call(
    output_names: Any, input_feed: Any, run_options: Any, *, options_error: type[Exception] = TypeError
) -> None:
    """Refuse arguments of ``run`` that are no names, feeds or options at all, with onnxruntime's kinds of exception.

    Args:
        output_names: Names, or nothing.
        input_feed: What should be values by input name.
        run_options: Options, or None.
        options_error: What onnxruntime's method raises for other options.

    Raises:
        AttributeError: The feed is no mapping.
        TypeError: Names are not strings, or ``run_options`` is something else.
    """
    if not hasattr(input_feed, "keys"):
        raise AttributeError(f"input_feed: expected values by input name, found {_kind(input_feed)}")
    if output_names and (isinstance(output_names, str | bytes) or not all(isinstance(n, str) for n in output_names)):
        raise TypeError(f"output_names: expected a list of names or None, found {output_names!r}")
    for name in input_feed:
        if not isinstance(name, str):
            raise TypeError(f"input_feed: expected input names, found {name!r}")
    check_run_options(run_options, options_error)


def check_run_options(run_options: Any, error: type[Exception]) -> None:
    """Refuse what are no run options, with the exception that onnxruntime's method raises."""
    if run_options is not None and not isinstance(run_options, ort.RunOptions):
        raise error(f"run_options: expected onnxruntime.RunOptions or None, found {_kind(run_options)}")


def check_kinds(input_feed: Mapping[str, Any]) -> None:
    """Refuse values that onnxruntime makes nothing of.

    Raises:
        RuntimeError: A bare number or text, or a tuple, where an array belongs.
    """
    for name, value in input_feed.items():
        if isinstance(value, _NO_VALUES):
            what = f"Input {name!r}: expected an array, a list or an OrtValue, found {_kind(value)}"
            raise RuntimeError(what)  # noqa: TRY004 - as onnxruntime


def check_ort_value(name: str, value: Any) -> None:
    """Refuse what is no OrtValue, as onnxruntime does.

    Raises:
        AttributeError: It is something else.
    """
    if not isinstance(value, ort.OrtValue):
        raise AttributeError(f"{name!r}: expected an OrtValue, found {_kind(value)}")  # noqa: TRY004 - onnxruntime's


def check_feed(inputs: Sequence[TensorInfo], feed: Mapping[str, Any]) -> None:
    """Refuse what InferenceSession refuses, with the same kinds of exception.

    Raises:
        ValueError: An input is missing.
        InvalidArgument: A name that is no input, a wrong element type, rank or dimension.
        Fail: A value is None.
    """
    known = {info.name: info for info in inputs}
    missing = [name for name in known if name not in feed]
    if missing:
        raise MissingInputError(f"Required inputs ({missing}) are missing from input feed ({list(feed)}).")
    for name, value in feed.items():
        if name not in known:
            raise InvalidArgument(f"Invalid input name: {name}; the model's inputs are {', '.join(known) or 'none'}")
        _check_value(known[name], value)


def check_outputs(outputs: Sequence[TensorInfo], names: Sequence[str] | None) -> list[str]:
    """The outputs asked for: all where none are named.

    Raises:
        InvalidArgument: A name that is no output.
    """
    known = [info.name for info in outputs]
    for name in names or ():
        if name not in known:
            raise InvalidArgument(f"Invalid output name: {name}; the model's outputs are {', '.join(known)}")
    return list(names) if names else known


def shape_of(value: Any) -> tuple[int, ...]:
    """Shape of an array or OrtValue."""
    return tuple(value.shape()) if isinstance(value, ort.OrtValue) else np.shape(value)


def _check_value(info: TensorInfo, value: Any) -> None:
    if isinstance(value, list):
        value = as_array(info, value)
    elif value is None:
        raise Fail(f"Missing input: {info.name} is None, expected a {info.type}")
    if isinstance(value, ort.OrtValue):
        found = value.data_type()
        fits = found == info.type
    else:
        found = str(np.asarray(value).dtype)
        text = info.type == "tensor(string)"
        fits = np.asarray(value).dtype.kind in "OSU" if text else _same_type(info.type, np.asarray(value).dtype)
    if not fits:
        raise InvalidArgument(f"Unexpected input data type for {info.name}. Actual: ({found}), expected: ({info.type})")
    shape = shape_of(value)
    if info.shape is None:
        return
    if len(shape) != len(info.shape):
        raise InvalidArgument(
            f"Invalid rank for input: {info.name} Got: {len(shape)} Expected: {len(info.shape)} Please fix either the "
            f"inputs/outputs or the model."
        )
    wrong = [at for at, (d, s) in enumerate(zip(info.shape, shape, strict=True)) if isinstance(d, int) and d != s]
    if wrong:
        details = " ".join(f"index: {at} Got: {shape[at]} Expected: {info.shape[at]}" for at in wrong)
        raise InvalidArgument(
            f"Got invalid dimensions for input: {info.name} for the following indices {details} Please fix either the "
            f"inputs/outputs or the model."
        )


def numeric_dtype(kind: str) -> np.dtype[Any] | None:
    """Numpy's own type for a tensor of numbers; None where it has none, and for text."""
    try:
        dtype = numpy_dtype(kind)
    except TypeError:
        return None
    return dtype if dtype.kind in "biufc" else None


def _same_type(kind: str, dtype: np.dtype[Any]) -> bool:
    try:
        return numpy_dtype(kind) == dtype
    except TypeError:  # numpy has no such type: bfloat16, or the smaller floats
        return kind == f"tensor({dtype.name})"


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
