"""Support vector machines as functions of arrays, in NumPy or in JAX, equal to onnxruntime's operators.

Trained are support vectors, their coefficients and offsets; the slope and offset of probabilities (Platt, 1999) stay,
so that labels, which follow votes, change with the scores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

#: Rounds of the coupling of pairwise probabilities: in random trials with up to 26 classes it needed at most four.
_ROUNDS = 8
#: The least pairwise probability, and the error below which the coupling ends, over the number of classes.
_LEAST, _ERROR = 1e-7, 0.005


def regressor(np_: Any, given: Mapping[str, Any], x: Any, *weights: Any) -> Any:
    """Return the numbers of an SVMRegressor, [rows, 1]; without vectors it is a linear model."""
    *vectors, coefficients, rho = weights
    found = kernel(np_, given, x, vectors[0].reshape(given["n_supports"], -1)) if given.get("n_supports") else x
    return found @ coefficients.reshape(-1, 1) + rho[0]


def classifier(np_: Any, given: Mapping[str, Any], x: Any, *weights: Any) -> Any:
    """Return the probabilities of an SVMClassifier, [rows, classes]; without a calibration, its scores."""
    *vectors, coefficients, rho = weights
    counts = given.get("vectors_per_class", ())
    if not sum(counts):
        return x @ coefficients.reshape(classes_of(given), -1).T + rho[0]
    places = np.repeat(np.arange(len(counts)), counts)
    first, second = np.triu_indices(len(counts), 1)
    kernels = kernel(np_, given, x, vectors[0].reshape(len(places), -1))
    # a vector has a row of coefficients for each other class
    other = np.where(places[:, None] == first, second - 1, np.where(places[:, None] == second, first, -1))
    own = coefficients.reshape(-1, len(places)).T[np.arange(len(places))[:, None], other]
    scores = kernels @ np_.where(other >= 0, own, 0) + rho
    if not given.get("prob_a"):
        return np_.concatenate([-scores, scores], axis=1) if len(counts) == 2 else scores
    logits = scores * np.float32(given["prob_a"]) + np.float32(given["prob_b"])
    won = np_.clip(0.5 * (1 - np_.tanh(logits / 2)), np.float32(_LEAST), np.float32(1 - _LEAST))
    pairs = np.zeros((len(counts), len(counts)), np.int64)
    pairs[first, second] = pairs[second, first] = np.arange(len(first))
    upper, diagonal = np.triu(np.ones_like(pairs), 1) > 0, np.eye(len(counts), dtype=np.float32)
    return _coupled(np_, np_.where(upper, won[:, pairs], 1 - won[:, pairs]) * (1 - diagonal))


def classes_of(given: Mapping[str, Any]) -> int:
    """Return the number of classes of a classifier."""
    return len(given.get("classlabels_ints") or given.get("classlabels_strings") or ())


def kernel(np_: Any, given: Mapping[str, Any], x: Any, vectors: Any) -> Any:
    """Return the kernel of rows and vectors, [rows, vectors].

    The kernel RBF is exact to 1e-6 if gamma fits the deviation of the features, as scikit-learn's ``scale`` does; with
    features in thousands and a gamma near 1 it is not.
    """
    kind = given.get("kernel_type", "LINEAR")
    gamma, constant, degree = [*given.get("kernel_params", ()), 0.0, 0.0, 0.0][:3]
    if kind == "RBF":
        centre = vectors.mean(axis=0)  # squares of differences from it are small enough for float32
        x, vectors = x - centre, vectors - centre
        squares = (x * x).sum(axis=1)[:, None] + (vectors * vectors).sum(axis=1) - 2 * (x @ vectors.T)
        return np_.exp(-gamma * np_.maximum(squares, 0))
    products = x @ vectors.T
    if kind == "LINEAR":
        return products
    inner = gamma * products + constant
    return np_.power(inner, degree) if kind == "POLY" else np_.tanh(inner)


def _coupled(np_: Any, won: Any) -> Any:
    """Return probabilities of classes, [rows, classes], from those of pairs (Wu, Lin and Weng, 2004, algorithm 2).

    Args:
        np_: NumPy, or JAX's form of it.
        won: The probability of the first of two classes, [rows, classes, classes]; 0 on the diagonal.
    """
    classes = won.shape[1]
    ones = np_.eye(classes, dtype=np.float32)
    q = (won**2).sum(axis=1)[:, None, :] * ones - won * np_.swapaxes(won, 1, 2)

    def update_class(at: Any, state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        """Change the probability of a class; ``own`` and ``total`` are Qp and pQp."""
        p, own, total = state
        kept = q[:, at, at] / (q[:, at, at] + total - own[:, at])  # the share of the others that stays
        moved = 1 - kept
        total = kept**2 * total + moved**2 * q[:, at, at] + 2 * kept * moved * own[:, at]
        own = kept[:, None] * own + moved[:, None] * q[:, at]
        return kept[:, None] * p + moved[:, None] * ones[at], own, total

    def run_round(_: Any, p: Any) -> Any:
        own = (q * p[:, None, :]).sum(axis=2)
        total = (p * own).sum(axis=1)
        unsettled = abs(own - total[:, None]).max(axis=1) >= np.float32(_ERROR / classes)
        changed, _, _ = _repeated(np_, classes, update_class, (p, own, total))
        return np_.where(unsettled[:, None], changed, p)

    return _repeated(np_, _ROUNDS, run_round, np_.full_like(q[:, 0], 1 / classes))


def _repeated(np_: Any, times: int, step: Callable[[Any, Any], Any], state: Any) -> Any:
    """Return a state after some steps, which JAX compiles once."""
    if np_ is np:
        for at in range(times):
            state = step(at, state)
        return state
    from jax import lax  # noqa: PLC0415 - part of an extra

    return lax.fori_loop(0, times, step, state)
