"""Fitted scikit-learn pipelines as ONNX models, by skl2onnx; what it cannot convert today is mended.

- HistGradientBoosting: its trees are written by Chrion. Thresholds are rounded down to float32, so that float32
  features take the same branches as in scikit-learn.
- KBinsDiscretizer with its default encoding, which is sparse: the dense encoding has the same values.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper

from chrion.common.installation import install_hint
from chrion.errors import OptionError
from chrion.graph.ort_sessions import first_line
from chrion.graph.rewrite import rename_reads
from chrion.graph.trees import Rule, TreeEnsemble, write_ensemble

Array = np.ndarray[Any, Any]
#: The version of ``ai.onnx.ml`` and the opset: those that skl2onnx and every supported onnxruntime have.
_OPSETS = {"": 18, "ai.onnx.ml": 3}
#: The name of the value that joins all columns.
_ALL = "all_columns"
#: Losses of a HistGradientBoostingRegressor whose raw scores are its predictions.
_IDENTITY_LOSSES = frozenset({"squared_error", "absolute_error", "quantile"})


def translate(pipeline: Any) -> onnx.ModelProto:
    """Return a fitted scikit-learn estimator or pipeline as an ONNX model.

    Args:
        pipeline: The estimator. There is no path or pickle in its place, since loading one runs code of its author.

    Returns:
        A model with one input a column, [rows, 1]: texts for columns with categories that are texts, float32 for
        others. Inputs have the names of the columns, or ``x0``, ``x1``, ... if the estimator was fitted without names.
        A classifier has the outputs ``label`` and ``probabilities`` ([rows, classes]).

    Raises:
        OptionError: scikit-learn or skl2onnx is not installed, the object is no fitted estimator, or a part of it
            cannot be translated; the message names it.
    """
    skl2onnx, base = _libraries()
    if not isinstance(pipeline, base.BaseEstimator):
        raise OptionError(f"pipeline: expected a fitted scikit-learn estimator, found {type(pipeline).__name__}")
    columns = _columns(pipeline)
    texts = _text_columns(pipeline, columns)
    kinds = skl2onnx.common.data_types
    steps = [part for _, part in pipeline.steps] if hasattr(pipeline, "steps") else [pipeline]
    chooses = hasattr(steps[0], "transformers_")
    if not chooses and texts and len(texts) < len(columns):
        raise OptionError(f"{type(pipeline).__name__}: texts and numbers need a ColumnTransformer before them")

    def kind(name: str, width: int) -> Any:
        return (kinds.StringTensorType if name in texts else kinds.FloatTensorType)([None, width])

    each = [(name, kind(name, 1)) for name in columns]
    inputs = each if chooses else [(_ALL, kind(columns[0], len(columns)))]
    mended = copy.deepcopy(pipeline)
    for part in _parts(mended):
        if type(part).__name__ == "KBinsDiscretizer" and part.encode == "onehot":
            part.encode = "onehot-dense"
    final = mended.steps[-1][1] if hasattr(mended, "steps") else mended
    try:
        model = skl2onnx.convert_sklearn(
            mended,
            initial_types=inputs,
            target_opset=_OPSETS,
            options={id(final): {"zipmap": False}} if base.is_classifier(steps[-1]) else None,
            custom_conversion_functions={type(part): _convert for part in _parts(mended) if _is_histogram(part)},
        )
    except OptionError:
        raise
    except Exception as error:
        raise OptionError(f"{type(pipeline).__name__}: cannot be translated: {first_line(error)}") from error
    return _with_names(model, columns) if chooses else _by_column(model, columns)


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


def _selected(own: Any, columns: list[str]) -> list[str]:
    if isinstance(own, slice):
        return columns[own]
    listed = [own] if isinstance(own, str | int) else list(own)
    if listed and all(isinstance(value, bool | np.bool_) for value in listed):
        return [name for name, chosen in zip(columns, listed, strict=True) if chosen]
    return [value if isinstance(value, str) else columns[int(value)] for value in listed]


def _parts(value: Any) -> Iterator[Any]:
    """Yield an estimator and all estimators in it."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from _parts(item)
    elif hasattr(value, "get_params") and hasattr(value, "__dict__"):
        yield value
        for item in vars(value).values():
            yield from _parts(item)


