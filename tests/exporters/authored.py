"""Models that programs write by hand: with spox, and with onnxscript, which compiles Python functions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxscript
import spox.opset.ai.onnx.ml.v3 as ml
import spox.opset.ai.onnx.v17 as op
from cases import Feed, case, main
from onnx import save
from onnxscript import FLOAT, INT64, script
from onnxscript import opset18 as op18
from spox import Optional, Tensor, Var, argument, build, inline

REQUIREMENTS = [
    "numpy==2.4.6",
    "onnx==1.23.2",
    "onnxscript==0.7.2",
    "protobuf==6.33.6",
    "spox==0.18.2",
]

#: A tensor of a dynamic number of rows.
Rows = FLOAT["N", 8]
LOCAL = onnxscript.values.Opset("local.layers", 1)


def noise(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """Draw normally distributed numbers."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def rows(name: str = "x", width: int = 8) -> list[Feed]:
    """Draw requests of one, three and nine rows."""
    return [{name: noise(count, width, seed=count)} for count in (1, 3, 9)]


def spoxed(name: str, feeds: Sequence[Feed]) -> Callable[..., Any]:
    """Declare a case whose inputs and outputs, by name, the decorated function returns."""

    def register(make_values: Callable[[], tuple[dict[str, Var], dict[str, Var]]]) -> Callable[..., Any]:
        @case(f"spox-{name}", exporter="spox", package="spox")
        def make(path: Path) -> Sequence[Feed]:
            inputs, outputs = make_values()
            save(build(inputs, outputs), path)
            return feeds

        return make_values

    return register


def scripted(name: str, feeds: Sequence[Feed]) -> Callable[..., Any]:
    """Declare a case that saves the decorated script."""

    def register(function: Any) -> Any:
        @case(f"onnxscript-{name}", exporter="onnxscript", package="onnxscript")
        def make(path: Path) -> Sequence[Feed]:
            save(function.to_model_proto(), path)
            return feeds

        return function

    return register


def table() -> Var:
    """Declare an input of a dynamic number of rows of eight."""
    return argument(Tensor(np.float32, ("N", 8)))


def dense(x: Var, seed: int) -> Var:
    """Multiply by weights and add a bias."""
    return op.add(op.matmul(x, op.const(noise(8, 8, seed=seed))), op.const(noise(8, seed=seed + 1)))


@spoxed("perceptron", rows())
def perceptron() -> tuple[dict[str, Var], dict[str, Var]]:
    """Stack layers whose weights are constants."""
    x = table()
    return {"x": x}, {"y": op.softmax(dense(op.relu(dense(x, 0)), 2))}


@spoxed("branches", rows())
def branches() -> tuple[dict[str, Var], dict[str, Var]]:
    """Choose between layers, both of which use an outer value."""
    x = table()
    h = dense(x, 0)
    positive = op.greater(op.reduce_sum(x, keepdims=0), op.const(np.float32(0)))
    (y,) = op.if_(positive, then_branch=lambda: [dense(h, 2)], else_branch=lambda: [op.neg(h)])
    return {"x": x}, {"y": y}


@spoxed("loop", [{"x": noise(n, 8, seed=n), "trips": np.array(trips)} for n, trips in ((1, 2), (3, 0), (2, 6))])
def loop() -> tuple[dict[str, Var], dict[str, Var]]:
    """Repeat a layer and keep every sum."""
    x, trips = table(), argument(Tensor(np.int64, ()))

    def body(_: Var, go: Var, state: Var) -> list[Var]:
        following = op.tanh(op.add(dense(state, 0), x))
        return [go, following, op.reduce_sum(following, keepdims=0)]

    last, sums = op.loop(trips, v_initial=[x], body=body)
    return {"x": x, "trips": trips}, {"last": last, "sums": sums}


@spoxed("inlined", rows())
def inlined() -> tuple[dict[str, Var], dict[str, Var]]:
    """Call a model inside another, twice."""
    inner = build(*perceptron())
    x = table()
    (once,) = inline(inner)(x).values()
    (twice,) = inline(inner)(once).values()
    return {"x": x}, {"once": once, "twice": twice}


@spoxed("words", [{"words": np.array(w, dtype=object)} for w in (["a"], ["b", "c", "a", "?"])])
def words() -> tuple[dict[str, Var], dict[str, Var]]:
    """Look up words in a table of vectors."""
    text = argument(Tensor(np.str_, ("N",)))
    ids = ml.label_encoder(text, keys_strings=["a", "b", "c"], values_int64s=[1, 2, 3], default_int64=0)
    return {"words": text}, {"ids": ids, "vectors": op.gather(op.const(noise(4, 5)), ids)}


@spoxed("optional", rows())
def optional() -> tuple[dict[str, Var], dict[str, Var]]:
    """Return an optional value from a branch that fills it and one that does not."""
    x = table()
    positive = op.greater(op.reduce_sum(x, keepdims=0), op.const(np.float32(0)))
    kind = Tensor(np.float32, ("N", 8))
    (maybe,) = op.if_(
        positive, then_branch=lambda: [op.optional(op.neg(x))], else_branch=lambda: [op.optional(type=kind)]
    )
    assert isinstance(maybe.type, Optional)
    return {"x": x}, {"there": op.optional_has_element(maybe)}


@script(LOCAL, default_opset=op18)
def layer(x: Any, weight: Any, bias: Any) -> Any:
    """Apply one dense layer; a function of the model."""
    return op18.Relu(op18.MatMul(x, weight) + bias)


@scripted("functions", [{**feed, "w": noise(8, 8, seed=3), "b": noise(8, seed=4)} for feed in rows()])
@script(default_opset=op18)
def functions(x: Rows, w: FLOAT[8, 8], b: FLOAT[8]) -> Rows:
    """Call one function three times."""
    return layer(layer(layer(x, w, b), w, b), w, b) - x


@scripted("while", rows())
@script(default_opset=op18)
def doubled(x: Rows) -> Rows:
    """Double while the largest value is small."""
    y = op18.Abs(x) + op18.Constant(value_float=0.1)
    small = op18.ReduceMax(y, keepdims=0) < op18.Constant(value_float=20.0)
    while small:
        y = y * op18.Constant(value_float=2.0)
        small = op18.ReduceMax(y, keepdims=0) < op18.Constant(value_float=20.0)
    return y


@scripted("for-and-if", [{**feed, "n": np.array(n)} for n, feed in enumerate(rows(), start=2)])
@script(default_opset=op18)
def alternating(x: Rows, n: INT64) -> Rows:
    """Add or halve by the parity of the iteration."""
    y = op18.Identity(x)
    for i in range(n):
        odd = op18.Cast(op18.Mod(i, op18.Constant(value_int=2)), to=9)
        if odd:  # noqa: SIM108  # becomes an operator, which a conditional expression cannot
            y = y * op18.Constant(value_float=0.5)
        else:
            y = y + x
    return y


if __name__ == "__main__":
    sys.exit(main("authored", sys.argv[1:]))
