"""Requests as arrays, with the figures that a trace may give for single requests."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
#: Maximum classes of requests, so that one byte stores a class.
MAX_CLASSES = 100


class Details(NamedTuple):
    """Figures of single requests. All of shape [n]."""

    #: Execution time in the reference variant of the model, NaN for a random one.
    duration_ms: Floats
    #: Objective of the request, counted from its arrival, NaN for the model's.
    deadline_ms: Floats
    #: Requests of a higher priority start first.
    priority: Indices
    #: The class of the request; None without classes.
    classes: Indices | None = None

    def rows(self, index: Indices) -> Details:
        """Return the figures of some requests."""
        classes = None if self.classes is None else self.classes[index]
        return Details(self.duration_ms[index], self.deadline_ms[index], self.priority[index], classes)


class Requests(NamedTuple):
    """A chunk of requests in order of arrival."""

    #: Times of arrival. Shape [n].
    times_ms: Floats
    #: Shape [n].
    models: Indices
    #: None if no request has figures of its own.
    details: Details | None = None


class Objectives:
    """Latency objectives: of models, and of single requests that have their own.

    Args:
        slo_ms: The objective of each model.
    """

    def __init__(self, slo_ms: Sequence[float]) -> None:
        self._by_model = [float(limit) for limit in slo_ms]
        self._models = np.array(slo_ms, np.float64)
        #: By number of the request, NaN for the model's objective; empty if no request has its own.
        self._own = array("d")
        #: The class of each request, by its number; empty without classes.
        self._classes = array("b")

    def add(self, details: Details) -> None:
        """Add the objectives and classes of the next requests."""
        self._own.frombytes(details.deadline_ms.astype(np.float64).tobytes())
        if details.classes is not None:
            self._classes.frombytes(details.classes.astype(np.int8).tobytes())

    def classes_of(self, numbers: Indices) -> Indices:
        """Return the classes of some requests; empty without classes. Shape [n]."""
        if not self._classes:
            return np.zeros(0, np.int64)
        return np.frombuffer(self._classes, np.int8)[numbers].astype(np.int64)

    def of_request(self, number: int, model: int) -> float:
        """Return the objective of a request."""
        own = self._own[number] if self._own else math.nan
        return self._by_model[model] if math.isnan(own) else own

    def of_requests(self, numbers: Floats, models: Indices) -> Floats:
        """Return the objectives of some requests. Shapes: [n]."""
        limits: Floats = self._models[models]
        if not self._own:
            return limits
        own = np.frombuffer(self._own)[numbers.astype(np.int64)]
        return np.where(np.isnan(own), limits, own)
