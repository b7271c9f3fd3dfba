"""Small PyTorch modules with recurrences, branches, loops, sequences, functions and shapes that depend on data."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxscript
import torch
from cases import Feed, case, main
from onnxscript import opset18
from torch import nn
from torch._higher_order_ops.scan import scan
from torch_export import Axes, Subject, captured, export, integers, normal, seeded, traced

#: Installed by pip for this family.
REQUIREMENTS = [
    "torch==2.13.0",
    "onnx==1.23.2",
    "onnxscript==0.7.2",
    "onnxruntime==1.31.1",
]

_STEPS = {"x": {0: "batch", 1: "length"}}


def _steps(*shapes: tuple[int, int]) -> list[Feed]:
    return [{"x": normal(*shape, 6)} for shape in shapes or ((2, 5), (1, 8), (3, 1))]


class Recurrent(nn.Module):
    """A recurrent layer whose outputs and last states are all returned."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return outputs of all steps and the last states."""
        output, state = self.layer(x)
        return (output, *state) if isinstance(state, tuple) else (output, state)


@traced("lstm", opset=11)
def _lstm() -> Subject:
    layer = nn.LSTM(6, 8, num_layers=2, bidirectional=True, batch_first=True)
    return Subject(Recurrent(layer), _steps(), ["output", "hidden", "cell"], _STEPS)


@captured("lstm-dynamo", opset=18)
def _lstm_dynamo() -> Subject:
    return Subject(Recurrent(nn.LSTM(6, 8, batch_first=True)), _steps(), ["output", "hidden", "cell"], _STEPS)


@traced("gru", opset=14)
def _gru() -> Subject:
    return Subject(Recurrent(nn.GRU(6, 8, bidirectional=True, batch_first=True)), _steps(), ["output", "state"], _STEPS)


@traced("rnn", opset=17)
def _rnn() -> Subject:
    layer = nn.RNN(6, 8, num_layers=2, nonlinearity="relu", batch_first=True)
    return Subject(Recurrent(layer), _steps(), ["output", "state"], _STEPS)


class StatefulLSTM(nn.Module):
    """A recurrent layer that takes and returns its state, as a model for streams does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(6, 8)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor, cell: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return outputs and the next state."""
        output, (hidden, cell) = self.layer(x, (hidden, cell))
        return output, hidden, cell


@traced("lstm-state", opset=16)
def _lstm_state() -> Subject:
    feeds = [
        {"x": normal(length, batch, 6), "hidden": normal(1, batch, 8), "cell": normal(1, batch, 8, seed=1)}
        for length, batch in ((4, 2), (1, 3), (6, 1))
    ]
    axes = {"x": {0: "length", 1: "batch"}, "hidden": {1: "batch"}, "cell": {1: "batch"}}
    return Subject(StatefulLSTM(), feeds, ["output", "next_hidden", "next_cell"], axes)


class Branch(nn.Module):
    """A branch on the sum of an input, with different work on either side."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the taken side computes."""
        if bool(x.sum() > 0):  # noqa: SIM108  (the statement becomes an operator)
            y = torch.relu(self.first(x))
        else:
            y = torch.tanh(self.second(x)) * 2.0
        return y + x


@traced("if", opset=13)
def _if() -> Subject:
    return Subject(torch.jit.script(Branch()), _signed(), axes={"x": {0: "batch"}})


def _signed() -> list[Feed]:
    return [{"x": sign * np.abs(normal(batch, 4))} for batch, sign in ((2, 1), (3, -1), (1, 1))]


class Condition(nn.Module):
    """A branch in the form that torch.export captures."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the taken side computes."""
        hidden = self.layer(x)
        return torch.cond(x.sum() > 0, torch.relu, lambda y: torch.tanh(y) * 2.0, (hidden,)) + x


@captured("if-dynamo", opset=18)
def _if_dynamo() -> Subject:
    return Subject(Condition(), _signed(), axes={"x": {0: "batch"}})


class Loop(nn.Module):
    """A loop whose number of rounds is an input, with a branch inside."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, count: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the state after the last round and the total."""
        total = torch.zeros(1)
        for at in range(int(count)):
            x = torch.tanh(self.layer(x))
            if at % 2 == 1:
                x = x * 0.5
            total = total + x.sum()
        return x, total


@traced("loop", opset=13)
def _loop() -> Subject:
    feeds: list[Feed] = [{"x": normal(n, 4), "count": np.array(count)} for n, count in ((2, 3), (1, 0), (4, 6))]
    return Subject(torch.jit.script(Loop()), feeds, ["state", "total"], {"x": {0: "batch"}})


class While(nn.Module):
    """A loop that ends when a value is small enough."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the halved input and the number of rounds."""
        rounds = torch.zeros(1, dtype=torch.int64)
        while bool(x.abs().max() > 0.1):
            x = x / 2
            rounds = rounds + 1
        return x, rounds


