"""Fine-tuning under drift: what the guard returns, on rows that come later, and other methods on the held-out rows.

A LightGBM model (16 leaves, rate 0.1, stopped early) is fitted on 20 000 old rows and converted to ONNX. ``finetune``
gets new rows that have drifted, and the model that it returns is compared with the original on 20 000 later ones:

    python scripts/bench_finetune.py -o docs/pipelines.md [--seeds 5] [--rows 4000]

It needs ``lightgbm``, ``onnxmltools`` and ``pyarrow``, takes about ten minutes on two cores, and writes its table into
the page, between the markers ``finetune``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import onnxruntime as ort
from page_markers import markdown_table, replace_section

import chrion
from chrion.pipelines.measures import Measures, measure

Array = np.ndarray[Any, Any]
FEATURES = 10
OLD, LATER = 20_000, 20_000
#: A returned model does harm if it loses so much AUC, in points, or gains so much log loss, times 100.
HARM_AUC, HARM_LOSS = -0.1, 0.1
RIVALS = ("tuned", "refit", "continued", "new rows only")


@dataclass(frozen=True, slots=True)
class Run:
    """One run; gains over the original in points of AUC, and in log loss times 100."""

    adopted: bool
    auc: float
    loss: float
    held: dict[str, float]


def relation(x: Array, z: Array) -> tuple[Array, Array]:
    """One feature begins to matter, and another one no longer does."""
    return x, z + 1.2 * x[:, 6] - np.sin(2 * x[:, 2])


def covariates(x: Array, _: Array) -> tuple[Array, Array]:
    """The relation stays, and three features move."""
    moved = x.copy()
    moved[:, :3] += 0.8
    return moved, signal(moved)


def sensor(x: Array, z: Array) -> tuple[Array, Array]:
    """A sensor reports another scale."""
    seen = x.copy()
    seen[:, 0] = 1.5 * x[:, 0] + 0.5
    return seen, z


def prior(x: Array, z: Array) -> tuple[Array, Array]:
    """The class becomes rarer."""
    return x, z - 1.0


def nothing(x: Array, z: Array) -> tuple[Array, Array]:
    """Nothing changes."""
    return x, z


DRIFTS: dict[str, Callable[[Array, Array], tuple[Array, Array]]] = {
    "relation": relation,
    "covariates": covariates,
    "sensor": sensor,
    "prior": prior,
    "none": nothing,
}


def signal(x: Array) -> Array:
    """Return the log odds of the class, up to noise."""
    first = x[:, 0] * x[:, 1] + np.sin(2 * x[:, 2])
    return np.asarray(first + (x[:, 3] > 0.5) * x[:, 4] - 0.7 * np.abs(x[:, 5]))


def draw(rng: np.random.Generator, rows: int, drift: str) -> tuple[Array, Array]:
    """Return features and classes."""
    x = rng.standard_normal((rows, FEATURES)).astype(np.float32)
    x, z = DRIFTS[drift](x, signal(x))
    return x, (z + 0.5 * rng.logistic(size=rows) > 0).astype(np.int64)


def original(x: Array, y: Array) -> Any:
    """Return a LightGBM model as ONNX."""
    import lightgbm as lgb  # noqa: PLC0415 - said in the docstring
    from onnxmltools import convert_lightgbm  # noqa: PLC0415
    from onnxmltools.convert.common.data_types import FloatTensorType  # noqa: PLC0415

    cut = len(y) * 4 // 5
    parameters = {"objective": "binary", "num_leaves": 16, "learning_rate": 0.1, "verbose": -1, "num_threads": 2}
    sets = [lgb.Dataset(x[cut:], y[cut:])]
    stop = [lgb.early_stopping(20, verbose=False)]
    model = lgb.train(parameters, lgb.Dataset(x[:cut], y[:cut]), 300, valid_sets=sets, callbacks=stop)
    return convert_lightgbm(model, initial_types=[("x", FloatTensorType([None, FEATURES]))], zipmap=False)


def run(drift: str, seed: int, rows: int) -> Run:
    """Fine-tune one model."""
    import pyarrow as pa  # noqa: PLC0415 - said in the docstring

    rng = np.random.default_rng(seed)
    model = original(*draw(rng, OLD, "none"))
    x, y = draw(rng, rows, drift)
    later = draw(rng, LATER, drift)
    table = pa.table({**{f"f{at}": x[:, at] for at in range(FEATURES)}, "y": y})
    tuned, report = chrion.finetune(model, table, seed=seed)
    before, after = (_measured(proto, *later) for proto in (model, tuned))
    first = report.rivals[0].measures
    held = {r.name: 100 * (r.measures.gain - first.gain) for r in report.rivals if r.measures and first}
    return Run(report.adopted, 100 * (after.gain - before.gain), 100 * (after.loss - before.loss), held)


def _measured(model: Any, x: Array, y: Array) -> Measures:
    options = ort.SessionOptions()
    options.log_severity_level = 4  # the converter declares the shape of one row
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return measure(np.asarray(session.run(None, {"x": x})[1], np.float64), y.astype(np.float64))


def rows_of(results: dict[str, list[Run]]) -> list[list[str]]:
    """Return the rows of the page's table, the head first."""
    heads = ["drift", "adopted", "AUC", "log loss", "harm", *(f"{name}, held out" for name in RIVALS)]
    rows = [heads]
    for drift, runs in results.items():
        harm = sum(r.auc < HARM_AUC or r.loss > HARM_LOSS for r in runs)
        held = [f"{mean(r.held.get(name, float('nan')) for r in runs):+.1f}" for name in RIVALS]
        auc, loss = mean(r.auc for r in runs), mean(r.loss for r in runs)
        cells = [drift, f"{sum(r.adopted for r in runs)} of {len(runs)}", f"{auc:+.1f}", f"{loss:+.1f}", str(harm)]
        rows.append([*cells, *held])
    return rows


def main() -> None:
    """Run all drifts, and write the table into a page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, help="the page")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=4000)
    given = parser.parse_args()
    results: dict[str, list[Run]] = {}
    for drift in DRIFTS:
        results[drift] = [run(drift, seed, given.rows) for seed in range(given.seeds)]
        print(*rows_of({drift: results[drift]})[-1], sep="  ", flush=True)
    if given.output:
        text = given.output.read_text(encoding="utf-8")
        filled = replace_section(text, "finetune", markdown_table(rows_of(results)))
        given.output.write_text(filled, encoding="utf-8")


if __name__ == "__main__":
    main()
