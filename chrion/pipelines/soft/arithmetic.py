"""Arithmetic operators of a pipeline as a network, after features or soft trees (WindTunnel, section 5.2.1).

Weights are those of the pipeline, plus deviations in a unit for each number. A unit is the root mean square of the
weights of its tensor, each of which counts by its effect: the root mean square, over rows, of the slope of the scores.
So a weight of a feature in thousands moves in thousandths. Effects are estimated by slopes of sums of scores with
random signs (Hutchinson, 1990).

The loss of classes is of logarithms of probabilities, found before the link: what float32 rounds to 0 has a slope, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from chrion.pipelines.leaves import SQUARED, Loss
from chrion.pipelines.operators import attributes, linear
from chrion.pipelines.soft.network import LEAST, Network, ScoreNetwork
from chrion.pipelines.soft.soft_trees import SoftTrees, feature_scales
from chrion.pipelines.tail import MOVES, Tail

Array = np.ndarray[Any, Any]
#: Operators whose results are probabilities, by what they are as the link of a linear classifier.
_LINKS = {"Exp": "SOFTMAX", "Sigmoid": "LOGISTIC", "Softmax": "SOFTMAX"}
#: The rows that effects are estimated from, and the sums of their scores.
_ROWS, _SUMS = 1024, 16
#: All weights of a tensor together have at least this effect, in units of scores.
_LEAST_EFFECT = 0.1


class ArithmeticNetwork(ScoreNetwork):
    """Arithmetic operators as a function of parameters and features.

    Args:
        tail: The operators.
        trees: The trees before them; None if there are none.
        x: Rows of features, [rows, features].
        loss: What raw scores are fitted with: a softmax of logarithms of probabilities, or squares of numbers.
        unit: The unit of numbers, as their deviation.
        dropout: The probability with which a unit of trees is left out while training, or a feature without trees: it
            then has its mean.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - as documented
        self, tail: Tail, trees: SoftTrees | None, x: Array, loss: Loss, unit: float, dropout: float
    ) -> None:
        self._tail, self._trees = tail, Network(trees, loss, dropout) if trees else None
        widest = max((int(np.prod(own.shape)) for own in tail.weights.values()), default=1)
        super().__init__(loss, dropout, unit, max(x.shape[1], self._trees.width if self._trees else widest))
        some = np.asarray(x[np.linspace(0, len(x) - 1, min(len(x), _ROWS)).astype(np.int64)], np.float32)
        self._centre = feature_scales(some)[0].astype(np.float32)
        self._units = self._units_from(some)
        self._names = {name: f"weight {at}" for at, name in enumerate(tail.weights)}

    def shapes(self, level: str) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the parameters of a level by name; without trees, all levels have the same."""
        own = {self._names[name]: value.shape for name, value in self._tail.weights.items()}
        return {**own, **(self._trees.shapes(level) if self._trees else {})}

    @property
    def tables(self) -> frozenset[str]:
        """The parameters that integers look up."""
        return frozenset(self._names[name] for name in self._tail.tables)

    def raw(self, parameters: Mapping[str, Any], x: Any, key: Any = None) -> Any:
        """Return logarithms of probabilities up to a constant, or numbers, [rows, targets]; see the class before."""
        return self._raw(self.weights(parameters), self._source(parameters, x, key))

    def weights(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Return the weights of the operators by their name in the model."""
        found: dict[str, Any] = dict(self._tail.weights)
        for name, key in self._names.items():
            if key in parameters:
                moved = self._units[name] * parameters[key]
                if name in self._tail.mirrored:
                    halves = moved.reshape(2, -1)
                    moved = (halves - halves[::-1]).reshape(moved.shape) / 2
                found[name] = found[name] + moved
        return found

    def _source(self, parameters: Mapping[str, Any], x: Any, key: Any) -> Any:
        """Return what the operators begin with."""
        if self._trees:
            return self._trees.raw(parameters, x, key)
        if key is None:
            return x
        return self._jax.numpy.where(self._tail.integers, x, self._centre + self._drop(x - self._centre, key))

    def _raw(self, weights: Mapping[str, Any], source: Any) -> Any:
        np_ = self._jax.numpy
        values = self._tail.values(np_, weights, np_.asarray(source))
        if self._loss is SQUARED:
            return values[self._tail.result].reshape(len(source), -1)
        return self._logarithms(values, self._tail.result, len(source))

    def _logarithms(self, values: Mapping[str, Any], name: str, rows: int) -> Any:
        """Return the logarithms of probabilities, [rows, classes], up to a constant for each row.

        A single column has the probabilities of the second of two classes.
        """
        np_, node = self._jax.numpy, self._tail.producers.get(name)
        link, first = "", values[name]
        if node is not None:
            if node.op_type in MOVES | {"Normalizer"}:
                return self._logarithms(values, node.input[0], rows)
            first, link = values[node.input[0]], _LINKS.get(node.op_type, "")
            if node.op_type == "LinearClassifier":
                given = attributes(node)
                first = linear(np_, given, *(values[own] for own in self._tail.inputs(node)))
                link = given.get("post_transform", "")
        found = (first if link else values[name]).reshape(rows, -1)
        one = found.shape[1] == 1
        if link == "LOGISTIC":
            return -np_.logaddexp(0, -(np_.concatenate([-found, found], axis=1) if one else found))
        if link == "SOFTMAX" and not one:
            return found
        found = values[name].reshape(rows, -1)
        return np_.log(np_.maximum(np_.concatenate([1 - found, found], axis=1) if one else found, LEAST))

    def _units_from(self, x: Array) -> dict[str, Array]:
        """Return the unit of each weight."""
        source, weights = self._source({}, x, None), dict(self._tail.weights)

        def summed(weights: Mapping[str, Any], signs: Any) -> Any:
            return (self._raw(weights, source) * signs).sum()

        shape = np.shape(self._raw(weights, source))
        slopes, rng = self._jax.jit(self._jax.grad(summed)), np.random.default_rng(0)
        squares = {name: np.zeros(value.shape) for name, value in weights.items()}
        for _ in range(_SUMS):
            for name, own in slopes(weights, rng.choice(np.array([-1, 1], np.float32), shape)).items():
                squares[name] += np.nan_to_num(np.asarray(own, np.float64)) ** 2
        for name in self._tail.tables:  # these rows look up some of their rows only
            squares[name][...] = squares[name].mean()
        scale = self._unit if self._loss is SQUARED else 1.0
        return {name: _unit(value, np.sqrt(squares[name] / _SUMS / len(x)), scale) for name, value in weights.items()}


def _unit(values: Array, effects: Array, scale: float) -> Array:
    """Return the units of weights with some effects; a weight of little effect moves no more than the mean one."""
    typical = max(float(np.linalg.norm(values * effects)), _LEAST_EFFECT * scale) / np.sqrt(values.size)
    most = max(float(np.sqrt(np.mean(values.astype(np.float64) ** 2))), typical / (effects.max() or np.inf))
    return np.asarray(np.minimum(typical / np.maximum(effects, 1e-30), most), np.float32)
