"""Latency of one ensemble of trees in everything that can run it, side by side.

LightGBM fits 100 trees of 64 leaves on ten numbers. The same trees run in LightGBM, in compilers for trees (lleaves and
tl2cgen), as tensors in PyTorch (Hummingbird), in onnxruntime as its kernel and as both tensor forms, and in
a HybridSession; scikit-learn's HistGradientBoosting has as many trees of its own. All use two threads and take turns:

    python scripts/bench_trees.py [-o docs/data] [--rounds 15]

Packages that are not installed are left out; lleaves needs ``llvmlite`` before 0.45. Cells are medians in ms; a form
that would need gigabytes is left out.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from command_arguments import add_output
from page_markers import markdown_table
from result_files import write_results

import chrion
from chrion.graph.trees import FORMS, is_tree_ensemble, read_ensemble, write_ensemble
from chrion.graph.trees.checks import with_own_leaves
from chrion.graph.trees.tensor_form import with_tensor_trees

Array = np.ndarray[Any, Any]
TREES, LEAVES, FEATURES, THREADS = 100, 64, 10, 2
BATCHES = (1, 10, 100, 1000, 10_000, 100_000)
#: Candidates with other trees: those of scikit-learn, and half of them on one thread, which bounds a split over lanes.
OWN, HALF = "scikit-learn, trees of its own", "onnxruntime, half of the trees, one thread"
#: The most numbers of a value of the gemm form: rows times trees times leaves.
_MOST = 1 << 27
_TRIAL_S, _PAUSE_S = 0.1, 2.0
#: Returns the probability of class 1 for features.
Predict = Callable[[Array], Array]


def candidates(folder: Path) -> Iterator[tuple[str, Predict]]:
    """Yield what can run the trees, by name; LightGBM is the first."""
    import lightgbm as lgb  # noqa: PLC0415 - the help needs no libraries
    import onnxruntime as ort  # noqa: PLC0415
    from onnxmltools import convert_lightgbm  # noqa: PLC0415
    from onnxmltools.convert.common.data_types import FloatTensorType  # noqa: PLC0415
    from sklearn.ensemble import HistGradientBoostingClassifier  # noqa: PLC0415

    rng = np.random.default_rng(0)
    x = rng.standard_normal((20_000, FEATURES)).astype(np.float32)
    y = (x[:, 0] * x[:, 1] + np.sin(2 * x[:, 2]) + 0.5 * rng.logistic(size=len(x)) > 0).astype(np.int64)
    parameters = {"objective": "binary", "num_leaves": LEAVES, "verbose": -1, "num_threads": 1}
    booster = lgb.train(parameters, lgb.Dataset(x, y), TREES)
    yield "LightGBM", lambda rows: np.asarray(booster.predict(rows, num_threads=THREADS))
    own = HistGradientBoostingClassifier(max_leaf_nodes=LEAVES, max_iter=TREES, early_stopping=False).fit(x, y)
    yield OWN, lambda rows: own.predict_proba(rows)[:, 1]
    booster.save_model(folder / "trees.txt")
    yield from _compiled(folder)
    model = convert_lightgbm(booster, initial_types=[("x", FloatTensorType([None, FEATURES]))], zipmap=False)
    model.graph.output[1].type.tensor_type.shape.dim[0].dim_param = "rows"
    options = ort.SessionOptions()
    options.intra_op_num_threads = THREADS
    options.log_severity_level = 4  # the converter declares the shape of one row
    forms = {"onnxruntime": model}
    forms |= {f"onnxruntime, {form}": with_tensor_trees(model, form, {"x": "tensor(float)"}) for form in FORMS}
    for name, proto in forms.items():
        session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
        yield name, _limited(_of(session), "gemm" in name)
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(_half(model).SerializeToString(), options, providers=["CPUExecutionProvider"])
    yield HALF, _of(session)
    options.intra_op_num_threads = THREADS
    yield "HybridSession", _of(chrion.HybridSession(model, options, tune="now"))


def _of(session: Any) -> Predict:
    return lambda rows: np.asarray(session.run(None, {"x": rows})[1][:, 1])


def _half(model: Any) -> Any:
    """Return the model with half of its trees: what each of two lanes would run."""
    changed = type(model)()
    changed.CopyFrom(model)
    [node] = filter(is_tree_ensemble, changed.graph.node)
    ensemble = read_ensemble(node)
    node.CopyFrom(write_ensemble(with_own_leaves(replace(ensemble, roots=ensemble.roots[: TREES // 2])), node))
    return changed


def _limited(predict: Predict, limited: bool) -> Predict:  # noqa: FBT001 - private
    def run(rows: Array) -> Array:
        if limited and len(rows) * TREES * LEAVES > _MOST:
            raise MemoryError
        return predict(rows)

    return run


def _compiled(folder: Path) -> Iterator[tuple[str, Predict]]:
    """Yield compilers of the trees in a file of LightGBM, and Hummingbird."""
    file = str(folder / "trees.txt")
    if find_spec("lleaves"):
        import lleaves  # noqa: PLC0415 - optional

        compiled = lleaves.Model(model_file=file)
        compiled.compile()
        yield "lleaves", lambda rows: compiled.predict(rows, n_jobs=THREADS)
    if find_spec("tl2cgen") and find_spec("treelite"):
        import tl2cgen  # noqa: PLC0415 - optional
        import treelite  # noqa: PLC0415

        library = str(folder / "trees.so")
        trees = treelite.frontend.load_lightgbm_model(file)
        tl2cgen.export_lib(trees, toolchain="gcc", libpath=library, params={"parallel_comp": THREADS})
        predictor = tl2cgen.Predictor(library, nthread=THREADS)
        yield "tl2cgen", lambda rows: predictor.predict(tl2cgen.DMatrix(rows)).reshape(len(rows), -1)[:, -1]
    if find_spec("hummingbird"):
        import lightgbm as lgb  # noqa: PLC0415 - optional
        import torch  # noqa: PLC0415
        from hummingbird.ml import convert  # noqa: PLC0415

        torch.set_num_threads(THREADS)
        tensors = convert(lgb.Booster(model_file=file), "torch")
        # It sums the trees of a Booster, without the logistic function.
        yield "Hummingbird", _limited(lambda rows: 1 / (1 + np.exp(-np.asarray(tensors.predict(rows)))), limited=True)


def measure(found: dict[str, Predict], rounds: int) -> list[list[str]]:
    """Return the rows of the table: medians in ms by candidate and batch."""
    cells: dict[str, list[str]] = {name: [] for name in found}
    for batch in BATCHES:
        x = np.random.default_rng(batch).standard_normal((batch, FEATURES)).astype(np.float32)
        running = {name: predict for name, predict in found.items() if _fits(predict, x)}
        times: dict[str, list[float]] = {name: [] for name in running}
        for _ in range(rounds):
            for name, predict in running.items():
                times[name].append(_trial(predict, x))
        for name, own in cells.items():
            own.append(f"{1e3 * median(times[name]):.3g}" if name in times else "")
    heads = ["runs the trees", "1 row", *(f"{batch:,} rows".replace(",", " ") for batch in BATCHES[1:])]
    return [heads, *([name, *own] for name, own in cells.items())]


def _fits(predict: Predict, x: Array) -> bool:
    time.sleep(_PAUSE_S)  # a HybridSession tunes now, and threads of what ran before spin for a while
    try:
        predict(x)
    except MemoryError:
        return False
    return True


def _trial(predict: Predict, x: Array) -> float:
    """Return the median time of requests in a moment, after as long a moment of them.

    The system needs some requests to spread the threads of a library again, after those of another one.
    """
    times: list[float] = []
    end = time.perf_counter() + _TRIAL_S
    while time.perf_counter() < end:
        predict(x)
    end = time.perf_counter() + _TRIAL_S
    while not times or time.perf_counter() < end:
        begin = time.perf_counter()
        predict(x)
        times.append(time.perf_counter() - begin)
    return median(times)


def check(found: dict[str, Predict]) -> None:
    """Check that all candidates with LightGBM's trees have its results.

    Raises:
        SystemExit: One has others.
    """
    x = np.random.default_rng(1).standard_normal((1000, FEATURES)).astype(np.float32)
    expected = found["LightGBM"](x)
    for name, predict in found.items():
        if name not in {OWN, HALF} and not np.allclose(predict(x), expected, atol=1e-4):
            raise SystemExit(f"error: {name} has other results than LightGBM")


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_output(parser)
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = dict(candidates(Path(folder)))
        check(found)
        table = markdown_table(measure(found, given.rounds))
    print(table)
    write_results(given.output, {"trees": table})


if __name__ == "__main__":
    main()
