"""Random small ONNX models with every oddity that a real one may have, and inputs for them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from helpers import BOOL, FLOAT, INT64, make_model, node, value

#: Values of this shape are what most operators take and make.
SHAPE = [3, 4]


class RandomModel:
    """A model under construction; ``floats`` are values of ``SHAPE`` that later operators may read."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        numbers = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.floats = ["x0", "x1"]
        self.others: list[onnx.ValueInfoProto] = []  # further values that may be outputs
        self.inputs = [
            value("x0", FLOAT, SHAPE),
            value("x1", FLOAT, SHAPE),
            value("index", INT64, [3]),
            value("flag", BOOL, []),
            value("factor", FLOAT, []),
            value("nothing", FLOAT, [0, 4]),
        ]
        self.feed: dict[str, np.ndarray[Any, Any]] = {
            "x0": numbers.standard_normal(SHAPE).astype(np.float32),
            "x1": numbers.standard_normal(SHAPE).astype(np.float32),
            "index": numbers.integers(0, 3, 3),
            "flag": np.array(bool(seed % 2)),
            "factor": np.array(0.5, np.float32),
            "nothing": np.zeros((0, 4), np.float32),
        }
        self.weights: dict[str, np.ndarray[Any, Any]] = {
            "square": (0.3 * numbers.standard_normal((4, 4))).astype(np.float32),
            "big": (0.01 * numbers.standard_normal((4, 300))).astype(np.float32),
            "given": numbers.standard_normal(SHAPE).astype(np.float32),
            "axis0": np.array([0]),
            "flat": np.array([-1]),
            "shape": np.array(SHAPE),
            "two": np.array([2]),
            "parts": np.array([1, 3]),
            "one": np.array(1.0, np.float32),
            "zero": np.array(0),
            "row": np.array([[0.25] * 4], np.float32),
        }
        self.steps = [
            self.unary,
            self.binary,
            self.product,
            self.wide_product,
            self.casts,
            self.split,
            self.branch,
            self.top,
            self.clip,
            self.dropout,
            self.non_zero,
            self.text,
            self.sequence,
            self.gather,
            self.scalar,
            self.empty,
            self.where,
            self.dead_end,
        ]

    def build(self, size: int) -> onnx.ModelProto:
        """Put ``size`` random steps together and choose outputs."""
        for _ in range(size):
            self.random.choice(self.steps)()
        made = [name for name in self.floats if name not in {"x0", "x1"}] or [self.unary()]
        chosen = self.random.sample(made, self.random.randint(1, min(3, len(made))))
        outputs = [value(name, FLOAT, SHAPE) for name in chosen]
        outputs += self.random.sample(self.others, min(len(self.others), 2))
        if self.random.random() < 0.3:
            outputs.append(value("given", FLOAT, SHAPE))  # an initialiser
        if self.random.random() < 0.3:
            outputs.append(value("x0", FLOAT, SHAPE))  # an input
        self.random.shuffle(outputs)
        return make_model(self.nodes, self.inputs, outputs, self.weights)

    # Steps.

    def unary(self) -> str:
        return self.made(self.random.choice(["Relu", "Neg", "Tanh", "Abs", "Sigmoid", "Identity"]), [self.any()])

    def binary(self) -> str:
        return self.made(self.random.choice(["Add", "Sub", "Mul", "Max"]), [self.any(), self.any()])

    def product(self) -> str:
        return self.made("MatMul", [self.any(), "square"])

    def wide_product(self) -> str:
        """Over a weight above a kilobyte, and back."""
        wide = self.op("MatMul", [self.any(), "big"])
        back = self.op("Transpose", ["big"], perm=[1, 0])
        return self.made("MatMul", [wide, back])

    def casts(self) -> str:
        kind = self.random.choice([TensorProto.DOUBLE, TensorProto.FLOAT16, INT64, TensorProto.INT8, BOOL])
        there = self.op("Cast", [self.any()], to=kind)
        self.others.append(value(there, kind, SHAPE))
        return self.made("Cast", [there], to=FLOAT)

    def split(self) -> str:
        parts = [self.fresh(), self.fresh()]
        self.add("Split", [self.any(), "parts"], parts, axis=1)
        self.others.append(value(parts[0], FLOAT, [3, 1]))
        return self.made("Concat", list(reversed(parts)), axis=1)

    def branch(self) -> str:
        """An If that captures outer values."""
        source, other = self.any(), self.any()

        def body(op_type: str, inputs: list[str]) -> onnx.GraphProto:
            name = self.fresh()
            return helper.make_graph([node(op_type, inputs, [name])], op_type, [], [value(name, FLOAT, SHAPE)])

        then, otherwise = body("Add", [source, other]), body("Neg", [source])
        return self.made("If", ["flag"], then_branch=then, else_branch=otherwise)

    def top(self) -> str:
        """Two outputs, of which the second is mostly not read."""
        top, index = self.fresh(), self.fresh()
        self.add("TopK", [self.any(), "two"], [top, index])
        self.others.append(value(index, INT64, [3, 2]))
        return self.made("Concat", [top, top], axis=1)

    def clip(self) -> str:
        """An optional input in the middle left out."""
        return self.made("Clip", [self.any(), "", "one"])

    def dropout(self) -> str:
        """An optional output that others read."""
        name, mask = self.fresh(), self.fresh()
        self.add("Dropout", [self.any()], [name, mask])
        self.floats.append(name)
        return self.made("Where", [mask, name, self.any()])

    def non_zero(self) -> str:
        """A shape that depends on the data, in the middle and perhaps as an output."""
        where = self.op("NonZero", [self.op("Relu", [self.any()])])
        self.others.append(value(where, INT64, [2, None]))
        count = self.op("ReduceSum", [self.op("Cast", [where], to=FLOAT)], keepdims=0)
        return self.made("Add", [self.any(), count])

    def text(self) -> str:
        strings = self.op("Cast", [self.op("Cast", [self.any()], to=INT64)], to=TensorProto.STRING)
        return self.made("Cast", [strings], to=FLOAT)

    def sequence(self) -> str:
        several = self.op("SequenceConstruct", [self.any(), self.any()])
        return self.made("SequenceAt", [several, "zero"])

    def gather(self) -> str:
        return self.made("Gather", [self.any(), "index"], axis=0)

    def scalar(self) -> str:
        return self.made("Mul", [self.any(), self.op("Add", ["factor", "one"])])

    def empty(self) -> str:
        """Nothing to compute on, all the same."""
        none = self.op("Neg", ["nothing"])
        self.others.append(value(none, FLOAT, [0, 4]))
        return self.made("Concat", [none, self.any()], axis=0)

    def where(self) -> str:
        return self.made("Where", [self.op("Greater", [self.any(), self.any()]), self.any(), "row"])

    def dead_end(self) -> None:
        """A result that nobody reads."""
        self.op("Exp", [self.any()])

    # How they are put together.

    def any(self) -> str:
        return self.random.choice([*self.floats, "given"])

    def fresh(self) -> str:
        self.count = getattr(self, "count", 0) + 1
        return f"v{self.count}"

    def add(self, op_type: str, inputs: list[str], outputs: list[str], **attributes: Any) -> None:
        """Some names are missing."""
        name = self.random.choice(["", f"{op_type}.{len(self.nodes)}"])
        self.nodes.append(node(op_type, inputs, outputs, name=name, **attributes))

    def op(self, op_type: str, inputs: list[str], **attributes: Any) -> str:
        name = self.fresh()
        self.add(op_type, inputs, [name], **attributes)
        return name

    def made(self, op_type: str, inputs: list[str], **attributes: Any) -> str:
        name = self.op(op_type, inputs, **attributes)
        self.floats.append(name)
        return name
