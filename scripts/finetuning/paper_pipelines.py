"""The three pipelines of Yu (2022), section 5.4.1, on features of a preprocessing: Pipe1, Pipe2 and Pipe3.

- Pipe1: logistic regression (of scaled features, which the text does not say).
- Pipe2: LightGBM, 100 trees of 64 leaves, learning rate 0.25.
- Pipe3: the same trees, a one for the leaf that each tree reaches, and a factorisation machine of 20 factors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from scipy import sparse

Array = np.ndarray[Any, Any]
TREES, LEAVES, RATE = 100, 64, 0.25
FACTORS = 20
_FACTOR_RATE, _BATCH, _EPOCHS, _PATIENCE = 1e-3, 4096, 1000, 5


def fit_trees(x: Array, y: Array, seed: int) -> Any:
    """Return the trees of the text, a Booster of LightGBM."""
    import lightgbm as lgb  # noqa: PLC0415 - Pipe1 does without

    parameters = {"objective": "binary", "num_leaves": LEAVES, "learning_rate": RATE, "seed": seed, "verbose": -1}
    return lgb.train({**parameters, "num_threads": 2}, lgb.Dataset(x, y), TREES)


def fit_machine(trees: Any, x: Array, y: Array, chosen: tuple[Array, Array], seed: int) -> FactorisationMachine:
    """Return a factorisation machine of the leaves that rows reach, fitted.

    Args:
        trees: The trees of :func:`fit_trees`.
        x: The features, [rows, features].
        y: The class of each row.
        chosen: The features and classes of the rows to choose with.
        seed: The seed of its factors.
    """
    machine = FactorisationMachine(TREES * LEAVES, seed)
    machine.fit(leaf_ones(trees, x), y, (leaf_ones(trees, chosen[0]), chosen[1]))
    return machine


def leaf_ones(trees: Any, x: Array) -> sparse.csr_matrix:
    """Return a one for each leaf that a row reaches, [rows, trees times leaves]."""
    reached = np.asarray(trees.predict(x, pred_leaf=True), np.int64).reshape(len(x), -1)
    columns = (reached + LEAVES * np.arange(reached.shape[1])).ravel()
    starts = np.arange(0, reached.size + 1, reached.shape[1])
    return sparse.csr_matrix((np.ones(reached.size), columns, starts), (len(x), TREES * LEAVES))


def fit_logistic(x: Array, y: Array) -> Any:
    """Return a logistic regression of scikit-learn, after the mean for missing features and a scale."""
    from sklearn.impute import SimpleImputer  # noqa: PLC0415 - trees do without
    from sklearn.linear_model import LogisticRegression  # noqa: PLC0415
    from sklearn.pipeline import make_pipeline  # noqa: PLC0415
    from sklearn.preprocessing import StandardScaler  # noqa: PLC0415

    imputer = SimpleImputer(keep_empty_features=True)
    return make_pipeline(imputer, StandardScaler(), LogisticRegression(max_iter=300)).fit(x, y)


class FactorisationMachine:
    """A factorisation machine of features that are 0 or 1, trained by Adam in batches, stopped early.

    The score is ``w0 + w z + (|V' z|^2 - sum_i z_i |v_i|^2) / 2`` (Rendle 2010, lemma 3.1).
    """

    def __init__(self, features: int, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self.weights = {
            "bias": np.zeros(1),
            "linear": np.zeros(features),
            "factors": 0.01 * self._rng.standard_normal((features, FACTORS)),
        }

    def fit(self, z: sparse.csr_matrix, y: Array, chosen: tuple[sparse.csr_matrix, Array]) -> None:
        """Minimise the log loss; keep the weights with the least one on other rows."""
        first = {name: np.zeros_like(own) for name, own in self.weights.items()}
        second = {name: np.zeros_like(own) for name, own in self.weights.items()}
        best, kept, waited, step = np.inf, dict(self.weights), 0, 0
        for _ in range(_EPOCHS):
            for rows in self._batches(len(y)):
                step += 1
                for name, slope in self.gradients(z[rows], y[rows]).items():
                    first[name] = 0.9 * first[name] + 0.1 * slope
                    second[name] = 0.999 * second[name] + 0.001 * slope**2
                    ahead = first[name] / (1 - 0.9**step)
                    spread = np.sqrt(second[name] / (1 - 0.999**step)) + 1e-8
                    self.weights[name] = self.weights[name] - _FACTOR_RATE * ahead / spread
            loss = self.loss(*chosen)
            waited = 0 if loss < best else waited + 1
            if loss < best:
                best, kept = loss, dict(self.weights)
            if waited >= _PATIENCE:
                break
        self.weights = kept

    def predict(self, z: sparse.csr_matrix) -> Array:
        """Return the probability of class 1."""
        return np.asarray(1 / (1 + np.exp(-self._scores(z)[0])))

    def loss(self, z: sparse.csr_matrix, y: Array) -> float:
        """Return the mean log loss."""
        scores = self._scores(z)[0]
        return float(np.mean(np.logaddexp(0, scores) - y * scores))

    def gradients(self, z: sparse.csr_matrix, y: Array) -> dict[str, Array]:
        """Return the gradients of the mean log loss."""
        scores, sums = self._scores(z)
        error = (1 / (1 + np.exp(-scores)) - y) / len(y)
        of_features = z.T @ error
        factors = z.T @ (error[:, None] * sums) - self.weights["factors"] * of_features[:, None]
        return {"bias": np.array([error.sum()]), "linear": of_features, "factors": factors}

    def _scores(self, z: sparse.csr_matrix) -> tuple[Array, Array]:
        """Return the scores and the sums of factors of rows."""
        factors = self.weights["factors"]
        sums = z @ factors
        pairs = 0.5 * ((sums**2).sum(axis=1) - z @ (factors**2).sum(axis=1))
        return self.weights["bias"] + z @ self.weights["linear"] + pairs, sums

    def _batches(self, rows: int) -> Iterator[Array]:
        order = self._rng.permutation(rows)
        for first in range(0, rows, _BATCH):
            yield order[first : first + _BATCH]
