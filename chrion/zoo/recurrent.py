"""Stacks of recurrent layers, folded or unfolded along time.

A stack of ``layers`` layers over ``seq`` steps is unfolded into chunks of ``chunk`` steps: every layer becomes
``seq / chunk`` ONNX operators that pass on their states. ``chunk=1`` is the paper's graph (Figure 4b) with one operator
per step; ``chunk=seq`` is the folded graph (Figure 4a) with one operator per layer. The weights depend on the seed and
not on the chunk, so the results do not depend on the chunk either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper

from chrion.common.wrong_values import wrong_value
from chrion.zoo.network import Network, Spec

#: The number of gates of each cell: the rows of its weights, in multiples of the hidden size.
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


@dataclass(frozen=True, slots=True)
class RecurrentSpec(Spec):
    """Parameters of a stack; the defaults are the paper's baseline (Table 6)."""

    cell: str = "LSTM"
    layers: int = 12
    batch: int = 8
    #: The width of the input and of each layer's output.
    io: int = 64
    seq: int = 96
    #: The steps of one operator.
    chunk: int = 1
    bidirectional: bool = False

    def __post_init__(self) -> None:
        if self.cell not in GATES:
            raise wrong_value("cell", f"one of {', '.join(GATES)}", self.cell)
        Spec.__post_init__(self)
        if self.chunk > self.seq:
            raise wrong_value("chunk", f"at most {self.seq}, the steps of the sequence", self.chunk)


def build_recurrent(spec: RecurrentSpec) -> onnx.ModelProto:
    """Build the stack: input ``X`` and output ``Y`` of [seq, batch, io]; twice the output width if bidirectional."""
    stack = _Stack(spec)
    inputs = stack.split(stack.input("X", [spec.seq, spec.batch, spec.io]))
    for layer in range(spec.layers):
        inputs = stack.layer(layer, inputs)
    stack.concatenate(inputs, "Y", axis=0)
    width = spec.io * (2 if spec.bidirectional else 1)
    stack.outputs.append(helper.make_tensor_value_info("Y", TensorProto.FLOAT, [spec.seq, spec.batch, width]))
    return stack.model(f"{spec.cell.lower()}-{spec.layers}x{spec.seq}")


class _Stack(Network):
    """A stack under construction."""

    def __init__(self, spec: RecurrentSpec) -> None:
        super().__init__(spec.seed)
        self.spec = spec
        self.steps = [min(spec.chunk, spec.seq - t) for t in range(0, spec.seq, spec.chunk)]

    def split(self, name: str) -> list[str]:
        """Split a value into one tensor of [steps, batch, io] per chunk."""
        if len(self.steps) == 1:
            return [name]
        sizes = self.constant("split_sizes", np.array(self.steps, np.int64))
        parts = [f"{name}.t{t}" for t in range(len(self.steps))]
        self.node("Split", [name, sizes], parts, axis=0)
        return parts

    def concatenate(self, parts: Sequence[str], name: str, axis: int) -> str:
        """Concatenate tensors under a given name; return the name."""
        if len(parts) > 1:
            self.node("Concat", parts, [name], axis=axis)
        else:
            self.node("Identity", parts, [name])
        return name

    def layer(self, layer: int, inputs: Sequence[str]) -> list[str]:
        """Add a layer; return its output as one tensor per chunk."""
        if not self.spec.bidirectional:
            return self.direction(layer, "forward", inputs)
        forward = self.direction(layer, "forward", inputs)
        backward = self.direction(layer, "reverse", inputs)
        return [
            self.concatenate(pair, f"l{layer}.t{t}", axis=2)
            for t, pair in enumerate(zip(forward, backward, strict=True))
        ]

    def direction(self, layer: int, direction: str, inputs: Sequence[str]) -> list[str]:
        """Add one direction of a layer; return its output as one tensor per chunk."""
        spec, tag = self.spec, f"l{layer}" + (".r" if direction == "reverse" else "")
        width = spec.io * (2 if spec.bidirectional and layer else 1)
        rows = GATES[spec.cell] * spec.io
        weights = [
            self.constant(f"{tag}.W", self._uniform(1, rows, width)),
            self.constant(f"{tag}.R", self._uniform(1, rows, spec.io)),
            self.constant(f"{tag}.B", self._uniform(1, 2 * rows)),
        ]
        zero = np.zeros((1, spec.batch, spec.io), np.float32)
        states = [self.constant(f"{tag}.{state}0", zero) for state in ("hc" if spec.cell == "LSTM" else "h")]
        outputs = [""] * len(inputs)
        order = range(len(inputs)) if direction == "forward" else reversed(range(len(inputs)))
        for t in order:
            outputs[t], states = self.chunk(f"{tag}.t{t}", direction, self.steps[t], inputs[t], weights, states)
        return outputs

    def chunk(  # noqa: PLR0913, PLR0917 - all inputs of a recurrent operator
        self, tag: str, direction: str, steps: int, source: str, weights: Sequence[str], states: Sequence[str]
    ) -> tuple[str, list[str]]:
        """Add an operator over ``steps`` steps; return its output [steps, batch, io] and its final states."""
        spec = self.spec
        sequence = "" if steps == 1 else f"{tag}.Y"
        after = [f"{tag}.h", f"{tag}.c"][: len(states)]
        self.node(
            spec.cell,
            [source, *weights, "", *states],
            [sequence, *after],
            hidden_size=spec.io,
            **({"direction": direction} if direction != "forward" else {}),
        )
        if steps == 1:  # Y_h [1, batch, io] is already the sequence of this one step
            return after[0], after
        axes = self.constant("axis_1", np.array([1], np.int64))
        self.node("Squeeze", [sequence, axes], [f"{tag}.y"])
        return f"{tag}.y", after

    def _uniform(self, *shape: int) -> npt.NDArray[np.float32]:
        """Return uniform random values, the usual initialisation of recurrent layers."""
        bound = self.spec.io**-0.5
        return self.random.uniform(-bound, bound, shape).astype(np.float32)
