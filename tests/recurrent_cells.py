"""Models of one LSTM, GRU or RNN with any attributes, for comparisons of their kernels."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto

from chrion.native import register_operators
from helpers import FLOAT, make_model, node, value

Array = np.ndarray[Any, Any]
#: The gates, states and functions of each kind.
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
STATES = {"LSTM": 2, "GRU": 1, "RNN": 1}
FUNCTIONS = {"LSTM": 3, "GRU": 2, "RNN": 1}
#: The functions of ONNX, with the numbers of their parameters alpha and beta.
ACTIVATIONS = {
    "Sigmoid": (0, 0),
    "Tanh": (0, 0),
    "Relu": (0, 0),
    "Affine": (1, 1),
    "LeakyRelu": (1, 0),
    "ThresholdedRelu": (1, 0),
    "ScaledTanh": (1, 1),
    "HardSigmoid": (1, 1),
    "Elu": (1, 0),
    "Softsign": (0, 0),
    "Softplus": (0, 0),
}


@dataclass
class Cell:
    """A recurrent operator.

    Attributes:
        optional: Those of its optional inputs that it has: ``B``, ``lens``, ``h``, ``c`` and ``P``.
        outputs: Which outputs it has.
        attributes: Further attributes of the node.
        scale: The standard deviation of its weights, by default 1 / sqrt(hidden).
    """

    kind: str
    inputs: int = 5
    hidden: int = 6
    direction: str = "forward"
    optional: str = "B"
    outputs: tuple[bool, ...] = (True, True, True)
    attributes: dict[str, Any] = field(default_factory=dict)
    scale: float | None = None

    @property
    def directions(self) -> int:
        """The number of directions."""
        return 2 if self.direction == "bidirectional" else 1

    def weights(self, seed: int = 0) -> dict[str, Array]:
        """Return seeded weights."""
        rows, random = GATES[self.kind] * self.hidden, np.random.default_rng(seed)
        shapes: dict[str, tuple[int, ...]] = {"W": (rows, self.inputs), "R": (rows, self.hidden)}
        shapes |= {"B": (2 * rows,)} if "B" in self.optional.split() else {}
        shapes |= {"P": (3 * self.hidden,)} if "P" in self.optional.split() else {}
        scale = np.float32(self.scale or self.hidden**-0.5)
        return {
            name: scale * random.standard_normal((self.directions, *shape), np.float32)
            for name, shape in shapes.items()
        }

    def model(self, weights: dict[str, Array] | None = None) -> onnx.ModelProto:
        """Return a model of the operator alone, with seeded weights by default."""
        weights = self.weights() if weights is None else weights
        given = {*self.optional.split(), *weights, "X"}
        names = [name if name in given else "" for name in ("X", "W", "R", "B", "lens", "h", "c", "P")]
        names = names[: max(at for at, name in enumerate(names) if name) + 1]
        results = [
            name if used else ""
            for name, used in zip(("Y", "Y_h", "Y_c")[: 1 + STATES[self.kind]], self.outputs, strict=False)
        ]
        results = results[: max(at for at, name in enumerate(results) if name) + 1]
        extra = {"hidden_size": self.hidden, "direction": self.direction, **self.attributes}
        types = {name: TensorProto.INT32 if name == "lens" else FLOAT for name in names if name not in {"", *weights}}
        return make_model(
            [node(self.kind, names, results, "cell", **extra)],
            [value(name, kind, None) for name, kind in types.items()],
            [value(name, FLOAT, None) for name in results if name],
            weights,
        )

    def feed(self, steps: int, batch: int, seed: int = 0, lengths: Any = None, shortest: int = 1) -> dict[str, Array]:
        """Return seeded inputs: normal ones, and lengths from ``shortest`` to ``steps`` if not given."""
        random, given = np.random.default_rng([seed, 1]), self.optional.split()
        feed: dict[str, Array] = {"X": random.standard_normal((steps, batch, self.inputs), np.float32)}
        if "lens" in given:
            drawn = random.integers(min(shortest, steps), steps + 1, batch)
            feed["lens"] = np.array(drawn if lengths is None else lengths, np.int32)
        for name in {"h", "c"} & {*given}:
            feed[name] = random.standard_normal((self.directions, batch, self.hidden), np.float32)
        return feed


def open_model(model: onnx.ModelProto, threads: int = 1) -> ort.InferenceSession:
    """Return a session that has the native operators."""
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 4
    register_operators(options)
    return ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])


def run_model(model: onnx.ModelProto, feed: dict[str, Array], threads: int = 1) -> list[Array]:
    """Return the outputs of a model that may have native operators."""
    outputs: list[Array] = open_model(model, threads).run(None, feed)
    return outputs


def draw_cell(random: np.random.Generator) -> Cell:
    """Return an operator of any attributes that onnxruntime runs."""
    kind = str(random.choice([*GATES]))
    direction = str(random.choice(["forward", "reverse", "bidirectional"]))
    directions = 2 if direction == "bidirectional" else 1
    optional = [name for name in ("B", "lens", "h") if random.random() < 0.5]
    attributes: dict[str, Any] = {}
    if kind == "LSTM":
        optional += [name for name in ("c", "P") if random.random() < 0.5]
        attributes["input_forget"] = int(random.random() < 0.2)
    if kind == "GRU":
        attributes["linear_before_reset"] = int(random.random() < 0.5)
    if random.random() < 0.3:
        attributes["clip"] = float(random.choice([0.1, 0.7, 3.0]))
    if random.random() < 0.6:
        names = [str(name) for name in random.choice([*ACTIVATIONS], FUNCTIONS[kind] * directions)]
        attributes["activations"] = names
        for at, parameter in enumerate(("activation_alpha", "activation_beta")):
            count = sum(ACTIVATIONS[name][at] for name in names)
            if count and random.random() < 0.8:
                attributes[parameter] = [float(v) for v in random.uniform(0.1, 0.9, count)]
    wanted = random.random(3) < 0.7
    wanted[int(random.integers(1 + STATES[kind]))] = True
    inputs = int(random.choice([1, 2, 3, 5, 16, 33, 130, 300]))
    hidden = int(random.choice([1, 2, 3, 4, 7, 8, 15, 16, 17, 33, 48, 65]))
    return Cell(
        kind,
        inputs,
        hidden,
        direction,
        " ".join(optional),
        outputs=tuple(bool(one) for one in wanted),
        attributes=attributes,
        # Some functions are not bounded, and gates above 1 amplify differences.
        scale=0.2 * max(inputs, hidden) ** -0.5 if "activations" in attributes else None,
    )


def draw_feed(cell: Cell, random: np.random.Generator, seed: int) -> dict[str, Array]:
    """Return inputs of any sizes for which onnxruntime has outputs: no steps, no rows and lengths of 0 among them.

    It ends the process for an LSTM or a GRU without rows, and for a GRU without steps or lengths. The final cells of an
    LSTM without steps or lengths are what its memory held before.
    """
    has_lengths = "lens" in cell.optional.split()
    no_steps = has_lengths or cell.kind == "RNN" or (cell.kind == "LSTM" and not cell.outputs[2])
    steps, batch = (int(random.choice(sizes)) for sizes in ([*range(9)], [0, 1, 1, 2, 3, 5, 7, 14]))
    return cell.feed(steps or int(not no_steps), batch or int(cell.kind != "RNN"), seed, shortest=0)
