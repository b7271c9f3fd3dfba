"""Decoder blocks with a mixture of experts, such as those of Mixtral.

Jiang et al., *Mixtral of experts* (2024): self-attention, then a router that selects the best two of the experts for
every step; an expert is a SwiGLU that computes only the steps that selected it. The metadata of the model states how
probably a request uses each expert; see :mod:`chrion.graph.usage`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx

from chrion.common.wrong_values import wrong_value
from chrion.graph.usage import USAGE_KEY
from chrion.zoo.decoder import Decoder, check_decoder_heads
from chrion.zoo.network import Spec
from chrion.zoo.weights_file import WeightsFile

#: Experts that a step selects.
TOP = 2
#: The standard deviation of Gumbel noise, that of the router's logits of one expert.
_DEVIATION = float(np.pi / np.sqrt(6))


@dataclass(frozen=True, slots=True)
class MoeSpec(Spec):
    """Parameters of the network; the defaults are a quarter of Mixtral's widths, in one block."""

    batch: int = 1
    #: Steps of the sequence.
    seq: int = 1
    layers: int = 1
    hidden: int = 1024
    #: Heads of the queries.
    heads: int = 8
    #: Heads of the keys and values.
    kv_heads: int = 2
    #: The width between the dense layers of an expert.
    inner: int = 3584
    experts: int = 8
    #: How much more probably the router scores the first expert best than the last one; 1 for equal experts.
    skew: float = 1.0

    def __post_init__(self) -> None:
        Spec.__post_init__(self)
        check_decoder_heads(self.hidden, self.heads, self.kv_heads)
        if self.experts < TOP:
            raise wrong_value("experts", f"{TOP} or more, the number that a step selects", self.experts)


def build_moe(spec: MoeSpec, store: WeightsFile | None = None) -> onnx.ModelProto:
    """Build the network.

    The input ``X`` and the output ``Y`` have the shape [batch, seq, hidden].
    """
    net = _Moe(spec, store)
    x = net.input("X", [spec.batch, spec.seq, spec.hidden])
    rotation, mask = net.rotation(spec.seq), net.causal_mask(spec.seq)
    first = first_choices(spec.experts, spec.skew)
    usage = {}
    for at in range(spec.layers):
        with net.scope(f"block{at}"):
            x = net.self_attention(x, rotation, mask)
            x = net.op("Add", x, net.mixture(net.rms_norm(x), first))
        for expert, share in enumerate(selection_shares(first)):
            used = 1 - (1 - share) ** (spec.batch * spec.seq)  # by at least one step
            usage[f"*block{at}/expert{expert}/*"] = round(float(used), 6)
    net.output(net.rms_norm(x), "Y", [spec.batch, spec.seq, spec.hidden])
    return net.model("moe", {USAGE_KEY: json.dumps(usage)})


def first_choices(experts: int, skew: float) -> npt.NDArray[np.float64]:
    """Return the probability of each expert to be a step's best one: a geometric sequence that sums to 1."""
    falling = skew ** (-np.arange(experts) / (experts - 1))
    return np.asarray(falling / falling.sum())


def selection_shares(first: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the probability of each expert to be among a step's best two.

    The second expert is drawn like the first one, among those that are left (Plackett and Luce's model).
    """
    odds = first / (1 - first)
    return np.asarray(first * (1 + odds.sum() - odds))


class _Moe(Decoder):
    def __init__(self, spec: MoeSpec, store: WeightsFile | None) -> None:
        super().__init__(spec.seed, spec.batch, spec.hidden, spec.heads, spec.kv_heads, store=store)
        self.steps, self.inner, self.experts = spec.batch * spec.seq, spec.inner, spec.experts
        self.shape = (spec.batch, spec.seq, spec.hidden)

    def mixture(self, x: str, first: npt.NDArray[np.float64]) -> str:
        """Add the experts that each step selects, weighted by the softmax of their scores."""
        rows = self.op("Reshape", x, self.integers(self.steps, self.hidden))
        gates = self._gates(rows, first)
        computed = [self._expert(at, rows, gate) for at, gate in enumerate(gates)]
        return self.op("Reshape", self.op("Sum", *computed), self.integers(*self.shape))

    def _gates(self, rows: str, first: npt.NDArray[np.float64]) -> list[str]:
        """Add the router: for each expert its weight in each step, zero where it was not selected: [steps]."""
        with self.scope("router"):
            matrix = self.normal("W", self.hidden, self.experts, deviation=_DEVIATION * self.hidden**-0.5)
            bias = self.constant(self.unique("b"), np.log(first).astype(np.float32))
            logits = self.op("Add", self.op("MatMul", rows, matrix), bias)
            best, chosen = self.unique("best"), self.unique("chosen")
            self.node("TopK", [logits, self.integers(TOP)], [best, chosen], axis=-1)
            zeros = self.constant(self.unique("zeros"), np.zeros((self.steps, self.experts), np.float32))
            spread = self.op("ScatterElements", zeros, chosen, self.op("Softmax", best, axis=-1), axis=1)
            columns = [self.unique(f"gate{at}") for at in range(self.experts)]
            self.node("Split", [spread, self.integers(*[1] * self.experts)], columns, axis=1)
            return [self.op("Squeeze", column, self.integers(1)) for column in columns]

    def _expert(self, at: int, rows: str, gate: str) -> str:
        """Add an expert that computes the steps with a gate other than zero: [steps, hidden]."""
        with self.scope(f"expert{at}"):
            positions = self.op("Transpose", self.op("NonZero", gate), perm=[1, 0])
            steps = self.op("Squeeze", positions, self.integers(1))
            computed = self.swiglu(self.op("Gather", rows, steps, axis=0), self.inner)
            weight = self.op("Unsqueeze", self.op("Gather", gate, steps, axis=0), self.integers(1))
            zeros = self.constant(f"zeros[{self.steps},{self.hidden}]", np.zeros((self.steps, self.hidden), np.float32))
            return self.op("ScatterND", zeros, positions, self.op("Mul", computed, weight))
