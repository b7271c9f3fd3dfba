"""Random ONNX models with the unusual features that real models may have, and inputs for them.

All randomness comes from one ``random.Random``. Therefore a seed reproduces a model, and Hypothesis, whose
``randoms()`` are such objects, can shrink it. :mod:`random_operators` contains the operators of the models.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from helpers import node

Dim = int | str
Shape = tuple[Dim, ...]

FLOAT, DOUBLE, HALF = TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16
INT8, UINT8, INT32, INT64 = TensorProto.INT8, TensorProto.UINT8, TensorProto.INT32, TensorProto.INT64
BOOL, STRING = TensorProto.BOOL, TensorProto.STRING
KINDS = (FLOAT, FLOAT, FLOAT, FLOAT, DOUBLE, HALF, INT8, UINT8, INT32, INT64, BOOL)
#: Name of the free dimension, if there is one.
FREE = "n"
#: Most elements of a value.
_MAX_ELEMENTS = 4096
#: Size of the free dimension that is assumed while the model is built.
_ASSUMED_SIZE = 3


class UnfitError(Exception):
    """The model has no value yet that suits a step."""


@dataclass(frozen=True)
class Value:
    """A tensor of the model; one of its dimensions may be the free one."""

    name: str
    kind: int
    #: None if the size depends on the data.
    shape: Shape | None

    @property
    def rank(self) -> int:
        assert self.shape is not None
        return len(self.shape)

    @property
    def elements(self) -> int:
        """Return the number of elements if the free dimension has its assumed size."""
        return math.prod(_ASSUMED_SIZE if isinstance(d, str) else d for d in self.shape or ())

    def info(self) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(self.name, self.kind, self.shape)


class Draft:
    """A model under construction: its nodes, weights, and the values that later operators may read."""

    def __init__(self, pick: Random) -> None:
        self.pick = pick
        self.numbers = np.random.default_rng(pick.getrandbits(32))
        self.opset = pick.choice([17, 21])
        self.nodes: list[onnx.NodeProto] = []
        self.functions: list[onnx.FunctionProto] = []
        #: Further operator domains.
        self.domains: set[str] = set()
        self.values: list[Value] = []
        #: Tensors whose size depends on the data: few operators can read them, and they may be outputs.
        self.loose: list[Value] = []
        self.others: list[onnx.ValueInfoProto] = []  # outputs that are not tensors
        self.weights: dict[str, np.ndarray[Any, Any]] = {}
        self.weight_values: list[Value] = []
        self.inputs = self._inputs()
        self._count = 0

    def _inputs(self) -> list[Value]:
        free = self.pick.random() < 0.4
        inputs = []
        for at in range(self.pick.randint(2, 4)):
            shape: list[Dim] = [self.pick.choice([1, 2, 3, 4]) for _ in range(self.pick.randint(0, 4))]
            if at == 0:
                shape = [2, 3, 4][: self.pick.randint(2, 3)]
            if shape and free and (at == 0 or self.pick.random() < 0.5):
                shape[0] = FREE
            elif shape and at > 1 and self.pick.random() < 0.2:
                shape[self.pick.randrange(len(shape))] = 0
            kind = FLOAT if at == 0 else self.pick.choice(KINDS)
            inputs.append(Value(f"x{at}", kind, tuple(shape)))
        self.values += inputs
        return inputs

    @property
    def free(self) -> bool:
        """Return True if an input has the free dimension."""
        return any(FREE in (i.shape or ()) for i in self.inputs)

    def feed(self, size: int = _ASSUMED_SIZE) -> dict[str, np.ndarray[Any, Any]]:
        """Return random inputs; the free dimension has the given size."""
        return {
            i.name: self.array(i.kind, tuple(size if isinstance(d, str) else d for d in i.shape or ()))
            for i in self.inputs
        }

    def array(self, kind: int, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        """Return random numbers of moderate size."""
        if kind == BOOL:
            return np.asarray(self.numbers.integers(0, 2, shape), np.bool_)
        if kind in {FLOAT, DOUBLE, HALF}:
            return np.asarray(self.numbers.standard_normal(shape), helper.tensor_dtype_to_np_dtype(kind))
        least = 0 if kind == UINT8 else -4
        return np.asarray(self.numbers.integers(least, 5, shape), helper.tensor_dtype_to_np_dtype(kind))

    # Selection of values.

    def choose(self, kinds: set[int] | None = None, *, ranks: range = range(9), least: int = 0) -> Value:
        """Return a value of one of the kinds and ranks, whose dimensions are all at least ``least``."""
        fitting = [
            v
            for v in self.values
            if (kinds is None or v.kind in kinds)
            and v.rank in ranks
            and all(isinstance(d, str) or d >= least for d in v.shape or ())
        ]
        if not fitting:
            raise UnfitError
        return self.pick.choice(fitting)

    def axis(self, value: Value, *, fixed: bool = False) -> int:
        """Return an axis of a value, sometimes counted from the end; with ``fixed``, not the free dimension."""
        fitting = [at for at, d in enumerate(value.shape or ()) if not (fixed and isinstance(d, str))]
        if not fitting:
            raise UnfitError
        at = self.pick.choice(fitting)
        return at if self.pick.random() < 0.7 else at - value.rank

    def partner(self, value: Value) -> Value:
        """Return a value that broadcasts to the shape of another: an existing value, or an old or new weight."""
        fitting = [v for v in self.values if v.kind == value.kind and _fits(v.shape, value.shape)]
        if fitting and self.pick.random() < 0.6:
            return self.pick.choice(fitting)
        shape = [1 if isinstance(d, str) or self.pick.random() < 0.3 else d for d in value.shape or ()]
        return self.weight(value.kind, tuple(shape[self.pick.randint(0, len(shape)) :]))

    # Construction.

    def new_name(self) -> str:
        self._count += 1
        return f"v{self._count}"

    def weight(self, kind: int, shape: tuple[int, ...]) -> Value:
        """Return a weight: in half of the cases an existing one, if there is one of the same kind and shape."""
        same = [w for w in self.weight_values if (w.kind, w.shape) == (kind, shape)]
        if same and self.pick.random() < 0.5:
            return self.pick.choice(same)
        return self.constant(self.array(kind, shape))

    def weight_of(self, array: Any) -> Value:
        """Return the weight of the given numbers; equal numbers share one weight."""
        array = np.asarray(array)
        kind = helper.np_dtype_to_tensor_dtype(array.dtype)
        for known in self.weight_values:
            if (known.kind, known.shape) == (kind, array.shape) and np.array_equal(self.weights[known.name], array):
                return known
        return self.constant(array)

    def constant(self, array: Any) -> Value:
        """Add a weight of the given numbers and return it."""
        array = np.asarray(array)
        value = Value(f"w{len(self.weights)}", helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        self.weights[value.name] = array
        self.weight_values.append(value)
        return value

    def add(self, op_type: str, inputs: list[Value | None], outputs: list[str], **attributes: Any) -> None:
        """Add a node, sometimes without a name; None stands for an omitted input."""
        name = self.pick.choice(["", f"{op_type}.{len(self.nodes)}"])
        read = [v.name if v else "" for v in inputs]
        self.nodes.append(node(op_type, read, outputs, name=name, **attributes))

    def emit(self, op_type: str, inputs: list[Value | None], kind: int, shape: Shape, **attributes: Any) -> Value:
        """Add a node with one output and return the output, which later nodes may read."""
        value = Value(self.new_name(), kind, shape)
        if value.elements > _MAX_ELEMENTS:
            raise UnfitError
        self.add(op_type, inputs, [value.name], **attributes)
        self.values.append(value)
        return value

    def model(self) -> onnx.ModelProto:
        """Return the model, with randomly chosen outputs."""
        made = [v for v in self.values if v not in self.inputs] or self.values[:1]
        outputs = [v.info() for v in self.pick.sample(made, self.pick.randint(1, min(3, len(made))))]
        outputs += [v.info() for v in self.loose if self.pick.random() < 0.3]
        outputs += [o for o in self.others if self.pick.random() < 0.2]
        if self.weight_values and self.pick.random() < 0.2:
            outputs.append(self.pick.choice(self.weight_values).info())
        if self.pick.random() < 0.2:
            outputs.append(self.inputs[0].info())
        self.pick.shuffle(outputs)
        inputs = [i.info() for i in self.inputs]
        if self.weight_values and self.pick.random() < 0.2:
            inputs.append(self.pick.choice(self.weight_values).info())  # a default value that requests may replace
        graph = helper.make_graph(
            self.nodes,
            "random",
            inputs,
            _unique(outputs),
            [numpy_helper.from_array(a, n) for n, a in self.weights.items()],
        )
        domains = sorted({*self.domains, *(["local"] if self.functions else [])})
        opsets = [helper.make_opsetid("", self.opset), *(helper.make_opsetid(name, 1) for name in domains)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10, functions=self.functions)


def _unique(outputs: list[onnx.ValueInfoProto]) -> list[onnx.ValueInfoProto]:
    return list({o.name: o for o in outputs}.values())


def _fits(shape: Shape | None, into: Shape | None) -> bool:
    """Return whether a shape broadcasts to another."""
    assert shape is not None
    assert into is not None
    if len(shape) > len(into):
        return False
    return all(d in (1, e) for d, e in zip(reversed(shape), reversed(into), strict=False))


def fixed(value: Value, axis: int) -> int:
    """Return the size of an axis.

    Raises:
        UnfitError: The axis is the free dimension.
    """
    size: Any = (value.shape or ())[axis]
    if isinstance(size, str):
        raise UnfitError
    return int(size)
