"""Models of rare element types: half precision, integers of few bits, booleans and strings."""

from __future__ import annotations

import sys

import numpy as np
from cases import main
from onnx import TensorProto
from textual import declare, integers, noise, scalar, shaped, tensor, text, vector

REQUIREMENTS = ["numpy", "onnx>=1.23"]

ROWS = shaped("x", (1, 8), (4, 8), (9, 8))
SQUARE = (8, 8)


declare(
    "float16",
    """
    net (float16[N, 8] x) => (float16[N, 8] y) {
      p = MatMul(x, W) q = Add(p, b) r = Relu(q) y = Softmax <axis = -1> (r)
    }
    """,
    [{"x": feed["x"].astype(np.float16)} for feed in ROWS],
    {"W": noise(*SQUARE, scale=0.3).astype(np.float16), "b": noise(8).astype(np.float16)},
    rtol=1e-2,
    atol=1e-2,
)
declare(
    "float16-inside",
    """
    net (float[N, 8] x) => (float[N, 8] y) {
      h = Cast <to = 10> (x) p = MatMul(h, W) q = Sigmoid(p) f = Cast <to = 1> (q) y = Add(f, x)
    }
    """,
    ROWS,
    {"W": noise(*SQUARE, scale=0.3).astype(np.float16)},
    rtol=1e-2,
    atol=1e-2,
)
declare(
    "bfloat16-inside",
    """
    net (float[N, 8] x) => (float[N, 8] y) {
      h = Cast <to = 16> (x) t = Transpose <perm = [1, 0]> (h) r = Reshape(t, shape) f = Cast <to = 1> (r)
      w = Cast <to = 1> (W) y = MatMul(f, w)
    }
    """,
    ROWS,
    {"shape": vector(-1, 8), "W": tensor("W", TensorProto.BFLOAT16, SQUARE, noise(*SQUARE))},
    rtol=1e-2,
    atol=1e-2,
)
declare(
    "double",
    "net (double[N, 8] x) => (double[N, 8] y) { p = MatMul(x, W) q = Add(p, b) y = Tanh(q) }",
    [{"x": feed["x"].astype(np.float64)} for feed in ROWS],
    {"W": noise(*SQUARE).astype(np.float64), "b": noise(8).astype(np.float64)},
    rtol=1e-9,
    atol=1e-9,
)
declare(
    "integers",
    """
    net (int32[N, 4] i, int64[N, 4] l, uint8[N, 4] u, int8[N, 4] s) =>
        (int64[N, 4] sums, bool[N, 4] less, uint8[N, 4] top) {
      wide = Cast <to = 7> (i)
      a = Add(wide, l)
      bytes = Cast <to = 7> (u)
      b = Mul(a, bytes)
      signed = Cast <to = 7> (s)
      sums = Mod(b, ten)
      less = Less(signed, sums)
      top = Max(u, u)
    }
    """,
    [
        {
            "i": integers(n, 4, high=9, low=-9, dtype=np.int32),
            "l": integers(n, 4, high=9, low=-9, seed=1),
            "u": integers(n, 4, high=255, dtype=np.uint8),
            "s": integers(n, 4, high=100, low=-100, dtype=np.int8),
        }
        for n in (1, 3)
    ],
    {"ten": scalar(10)},
)
declare(
    "bool",
    """
    net (bool[N] a, bool[N] b) => (bool[N] y, bool[N] z, int64[1] count) {
      p = And(a, b) q = Or(a, b) y = Xor(p, q) z = Not(y) n = Cast <to = 7> (z) count = ReduceSum(n)
    }
    """,
    [{"a": integers(n, high=2, dtype=bool), "b": integers(n, high=2, seed=9, dtype=bool)} for n in (1, 6, 0)],
)
declare(
    "int4-weights",
    """
    net (float[N, 32] x) => (float[N, 16] y) {
      w = DequantizeLinear <axis = 0, block_size = 16> (W, scales, points)
      p = MatMul(x, w)
      y = Gelu(p)
    }
    """,
    shaped("x", (1, 32), (6, 32)),
    {
        "W": tensor("W", TensorProto.INT4, (32, 16), integers(32, 16, high=8, low=-8)),
        "scales": np.abs(noise(2, 16, scale=0.1)) + 0.01,
        "points": tensor("points", TensorProto.INT4, (2, 16), integers(2, 16, high=3, low=-3)),
    },
    opset=21,
    rtol=2e-2,  # fused with its product, the weight meets activations rounded to eight bits
    atol=5e-2,
)
declare(
    "float8-inside",
    """
    net (float[N, 8] x) => (float[N, 8] y) {
      q = QuantizeLinear(x, scale, point)
      f = DequantizeLinear(q, scale, point)
      y = MatMul(f, W)
    }
    """,
    ROWS,
    {
        "scale": scalar(0.02, np.float32),
        "point": tensor("point", TensorProto.FLOAT8E4M3FN, (), [0.0]),
        "W": SQUARE,
    },
    opset=19,
)

# Strings.
WORDS = text("Graph", "of", "NODES", "and", "of", "edges")
declare(
    "strings-normalised",
    """
    net (string[N] words) => (string[] lower, int64[] ids, float[] counts) {
      lower = StringNormalizer <case_change_action = "LOWER", stopwords = ["of", "and"], locale = "C"> (words)
      ids = ai.onnx.ml.LabelEncoder
        <keys_strings = ["graph", "nodes", "edges"], values_int64s = [3, 1, 2], default_int64 = -1> (lower)
      counts = TfIdfVectorizer <max_gram_length = 2, min_gram_length = 1, max_skip_count = 1, mode = "TF",
        ngram_counts = [0, 3], ngram_indexes = [0, 1, 2, 3], pool_int64s = [1, 2, 3, 3, 1]> (ids)
    }
    """,
    [{"words": WORDS}, {"words": text("edges", "unseen")}, {"words": text("and", "graph")}],
    domains={"ai.onnx.ml": 3},
)
declare(
    "strings-operators",
    """
    net (string[N] a, string[N] b, int64[K] places) =>
        (string[N] c, string[] parts, int64[] n, bool[] match, string[] taken) {
      c = StringConcat(a, b)
      parts, n = StringSplit <delimiter = "o"> (c)
      match = RegexFullMatch <pattern = "[a-z]+"> (c)
      chosen = Where(match, a, c)
      taken = Gather(chosen, places)
    }
    """,
    [
        {"a": WORDS, "b": WORDS[::-1], "places": vector(0, 5, 5)},
        {"a": text("", "ünï"), "b": text("zoo", "x"), "places": vector(1)},
    ],
    opset=20,
)
declare(
    "strings-constant",
    """
    net (int64[N] ids) => (string[N] names, bool[N] same) {
      table = Constant <value = string[3] {"no", "maybe", "yes"}> ()
      names = Gather(table, ids)
      same = Equal(names, word)
    }
    """,
    [{"ids": vector(0, 2, 1, 2)}, {"ids": vector(1)}],
    {"word": text("yes")},
    opset=19,
)

if __name__ == "__main__":
    sys.exit(main("element_types", sys.argv[1:]))