def _is_histogram(part: Any) -> bool:
    return type(part).__name__ in {"HistGradientBoostingClassifier", "HistGradientBoostingRegressor"}


def _convert(scope: Any, operator: Any, container: Any) -> None:
    """Convert a HistGradientBoosting estimator: a converter of skl2onnx."""
    ensemble = histogram_ensemble(operator.raw_operator)
    source = operator.inputs[0].full_name
    if type(operator.inputs[0].type).__name__ != "FloatTensorType":
        cast = scope.get_unique_variable_name("features")
        container.add_node("Cast", source, cast, to=onnx.TensorProto.FLOAT, name=scope.get_unique_operator_name("Cast"))
        source = cast
    kind = "TreeEnsembleRegressor" if ensemble.labels is None else "TreeEnsembleClassifier"
    node = write_ensemble(ensemble, helper.make_node(kind, [source], ["y"], domain="ai.onnx.ml"))
    attributes: Mapping[str, Any] = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    container.add_node(
        kind,
        source,
        [output.full_name for output in operator.outputs],
        op_domain="ai.onnx.ml",
        op_version=1,
        name=scope.get_unique_operator_name(kind),
        **attributes,
    )


def histogram_ensemble(model: Any) -> TreeEnsemble:
    """Return the trees of a fitted HistGradientBoosting estimator.

    Raises:
        OptionError: It has categorical features, or a loss with a link that no tree ensemble has.
    """
    name = type(model).__name__
    if getattr(model, "is_categorical_", None) is not None:
        raise OptionError(f"{name}: its categorical features cannot be translated", hint="encode them before")
    classes = getattr(model, "classes_", None)
    if classes is None and model.loss not in _IDENTITY_LOSSES:
        raise OptionError(f"{name}: the loss {model.loss!r} cannot be translated")
    trees = [(target, tree.nodes) for row in model._predictors for target, tree in enumerate(row)]  # noqa: SLF001 - it has no public access
    counts = [len(nodes) for _, nodes in trees]
    nodes = np.concatenate([own for _, own in trees])
    first = np.repeat(np.cumsum([0, *counts[:-1]]), counts)
    leaf = nodes["is_leaf"].astype(bool)
    #: The number of each node as a child.
    child = np.where(leaf, ~(np.cumsum(leaf) - 1), np.cumsum(~leaf) - 1)
    inner = ~leaf
    thresholds = nodes["num_threshold"][inner]
    rounded = thresholds.astype(np.float32)
    above = rounded.astype(np.float64) > thresholds
    rounded[above] = np.nextafter(rounded[above], np.float32(-np.inf))
    several = classes is not None and len(classes) > 2
    labels = None if classes is None else tuple(classes.tolist())
    if labels is not None and not isinstance(labels[0], str):
        labels = tuple(int(label) for label in labels)
    return TreeEnsemble(
        roots=child[np.cumsum([0, *counts[:-1]])],
        features=nodes["feature_idx"][inner].astype(np.int64),
        rules=np.full(int(inner.sum()), Rule.LEQ, np.uint8),
        thresholds=rounded,
        true=child[(first + nodes["left"])[inner]],
        false=child[(first + nodes["right"])[inner]],
        missing_true=nodes["missing_go_to_left"][inner].astype(bool),
        members={},
        leaf_count=int(leaf.sum()),
        entry_leaves=np.arange(int(leaf.sum())),
        entry_targets=np.repeat([target for target, _ in trees], counts)[leaf],
        entry_weights=nodes["value"][leaf].astype(np.float32),
        targets=1 if labels is None else len(labels),
        base=np.ravel(model._baseline_prediction).astype(np.float32),  # noqa: SLF001 - it has no public access
        transform="NONE" if labels is None else "SOFTMAX" if several else "LOGISTIC",
        labels=labels,
    )
