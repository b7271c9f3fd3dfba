"""Operators that treat every token by itself: plain onnxruntime gives one token what it has among others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from chrion.generation.rewrites.observation import Observation, Size
from chrion.generation.rewrites.token_axis import token_axes, tokens_axis

Array = np.ndarray[Any, Any]
TOKENS = 5
RANDOM = np.random.default_rng(0)


@dataclass(frozen=True)
class Case:
    """An operator with token-wise inputs, each with the number of its token axis, and with weights."""

    kind: str
    #: The inputs in order: names of ``tokens`` and ``weights``.
    inputs: str
    #: Arrays of TOKENS tokens, and their token axes.
    tokens: dict[str, tuple[Array, int]]
    weights: dict[str, Array | onnx.TensorProto] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    domain: str = ""
    outputs: int = 1
    #: What varies of a case, in its name.
    about: str = ""

    @property
    def node(self) -> onnx.NodeProto:
        names = [name.strip("-") for name in self.inputs.split()]
        results = [f"out{at}" for at in range(self.outputs)]
        return helper.make_node(self.kind, names, results, domain=self.domain, **self.attributes)

    def run(self, feed: dict[str, Array]) -> list[Array]:
        """Return the outputs of plain onnxruntime."""
        inputs = [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
            for name, value in feed.items()
        ]
        weights = []
        for name, value in self.weights.items():
            weights.append(value if isinstance(value, onnx.TensorProto) else numpy_helper.from_array(value, name))
        outputs = [onnx.ValueInfoProto(name=name) for name in self.node.output]
        graph = helper.make_graph([self.node], "one", inputs, outputs, weights)
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        options = ort.SessionOptions()
        options.log_severity_level = 4
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        found: list[Array] = session.run(None, feed)
        return found

    def rows(self, tokens: list[int]) -> dict[str, Array]:
        """Return some tokens of each input."""
        return {name: np.take(value, tokens, axis) for name, (value, axis) in self.tokens.items()}


def floats(*shape: int) -> Array:
    return RANDOM.standard_normal(shape).astype(np.float32)


def numbers(most: int, *shape: int, kind: Any = np.int64) -> Array:
    return RANDOM.integers(0, most, shape).astype(kind)


def scale(value: float = 0.05) -> Array:
    return np.array(value, np.float32)


def zero(kind: Any = np.uint8) -> Array:
    return np.array(128 if kind == np.uint8 else 0, kind)


X = {"x": (floats(1, TOKENS, 8), 1)}
U8 = {"x": (numbers(255, 1, TOKENS, 8, kind=np.uint8), 1)}
MICROSOFT = "com.microsoft"
ALL = {"zero": np.array([0]), "end": np.array([2**63 - 1]), "axis": np.array([1])}
Q = {"s": scale(), "z": zero(), "w": numbers(255, 8, 6, kind=np.uint8)}
EXPERTS = {"up": floats(3, 12, 8), "down": floats(3, 8, 12), "up0": floats(3, 12), "down0": floats(3, 8)}
ROUTED = {**X, "r": (floats(TOKENS, 3), 0)}
PICKED = {"x": (numbers(4, TOKENS, 2), 0)}
UINT4 = helper.make_tensor("w", TensorProto.UINT4, [7, 32], numbers(16, 7 * 32).tolist())

TOKEN_WISE = [
    Case("TopK", "x k", X, {"k": np.array([2])}, outputs=2),
    Case("Tile", "x n", X, {"n": np.array([1, 1, 3])}),
    Case("ArgMax", "x", X, attributes={"axis": 2, "keepdims": 0}),
    Case("ArgMin", "x", {"x": (floats(4, TOKENS), 1)}, attributes={"axis": 0, "keepdims": 0}, about="before"),
    Case("ArgMax", "x", X, attributes={"axis": -1}, about="kept"),
    Case("OneHot", "x d v", PICKED, {"d": np.array(4), "v": np.array([0, 1])}),
    Case("OneHot", "x d v", PICKED, {"d": np.array(4), "v": np.array([0, 1])}, {"axis": 0}, about="before"),
    Case("Gather", "t x", {"x": (numbers(9, 2, TOKENS), 1)}, {"t": floats(3, 9)}, {"axis": 1}),
    Case("Gather", "x i", {"x": (floats(3, TOKENS, 4), 1)}, {"i": np.array([[0, 2], [1, 1]])}, about="before"),
    Case("Gather", "x i", {"x": (floats(3, TOKENS, 4), 1)}, {"i": np.array([0, 2])}, {"axis": -1}, about="behind"),
    Case("GatherElements", "x i", {**X, "i": (numbers(8, 1, TOKENS, 3), 1)}, attributes={"axis": 2}),
    Case("GatherElements", "t x", {"x": (numbers(9, 1, TOKENS, 4), 1)}, {"t": floats(1, 9, 4)}, {"axis": 1}),
    Case("GatherND", "t x", {"x": (numbers(9, 1, TOKENS, 1), 1)}, {"t": floats(9, 4)}),
    Case("GatherND", "x i", {"x": (floats(3, 2, TOKENS, 4), 2)}, {"i": np.array([[0, 1], [2, 0], [1, 1]])}, about="in"),
    Case(
        "ScatterElements",
        "x i u",
        {"x": (floats(TOKENS, 4), 0), "i": (numbers(4, TOKENS, 1), 0), "u": (floats(TOKENS, 1), 0)},
        attributes={"axis": 1},
    ),
    Case("Slice", "x zero end axis", X, ALL),
    Case("Slice", "x zero end axis one", X, {**ALL, "one": np.array([1])}, about="step"),
    Case("MatMulInteger", "x w z z", U8, {"w": numbers(255, 8, 6, kind=np.uint8), "z": zero()}),
    Case(
        "MatMulInteger",
        "w x",
        {"x": (numbers(255, 3, TOKENS, kind=np.uint8), 1)},
        {"w": Q["w"][:, :3]},
        about="columns",
    ),
    Case("QLinearMatMul", "x s z w s z s z", U8, Q),
    Case(
        "QLinearMatMul",
        "w s z x s z s z",
        {"x": (numbers(255, 6, TOKENS, kind=np.uint8), 1)},
        Q,
        about="columns",
    ),
    Case(
        "QGemm",
        "x s z w s z c s z",
        {"x": (U8["x"][0][0], 0)},
        {**Q, "c": numbers(9, 6, kind=np.int32)},
        domain=MICROSOFT,
    ),
    Case("QLinearAdd", "x s z b s z s z", U8, {**Q, "b": numbers(255, 8, kind=np.uint8)}, domain=MICROSOFT),
    Case(
        "MatMulBnb4",
        "x w a",
        {"x": (floats(1, TOKENS, 32), 1)},
        {"w": numbers(255, 32 * 6 // 2, kind=np.uint8), "a": np.abs(floats(12))},
        {"K": 32, "N": 6, "block_size": 16, "quant_type": 1},
        MICROSOFT,
    ),
    Case(
        "GatherBlockQuantized",
        "w x a",
        {"x": (numbers(7, 1, TOKENS), 1)},
        {"w": UINT4, "a": floats(7, 2)},
        {"gather_axis": 0, "quantize_axis": 1, "block_size": 16},
        MICROSOFT,
    ),
    Case("MoE", "x r up up0 down down0", ROUTED, EXPERTS, {"k": 2, "activation_type": "relu"}, MICROSOFT),
    Case(
        "QMoE",
        "x r up ups - down downs",
        {"x": (floats(1, TOKENS, 16), 1), "r": (floats(TOKENS, 3), 0)},
        {
            "up": numbers(255, 3, 32, 8, kind=np.uint8),
            "ups": scale() * floats(3, 32),
            "down": numbers(255, 3, 16, 16, kind=np.uint8),
            "downs": scale() * floats(3, 16),
        },
        {"k": 2, "activation_type": "relu", "expert_weight_bits": 4},
        MICROSOFT,
    ),
]
MIXING = [
    Case("TopK", "x k", X, {"k": np.array([2])}, {"axis": 1}, outputs=2),
    Case("Tile", "x n", X, {"n": np.array([1, 2, 1])}),
    Case("ArgMax", "x", X, attributes={"axis": 1}),
    Case("Gather", "x i", X, {"i": np.array([0, 2])}, {"axis": 1}),
    Case("Gather", "x i", {**X, "i": (numbers(5, TOKENS), 0)}, attributes={"axis": 1}, about="both"),
    Case("GatherElements", "x i", {**X, "i": (numbers(TOKENS, 1, TOKENS, 3), 1)}, attributes={"axis": 1}),
    Case(
        "GatherElements", "t x", {"x": (numbers(4, TOKENS, 4), 0)}, {"t": floats(TOKENS, 4)}, {"axis": 1}, about="rows"
    ),
    Case("GatherND", "x i", {"x": (floats(TOKENS, 4), 0)}, {"i": np.array([[0], [2]])}),
    Case("GatherND", "t x", {"x": (numbers(2, 3, TOKENS), 1)}, {"t": floats(2, 2, 2, 2, 2)}, about="depth"),
    Case(
        "ScatterElements",
        "x i u",
        {"x": (floats(TOKENS, 4), 0), "i": (numbers(TOKENS, TOKENS, 4), 0), "u": (floats(TOKENS, 4), 0)},
    ),
    Case("Slice", "x one end axis", X, {**ALL, "one": np.array([1])}),
    Case("Slice", "x zero few axis", X, {**ALL, "few": np.array([TOKENS])}, about="end"),
    Case("Slice", "x zero end axis two", X, {**ALL, "two": np.array([2])}, about="step"),
    Case(
        "Slice",
        "x last back axis minus",
        X,
        {**ALL, "last": np.array([-1]), "back": -ALL["end"], "minus": np.array([-1])},
    ),
    Case(
        "MatMulInteger",
        "w x",
        {"x": (numbers(255, TOKENS, 4, kind=np.uint8), 0)},
        {"w": numbers(255, 3, TOKENS, kind=np.uint8)},
    ),
    Case("MatMulInteger", "x x", {"x": (numbers(255, TOKENS, TOKENS, kind=np.uint8), 0)}, about="itself"),
    Case("QGemm", "x s z w s z", {"x": (numbers(255, 8, TOKENS, kind=np.uint8), 1)}, Q, {"transA": 1}, MICROSOFT),
    Case("DynamicQuantizeLinear", "x", X, outputs=3),
    Case(
        "MoE",
        "x r up up0 down down0",
        X,
        {**EXPERTS, "r": floats(TOKENS, 3)},
        {"k": 2, "activation_type": "relu"},
        MICROSOFT,
    ),
    Case("NonZero", "x", X),
    Case("Softmax", "x", X, attributes={"axis": 1}),
    Case("Concat", "x w", X, {"w": floats(1, TOKENS, 2)}, {"axis": 2}, about="positions"),
]


def axes_of(case: Case) -> tuple[int, ...] | None:
    """Return the token axes of the outputs, from the sizes that onnxruntime's outputs have."""
    shapes: dict[str, tuple[Size | None, ...]] = {}
    for name, (value, axis) in case.tokens.items():
        shapes[name] = tuple(Size(int(at == axis), 0, 0 if at == axis else n) for at, n in enumerate(value.shape))
    arrays = {n: numpy_helper.to_array(w) if isinstance(w, onnx.TensorProto) else w for n, w in case.weights.items()}
    shapes |= {name: tuple(Size(0, 0, n) for n in value.shape) for name, value in arrays.items()}
    many = case.run(case.rows([*range(TOKENS)]))
    for name, value in zip(case.node.output, many, strict=True):
        shapes[name] = tuple(Size(1, 0, 0) if n == TOKENS else Size(0, 0, n) for n in value.shape)
    seen = Observation(shapes, {}, arrays, {})
    return token_axes(case.node, {name: axis for name, (_, axis) in case.tokens.items()}, seen)


