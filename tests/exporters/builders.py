"""Models whose structure is legal but rare: names, inputs, outputs, shapes and functions."""

from __future__ import annotations

import sys

import numpy as np
from cases import main
from onnx import ModelProto, TensorProto, helper
from textual import declare, noise, scalar, shaped, text, vector

REQUIREMENTS = ["numpy", "onnx>=1.23"]


def describe(model: ModelProto) -> None:
    """Add documentation, metadata, and types of inner values, one of them of a value that does not exist."""
    model.doc_string = "A model.\nIn two lines."
    model.producer_name, model.producer_version, model.model_version = "producer", "1.0", 7
    helper.set_model_props(model, {"author": "nobody", "json": '{"a": [1, 2]}', "empty": ""})
    for node in model.graph.node:
        node.doc_string = f"{node.op_type} of {node.input[0]}"
    for name in ("h", "absent"):
        model.graph.value_info.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 8]))


ROWS = shaped("x", (1, 8), (4, 8), (9, 8))
SQUARE = (8, 8)

# Names.
declare(
    "names-missing",
    "net (float[N, 8] x) => (float[N, 8] y) { p = MatMul(x, W) q = Relu(p) r = MatMul(q, W2) y = Add(r, q) }",
    ROWS,
    {"W": SQUARE, "W2": SQUARE},
    names=None,
)
declare(
    "names-of-modules",
    """
    net (float[batch, 8] "input.1") => (float[batch, 8] "/model/out.1") {
      ["/model/layer.0/linear/MatMul"] "/model/layer.0/linear/MatMul_output_0" = MatMul("input.1", "onnx::MatMul_12")
      ["/model/layer.0/linear/Add"] "/model/layer.0/linear/Add_output_0" =
        Add("model.layer.0.linear.bias", "/model/layer.0/linear/MatMul_output_0")
      ["/model/layer.0/act/Relu"] "/model/layer.0/act/Relu_output_0" = Relu("/model/layer.0/linear/Add_output_0")
      ["/model/layer.1/linear/MatMul"] "/model/layer.1/linear/MatMul_output_0" =
        MatMul("/model/layer.0/act/Relu_output_0", "onnx::MatMul_13")
      ["/model/layer.1/linear/Add"] "/model/out.1" = Add("/model/layer.1/linear/MatMul_output_0", "input.1")
    }
    """,
    [{"input.1": feed["x"]} for feed in ROWS],
    {"onnx::MatMul_12": SQUARE, "model.layer.0.linear.bias": (8,), "onnx::MatMul_13": SQUARE},
)
declare(
    "names-strange",
    """
    net (float[N, 8] "serving default: x?") => (float[N, 8] "größe", float[N, 8] "a\tb|c") {
      ["größe"] "größe" = MatMul("serving default: x?", "W 1")
      ["a,b;c"] "p;q" = Tanh("größe")
      ["  "] "a\tb|c" = Sub("p;q", "größe")
    }
    """,
    [{"serving default: x?": feed["x"]} for feed in ROWS],
    {"W 1": SQUARE},
    names=None,
)
declare(
    "names-of-nodes-like-values",
    "net (float[N, 8] x) => (float[N, 8] y) { [x] p = Sigmoid(x) [W] q = MatMul(p, W) [p] y = Mul(q, p) }",
    ROWS,
    {"W": SQUARE},
    names=None,
)
declare(
    "described",
    "net (float[batch, 8] x) => (float[batch, 8] y) { h = MatMul(x, W) y = Softplus(h) }",
    ROWS,
    {"W": SQUARE},
    change=describe,
    domains={"unused.domain": 3},
)

# Inputs and outputs.
declare(
    "output-is-input",
    "net (float[N, 8] x, int64[M] ids) => (float[N, 8] x, float[N, 8] y, int64[M] ids) { y = MatMul(x, W) }",
    [{"x": noise(2, 8), "ids": vector(1, 2, 3)}, {"x": noise(5, 8, seed=1), "ids": vector(4)}],
    {"W": SQUARE},
)
declare(
    "output-is-identity-of-input",
    """
    net (float[N, 8] x) => (float[N, 8] y, float[N, 8] z, float[N, 8] w) {
      y = Identity(x) z = Abs(x) w = Identity(z)
    }
    """,
    ROWS,
)
declare(
    "output-constant",
    """
    net (float[N, 8] x) => (float[N, 8] y, float[2, 2] k, int64[1] size) {
      k = Constant <value = float[2, 2] {1, 2, 3, 4}> ()
      n = Size(k)
      one = Constant <value_ints = [1]> ()
      size = Reshape(n, one)
      y = MatMul(x, W)
    }
    """,
    ROWS,
    {"W": SQUARE},
)
declare(
    "output-initialiser",
    "net (float[N, 8] x) => (float[N, 8] y, float[8] b) { y = Add(x, b) }",
    ROWS,
    {"b": (8,)},
)
declare(
    "input-unused",
    "net (float[N, 8] x, int64[K] unused, string[L] words) => (float[N, 8] y) { y = MatMul(x, W) }",
    [{**feed, "unused": vector(1, 2), "words": text("a")} for feed in ROWS],
    {"W": SQUARE},
)
declare(
    "inputs-none",
    """
    net () => (float[3, 8] y) {
      k = ConstantOfShape <value = float[1] {0.5}> (shape)
      p = MatMul(k, W)
      y = Tanh(p)
    }
    """,
    [{}, {}],
    {"shape": vector(3, 8), "W": SQUARE},
)
declare(
    "inputs-scalar",
    """
    net (float[N, 8] x, float scale, int64 power, bool flip) => (float[N, 8] y, float total) {
      p = Mul(x, scale)
      q = Abs(p)
      r = Pow(q, power)
      s = Neg(r)
      y = Where(flip, r, s)
      total = ReduceSum <keepdims = 0> (y)
    }
    """,
    [
        {
            "x": noise(n, 8, seed=n),
            "scale": scalar(0.5 * n, np.float32),
            "power": scalar(n),
            "flip": scalar(n > 1, bool),
        }
        for n in (1, 2, 3)
    ],
)
declare(
    "outputs-many",
    "net (float[N, 32] x) => ("
    + ", ".join(f"float[N, 1] y{i}" for i in range(32))
    + ") { "
    + ", ".join(f"y{i}" for i in range(32))
    + " = Split <axis = 1> (x) }",
    shaped("x", (1, 32), (6, 32)),
)
declare(
    "outputs-left-out",
    """
    net (float[T, N, 8] x) => (float[1, N, 4] last) {
      , last, = LSTM <hidden_size = 4> (x, W, R, , , h0)
    }
    """,
    [{"x": noise(t, n, 8, seed=t)} for t, n in ((1, 2), (5, 2), (9, 2))],
    {"W": (1, 16, 8), "R": (1, 16, 4), "h0": (1, 2, 4)},
)

