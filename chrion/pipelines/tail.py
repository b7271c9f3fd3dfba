"""The arithmetic operators at the end of a pipeline, which can be differentiated, and their weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from chrion.errors import ChrionError
from chrion.graph.ort_sessions import first_line
from chrion.graph.rewrite import RewriteError, bodies_of, needed_nodes, producers
from chrion.pipelines.operators import FLOATS, WEIGHTS, applied, attributes, is_differentiable
from chrion.pipelines.support_vectors import classes_of

Array = np.ndarray[Any, Any]
#: Operators that leave the scores as they are.
MOVES = frozenset({"Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
#: Operators with a linear model.
_MODELS = frozenset({"Gemm", "LinearClassifier", "LinearRegressor", "MatMul", "SVMClassifier", "SVMRegressor"})
_LABELS = ("classlabels_int64s", "classlabels_ints", "classlabels_strings")
_INTEGERS = frozenset({"tensor(int32)", "tensor(int64)"})
#: Operators between the categories of the inputs and the integers that look up rows of tables.
_NUMBERING = MOVES | {"Add", "CategoryMapper", "Gather", "LabelEncoder", "Mod", "Mul", "Slice", "Split", "Sub"}
#: The most rows of a table that integers look up: they are passed as float32.
_MOST_ROWS = 1 << 24
#: The type of a value, as onnxruntime names it, and its shape.
Kind = tuple[str, Sequence[int | str | None] | None]


@contextmanager
def arithmetic_refusals() -> Iterator[None]:
    """Refuse operators that have no function for their inputs, or attributes that cannot be read."""
    try:
        yield
    except ChrionError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise RewriteError(f"cannot be differentiated: {first_line(error)}") from error


@dataclass(frozen=True)
class Source:
    """A value that operators begin with, and its shape after the rows; None for that of the features."""

    name: str
    shape: tuple[int, ...] | None = None
    #: Whether its integers look up rows of tables.
    looks_up: bool = False


@dataclass(frozen=True, eq=False)
class Tail:
    """The operators from some values of a model to its scores.

    Attributes:
        sources: The values that they begin with: features, the scores of trees, or several that features consist of.
        result: The value with probabilities, or numbers.
        nodes: The operators in their order.
        constants: What they read beside the sources and each other, attributes with weights included, by name.
        labels: The classes; None if the scores are numbers.
        shared: The constants that other operators of the model read, too.
    """

    sources: Sequence[Source]
    result: str
    nodes: Sequence[onnx.NodeProto]
    constants: Mapping[str, Array]
    labels: tuple[Any, ...] | None
    shared: frozenset[str] = frozenset()

    @cached_property
    def weights(self) -> Mapping[str, Array]:
        """The constants that are weights of these operators alone; exponents, bounds and scalar factors are not."""
        read = [(node, at, name) for node in self.nodes for at, name in enumerate(self.inputs(node))]
        read = [own for own in read if own[2] in self.constants]
        others = {name for node, at, name in read if not _is_weight(node, at, self.constants[name])}
        return {name: self.constants[name] for _, _, name in read if name not in others | self.shared}

    @cached_property
    def tables(self) -> frozenset[str]:
        """The weights that integers look up."""
        names = {own.name for own in self.sources if own.looks_up}
        looked_up = (node.input[0] for node in self.nodes if node.op_type == "Gather" and node.input[1] in names)
        return frozenset(looked_up) & self.weights.keys()

    @property
    def looks_up(self) -> bool:
        """Whether integers among the features look up rows of tables."""
        return any(own.looks_up for own in self.sources)

    @cached_property
    def integers(self) -> Array:
        """Whether each feature is such an integer; a single value if none is."""
        columns = [np.full(int(np.prod(own.shape or ())), own.looks_up) for own in self.sources]
        return np.concatenate(columns) if self.looks_up else np.array([False])

    @cached_property
    def mirrored(self) -> frozenset[str]:
        """The weights that have opposite values for two classes, whose logistic functions add up to 1."""
        return frozenset(
            name
            for node in self.nodes
            if node.op_type == "LinearClassifier" and attributes(node).get("post_transform") == "LOGISTIC"
            for _, name in _weight_names(node)
            if len(self.constants[f"{node.output[-1]}/intercepts"]) == 2
        )

    def values(self, np_: Any, weights: Mapping[str, Any], features: Any) -> dict[str, Any]:
        """Return all values of the operators by name.

        Args:
            np_: JAX's form of NumPy.
            weights: The weights.
            features: The values that they begin with, [rows, features].
        """
        found, first = {"": None, **self.constants, **weights}, 0
        for own in self.sources:
            if own.shape is None:
                found[own.name] = features
                continue
            last = first + int(np.prod(own.shape))
            part = features[:, first:last].reshape(len(features), *own.shape)
            found[own.name], first = part.astype(np.int32) if own.looks_up else part, last
        for node in self.nodes:
            inputs = [found[name] for name in self.inputs(node)]
            fixed = all(own is None or isinstance(own, np.ndarray | np.generic) for own in inputs)
            found[node.output[-1]] = applied(np if fixed else np_, node, inputs)
        return found

    @staticmethod
    def inputs(node: onnx.NodeProto) -> list[str]:
        """Return the inputs of an operator, followed by the names of its attributes that are weights."""
        return [*node.input, *(name for _, name in _weight_names(node))]

    @cached_property
    def producers(self) -> Mapping[str, onnx.NodeProto]:
        """The operators by what they compute."""
        return producers(self.nodes)

    def with_weights(self, model: onnx.ModelProto, weights: Mapping[str, Array]) -> onnx.ModelProto:
        """Return the model with other weights; the rest of it stays."""
        weights = {name: own for name, own in weights.items() if not np.array_equal(own, self.constants[name])}
        changed = onnx.ModelProto()
        changed.CopyFrom(model)
        for tensor in changed.graph.initializer:
            if tensor.name in weights:
                tensor.CopyFrom(numpy_helper.from_array(weights[tensor.name], tensor.name))
        for node in changed.graph.node:
            names = [("value", node.output[0])] if node.op_type == "Constant" else _weight_names(node)
            for attribute, name in names:
                if name in weights:
                    own = weights[name]
                    value = own.tolist() if node.op_type != "Constant" else numpy_helper.from_array(own, name)
                    kept = [old for old in node.attribute if old.name != attribute]
                    del node.attribute[:]
                    node.attribute.extend([*kept, helper.make_attribute(attribute, value)])
        return changed


@arithmetic_refusals()
def find_tail(model: onnx.ModelProto, kind_of: Callable[[str], Kind]) -> Tail:
    """Return the operators after the earliest table of features that the scores depend on alone.

    If integers look up tables of weights, the operators begin with these integers and all else that scores depend on.

    Args:
        model: The model.
        kind_of: Returns the type and the shape of a value.

    Raises:
        RewriteError: There are none with weights; the message names the operator in the way.
    """
    fixed = _fixed(model.graph)
    try:
        sources = _sources(model.graph, fixed, kind_of)
        tail = tail_after(model, sources) if sources else None
    except RewriteError:
        with suppress(RewriteError):
            return _after_a_table(model, fixed, kind_of)
        raise
    return tail if tail and tail.weights else _after_a_table(model, fixed, kind_of)


def _after_a_table(model: onnx.ModelProto, fixed: Collection[str], kind_of: Callable[[str], Kind]) -> Tail:
    """Return the operators after the earliest table of features that the scores depend on alone."""
    ends = {_result(model.graph)}
    found: list[str] = []
    blocked = None
    for node in reversed(model.graph.node):
        if ends.isdisjoint(node.output):
            continue
        if not is_differentiable(node, fixed):
            blocked = node
            break
        ends = (ends - {*node.output}) | ({*node.input} - {"", *fixed})
        found += ends if len(ends) == 1 else ()
    for source in reversed(found):
        kind, shape = kind_of(source)
        if kind == "tensor(float)" and len(shape or [0, 0]) == 2:
            tail = tail_after(model, [Source(source)])
            if tail.weights:
                return tail
            break
    if blocked is None:
        raise RewriteError("has no table of float32 features that all scores depend on, with weights after it")
    if any(node.op_type in _MODELS for node in needed_nodes(model.graph.node, blocked.input)):
        raise RewriteError("is not differentiable", blocked)
    hint = "fine-tuning needs trees or a linear model"
    raise RewriteError("is not differentiable, and no weights follow it", blocked, hint=hint)


def _sources(graph: onnx.GraphProto, fixed: Collection[str], kind_of: Callable[[str], Kind]) -> list[Source]:
    """Return the values that scores depend on, if integers that look up tables of weights are among them."""
    tables = _constants(graph, graph.node)
    numbers = _numbers(graph, fixed)
    ends, looked_up = {_result(graph)}, set[str]()
    for node in reversed(graph.node):
        if ends.isdisjoint(node.output) or not looked_up.isdisjoint(node.output):
            continue
        if not is_differentiable(node, fixed, numbers):
            continue
        read = {*node.input} - {"", *fixed}
        if node.op_type == "Gather" and node.input[1] in read:
            axis = attributes(node).get("axis", 0)
            if node.input[0] not in tables:
                continue
            if tables[node.input[0]].shape[axis] > _MOST_ROWS:
                raise RewriteError(f"looks up a table of more than {_MOST_ROWS} rows", node)
            looked_up.add(node.input[1])
            read = set()
        ends = (ends - {*node.output}) | read
    return [_source(name, kind_of(name), looks_up=name in looked_up) for name in sorted(ends | looked_up) if looked_up]


def _numbers(graph: onnx.GraphProto, fixed: Collection[str]) -> set[str]:
    """Return the inputs, and the values that number their categories; not numbers that are computed from features."""
    found = {info.name for info in graph.input} - {*fixed}
    for node in graph.node:
        read = {*node.input} - {"", *fixed}
        if node.op_type in _NUMBERING and read and read <= found:
            found.update(node.output)
    return found


def _source(name: str, kind: Kind, *, looks_up: bool) -> Source:
    """Return a value that operators begin with, of a type and a shape."""
    own, shape = kind
    columns = [size for size in shape[1:] if isinstance(size, int)] if shape else []
    if own not in _INTEGERS | {"tensor(float)"} or not shape or len(columns) < len(shape) - 1:
        raise RewriteError(f"scores depend on {name!r}, of type {own} and shape {[*(shape or ())]}",
                           hint="expected float32 or integers, of a known number for each row")  # fmt: skip
    return Source(name, tuple(columns), looks_up)


@arithmetic_refusals()
def tail_after(model: onnx.ModelProto, sources: Sequence[Source]) -> Tail:
    """Return the operators from some values to the scores.

    Raises:
        RewriteError: One is not differentiable, or the scores depend on other values, too.
    """
    graph, result, names = model.graph, _result(model.graph), {own.name for own in sources}
    nodes = needed_nodes([node for node in graph.node if names.isdisjoint(node.output)], [result])
    fixed, looked_up = _fixed(graph), {own.name for own in sources if own.looks_up}
    for node in nodes:
        if node.op_type != "Constant" and not is_differentiable(node, fixed, looked_up):
            raise RewriteError("is not differentiable", node)
    made = names.union(*(node.output for node in nodes))
    if {name for node in nodes for name in node.input} - made - fixed - {""}:
        raise RewriteError(f"scores depend on more than {', '.join(map(repr, sorted(names)))}")
    inner = tuple(node for node in nodes if node.op_type != "Constant")
    shared = _read_outside(graph.node, {name for node in nodes for name in node.output})
    return Tail(sources, result, inner, _constants(graph, inner), _labels(graph, result), shared)


def _read_outside(nodes: Iterable[onnx.NodeProto], made: Collection[str]) -> frozenset[str]:
    """Return the values that operators read, also in their bodies, except for those that make some values."""
    others = [node for node in nodes if not {*node.output} & {*made}]
    inner = (_read_outside(body.node, ()) for node in others for body in bodies_of(node))
    return frozenset(name for node in others for name in node.input).union(*inner)


def _is_weight(node: onnx.NodeProto, at: int, value: Array) -> bool:
    if value.dtype != np.float32 or node.op_type in {"Clip", "Max", "Min"} or (node.op_type == "Pow" and at == 1):
        return False
    added = node.op_type in {"Add", "Gemm", "MatMul"} or (node.op_type == "Sub" and at == 1)
    return value.size > 1 or added or node.op_type in WEIGHTS


def _weight_names(node: onnx.NodeProto) -> list[tuple[str, str]]:
    """Return the attributes of a node that are weights, and their names among constants."""
    names = WEIGHTS.get(node.op_type, ())
    if node.op_type.startswith("SVM") and "support_vectors" not in attributes(node):  # a linear model
        names = names[1:]
    return [(attribute, f"{node.output[-1]}/{attribute}") for attribute in names]


def _fixed(graph: onnx.GraphProto) -> set[str]:
    """Return the values that do not depend on the inputs of a model."""
    fixed = {tensor.name for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant" or (node.input and fixed.issuperset(filter(None, node.input))):
            fixed.update(node.output)
    return fixed


def _constants(graph: onnx.GraphProto, nodes: Iterable[onnx.NodeProto]) -> dict[str, Array]:
    """Return the constants that nodes read, by name."""
    read, found = {name for node in nodes for name in node.input}, {}
    for tensor in graph.initializer:
        if tensor.name in read:
            found[tensor.name] = numpy_helper.to_array(tensor)
    for node in graph.node:
        if node.op_type == "Constant" and node.output[0] in read:
            [(kind, value)] = attributes(node).items()
            found[node.output[0]] = numpy_helper.to_array(value) if kind == "value" else np.array(value)
    for node in nodes:
        given = attributes(node)
        for attribute, name in _weight_names(node):
            missing = [0.0] * (classes_of(given) or given.get("targets", 1))
            found[name] = np.array(given.get(attribute, [1.0] if attribute == "scale" else missing), np.float32)
    return found


def _result(graph: onnx.GraphProto) -> str:
    """Return the value with the scores: the last output, or what it is a map of."""
    last = str(graph.output[-1].name)
    node = producers(graph.node).get(last)
    return str(node.input[0]) if node is not None and node.op_type == "ZipMap" else last


def _labels(graph: onnx.GraphProto, result: str) -> tuple[Any, ...] | None:
    """Return the classes that a classifier, a map, or a table of labels names; else those of a logistic function."""
    scored = {node.output[-1] for node in needed_nodes(graph.node, [result])}
    constants = {tensor.name: tensor for tensor in graph.initializer}
    kinds = {output.name: output.type.tensor_type.elem_type for output in graph.output}
    whole = [name for name, kind in kinds.items() if kind not in FLOATS]
    named = {node.output[-1] for node in needed_nodes(graph.node, whole)} - scored
    for node in reversed(needed_nodes(graph.node, [output.name for output in graph.output])):
        given = attributes(node)
        for name in _LABELS:
            if given.get(name):
                return tuple(own.decode() if isinstance(own, bytes) else own for own in given[name])
        if node.output[-1] in named and node.op_type in {"ArrayFeatureExtractor", "Gather"}:
            labels = numpy_helper.to_array(constants[node.input[0]]) if node.input[0] in constants else np.zeros(0)
            if labels.size > 1 and labels.dtype.kind != "f":
                return tuple(labels.ravel().tolist())
    made, name = producers(graph.node), result
    while name in made and made[name].op_type in MOVES:
        name = made[name].input[0]
    dims = [own.dim_value for own in graph.output[-1].type.tensor_type.shape.dim]
    sizes = {"Sigmoid": 2, "Softmax": dims[-1] if dims else 0}
    return tuple(range(sizes.get(made[name].op_type if name in made else "", 0))) or None