@pytest.mark.parametrize("case", TOKEN_WISE, ids=lambda case: f"{case.kind} {case.about}".strip())
def test_token_wise_operators(case: Case) -> None:
    """The outputs for a token by itself are its rows in the outputs for all tokens, along the axis that is found."""
    axes = axes_of(case)
    assert axes is not None
    many = case.run(case.rows([*range(TOKENS)]))
    for at in range(TOKENS):
        for value, single, axis in zip(many, case.run(case.rows([at])), axes, strict=True):
            np.testing.assert_allclose(np.take(value, [at], axis), single, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", MIXING, ids=lambda case: f"{case.kind} {case.about}".strip())
def test_operators_that_may_mix_tokens(case: Case) -> None:
    """Operators along the axis of tokens, of a part of them, or over all of them have no token axis."""
    assert axes_of(case) is None


@pytest.mark.parametrize(
    ("node", "source", "axis"),
    [
        (helper.make_node("ConstantOfShape", ["shape"], ["y"]), (), 1),
        (helper.make_node("Expand", ["x", "shape"], ["y"]), (1, 1, 8), 1),
        (helper.make_node("Expand", ["x", "shape"], ["y"]), (8,), 1),
        (helper.make_node("Expand", ["x", "shape"], ["y"]), (1, 5, 8), None),
        (helper.make_node("RandomNormal", [], ["y"]), (), None),
    ],
)
def test_rows_that_are_equal_for_all_tokens(node: onnx.NodeProto, source: tuple[int, ...], axis: int | None) -> None:
    """A constant that is repeated for each token is token-wise, and one that varies along that axis is not."""
    shapes = {"x": tuple(Size(0, 0, n) for n in source), "y": (Size(0, 0, 1), Size(1, 0, 0), Size(0, 0, 8))}
    assert tokens_axis(shapes["y"]) == 1
    assert tokens_axis((*shapes["y"], Size(0, 1, 0))) is None  # the past is another length
    assert token_axes(node, {}, Observation(shapes, {}, {}, {})) == (None if axis is None else (axis,))