@traced("while", opset=14)
def _while() -> Subject:
    feeds = [{"x": normal(batch, 4) * scale} for batch, scale in ((2, 1.0), (3, 50.0), (1, 0.0))]
    feeds = [{"x": feed["x"].astype(np.float32)} for feed in feeds]
    return Subject(torch.jit.script(While()), feeds, ["small", "rounds"], {"x": {0: "batch"}})


class Scan(nn.Module):
    """A scan over rows in the form that torch.export captures."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the last state and all states."""

        def step(state: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            following = torch.tanh(state + row)
            return following, following * 2

        return scan(step, torch.zeros(4), x)


@captured("scan-dynamo", opset=18)
def _scan() -> Subject:
    return Subject(Scan(), [{"x": normal(rows, 4)} for rows in (3, 2, 7)], ["state", "states"], {"x": {0: "rows"}})


class SequenceOutput(nn.Module):
    """A list of tensors that a loop grows."""

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return running sums, one for each row."""
        rows: list[torch.Tensor] = []
        total = torch.zeros_like(x[0])
        for at in range(x.size(0)):
            total = total + x[at]
            rows.append(total)
        return rows


@traced("sequence-output", opset=13)
def _sequence_output() -> Subject:
    feeds = [{"x": normal(rows, 4)} for rows in (3, 1, 6)]
    return Subject(torch.jit.script(SequenceOutput()), feeds, ["rows"], {"x": {0: "rows"}})


class SequenceSplit(nn.Module):
    """Pieces of a tensor that are joined again, and some of them returned."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the pieces in reverse order and the last one."""
        pieces = torch.split(x, 2)
        reverse: list[torch.Tensor] = []
        for at in range(len(pieces)):
            reverse.append(pieces[len(pieces) - 1 - at])  # noqa: PERF401  (TorchScript has no such comprehension)
        return torch.cat(reverse), pieces[-1]


@traced("sequence-split", opset=14)
def _sequence_split() -> Subject:
    feeds = [{"x": normal(rows, 3)} for rows in (6, 4, 9)]
    return Subject(torch.jit.script(SequenceSplit()), feeds, ["reverse", "last"], {"x": {0: "rows"}})


class SequenceInput(nn.Module):
    """A list of tensors of different lengths as an input."""

    def forward(self, x: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the total of all tensors and the first one, doubled."""
        total = torch.zeros(3)
        for item in x:
            total = total + item.sum(dim=0)
        return total, x[0] * 2.0


@traced("sequence-input", opset=13)
def _sequence_input() -> Subject:
    feeds: list[Feed] = [{"x": [normal(rows, 3) for rows in sizes]} for sizes in ((2, 3), (1,), (4, 1, 2))]
    return Subject(torch.jit.script(SequenceInput()), feeds, ["total", "first"])


class Masked(nn.Module):
    """Rows that a mask selects, their positions and what is above zero."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return tensors whose shapes depend on the mask and on values."""
        return x[mask] * 2.0, mask.nonzero(), x[x > 0], x.masked_fill(mask[:, None], 0.0)


@traced("masks", opset=12)
@captured("masks-dynamo", opset=18)
def _masks() -> Subject:
    feeds: list[Feed] = [
        {"x": normal(rows, 4), "mask": np.arange(rows) % step == 0} for rows, step in ((6, 2), (1, 1), (5, 3))
    ]
    feeds.append({"x": -np.abs(normal(3, 4)), "mask": np.zeros(3, bool)})
    axes = {"x": {0: "rows"}, "mask": {0: "rows"}}
    return Subject(Masked(), feeds, ["selected", "places", "positive", "filled"], axes)


class Uniques(nn.Module):
    """Distinct values and how often each occurs."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return values, inverse indices and counts."""
        return torch.unique(x, sorted=True, return_inverse=True, return_counts=True)


@traced("unique", opset=13)
def _unique() -> Subject:
    feeds = [{"x": integers(high, length)} for high, length in ((5, 12), (2, 7), (50, 20))]
    return Subject(Uniques(), feeds, ["values", "inverse", "counts"], {"x": {0: "length"}})


class OptionalScale(nn.Module):
    """An input that may be left out, as some callers do."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        """Return the input, scaled if a scale is given."""
        return torch.relu(x) if scale is None else torch.relu(x * scale)


@traced("optional-missing", opset=15)
@captured("optional-missing-dynamo", opset=18)
def _optional_missing() -> Subject:
    return Subject(OptionalScale(), [{"x": normal(batch, 4)} for batch in (2, 1, 5)], axes={"x": {0: "batch"}})


@traced("optional-given", opset=15)
def _optional_given() -> Subject:
    feeds = [{"x": normal(batch, 4), "scale": normal(4)} for batch in (2, 1, 5)]
    return Subject(OptionalScale(), feeds, axes={"x": {0: "batch"}})


_FUNCTIONS = onnxscript.values.Opset("example.functions", 1)


@onnxscript.script(_FUNCTIONS)
def scaled(x: onnxscript.FLOAT[...], factor: float) -> onnxscript.FLOAT[...]:
    """Return a multiple of a tensor."""
    return opset18.Mul(x, opset18.Constant(value_float=factor))


@onnxscript.script(_FUNCTIONS)
def gated(x: onnxscript.FLOAT[...], y: onnxscript.FLOAT[...]) -> onnxscript.FLOAT[...]:
    """Return a product with an activation that calls another function."""
    return opset18.Mul(opset18.Mul(x, opset18.Sigmoid(scaled(x, 1.702))), y)


class Gated(nn.Module):
    """A layer that calls a function of the model by name, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(4, 8)
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        left, right = self.first(x), self.second(x)
        for _ in range(2):
            left = torch.onnx.ops.symbolic(
                "example.functions::gated", (left, right), dtype=x.dtype, shape=left.shape, version=1
            )
        return self.last(left)


@case("functions-dynamo", exporter="torch.onnx (dynamo)", package="torch")
def _functions(path: Path) -> Sequence[Feed]:
    feeds = [{"x": normal(batch, 4)} for batch in (2, 1, 5)]
    export(seeded(lambda: Subject(Gated(), feeds, axes={"x": {0: "batch"}})), path, dynamo=True, opset=18)
    model = onnx.load(path, load_external_data=False)
    model.functions.extend([scaled.to_function_proto(), gated.to_function_proto()])
    onnx.save(model, path)
    return feeds


class Contributed(nn.Module):
    """Operators of onnxruntime's own domain, called by name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.bias = nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a fused product of fused activations."""
        hidden = self._operator("com.microsoft::BiasGelu", (self.layer(x), self.bias), x)
        return self._operator("com.microsoft::FusedMatMul", (hidden, self.layer.weight), x, alpha=0.5, transB=1)

    def _operator(
        self, name: str, values: tuple[torch.Tensor, ...], like: torch.Tensor, **attributes: float
    ) -> torch.Tensor:
        return torch.onnx.ops.symbolic(name, values, attributes, dtype=like.dtype, shape=like.shape, version=1)


@captured("contributed-dynamo", opset=18)
def _contributed() -> Subject:
    return Subject(Contributed(), [{"x": normal(batch, 8)} for batch in (2, 1, 5)], axes={"x": {0: "batch"}})


class SkipNormOperator(torch.autograd.Function):
    """A layer normalization that the TorchScript exporter writes as an operator of onnxruntime's own domain."""

    @staticmethod
    def forward(_ctx: object, x: torch.Tensor, skip: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
        """Compute the operator in PyTorch."""
        return nn.functional.layer_norm(x + skip, gamma.shape, gamma)

    @staticmethod
    def symbolic(graph: torch.Graph, x: torch.Value, skip: torch.Value, gamma: torch.Value) -> torch.Value:
        """Write the operator."""
        return graph.op("com.microsoft::SkipLayerNormalization", x, skip, gamma, epsilon_f=1e-5).setType(x.type())


class SkipNorm(nn.Module):
    """A residual connection and a normalization in one operator."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.gamma = nn.Parameter(torch.randn(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalized sum."""
        return SkipNormOperator.apply(self.layer(x), x, self.gamma)


@traced("skip-norm", opset=17)
def _skip_norm() -> Subject:
    return Subject(SkipNorm(), _steps(), axes=_STEPS)


class Beam(nn.Module):
    """Greedy decoding: a loop around a small network, with a growing list of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.cell = nn.Linear(16, 8)
        self.head = nn.Linear(8, 12)

    def forward(self, x: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        """Return the tokens of all steps."""
        state = torch.zeros(x.size(0), 8)
        tokens = x[:, None]
        for _ in range(int(steps)):
            state = torch.tanh(self.cell(torch.cat([self.embedding(tokens[:, -1]), state], dim=1)))
            tokens = torch.cat([tokens, self.head(state).argmax(dim=1, keepdim=True)], dim=1)
        return tokens


@traced("greedy-decoding", opset=16)
def _greedy_decoding() -> Subject:
    feeds: list[Feed] = [{"x": integers(12, n), "steps": np.array(count)} for n, count in ((2, 4), (1, 7), (3, 0))]
    axes: Axes = {"x": {0: "batch"}, "tokens": {0: "batch", 1: "length"}}
    return Subject(torch.jit.script(Beam()), feeds, ["tokens"], axes)


if __name__ == "__main__":
    sys.exit(main("pytorch_control"))