# Shapes.
declare(
    "shapes-unknown",
    """
    net (float[] x, int64[] shape) => (float[] y) {
      p = Reshape(x, shape)
      q = Exp(p)
      y = ReduceMean <axes = [-1], keepdims = 1> (q)
    }
    """,
    [
        {"x": noise(4, 6), "shape": vector(2, 12)},
        {"x": noise(12), "shape": vector(3, 2, 2)},
        {"x": noise(2, 3, 4, 5), "shape": vector(-1)},
    ],
)
declare(
    "shapes-by-expression",
    """
    net (float[batch, seq, 8] x) => (float["batch*seq", 8] y, float[batch, "seq + 1", 8] z) {
      flat = Reshape(x, shape)
      y = MatMul(flat, W)
      z = Pad(x, pads)
    }
    """,
    shaped("x", (1, 3, 8), (2, 5, 8), (4, 1, 8)),
    {"shape": vector(-1, 8), "W": SQUARE, "pads": vector(0, 1, 0, 0, 0, 0)},
)
declare(
    "shapes-depend-on-data",
    """
    net (float[N] x) => (float[] kept, int64[] places, float[] values, int64[] back) {
      yes = Greater(x, zero)
      places = NonZero(yes)
      kept = Compress(x, yes)
      whole = Round(x)
      values, , back, = Unique <sorted = 1> (whole)
    }
    """,
    shaped("x", (1,), (7,), (40,)),
    {"zero": scalar(0, np.float32)},
)
declare(
    "sizes-zero",
    """
    net (float[N, 8] x, float[M, 8] past) => (float[K, 8] joined, float[K, 8] y) {
      joined = Concat <axis = 0> (past, x)
      p = MatMul(joined, W)
      y = Relu(p)
    }
    """,
    [
        {"x": noise(3, 8), "past": noise(0, 8)},
        {"x": noise(1, 8), "past": noise(3, 8)},
        {"x": noise(0, 8), "past": noise(0, 8)},
    ],
    {"W": SQUARE},
)
declare(
    "ranks-up-to-seven",
    """
    net (float[a, b, c, 2, 3, 1, 2] x) => (float[] y) {
      p = Transpose <perm = [6, 0, 5, 1, 4, 2, 3]> (x)
      q = Squeeze(p, two)
      y = ReduceMax <axes = [0, 3], keepdims = 0> (q)
    }
    """,
    shaped("x", (1, 1, 1, 2, 3, 1, 2), (2, 3, 2, 2, 3, 1, 2)),
    {"two": vector(2)},
)

# Functions.
declare(
    "functions",
    """
    net (float[N, 8] x) => (float[N, 8] y) {
      p = local.layer <slope = 0.2> (x, W, b)
      q = local.layer (p, W2, b)
      y = local.layer (q, W, )
    }
    <domain: "local", opset_import: ["": 17, "local": 1]>
    layer <slope: float = 0.1> (x, weight, bias) => (y) {
      p = MatMul(x, weight)
      r = local.activate <slope: float = @slope> (p)
      y = Add(r, x)
    }
    <domain: "local", opset_import: ["": 17]>
    activate <slope> (x) => (y) {
      p = LeakyRelu <alpha: float = @slope> (x)
      y = Tanh(p)
    }
    """,
    ROWS,
    {"W": SQUARE, "W2": SQUARE, "b": (8,)},
    domains={"local": 1},
)
declare(
    "function-with-branch",
    """
    net (float[N, 8] x) => (float[N, 8] y, float[N, 8] z) { y = pkg.net.choose(x) p = Neg(x) z = pkg.net.choose(p) }
    <domain: "pkg.net", opset_import: ["": 18]>
    choose (x) => (y) {
      total = ReduceSum <keepdims = 0> (x)
      zero = Constant <value_float = 0.0> ()
      up = Greater(total, zero)
      y = If (up) <
        then_branch = yes () => (a) { a = Relu(x) },
        else_branch = no () => (b) { n = Neg(x) b = Exp(n) }
      >
    }
    """,
    ROWS,
    opset=18,
    domains={"pkg.net": 1},
)

if __name__ == "__main__":
    sys.exit(main("builders", sys.argv[1:]))
