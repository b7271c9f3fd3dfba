"""Fitted scikit-learn pipelines as ONNX models, by skl2onnx; what it cannot convert today is mended.

HistGradientBoosting, KBinsDiscretizer, Normalizer, QuantileTransformer, SplineTransformer, and k-means before another
step have converters of Chrion (:mod:`chrion.pipelines.histograms`, :mod:`chrion.pipelines.transformers`); those of
LightGBM and XGBoost are in onnxmltools.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import onnx
from onnx import helper

from chrion.common.installation import install_hint
from chrion.errors import OptionError
from chrion.graph.ort_sessions import first_line
from chrion.graph.rewrite import rename_reads
from chrion.pipelines.histograms import categories_of, convert_histograms, is_histogram
from chrion.pipelines.transformers import (
    convert_bins,
    convert_distances,
    convert_norms,
    convert_quantiles,
    convert_splines,
)

#: The version of ``ai.onnx.ml`` and the opset: those that skl2onnx and every supported onnxruntime have.
_OPSETS = {"": 18, "ai.onnx.ml": 3}
#: The name of the value that joins all columns.
_ALL = "all_columns"
#: The converters of Chrion, by the name of the type.
_CONVERTERS: dict[str, Callable[[Any, Any, Any], None]] = {
    "HistGradientBoostingClassifier": convert_histograms,
    "HistGradientBoostingRegressor": convert_histograms,
    "KBinsDiscretizer": convert_bins,
    "KMeansDistances": convert_distances,
    "Normalizer": convert_norms,
    "QuantileTransformer": convert_quantiles,
    "SplineTransformer": convert_splines,
}


#: The options of their converters for classifiers, and the values of these.
_CLASSIFIER_OPTIONS = {"zipmap": [True, False, "columns"], "nocl": [True, False]}
#: The estimators with a converter of onnxmltools: the module of the converter in it, and its name.
_BOOSTED = {
    "LGBMClassifier": ("lightgbm.operator_converters.LightGbm", "convert_lightgbm"),
    "LGBMRegressor": ("lightgbm.operator_converters.LightGbm", "convert_lightgbm"),
    "XGBClassifier": ("xgboost.operator_converters.XGBoost", "convert_xgboost"),
    "XGBRegressor": ("xgboost.operator_converters.XGBoost", "convert_xgboost"),
}


def translate(pipeline: Any) -> onnx.ModelProto:
    """Return a fitted scikit-learn estimator or pipeline as an ONNX model.

    Args:
        pipeline: The estimator. There is no path or pickle in its place, since loading one runs code of its author.

    Returns:
        A model with one input a column, ``[rows, 1]``: texts for columns with categories that are texts, float32 for
        others. Inputs have the names of the columns, or ``x0``, ``x1``, ... if the estimator was fitted without names.
        A classifier has the outputs ``label`` and ``probabilities`` (``[rows, classes]``).

    Raises:
        OptionError: scikit-learn or skl2onnx is not installed, or onnxmltools for LightGBM and XGBoost; the object is
            no fitted estimator, or a part of it cannot be translated; the message names it.
    """
    skl2onnx, base = _libraries()
    if not isinstance(pipeline, base.BaseEstimator):
        raise OptionError(f"pipeline: expected a fitted scikit-learn estimator, found {type(pipeline).__name__}")
    columns = _columns(pipeline)
    texts = _text_columns(pipeline, columns)
    kinds = skl2onnx.common.data_types
    steps = [part for _, part in pipeline.steps] if hasattr(pipeline, "steps") else [pipeline]
    if len(getattr(steps[-1], "classes_", (0, 1))) < 2:
        raise OptionError(f"{type(pipeline).__name__}: fitted on one class, {str(steps[-1].classes_[0])!r}")
    #: Whether the first step takes each column as it is.
    chooses = hasattr(steps[0], "transformers_") or bool(is_histogram(steps[0]) and categories_of(steps[0]))
    if not chooses and texts and len(texts) < len(columns):
        raise OptionError(f"{type(pipeline).__name__}: texts and numbers need a ColumnTransformer before them")

    def kind(name: str, width: int) -> Any:
        return (kinds.StringTensorType if name in texts else kinds.FloatTensorType)([None, width])

    each = [(name, kind(name, 1)) for name in columns]
    inputs = each if chooses else [(_ALL, kind(columns[0], len(columns)))]
    _register_boosted(skl2onnx, pipeline)
    try:
        model = _converted(skl2onnx, _mended(pipeline), inputs, classifier=base.is_classifier(steps[-1]))
    except OptionError:
        raise
    except Exception as error:
        follows = steps[1:] and type(steps[-1]).__name__ not in str(error)
        raise OptionError(
            f"{type(pipeline).__name__}: cannot be translated: {first_line(error)}",
            hint="apply the steps up to it yourself, and translate the rest, as pipeline[1:]" if follows else "",
        ) from error
    results = 2 if base.is_classifier(steps[-1]) else 1 if base.is_regressor(steps[-1]) else len(model.graph.output)
    del model.graph.output[:-results]  # leaves that a step encodes are an output, too
    _check_outputs(model, columns)
    _rename_inner(model, columns)
    model = _with_names(model, columns) if chooses else _by_column(model, columns)
    for info in (*model.graph.input, *model.graph.output):
        dims = info.type.tensor_type.shape.dim
        if dims and not dims[0].HasField("dim_value"):
            dims[0].dim_param = "rows"
    return model


def _register_boosted(skl2onnx: Any, pipeline: Any) -> None:
    """Register onnxmltools' converters for a pipeline's estimators of LightGBM and XGBoost, unless the caller has.

    Raises:
        OptionError: onnxmltools is not installed.
    """
    registered = importlib.import_module("skl2onnx._supported_operators").sklearn_operator_name_map
    for kind in {type(part) for part in _parts(pipeline) if type(part).__name__ in _BOOSTED} - registered.keys():
        name, shapes = kind.__name__, skl2onnx.common.shape_calculator
        module, function = _BOOSTED[name]
        try:
            convert = getattr(importlib.import_module(f"onnxmltools.convert.{module}"), function)
        except ImportError as error:
            raise OptionError(
                f"{name}: translation needs the package onnxmltools", hint="pip install onnxmltools"
            ) from error
        if name.endswith("Classifier"):
            calculate, options = shapes.calculate_linear_classifier_output_shapes, _CLASSIFIER_OPTIONS
        else:
            calculate, options = shapes.calculate_linear_regressor_output_shapes, None
        skl2onnx.update_registered_converter(kind, f"Onnxmltools{name}", calculate, convert, options=options)


def _mended(pipeline: Any) -> Any:
    """Return a copy as skl2onnx takes it: dense codes of leaves, and weights of votes without dropped estimators."""
    mended = copy.deepcopy(pipeline)
    for part in _parts(mended):
        if type(part).__name__ == "RandomTreesEmbedding":
            part.sparse_output = part.one_hot_encoder_.sparse_output = False
        if type(part).__name__ == "VotingClassifier":
            part.flatten_transform = False  # which scores do not depend on
        if type(part).__name__.startswith("Voting") and part.weights is not None:
            part.weights = np.asarray(part._weights_not_none)  # noqa: SLF001 - it has no public access
        if type(part).__name__ in {"KMeans", "MiniBatchKMeans"} and part is not _final(mended):
            part.__class__ = _distances_class()  # of a copy
    return mended


def _final(estimator: Any) -> Any:
    """Return the last step of a pipeline, or the estimator; of a search, that of the best one."""
    if hasattr(estimator, "best_estimator_"):
        return _final(estimator.best_estimator_)
    return _final(estimator.steps[-1][1]) if hasattr(estimator, "steps") else estimator


@cache
def _distances_class() -> type:
    """Return the class of k-means as a transformer; skl2onnx knows it as a clusterer alone."""
    base = _libraries()[1]
    return type("KMeansDistances", (base.TransformerMixin, base.BaseEstimator), {})


def _converted(skl2onnx: Any, pipeline: Any, inputs: Any, *, classifier: bool) -> onnx.ModelProto:
    final = pipeline.steps[-1][1] if hasattr(pipeline, "steps") else pipeline
    own = {type(part) for part in _parts(pipeline) if type(part).__name__ in _CONVERTERS}
    model: onnx.ModelProto = skl2onnx.convert_sklearn(
        pipeline,
        initial_types=inputs,
        target_opset=_OPSETS,
        options={id(final): {"zipmap": False}} if classifier else None,
        custom_conversion_functions={kind: _CONVERTERS[kind.__name__] for kind in own},
        custom_shape_calculators=dict.fromkeys(own, partial(_set_types, skl2onnx.common.data_types)),
    )
    return model


def _check_outputs(model: onnx.ModelProto, columns: Sequence[str]) -> None:
    """Raise an OptionError if a column has the name of an output."""
    taken = [info.name for info in model.graph.output if info.name in columns]
    if taken:
        raise OptionError(f"column {taken[0]!r}: an output of the model has this name", hint="rename the column")


def _rename_inner(model: onnx.ModelProto, columns: Sequence[str]) -> None:
    """Rename the inner values and weights that have the name of a column, in place."""
    graph = model.graph
    given = {info.name for info in graph.input}
    inner = {name for node in graph.node for name in node.output} | {tensor.name for tensor in graph.initializer}
    names = {name: f"{name}/inner" for name in inner & set(columns) - given}
    rename_reads(graph.node, names)
    for node in graph.node:
        node.output[:] = [names.get(name, name) for name in node.output]
    for tensor in graph.initializer:
        tensor.name = names.get(tensor.name, tensor.name)


def _with_names(model: onnx.ModelProto, columns: Sequence[str]) -> onnx.ModelProto:
    """Return a model whose inputs have the names of the columns; skl2onnx replaces some characters."""
    names = {info.name: name for info, name in zip(model.graph.input, columns, strict=True) if info.name != name}
    rename_reads(model.graph.node, names)
    for info in model.graph.input:
        info.name = names.get(info.name, info.name)
    return model


def _by_column(model: onnx.ModelProto, columns: Sequence[str]) -> onnx.ModelProto:
    """Return a model with an input for each column in place of a single one."""
    whole, element = model.graph.input[0].name, model.graph.input[0].type.tensor_type.elem_type
    if whole in columns:
        rename_reads(model.graph.node, {whole: f"{whole}/inner"})
        whole = f"{whole}/inner"
    del model.graph.input[:]
    model.graph.input.extend(helper.make_tensor_value_info(name, element, [None, 1]) for name in columns)
    model.graph.node.insert(0, helper.make_node("Concat", columns, [whole], f"{whole}/columns", axis=1))
    if not any(opset.domain == "" for opset in model.opset_import):
        model.opset_import.add(version=_OPSETS[""])
    return model


def _libraries() -> tuple[Any, Any]:
    try:
        import skl2onnx  # noqa: PLC0415 - part of an extra
        import skl2onnx.common.data_types  # noqa: PLC0415 - part of an extra
        import skl2onnx.common.shape_calculator  # noqa: PLC0415 - part of an extra
        from sklearn import base  # noqa: PLC0415 - part of an extra
    except ImportError as error:
        raise OptionError(
            "translation needs the packages scikit-learn and skl2onnx", hint=install_hint("translate")
        ) from error
    return skl2onnx, base


def _columns(pipeline: Any) -> list[str]:
    names = getattr(pipeline, "feature_names_in_", None)
    count = getattr(pipeline, "n_features_in_", None)
    if names is None and count is None:
        raise OptionError(f"{type(pipeline).__name__}: not fitted, or fitted without columns", hint="fit it first")
    return [str(name) for name in names] if names is not None else [f"x{at}" for at in range(count or 0)]


def _text_columns(pipeline: Any, columns: list[str]) -> set[str]:
    """Return the columns whose categories are texts."""
    found = set()
    for part, own in _encoded(pipeline, columns):
        for name, categories in zip(own, part.categories_, strict=False):
            if np.asarray(categories).dtype.kind in "OUST":
                found.add(name)
    return found


def _encoded(estimator: Any, columns: list[str]) -> Iterator[tuple[Any, list[str]]]:
    """Yield encoders with the columns that they read."""
    if hasattr(estimator, "transformers_"):
        for _, part, own in estimator.transformers_:
            if not isinstance(part, str):
                yield from _encoded(part, _selected(own, columns))
    elif hasattr(estimator, "steps"):
        for _, part in estimator.steps:
            yield from _encoded(part, columns)
            if hasattr(part, "transformers_"):
                return  # what follows reads other columns
    elif hasattr(estimator, "categories_"):
        yield estimator, columns
    elif is_histogram(estimator) and categories_of(estimator):
        yield from _encoded(estimator._preprocessor, columns)  # noqa: SLF001 - it has no public access


def _selected(own: Any, columns: list[str]) -> list[str]:
    if isinstance(own, slice):
        return columns[own]
    listed = [own] if isinstance(own, str | int) else list(own)
    if listed and all(isinstance(value, bool | np.bool_) for value in listed):
        return [name for name, chosen in zip(columns, listed, strict=True) if chosen]
    return [value if isinstance(value, str) else columns[int(value)] for value in listed]


def _set_types(kinds: Any, operator: Any) -> None:
    """Set the types of the outputs of an operator with a converter of Chrion: a shape calculator of skl2onnx."""
    model = operator.raw_operator
    if hasattr(model, "cluster_centers_"):
        operator.outputs[0].type = kinds.FloatTensorType([None, len(model.cluster_centers_)])
    elif not is_histogram(model):
        width = sum(model.n_bins_) if getattr(model, "encode", "ordinal") != "ordinal" else model.n_features_in_
        operator.outputs[0].type = kinds.FloatTensorType([None, getattr(model, "n_features_out_", int(width))])
    elif hasattr(model, "classes_"):
        label = kinds.StringTensorType if model.classes_.dtype.kind in "OUST" else kinds.Int64TensorType
        operator.outputs[0].type = label([None])
        operator.outputs[1].type = kinds.FloatTensorType([None, len(model.classes_)])
    else:
        operator.outputs[0].type = kinds.FloatTensorType([None, 1])


def _parts(value: Any) -> Iterator[Any]:
    """Yield an estimator and all estimators in it."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from _parts(item)
    elif hasattr(value, "get_params") and hasattr(value, "__dict__"):
        yield value
        for item in vars(value).values():
            yield from _parts(item)
