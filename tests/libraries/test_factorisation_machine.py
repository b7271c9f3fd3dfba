"""The factorisation machine of the comparison with the paper's pipelines."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("scipy", reason="no SciPy in this environment")

from finetuning.paper_pipelines import FactorisationMachine
from scipy import sparse


def ones(rng: np.random.Generator, rows: int, features: int) -> np.ndarray:
    """Return features that are 0 or 1."""
    return (rng.random((rows, features)) < 0.4).astype(float)


def test_its_gradients_are_those_of_finite_differences() -> None:
    """The slope of the log loss in each weight is that between two points beside it."""
    rng = np.random.default_rng(0)
    z, y = ones(rng, 30, 6), rng.integers(0, 2, 30)
    machine = FactorisationMachine(6, seed=0)
    for name, own in machine.weights.items():
        machine.weights[name] = own + 0.3 * rng.standard_normal(own.shape)
    slopes = machine.gradients(sparse.csr_matrix(z), y)
    for name, own in machine.weights.items():
        at = tuple(rng.integers(0, size) for size in own.shape)
        losses = []
        for step in (1e-5, -1e-5):
            moved = own.copy()
            moved[at] += step
            machine.weights[name] = moved
            losses.append(machine.loss(sparse.csr_matrix(z), y))
        machine.weights[name] = own
        assert slopes[name][at] == pytest.approx((losses[0] - losses[1]) / 2e-5, rel=1e-4, abs=1e-8)


def test_its_scores_are_those_of_all_pairs() -> None:
    """The sum over pairs of features, which is linear in their number, is that of the definition."""
    rng = np.random.default_rng(1)
    z = ones(rng, 20, 5)
    machine = FactorisationMachine(5, seed=1)
    machine.weights["linear"] = rng.standard_normal(5)
    factors = machine.weights["factors"]
    pairs = sum(factors[i] @ factors[j] * z[:, i] * z[:, j] for i in range(5) for j in range(i))
    expected = 1 / (1 + np.exp(-(z @ machine.weights["linear"] + pairs)))
    np.testing.assert_allclose(machine.predict(sparse.csr_matrix(z)), expected)


def test_its_model_has_its_scores() -> None:
    """The model returns the probabilities of the machine of LightGBM's leaves."""
    for library in ("jax", "lightgbm", "onnxmltools"):
        pytest.importorskip(library, reason=f"no {library} in this environment")
    from finetuning import paper_networks as networks  # noqa: PLC0415 - needs them
    from finetuning.paper_pipelines import LEAVES, TREES, fit_trees, leaf_ones  # noqa: PLC0415

    rng = np.random.default_rng(2)
    x = rng.standard_normal((1500, 6)).astype(np.float32)
    booster = fit_trees(x, (x[:, 0] * x[:, 1] + x[:, 2] > 0).astype(int), seed=0)
    machine = FactorisationMachine(TREES * LEAVES, seed=2)
    machine.weights = {name: 0.1 * rng.standard_normal(own.shape) for name, own in machine.weights.items()}
    declared = [("x", networks.FloatTensorType([None, 6]))]
    ensemble = networks.Pipeline(networks.convert_lightgbm(booster, initial_types=declared, zipmap=False)).ensemble
    places = networks.leaf_places(booster.predict(x, pred_leaf=True), ensemble, x)
    pipeline = networks.Pipeline(networks.machine_model(ensemble, machine.weights, places))
    found = pipeline.score_runner()({"x": x})[:, 1]
    np.testing.assert_allclose(found, machine.predict(leaf_ones(booster, x)), atol=1e-4)


def test_the_untrained_network_of_pipe1_is_its_regression() -> None:
    """Missing and empty features have the probabilities of scikit-learn's pipeline."""
    for package in ("lightgbm", "onnxmltools", "jax", "sklearn"):
        pytest.importorskip(package, reason=f"no {package} in this environment")
    from finetuning import paper_networks as networks  # noqa: PLC0415 - needs them
    from finetuning.paper_pipelines import fit_logistic  # noqa: PLC0415

    rng = np.random.default_rng(0)
    x = rng.normal(3, 2, (200, 4)).astype(np.float32)
    x[rng.random(x.shape) < 0.1], x[:, 3] = np.nan, np.nan
    fitted = fit_logistic(x, rng.integers(0, 2, 200))
    pipeline = networks.Pipeline(networks.translate(fitted))
    network = networks.ArithmeticNetwork(pipeline.tail, None, x, pipeline.loss, 1.0, 0.0)
    found = np.asarray(network.probabilities(network.raw({}, x)))
    np.testing.assert_allclose(found, fitted.predict_proba(x), atol=1e-5)
