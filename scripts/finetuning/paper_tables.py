"""The pipelines of Yu (2022) on its preprocessings: the cells of tables 5.3 to 5.6."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import chain
from typing import Any

import lightgbm as lgb
import numpy as np
import pandas as pd

from chrion.pipelines.measures import measure
from finetuning.click_logs import Rows, Splits
from finetuning.encodings import SCHEMES, Encoder
from finetuning.eras import DATA
from finetuning.paper_pipelines import LEAVES, fit_logistic, fit_machine, fit_trees, leaf_ones

Array = np.ndarray[Any, Any]
#: AUC of table 5.3 by data, row and preprocessing.
PRINTED: Mapping[str, Mapping[str, tuple[float | None, float | None, float | None]]] = {
    "flight": {
        "Pipe1": (0.6783, 0.6847, 0.7126),
        "Pipe2": (0.7358, 0.7427, 0.7507),
        "Pipe3": (0.7519, 0.7547, 0.7467),
        "W.T. Pipe1": (0.6913, 0.6910, 0.7244),
        "W.T. Pipe2": (0.7790, 0.7897, 0.7960),
        "W.T. Pipe3": (0.7829, 0.7906, 0.7989),
    },
    "avazu": {
        "Pipe1": (0.6896, 0.7264, 0.7553),
        "Pipe2": (0.7521, 0.7550, 0.7718),
        "Pipe3": (0.7597, 0.7616, 0.7728),
        "W.T. Pipe1": (0.7588, 0.7589, 0.7637),
        "W.T. Pipe2": (0.7753, 0.7742, 0.7763),
        "W.T. Pipe3": (0.7746, 0.7718, 0.7753),
    },
    "criteo": {  # with tables 5.4 (trees alone), 5.5 (cold) and 5.6 (levels)
        "Pipe1": (0.7167, 0.7442, 0.7769),
        "Pipe2": (0.7739, 0.7781, 0.7925),
        "Pipe3": (0.7838, 0.7884, 0.7954),
        "W.T. Pipe1": (0.7750, 0.7804, 0.7903),
        "W.T. Pipe2": (0.8006, 0.8053, 0.8041),
        "W.T. Pipe2, L2": (None, 0.7924, None),
        "W.T. Pipe2, L3": (None, 0.8051, None),
        "W.T. Pipe2, trees alone": (None, 0.7962, 0.7998),
        "W.T. Pipe2, cold": (None, 0.7983, 0.7990),
        "W.T. Pipe3": (0.8014, 0.8058, 0.8048),
        "W.T. Pipe3, cold": (None, 0.7966, 0.7975),
    },
}
#: AUC of table 5.6, of Pre2, by data, row and share of the rows to train with.
PRINTED_SHARES: Mapping[str, Mapping[str, tuple[float, float, float]]] = {
    "criteo": {
        "Pipe2": (0.7781, 0.7777, 0.7657),
        "W.T. Pipe2, L2": (0.7924, 0.7874, 0.7685),
        "W.T. Pipe2, L3": (0.8051, 0.7912, 0.7699),
        "W.T. Pipe2": (0.8053, 0.7906, 0.7691),
    },
}
_SHARES = (1.0, 0.1, 0.01)
#: The row, the column, and the AUC and the log loss of the rows to test with.
Cell = tuple[str, str, float, float]


def cells(splits: Splits, seed: int, epochs: int) -> Iterator[Cell]:
    """Yield the cells of tables 5.3 to 5.5, whose columns are preprocessings.

    Beside the three pipelines: LightGBM that is stopped early, as it would be today, TabM if it is installed, and the
    pipelines as networks if JAX and onnxmltools are.

    Args:
        splits: The rows.
        seed: The seed of all.
        epochs: The most epochs of a network.
    """
    for scheme in SCHEMES:
        encoder, x, y = _encoded(splits, scheme)
        for name, found in _predicted(splits, encoder, x, y, seed, epochs):
            yield name, scheme, *_measured(found, y[2])


def share_cells(splits: Splits, seed: int, epochs: int) -> Iterator[Cell]:
    """Yield the cells of table 5.6, whose columns are shares of the rows to train with, at random; as :func:`cells`."""
    from finetuning.paper_networks import FORMS, Networks  # noqa: PLC0415 - optional

    forms = {name: FORMS[name] for name in ("W.T. Pipe2, L2", "W.T. Pipe2, L3", "W.T. Pipe2")}
    order = np.random.default_rng(seed).permutation(len(splits.train))
    for share in _SHARES:
        part = replace(splits, train=splits.train.part(np.sort(order[: round(share * len(order))])))
        encoder, x, y = _encoded(part, "Pre2")
        trees = fit_trees(x[0], y[0], seed)
        networks = Networks(part, encoder, x, y, seed, epochs)
        for name, found in chain([("Pipe2", np.asarray(trees.predict(x[2])))], networks.predicted(forms, trees)):
            yield name, f"{100 * share:g} %", *_measured(found, y[2])


def _encoded(splits: Splits, scheme: str) -> tuple[Encoder, list[Array], list[Array]]:
    """Return a preprocessing, and the features and the classes of the rows to train, to choose and to test with."""
    encoder = Encoder(SCHEMES[scheme], splits.train)
    x = [encoder.encode(splits.train, trained=True), encoder.encode(splits.validation), encoder.encode(splits.test)]
    return encoder, x, [own.y.astype(np.int64) for own in (splits.train, splits.validation, splits.test)]


def _measured(found: Array, y: Array) -> tuple[float, float]:
    """Return the AUC and the log loss of probabilities of class 1."""
    measures = measure(np.stack([1 - found, found], axis=1), y.astype(np.float64))
    return measures.gain, measures.loss


def _predicted(  # noqa: PLR0913, PLR0917 - as of the cells
    splits: Splits, encoder: Encoder, x: Sequence[Array], y: Sequence[Array], seed: int, epochs: int
) -> Iterator[tuple[str, Array]]:
    """Yield each row with the probability of class 1 of the rows to test with."""
    chosen = x[1], y[1]
    logistic, trees = fit_logistic(x[0], y[0]), fit_trees(x[0], y[0], seed)
    machine = fit_machine(trees, x[0], y[0], chosen, seed)
    yield "Pipe1", np.asarray(logistic.predict_proba(x[2])[:, 1])
    yield "Pipe2", np.asarray(trees.predict(x[2]))
    yield "Pipe3", machine.predict(leaf_ones(trees, x[2]))
    yield "Pipe2, stopped early", _stopped(x[0], y[0], chosen, seed)(x[2])
    if find_spec("tabm"):
        from finetuning.tabm_baseline import fit_tabm  # noqa: PLC0415 - optional

        filled = [np.nan_to_num(own) for own in x]
        yield "TabM", fit_tabm(filled[0], y[0], (filled[1], y[1]), seed, epochs)(filled[2])
    if find_spec("jax") and find_spec("onnxmltools"):
        from finetuning.paper_networks import FORMS, Networks  # noqa: PLC0415 - optional

        yield from Networks(splits, encoder, x, y, seed, epochs).predicted(FORMS, trees, logistic, machine)


def _stopped(x: Array, y: Array, chosen: tuple[Array, Array], seed: int) -> Callable[[Array], Array]:
    """Return the function of LightGBM that is stopped early, as it would be fitted today."""
    parameters = {"objective": "binary", "num_leaves": LEAVES, "learning_rate": 0.1, "seed": seed, "verbose": -1}
    stop = [lgb.early_stopping(20, verbose=False)]
    trees = lgb.train(
        {**parameters, "num_threads": 2}, lgb.Dataset(x, y), 500, valid_sets=[lgb.Dataset(*chosen)], callbacks=stop
    )
    return lambda rows: np.asarray(trees.predict(rows))


def packaged(name: str, share: float, seed: int) -> Splits:
    """Return data of packages or drawn ones: old rows train, new ones choose, and later ones test; a share of each."""
    eras = DATA[name].draw(seed)
    parts = [part.iloc[: round(share * len(part))] for part in (eras.old, eras.new, eras.later)]
    whole = pd.concat(parts)
    texts = [column for column in whole.columns if not pd.api.types.is_numeric_dtype(whole[column])]
    numbers = [column for column in whole.columns if column not in {*texts, "y"}]
    codes = (
        np.stack([pd.factorize(whole[column])[0] for column in texts], axis=1) if texts else np.zeros((len(whole), 0))
    )
    rows = Rows(whole[numbers].to_numpy(np.float32), codes.astype(np.int64), whole["y"].to_numpy(np.int8))
    ends = np.cumsum([0, *map(len, parts)])
    return Splits(*(rows.part(slice(ends[at], ends[at + 1])) for at in range(3)))
