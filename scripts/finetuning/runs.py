"""One run of fine-tuning: a pipeline of old rows, adapted to new ones, and measured on later ones."""

from __future__ import annotations

import time
import warnings
from importlib.util import find_spec
from itertools import pairwise
from statistics import median
from typing import Any

import lightgbm as lgb
import numpy as np
import onnx
import onnxruntime as ort
import pandas as pd
from sklearn.compose import ColumnTransformer
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import TargetEncoder

import chrion
from chrion.graph.trees import is_tree_ensemble, read_ensemble
from chrion.pipelines.finetuning import TOLERANCE
from chrion.pipelines.leaves import LeafProblem, fit_leaves
from chrion.pipelines.measures import Measures, measure
from chrion.pipelines.pipeline import Pipeline
from chrion.pipelines.rows import Rows
from chrion.pipelines.soft import LEVELS, SoftOptions, Start, as_soft
from chrion.pipelines.table import Table
from finetuning.eras import DATA, Eras
from finetuning.outcomes import Gain, Run, Seconds

Array = np.ndarray[Any, Any]
#: The rows of a request whose latency is compared.
_REQUEST = 1000
#: The turns of methods whose times are compared, and the ridge if none was better than the original.
_TURNS, _RIDGE = 7, 100.0


def fitted(rows: pd.DataFrame, seed: int) -> Any:
    """Return a pipeline of scikit-learn that is fitted on rows."""
    x = rows.drop(columns="y")
    texts = _texts(rows)
    parts = [("numbers", "passthrough", [name for name in x.columns if name not in texts])]
    parts += [("texts", TargetEncoder(target_type="binary", random_state=seed), texts)] if texts else []
    trees = HistGradientBoostingClassifier(
        max_leaf_nodes=16, max_iter=300, early_stopping=True, validation_fraction=0.2, n_iter_no_change=20,
        random_state=seed,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # another name for the seed of the encoder
        return make_pipeline(ColumnTransformer(parts), trees).fit(x, rows["y"])


def run(name: str, seed: int) -> Run:
    """Fine-tune one model."""
    eras = DATA[name].draw(seed)
    pipeline = fitted(eras.old, seed)
    model = chrion.translate(pipeline)
    returned, report = chrion.finetune(model, eras.new, seed=seed)
    y = eras.later["y"].to_numpy(np.float64)
    before = measure(_scores(model, eras.later), y)
    tuned, full = chrion.finetune(model, eras.new, validation=eras.later, seed=seed)
    first = next(own.measures for own in full.compared if own.name == "original")
    methods = {r.name: _gain(first, r.measures) for r in full.compared if r.measures and first}
    both = fitted(pd.concat([eras.old, eras.new]), seed)
    methods["old and new rows"] = _gain(before, measure(both.predict_proba(eras.later.drop(columns="y")), y))
    return Run(
        drifts=DATA[name].drifts,
        adopted=report.adopted,
        returned=_gain(before, measure(_scores(returned, eras.later), y)),
        methods=methods,
        seconds=seconds_of(pipeline, eras, seed),
        latency=_latency(model, returned, eras.later) if report.adopted else 1.0,
        equal=_equal(tuned, eras.later) if full.adopted else 1.0,
        encoded=bool(_texts(eras.old)),
    )


def networks(name: str, seed: int) -> dict[str, Gain]:
    """Return the gains on later rows of a tuned pipeline (L1), of networks of it by level, and of TabM."""
    eras = DATA[name].draw(seed)
    model = chrion.translate(fitted(eras.old, seed))
    first = measure(_scores(model, eras.later), eras.later["y"].to_numpy(np.float64))
    found = {"softened": _gain(first, _softened(model, eras))}
    for level in LEVELS:
        _, report = chrion.finetune(model, eras.new, validation=eras.later, level=level, seed=seed)
        trees, before = f"{level}, as trees", report.compared[0].measures
        names = {"soft, not trained": "L1, softened", "soft": level, "soft, as trees": trees}
        if level == "L1" or report.level != "L1":  # else the tuned model is that of L1
            names["tuned"] = trees if level != "L1" and report.cost is None else level
        for own in report.compared:
            if own.name in names and own.measures and before:
                found[names[own.name]] = _gain(before, own.measures)
    if find_spec("tabm"):
        found["TabM"] = _gain(first, measure(_network(eras, seed), eras.later["y"].to_numpy(np.float64)))
    return found


def _softened(model: onnx.ModelProto, eras: Eras) -> Measures:
    """Return the measures of a pipeline on later rows as a network that is not tuned."""
    pipeline = Pipeline(model)
    tables = [Table(rows, lambda columns: pipeline.texts(columns, "y")) for rows in (eras.new, eras.later)]
    rows = Rows(pipeline, "y", tables, len(eras.later))
    soft = as_soft(rows, Start(pipeline.proto, rows.problem.original), SoftOptions())
    return measure(soft.predict(soft.raw(rows.held)), rows.y[rows.held])


def _texts(rows: pd.DataFrame) -> list[str]:
    return [name for name in rows.columns if not pd.api.types.is_numeric_dtype(rows[name])]


def _gain(before: Measures, after: Measures) -> Gain:
    return Gain(100 * (after.gain - before.gain), 100 * (after.loss - before.loss))


def _session(model: Any) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 2
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _feeds(session: ort.InferenceSession, rows: pd.DataFrame) -> dict[str, Array]:
    types = {i.name: object if i.type == "tensor(string)" else np.float32 for i in session.get_inputs()}
    return {name: rows[[name]].to_numpy(dtype) for name, dtype in types.items()}


def _scores(model: Any, rows: pd.DataFrame) -> Array:
    session = _session(model)
    return np.asarray(session.run(None, _feeds(session, rows))[1], np.float64)


def _latency(old: Any, new: Any, rows: pd.DataFrame) -> float:
    """Return the median latency of a model relative to that of another one; both take turns."""
    sessions = [_session(old), _session(new)]
    feeds = _feeds(sessions[0], rows[:_REQUEST])
    times: list[list[float]] = [[], []]
    for _ in range(60):
        for session, own in zip(sessions, times, strict=True):
            begin = time.perf_counter()
            session.run(None, feeds)
            own.append(time.perf_counter() - begin)
    return median(times[1][10:]) / median(times[0][10:])


def _equal(model: Any, rows: pd.DataFrame) -> float:
    """Return the share of rows whose class in onnxruntime is that of the leaves they reach, added in float64."""
    changed = type(model)()
    changed.CopyFrom(model)
    node = next(node for node in changed.graph.node if is_tree_ensemble(node))
    changed.graph.output.add().name = node.input[0]
    session = _session(changed)
    label, *_, features = session.run(None, _feeds(session, rows))
    ensemble = read_ensemble(node)
    leaves = ensemble.leaf_weights.astype(np.float64).sum(axis=1)
    raw = leaves[ensemble.leaves_of(features)].sum(axis=1) + ensemble.base.astype(np.float64).sum()
    return float(np.mean((raw > 0) == np.asarray(label).astype(bool)))


class Clock:
    """Takes the times of the stages of a fine-tuning that follows; of the processor, since other programs may run."""

    def __init__(self) -> None:
        self._begins = [("model", time.process_time())]

    def __call__(self, _done: int, _total: int, name: str) -> None:
        """Note that a stage begins."""
        self._begins.append((name, time.process_time()))

    @property
    def leaves(self) -> float:
        """The seconds in which leaves were fitted for each ridge, and once more."""
        return sum(end - begin for (name, begin), (_, end) in pairwise(self._begins) if name == "leaves")

    @property
    def whole(self) -> float:
        """The seconds until other methods are measured."""
        return dict(self._begins)["other methods"] - self._begins[0][1]


def seconds_of(pipeline: Any, eras: Eras, seed: int) -> Seconds:
    """Return the times of a fine-tuning beside that of LightGBM's ``refit`` of as many trees, of the processor.

    Both begin with the rows to fit in memory and a model that is loaded, encode the rows, find their leaves, and fit
    these on one thread. They take turns, and the fastest of several times of each counts.
    """
    model, clock = chrion.translate(pipeline), Clock()
    _, report = chrion.finetune(model, eras.new, seed=seed, progress=clock)
    rows = eras.new[: sum(report.rows[:2])]
    x, y = pipeline[0].transform(eras.old.drop(columns="y")), eras.old["y"].to_numpy()
    parameters = {"objective": "binary", "num_leaves": 16, "seed": seed, "num_threads": 1, "verbose": -1}
    booster = lgb.train(parameters, lgb.Dataset(x, y), pipeline[-1].n_iter_)
    own = Pipeline(model)
    reach, feeds, weights = own.leaf_runner(), _feeds(own.session, rows), own.ensemble.entry_weights.astype(np.float64)
    labels = rows["y"].to_numpy()

    def fit() -> None:
        found = reach(feeds)
        problem = LeafProblem(found, own.columns, labels.astype(float), own.base, own.scale, own.loss, weights)
        fit_leaves(problem, report.ridge or _RIDGE, tolerance=TOLERANCE)

    def refit() -> None:
        booster.refit(pipeline[0].transform(rows.drop(columns="y")), labels)

    times: list[list[float]] = [[], []]
    for _ in range(_TURNS):
        for call, taken in zip((fit, refit), times, strict=True):
            begin = time.process_time()
            call()
            taken.append(time.process_time() - begin)
    return Seconds(min(times[0]), min(times[1]), clock.leaves, clock.whole)


def _network(eras: Eras, seed: int) -> Array:
    """Return the scores of TabM, which has an encoder of its own, for the later rows."""
    from finetuning.tabm_baseline import fit_tabm  # noqa: PLC0415 - optional

    cut = len(eras.new) * 4 // 5
    early = fitted(eras.new[:cut], seed)[0]
    parts = [eras.new[:cut], eras.new[cut:], eras.later]
    x = [np.nan_to_num(np.asarray(early.transform(own.drop(columns="y")), np.float64)) for own in parts]
    y = [own["y"].to_numpy() for own in parts]
    found = fit_tabm(x[0], y[0], (x[1], y[1]), seed)(x[2])
    return np.stack([1 - found, found], axis=1)
