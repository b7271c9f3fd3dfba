"""The functions of soft trees and of arithmetic operators in JAX, and their losses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from chrion.common.installation import install_hint
from chrion.errors import OptionError
from chrion.pipelines import leaves
from chrion.pipelines.leaves import Loss
from chrion.pipelines.soft.soft_trees import SoftTrees

Array = np.ndarray[Any, Any]
#: Probabilities of a forest are at least this.
LEAST = 1e-6
#: A standardised feature in a decision on several ones is at most this.
LARGEST = 1e3


def libraries() -> tuple[Any, Any]:
    """Return JAX and optax.

    Raises:
        OptionError: One is not installed.
    """
    try:
        import jax  # noqa: PLC0415 - part of an extra
        import optax  # noqa: PLC0415 - part of an extra
    except ImportError as error:
        raise OptionError(
            "differentiable networks need the packages jax and optax", hint=install_hint("finetune")
        ) from error
    return jax, optax


class ScoreNetwork(ABC):
    """A function of parameters and features that returns raw scores: its losses, and its results for many rows.

    Args:
        loss: What the scores are fitted with.
        dropout: The probability with which a unit is left out while training.
        unit: The unit of numbers in losses.
        width: The numbers that are computed for a row.

    Attributes:
        width: The same.
    """

    def __init__(self, loss: Loss, dropout: float, unit: float, width: int) -> None:
        self._jax, self._loss, self._dropout, self._unit = libraries()[0], loss, dropout, unit
        self._compiled, self.width = self._jax.jit(self.raw), width

    @abstractmethod
    def raw(self, parameters: Mapping[str, Any], x: Any, key: Any = None) -> Any:
        """Return raw scores, [rows, targets].

        Args:
            parameters: The deviations from the pipeline by name; those that are missing are zero.
            x: The features, [rows, features].
            key: The random key of dropout; nothing is dropped if None.
        """

    @property
    def tables(self) -> frozenset[str]:
        """The parameters that are tables with a row for each category."""
        return frozenset()

    @abstractmethod
    def shapes(self, level: str) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the parameters of a level by name."""

    def _drop(self, units: Any, key: Any) -> Any:
        if key is None or not self._dropout:
            return units
        kept = self._jax.random.bernoulli(key, 1 - self._dropout, units.shape)
        return self._jax.numpy.where(kept, units / (1 - self._dropout), 0.0)

    def probabilities(self, raw: Any) -> Any:
        """Return probabilities [rows, classes], or numbers [rows]."""
        jax, np_ = self._jax, self._jax.numpy
        if self._loss is leaves.SQUARED:
            return raw[:, 0]
        if self._loss is leaves.SOFTMAX:
            return jax.nn.softmax(raw, axis=1)
        if self._loss is leaves.BRIER:
            kept = np_.maximum(raw, LEAST)
            return kept / kept.sum(axis=1, keepdims=True)
        second = jax.nn.sigmoid(raw[:, 0]) if self._loss is leaves.LOGISTIC else np_.clip(raw[:, 0], LEAST, 1 - LEAST)
        return np_.stack([1 - second, second], axis=1)

    def losses(self, raw: Any, y: Any) -> Any:
        """Return the loss of each row: the log loss of classes, or half the squared error in units of the deviation.

        Args:
            raw: Raw scores.
            y: Classes, or numbers.
        """
        jax, np_ = self._jax, self._jax.numpy
        if self._loss is leaves.SQUARED:
            return (raw[:, 0] - y) ** 2 / 2 / self._unit**2
        if self._loss is leaves.LOGISTIC:
            return jax.nn.softplus(raw[:, 0]) - y * raw[:, 0]
        if self._loss is leaves.SOFTMAX:
            logarithms = jax.nn.log_softmax(raw, axis=1)
        else:
            logarithms = np_.log(self.probabilities(raw))
        return -np_.take_along_axis(logarithms, y.astype(np_.int32)[:, None], axis=1)[:, 0]

    def scores(self, parameters: Mapping[str, Any], x: Callable[[slice], Array], rows: slice) -> Array:
        """Return the raw scores of many rows, computed in blocks.

        Args:
            parameters: The deviations from the ensemble.
            x: Returns the features of some rows.
            rows: The rows.
        """
        block_rows = max(64, (1 << 24) // self.width)  # they need about 64 MB
        parts, step = [], min(block_rows, rows.stop - rows.start)
        for at in range(rows.start, rows.stop, max(step, 1)):
            block = x(slice(at, min(at + step, rows.stop)))
            whole = np.pad(block, ((0, step - len(block)), (0, 0)), "edge")  # another shape would be compiled anew
            parts.append(np.asarray(self._compiled(dict(parameters), whole))[: len(block)])
        return np.concatenate(parts)


class Network(ScoreNetwork):
    """Soft trees as a function of parameters and features.

    Args:
        trees: The trees.
        loss: What their scores are fitted with.
        dropout: The probability with which a decision or a leaf is left out while training.
    """

    def __init__(self, trees: SoftTrees, loss: Loss, dropout: float = 0.0) -> None:
        count, leaf_count, nodes = trees.paths.shape
        super().__init__(loss, dropout, trees.unit, int(count * max(leaf_count, nodes)))
        self._trees = trees
        self._constants = {
            name: self._jax.numpy.asarray(getattr(trees, name))
            for name in ("features", "thresholds", "temperatures", "exact", "paths", "offsets", "values", "entries")
        }

    def shapes(self, level: str) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the parameters of a level by name."""
        return self._trees.shapes(level)

    def raw(self, parameters: Mapping[str, Any], x: Any, key: Any = None) -> Any:
        """Return the sums of the values of leaves, [rows, targets]; see the class before."""
        np_, trees, own = self._jax.numpy, self._trees, self._constants
        reached = self._reached(parameters, x, key)
        values = own["values"] + trees.unit * np_.where(own["entries"], parameters.get("values", 0.0), 0.0)
        bias = trees.bias + trees.unit * parameters.get("bias", 0.0)
        if trees.leaf_of is not None:
            return bias + (values * (1 + reached)).reshape(-1, len(x))[trees.leaf_of].T
        return bias + np_.einsum("tlk,tln->nk", values, reached)

    def _reached(self, parameters: Mapping[str, Any], x: Any, key: Any) -> Any:
        """Return how far each leaf is reached, [trees, leaves, rows]: from -1 to 1."""
        np_, own = self._jax.numpy, self._constants
        keys = (None, None) if key is None else self._jax.random.split(key)
        decisions = self._drop(self._decisions(parameters, x), keys[0])
        paths = own["paths"] + parameters.get("paths", 0.0)
        offsets = own["offsets"] + parameters.get("offsets", 0.0)
        agreeing = np_.einsum("tli,tin->tln", paths, decisions) + offsets[..., None]
        return self._drop(np_.tanh(agreeing / self._trees.leaf_temperature), keys[1])

    def _decisions(self, parameters: Mapping[str, Any], x: Any) -> Any:
        """Return all decisions, [trees, nodes, rows]."""
        np_, trees, own = self._jax.numpy, self._trees, self._constants
        missing = np_.isnan(x)
        wide = np_.concatenate([np_.where(missing, np_.inf, x), np_.where(missing, -np_.inf, x)], axis=1)
        values = wide.T[own["features"]]
        thresholds = own["thresholds"] + own["temperatures"] * parameters.get("shifts", 0.0)
        excess = (thresholds[..., None] - values) / own["temperatures"][..., None]
        if "mix" in parameters:
            scaled = np_.clip((np_.where(missing, trees.centre, x) - trees.centre) / trees.spread, -LARGEST, LARGEST)
            excess = excess - np_.einsum("tif,nf->tin", parameters["mix"], scaled)
        soft = np_.tanh(excess)
        if not trees.exact.any():
            return soft
        equal = np_.where(values == own["thresholds"][..., None], 1.0, -1.0)
        return np_.where(own["exact"][..., None], equal, soft)
