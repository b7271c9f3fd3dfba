"""Outputs of a session compared with those of plain onnxruntime, within stated tolerances.

The outputs of a cut model may differ from those of the whole model in their last bits, since onnxruntime fuses less of
it; and a model may amplify a last bit to a whole number, by rounding, comparing, or the sine of a large number.
Therefore, if outputs differ, plain onnxruntime is run again at its other optimisation levels, and with inputs that
differ in their last bits. If it does not agree with itself, the comparison is unsettled.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

_LEVELS = (
    ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
    ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
)
#: Number of runs with inputs that differ in their last bits.
_PERTURBATIONS = 4
#: Least relative tolerance of types with eight and eleven significant bits.
_HALF_TOLERANCES = {"bfloat16": 5e-2, "float16": 1e-2}

Feed = Mapping[str, Any]


@dataclass(frozen=True)
class Tolerance:
    """The largest accepted difference of floating-point numbers: ``|a - b| <= absolute + relative * |b|``.

    The relative tolerance is at least 1 % for float16 and 5 % for bfloat16. Values of other types must be equal.
    """

    relative: float = 1e-4
    absolute: float = 1e-5

    def of(self, dtype: np.dtype[Any]) -> tuple[float, float]:
        """Return the relative and the absolute tolerance for a type."""
        least = _HALF_TOLERANCES.get(dtype.name, 0.0)
        return max(self.relative, least), max(self.absolute, least / 10)


STRICT = Tolerance()


class Reference:
    """Plain onnxruntime on one thread.

    Args:
        source: A model file or its bytes.
        tolerance: Differences up to it count as equal.

    Raises:
        Exception: InferenceSession's exception for a model that it refuses.
    """

    def __init__(self, source: str | Path | bytes, tolerance: Tolerance = STRICT) -> None:
        self._source = source
        self._tolerance = tolerance
        self._others: list[ort.InferenceSession] = []
        #: A default InferenceSession, except for its single thread.
        self.session = self._open(_LEVELS[0])

    def open_all_levels(self) -> None:
        """Open the sessions of the other optimisation levels, which are otherwise opened when they are needed.

        Raises:
            Exception: InferenceSession's exception for a model that it refuses.
        """
        self._others = self._others or [self._open(level) for level in _LEVELS[1:]]

    def run(self, feed: Feed) -> list[Any]:
        """Return all outputs for a request."""
        return list(self.session.run(None, feed, quiet_run()))

    def settles(self, feed: Feed, expected: Sequence[Any]) -> bool:
        """Return whether all other runs of plain onnxruntime agree with ``expected``, its outputs."""
        return not any(difference(other, expected, self._tolerance) for other in self._run_variants(feed))

    def difference(self, found: Sequence[Any], expected: Sequence[Any]) -> str:
        """Describe how outputs differ beyond the tolerance; empty if they do not."""
        return difference(found, expected, self._tolerance)

    def _run_variants(self, feed: Feed) -> Iterator[list[Any]]:
        """Run the request at other optimisation levels, and then with perturbed inputs."""
        with contextlib.suppress(Exception):  # a level may refuse a model that others accept
            self.open_all_levels()
        for other in self._others:
            with contextlib.suppress(Exception):
                yield other.run(None, feed, quiet_run())
        numbers = np.random.default_rng(0)
        for _ in range(_PERTURBATIONS):
            yield self.run({name: _perturb(value, numbers) for name, value in feed.items()})

    def _open(self, level: ort.GraphOptimizationLevel) -> ort.InferenceSession:
        options = quiet_options()
        options.graph_optimization_level = level
        options.intra_op_num_threads = 1
        source = str(self._source) if isinstance(self._source, Path) else self._source
        return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def quiet_options() -> ort.SessionOptions:
    """Return session options that log nothing."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    return options


def quiet_run() -> ort.RunOptions:
    """Return run options that log nothing."""
    options = ort.RunOptions()
    options.log_severity_level = 4
    return options


def difference(ours: Any, theirs: Any, tolerance: Tolerance = STRICT) -> str:
    """Describe how values differ beyond a tolerance; empty if they do not.

    Values are arrays, lists and dictionaries of values, numbers, text or None.
    """
    if isinstance(theirs, list | tuple):
        return _sequence_difference(ours, theirs, tolerance)
    if isinstance(theirs, dict):
        return _map_difference(ours, theirs, tolerance)
    if isinstance(theirs, np.ndarray):
        return (
            _array_difference(ours, theirs, tolerance)
            if isinstance(ours, np.ndarray)
            else _type_difference(ours, theirs)
        )
    if isinstance(theirs, float):
        return _number_difference(ours, theirs, tolerance)
    return "" if type(ours) is type(theirs) and ours == theirs else f"{ours!r}, not {theirs!r}"


def _sequence_difference(ours: Any, theirs: Sequence[Any], tolerance: Tolerance) -> str:
    if not isinstance(ours, list | tuple):
        return _type_difference(ours, theirs)
    if len(ours) != len(theirs):
        return f"{len(ours)} outputs, not {len(theirs)}"
    for at, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if wrong := difference(a, b, tolerance):
            return f"output {at}: {wrong}"
    return ""


def _map_difference(ours: Any, theirs: Mapping[Any, Any], tolerance: Tolerance) -> str:
    if not isinstance(ours, dict):
        return _type_difference(ours, theirs)
    if ours.keys() != theirs.keys():
        return f"keys {sorted(map(repr, ours))}, not {sorted(map(repr, theirs))}"
    for key, b in theirs.items():
        if wrong := difference(ours[key], b, tolerance):
            return f"key {key!r}: {wrong}"
    return ""


def _array_difference(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any], tolerance: Tolerance) -> str:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return f"{a.dtype}{list(a.shape)}, not {b.dtype}{list(b.shape)}"
    if b.dtype.kind not in "fc" and b.dtype.name not in _HALF_TOLERANCES:
        return "" if np.array_equal(a, b) else f"{a}, not {b}"
    relative, absolute = tolerance.of(b.dtype)
    if b.dtype.name in _HALF_TOLERANCES:
        a, b = a.astype(np.float32), b.astype(np.float32)
    with np.errstate(all="ignore"):
        same = np.allclose(a, b, rtol=relative, atol=absolute, equal_nan=True)
    return "" if same else f"{a}, not {b}"


def _number_difference(ours: Any, theirs: float, tolerance: Tolerance) -> str:
    if not isinstance(ours, float):
        return _type_difference(ours, theirs)
    both_nan = math.isnan(ours) and math.isnan(theirs)
    near = math.isclose(ours, theirs, rel_tol=tolerance.relative, abs_tol=tolerance.absolute)
    return "" if both_nan or near else f"{ours}, not {theirs}"


def _type_difference(ours: Any, theirs: Any) -> str:
    return f"{type(ours).__name__}, not {type(theirs).__name__}"


def _perturb(value: Any, numbers: np.random.Generator) -> Any:
    """Return an array that differs in its last bits."""
    if not isinstance(value, np.ndarray) or value.dtype.kind != "f":
        return value
    signs = numbers.choice([-1, 1], value.shape)
    return np.asarray(value * (1 + 4 * np.finfo(value.dtype).eps * signs).astype(value.dtype))
