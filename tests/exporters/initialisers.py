"""Models that hold their weights in rare ways: shared, sparse, overridable, as nodes, or in files of their own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from cases import Feed, case, main
from onnx import ModelProto, SparseTensorProto, external_data_helper, helper, numpy_helper, save
from textual import declare, noise, parse, shaped

REQUIREMENTS = ["numpy", "onnx>=1.23"]

ROWS = shaped("x", (1, 8), (4, 8), (9, 8))
SQUARE = (8, 8)


def list_as_inputs(*names: str) -> Callable[[ModelProto], None]:
    """Return an edit that lists initialisers as inputs too, so that requests can override them."""

    def change(model: ModelProto) -> None:
        for weight in model.graph.initializer:
            if weight.name in names:
                model.graph.input.append(helper.make_tensor_value_info(weight.name, weight.data_type, weight.dims))

    return change


declare(
    "shared-by-layers",
    """
    net (float[N, 8] x) => (float[N, 8] y) {
      p = MatMul(x, W)
      q = Add(p, b)
      r = Relu(q)
      s = MatMul(r, W)
      y = Add(s, b)
    }
    """,
    ROWS,
    {"W": SQUARE, "b": (8,)},
)
declare(
    "shared-by-gemms",
    """
    net (float[N, 8] x) => (float[N, 8] y, float[N, 8] z) {
      p = Gemm <transB = 1> (x, W, b)
      y = Gemm <alpha = 0.5> (p, W, b)
      z = Add(p, b)
    }
    """,
    ROWS,
    {"W": SQUARE, "b": (8,)},
)
declare(
    "overridable",
    "net (float[N, 8] x) => (float[N, 8] y) { p = MatMul(x, W) q = Add(p, b) y = Relu(q) }",
    [ROWS[0], {**ROWS[1], "b": noise(8, seed=5)}, {**ROWS[2], "b": noise(8, seed=6), "W": noise(8, 8, seed=7)}],
    {"W": SQUARE, "b": (8,)},
    change=list_as_inputs("W", "b"),
)
declare(
    "unused",
    "net (float[N, 8] x) => (float[N, 8] y) { dead = MatMul(x, W) deader = Relu(dead) y = Tanh(x) }",
    ROWS,
    {"W": SQUARE, "never": (30, 30)},
)
declare(
    "constants-as-nodes",
    """
    net (float[N, 4] x) => (float[N, 4] y) {
      w = Constant <value = float[4, 4] {1, 0.5, 0, 0, 0, 1, 0, 0.25, 0, 0, 1, 0, 2, 0, 0, 1}> ()
      k = Constant <value_floats = [1.0, 2.0, 3.0, 4.0]> ()
      s = Constant <value_float = 0.5> ()
      axes = Constant <value_ints = [1]> ()
      p = MatMul(x, w)
      q = Add(p, k)
      r = Mul(q, s)
      t = ReduceSum(r, axes)
      y = Sub(r, t)
    }
    """,
    shaped("x", (1, 4), (3, 4)),
)


@case("sparse", exporter="onnx.helper", package="onnx")
def sparse(path: Path) -> Sequence[Feed]:
    """Write a model of one sparse weight, given by flat indices."""
    model = parse("net (float[N, 8] x) => (float[N, 8] y) { p = MatMul(x, W) y = Relu(p) }")
    values = numpy_helper.from_array(noise(5), "W")
    places = numpy_helper.from_array(np.array([0, 9, 17, 42, 63]), "W_places")
    model.graph.sparse_initializer.append(SparseTensorProto(values=values, indices=places, dims=[8, 8]))
    save(model, path)
    return ROWS


@case("in-several-files", exporter="onnx.helper", package="onnx")
def external(path: Path) -> Sequence[Feed]:
    """Write a model whose weights lie in two files, three in one of them at offsets, and one in the model."""
    model = parse(
        """
        net (float[N, 64] x) => (float[N, 64] y) {
          p = MatMul(x, A) q = Add(p, a) r = Relu(q) s = MatMul(r, B) t = Add(s, b) y = Mul(t, k)
        }
        """,
        {"A": (64, 64), "a": (64,), "B": (64, 64), "b": (64,), "k": (1,)},
    )
    for weight in model.graph.initializer:
        if weight.name != "k":
            location = "weights-0.bin" if weight.name in "Aab" else "weights-1.bin"
            external_data_helper.set_external_data(weight, location)
    save(model, path)
    return shaped("x", (1, 64), (5, 64))


@case("as-inputs-ir3", exporter="onnx.helper", package="onnx")
def old(path: Path) -> Sequence[Feed]:
    """Write a model in version 3 of the format, which wants every initialiser to be an input too."""
    model = parse(
        "net (float[N, 8] x, float[8, 8] W, float[8] b) => (float[N, 8] y) { p = MatMul(x, W) y = Add(p, b) }",
        {"W": SQUARE, "b": (8,)},
        opset=8,
    )
    model.ir_version = 3
    save(model, path)
    return ROWS


if __name__ == "__main__":
    sys.exit(main("initialisers", sys.argv[1:]))
