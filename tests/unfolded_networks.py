"""Random recurrent networks, unfolded along time in the ways in which exporters write them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import onnx

from helpers import FLOAT, make_model, node, value

#: The gates and the states of each cell.
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
#: How the inputs of steps are taken from the input of the model; all but the last one are steps of one value.
SOURCES = ("split", "slice", "gather", "batch first", "reversed", "separate")


class UnfoldedNetwork:
    """A network of random size and form.

    Attributes:
        folds: The number of recurrent operators after folding; None if that depends on details.
        model: The model.
    """

    def __init__(self, pick: Random, *, awkward: bool) -> None:
        self._pick, self._awkward = pick, awkward
        self._rng = np.random.default_rng(pick.randrange(1 << 30))
        self._nodes: list[onnx.NodeProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._weights: dict[str, np.ndarray[Any, Any]] = {}
        self._opset = pick.choice([11, 12, 17])
        self.folds: int | None = 0
        self.cell = pick.choice([*GATES])
        self.batch, self.hidden = pick.randint(1, 3), pick.randint(1, 4)
        self.sizes = [1] * pick.randint(2, 6) if pick.random() < 0.7 else pick.choices([1, 2, 3], k=pick.randint(2, 4))
        self.model = self._build()

    def _build(self) -> onnx.ModelProto:
        pick = self._pick
        width = self.hidden if pick.random() < 0.5 else pick.randint(1, 4)
        steps = self._steps(width)
        for layer in range(pick.randint(1, 3)):
            before, before_width = steps, width
            forward = pick.random() < 0.7
            steps = self._layer(f"l{layer}", steps, width, reverse=not forward)
            width = self.hidden
            if pick.random() < 0.3:
                other = self._layer(f"l{layer}r", before, before_width, reverse=forward)
                steps = [self._add("Concat", [a, b], axis=2) for a, b in zip(steps, other, strict=True)]
                width *= 2
            steps, width = self._between(steps, width, before if before_width == width else None)
        self._finish(steps)
        return make_model(self._nodes, self._inputs, self._outputs, self._weights, opset=self._opset)

    def _add(self, kind: str, inputs: Sequence[str], **attributes: Any) -> str:
        name = f"v{len(self._nodes)}"
        self._nodes.append(node(kind, inputs, [name], f"n{len(self._nodes)}", **attributes))
        return name

    def _weight(self, array: Any) -> str:
        name = f"w{len(self._weights)}"
        self._weights[name] = np.asarray(array)
        return name

    def _axes(self, kind: str, source: str, axes: list[int]) -> str:
        if self._opset < 13:
            return self._add(kind, [source], axes=axes)
        return self._add(kind, [source, self._weight(np.array(axes, np.int64))])

    def _slice(self, source: str, axis: int, start: int, stop: int) -> str:
        return self._add("Slice", [source, *(self._weight(np.array([v], np.int64)) for v in (start, stop, axis))])

    def _steps(self, width: int) -> list[str]:
        """Add the inputs of the model; return its steps, or chunks, as [steps, batch, width]."""
        kind = self._pick.choice(SOURCES)
        total, bounds = sum(self.sizes), np.cumsum([0, *self.sizes]).tolist()
        if kind == "separate":
            names = [f"x{t}" for t in range(len(self.sizes))]
            self._inputs += [value(n, FLOAT, [s, self.batch, width]) for n, s in zip(names, self.sizes, strict=True)]
            return names
        batch_first = kind == "batch first"
        self._inputs.append(
            value("x", FLOAT, [self.batch, total, width] if batch_first else [total, self.batch, width])
        )
        if kind == "split":
            parts = [f"x/{t}" for t in range(len(self.sizes))]
            sizes: dict[str, Any] = {"split": self.sizes} if self._opset < 13 else {}
            inputs = ["x"] if sizes else ["x", self._weight(np.array(self.sizes, np.int64))]
            self._nodes.append(node("Split", inputs, parts, "split", axis=0, **sizes))
            return parts
        if max(self.sizes) > 1:
            source = self._add("Transpose", ["x"], perm=[1, 0, 2]) if batch_first else "x"
            return [self._slice(source, 0, a, b) for a, b in itertools.pairwise(bounds)]
        axis = int(batch_first)
        if kind == "slice":
            return [self._slice("x", 0, t, t + 1) for t in range(total)]
        taken = [
            self._add("Gather", ["x", self._weight(np.int64(t - total * (t % 2)))], axis=axis) for t in range(total)
        ]
        steps = [self._axes("Unsqueeze", name, [0]) for name in taken]
        return steps[::-1] if kind == "reversed" else steps

    def _layer(self, tag: str, steps: Sequence[str], width: int, *, reverse: bool) -> list[str]:
        """Add one direction of a layer; return its results as [steps, batch, hidden]."""
        pick, rows, count = self._pick, GATES[self.cell] * self.hidden, 2 if self.cell == "LSTM" else 1
        shapes = [(rows, width), (rows, self.hidden), *([(2 * rows,)] if pick.random() < 0.8 else [])]
        given = [self._rng.standard_normal((1, *shape)).astype(np.float32) for shape in shapes]
        peepholes = self._rng.standard_normal((1, 3 * self.hidden)).astype(np.float32)
        has_peepholes = self.cell == "LSTM" and pick.random() < 0.3
        attributes = self._attributes()
        states = self._initial_states(tag, count)
        shared, passing = pick.random() < 0.6, pick.choice(["direct", "squeezed", "sequence"])
        constants: list[str] = []
        order = [*range(len(steps))][:: -1 if reverse else 1]
        results = [""] * len(steps)
        self._count(1)
        for at, t in enumerate(order):
            if at and self._awkward and pick.random() < 0.1:  # other weights from here on
                given, constants = [array + 1 for array in given], []
                self.folds = None
            if not constants or not shared:
                constants = [*map(self._weight, given)]
            source = steps[t]
            if at and self._awkward and width == self.hidden and pick.random() < 0.1:  # feedback
                last = self._axes("Unsqueeze", self._axes("Squeeze", states[0], [0]), [0])
                source = self._add("Add", [source, last])
                self.folds = None
            inputs = [source, *constants, *[""] * (5 - 1 - len(constants)), *states]
            if has_peepholes:
                inputs += [""] * (7 - len(inputs)) + [self._weight(peepholes)]
            while not inputs[-1]:
                inputs.pop()
            outputs = [f"{tag}/{t}/{name}" for name in ("Y", "Y_h", "Y_c")[: 1 + count]]
            direction = {"direction": "reverse"} if reverse and (self.sizes[t] > 1 or pick.random() < 0.5) else {}
            self._nodes.append(node(self.cell, inputs, outputs, f"{tag}/{t}", **attributes, **direction))
            states = outputs[1:]
            if passing == "squeezed":
                states = [self._axes("Unsqueeze", self._axes("Squeeze", name, [0]), [0]) for name in states]
            elif passing == "sequence":
                end = 0 if direction else self.sizes[t] - 1
                states[0] = self._add("Gather", [outputs[0], self._weight(np.int64(end))], axis=0)
            one = self.sizes[t] == 1 and pick.random() < 0.5
            results[t] = outputs[1] if one else self._axes("Squeeze", outputs[0], [1])
            if self._awkward and pick.random() < 0.1:
                self._return(pick.choice(outputs[1:]), [1, self.batch, self.hidden])
                self.folds = None
        if pick.random() < 0.5:
            for name in outputs[1:]:
                self._return(name, [1, self.batch, self.hidden])
        return results

    def _count(self, cells: int) -> None:
        self.folds = None if self.folds is None else self.folds + cells

    def _attributes(self) -> dict[str, Any]:
        attributes: dict[str, Any] = {"hidden_size": self.hidden}
        if self._pick.random() < 0.3:
            attributes["clip"] = 0.7
        if self.cell == "GRU":
            attributes["linear_before_reset"] = self._pick.randint(0, 1)
        if self._pick.random() < 0.3:
            attributes["activations"] = {
                "LSTM": ["HardSigmoid", "Tanh", "Softsign"],
                "GRU": ["HardSigmoid", "Relu"],
            }.get(self.cell, ["Affine"])
            attributes |= {"activation_alpha": [0.3], "activation_beta": [0.4]}
        return attributes

    def _initial_states(self, tag: str, count: int) -> list[str]:
        kind = self._pick.choice(["absent", "constant", "input"])
        shape = [1, self.batch, self.hidden]
        if kind == "constant":
            return [self._weight(self._rng.standard_normal(shape).astype(np.float32)) for _ in range(count)]
        names = [f"{tag}/{state}0" for state in "hc"[:count]] if kind == "input" else []
        self._inputs += [value(name, FLOAT, shape) for name in names]
        return names

    def _between(self, steps: list[str], width: int, residual: Sequence[str] | None) -> tuple[list[str], int]:
        """Apply some operators to each step of a layer's results; return these, and their width."""
        for _ in range(self._pick.choice([0, 0, 1, 2])):
            match self._pick.choice(["unary", "row", "scalar", "product", "residual", "arranged"]):
                case "unary":
                    kind = self._pick.choice(["Relu", "Tanh", "Neg"])
                    steps = [self._add(kind, [name]) for name in steps]
                case "row":
                    row = self._weight(self._rng.standard_normal(width).astype(np.float32))
                    steps = [self._add("Mul", [name, row]) for name in steps]
                case "scalar":
                    scalar = self._weight(np.float32(0.5))
                    steps = [self._add("Sub", [scalar, name]) for name in steps]
                case "product":
                    matrix = self._weight(self._rng.standard_normal((width, 3)).astype(np.float32))
                    steps, width, residual = [self._add("MatMul", [name, matrix]) for name in steps], 3, None
                case "residual" if residual:
                    steps = [self._add("Add", [a, b]) for a, b in zip(steps, residual, strict=True)]
                case "arranged" if max(self.sizes) == 1:
                    flat = [self._add("Tanh", [self._axes("Squeeze", name, [0])]) for name in steps]
                    steps = [self._axes("Unsqueeze", name, [0]) for name in flat]
        return steps, width

    def _finish(self, steps: Sequence[str]) -> None:
        kinds = ["joined", "stacked", "single"] if max(self.sizes) == 1 else ["joined", "single"]
        kind = self._pick.choice(kinds)
        if kind == "joined":
            self._return(self._add("Concat", steps, axis=0), None)
        elif kind == "stacked":
            flat = [self._axes("Squeeze", name, [0]) for name in steps]
            self._return(self._add("Concat", [self._axes("Unsqueeze", name, [1]) for name in flat], axis=1), None)
        if kind == "single" or self._awkward:
            for name in self._pick.sample(list(steps), self._pick.randint(1, len(steps))):
                self._return(name, None)

    def _return(self, name: str, shape: list[int] | None) -> None:
        if all(name != output.name for output in self._outputs):
            self._outputs.append(value(name, FLOAT, shape))

    def feed(self) -> dict[str, Any]:
        """Return random inputs."""
        return {
            info.name: self._rng.standard_normal([d.dim_value for d in info.type.tensor_type.shape.dim]).astype(
                np.float32
            )
            for info in self._inputs
        }
