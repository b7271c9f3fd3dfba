"""What else could be done: ``refit``, continued boosting, a model of the new rows alone, one of old and new rows.

These are measured beside the tuned model and not handed back. Boosting needs LightGBM, which is optional. With old
rows, target encoders are fitted anew, too.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from chrion.pipelines import leaves
from chrion.pipelines.leaves import refit
from chrion.pipelines.report import ComparedModel
from chrion.pipelines.rows import EncoderTables, Rows

Array = np.ndarray[Any, Any]
#: The learning rate of LightGBM by default: an ONNX model does not tell its own.
_RATE = 0.1
_LEAVES, _ROUNDS, _PATIENCE = 16, 300, 20
_MISSING = "needs the package lightgbm"
#: Returns the measures of a model by its name and its scores for the held-out rows.
Measure = Callable[[str, Array], ComparedModel]


def baselines(rows: Rows, seed: int, measured: Measure, most: int) -> Iterator[ComparedModel]:
    """Yield the baselines, measured on the held-out rows, or without measures and with a note.

    Args:
        rows: The rows.
        seed: The seed of LightGBM.
        measured: Measures a model.
        most: The most rows that models are fitted for.
    """
    if len(rows.y) > most:
        yield from _left_out(f"for at most {most:,} rows".replace(",", " "), "refit", "continued", "new rows only")
        return
    features = rows.features()
    problem = None if rows.pipeline.tail else rows.problem
    if problem is None:
        yield from _left_out("needs trees whose scores are the results", "refit", "continued")
    elif problem.loss in {leaves.LOGISTIC, leaves.SQUARED}:
        weights = refit(problem.part(rows.tuned), _RATE)
        yield measured("refit", problem.part(rows.held).predict(weights))
        margins = problem.raw(problem.original)
        yield _measured("continued", partial(_boosted, rows, features, margins, seed), measured)
    else:
        yield from _left_out("for boosted trees of two classes, and for numbers", "refit", "continued")
    yield _measured("new rows only", partial(_boosted, rows, features, None, seed), measured)


def retrained(rows: Rows, seed: int, measured: Measure) -> Iterator[ComparedModel]:
    """Yield a new model of old and new rows, with new tables of target encoders; as :func:`baselines`.

    Args:
        rows: The old rows, followed by the new ones.
        seed: The seed of LightGBM.
        measured: Measures a model.
    """

    def make() -> Array:
        import lightgbm  # noqa: F401, PLC0415 - optional; before the features are computed

        tables = EncoderTables(rows, moved=False, empty=True).updated(rows.fit)
        return _boosted(rows, rows.features(given=tables.given if tables else None), None, seed)

    yield _measured("old and new rows", make, measured)


def _left_out(note: str, *names: str) -> Iterator[ComparedModel]:
    return (ComparedModel(name, None, note) for name in names)


def _measured(name: str, make: Callable[[], Array], measured: Measure) -> ComparedModel:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return measured(name, make())
    except ImportError:
        return ComparedModel(name, None, _MISSING)
    except Exception as error:  # noqa: BLE001 - any error of these libraries; the model is left out
        return ComparedModel(
            name, None, f"failed: {str(error).splitlines()[0][:100] if str(error) else type(error).__name__}"
        )


def _boosted(rows: Rows, features: Array, margins: Array | None, seed: int) -> Array:
    """Return predictions for the held-out rows of boosting on the others, stopped early by those to choose with."""
    import lightgbm as lgb  # noqa: PLC0415 - optional

    classes = rows.pipeline.classes
    objective = {0: "regression", 2: "binary"}.get(classes, "multiclass")
    parameters = {
        "objective": objective,
        "num_leaves": _LEAVES,
        "learning_rate": _RATE,
        "seed": seed,
        "deterministic": True,
        "num_threads": 1,  # several that wait for each other on busy cores take many times as long
        "verbose": -1,
        **({"num_class": classes} if objective == "multiclass" else {}),
    }

    def part(own: slice, **given: Any) -> Any:
        start = None if margins is None else margins[own, 0]
        return lgb.Dataset(features[own], rows.y[own], init_score=start, **given)

    data = part(rows.fit, free_raw_data=False)
    other = part(rows.chosen, reference=data)
    stop = lgb.early_stopping(_PATIENCE, verbose=False)
    booster = lgb.train(parameters, data, _ROUNDS, valid_sets=[other], callbacks=[stop])
    raw = booster.predict(features[rows.held], raw_score=True)
    raw = np.asarray(raw).reshape(rows.sizes[2], -1) + (0 if margins is None else margins[rows.held])
    if objective == "multiclass":
        return leaves.SOFTMAX.predict(raw)
    return leaves.SQUARED.predict(raw) if objective == "regression" else leaves.LOGISTIC.predict(raw)
