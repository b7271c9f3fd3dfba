"""The pipelines of Yu (2022) on its preprocessings: the cells of table 5.3, of the original pipelines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any

import lightgbm as lgb
import numpy as np
import pandas as pd

from chrion.pipelines.measures import measure
from finetuning.click_logs import Rows, Splits
from finetuning.encodings import SCHEMES, Encoder
from finetuning.eras import DATA
from finetuning.paper_pipelines import LEAVES, fit_pipeline

Array = np.ndarray[Any, Any]
#: AUC of table 5.3 by data, row and preprocessing.
PRINTED: Mapping[str, Mapping[str, tuple[float, float, float]]] = {
    "flight": {"Pipe1": (0.6783, 0.6847, 0.7126), "Pipe2": (0.7358, 0.7427, 0.7507), "Pipe3": (0.7519, 0.7547, 0.7467)},
    "avazu": {"Pipe1": (0.6896, 0.7264, 0.7553), "Pipe2": (0.7521, 0.7550, 0.7718), "Pipe3": (0.7597, 0.7616, 0.7728)},
    "criteo": {"Pipe1": (0.7167, 0.7442, 0.7769), "Pipe2": (0.7739, 0.7781, 0.7925), "Pipe3": (0.7838, 0.7884, 0.7954)},
}
PIPELINES = ("Pipe1", "Pipe2", "Pipe3")
STOPPED, NETWORK = "Pipe2, stopped early", "TabM"


def cells(splits: Splits, seed: int) -> Iterator[tuple[str, str, float, float]]:
    """Yield the row, the preprocessing, and the AUC and the log loss of the rows to test with.

    Beside the three pipelines, LightGBM that is stopped early, as it would be today, and TabM if it is installed.
    """
    y = [own.y.astype(np.int64) for own in (splits.train, splits.validation, splits.test)]
    for scheme in SCHEMES:
        encoder = Encoder(SCHEMES[scheme], splits.train)
        x = [encoder.encode(splits.train, trained=True), encoder.encode(splits.validation), encoder.encode(splits.test)]
        fits = {name: _pipeline(name, seed) for name in PIPELINES} | {STOPPED: _stopped(seed)}
        if find_spec("tabm"):
            fits[NETWORK] = _network(seed)
        for name, fit in fits.items():
            found = fit(x[0], y[0], (x[1], y[1]))(x[2])
            measures = measure(np.stack([1 - found, found], axis=1), y[2].astype(np.float64))
            yield name, scheme, measures.gain, measures.loss


Fit = Callable[[Array, Array, tuple[Array, Array]], Callable[[Array], Array]]


def _pipeline(name: str, seed: int) -> Fit:
    return lambda x, y, chosen: fit_pipeline(name, x, y, chosen, seed)


def _stopped(seed: int) -> Fit:
    def fit(x: Array, y: Array, chosen: tuple[Array, Array]) -> Callable[[Array], Array]:
        parameters = {"objective": "binary", "num_leaves": LEAVES, "learning_rate": 0.1, "seed": seed, "verbose": -1}
        sets = [lgb.Dataset(*chosen)]
        stop = [lgb.early_stopping(20, verbose=False)]
        trees = lgb.train({**parameters, "num_threads": 2}, lgb.Dataset(x, y), 500, valid_sets=sets, callbacks=stop)
        return lambda rows: np.asarray(trees.predict(rows))

    return fit


def _network(seed: int) -> Fit:
    from finetuning.tabm_rival import fit_tabm  # noqa: PLC0415 - optional

    return lambda x, y, chosen: fit_tabm(np.nan_to_num(x), y, chosen, seed)


def packaged(name: str, seed: int) -> Splits:
    """Return data of packages or drawn ones: old rows train, new ones choose, and later ones test."""
    eras = DATA[name].draw(seed)
    parts = (eras.old, eras.new, eras.later)
    whole = pd.concat(parts)
    texts = [column for column in whole.columns if not pd.api.types.is_numeric_dtype(whole[column])]
    numbers = [column for column in whole.columns if column not in {*texts, "y"}]
    codes = (
        np.stack([pd.factorize(whole[column])[0] for column in texts], axis=1) if texts else np.zeros((len(whole), 0))
    )
    rows = Rows(whole[numbers].to_numpy(np.float32), codes.astype(np.int64), whole["y"].to_numpy(np.int8))
    ends = np.cumsum([0, *map(len, parts)])
    return Splits(*(rows.part(slice(ends[at], ends[at + 1])) for at in range(3)))
