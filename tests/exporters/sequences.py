"""Models of sequences of tensors and of optional values."""

from __future__ import annotations

import sys

from cases import main
from textual import declare, flags, noise, scalar, shaped, trips, vector

REQUIREMENTS = ["numpy", "onnx>=1.23"]

SQUARE = (8, 8)

declare(
    "operators",
    """
    net (float[N, 8] x, int64 at) => (float[] y, int64 length, float[] stacked) {
      double = Add(x, x)
      wide = MatMul(x, W)
      all = SequenceConstruct(x, double)
      more = SequenceInsert(all, wide, at)
      less = SequenceErase(more, zero)
      length = SequenceLength(less)
      one = SequenceAt(less, minus)
      y = Relu(one)
      stacked = ConcatFromSequence <axis = 0, new_axis = 1> (less)
    }
    """,
    [{"x": noise(n, 8, seed=n), "at": scalar(at)} for n, at in ((1, 0), (3, 1), (2, 2))],
    {"W": SQUARE, "zero": scalar(0), "minus": scalar(-1)},
)
declare(
    "split",
    """
    net (float[N, 8] x, int64[K] sizes) => (seq(float[]) parts, float[] second, float[] back) {
      parts = SplitToSequence <axis = 0> (x, sizes)
      second = SequenceAt(parts, one)
      rows = SplitToSequence <axis = 0, keepdims = 0> (x)
      back = ConcatFromSequence <axis = 0, new_axis = 1> (rows)
    }
    """,
    [{"x": noise(6, 8), "sizes": vector(1, 2, 3)}, {"x": noise(4, 8, seed=1), "sizes": vector(2, 2)}],
    {"one": scalar(1)},
)
declare(
    "input",
    """
    net (seq(float[N, 8]) parts, int64 at) => (float[M, 8] y, seq(float[N, 8]) longer, int64 n) {
      joined = ConcatFromSequence <axis = 0> (parts)
      y = MatMul(joined, W)
      one = SequenceAt(parts, at)
      longer = SequenceInsert(parts, one)
      n = SequenceLength(longer)
    }
    """,
    [
        {"parts": [noise(2, 8), noise(3, 8, seed=1)], "at": scalar(1)},
        {"parts": [noise(1, 8, seed=2)], "at": scalar(0)},
        {"parts": [noise(1, 8, seed=i) for i in range(5)], "at": scalar(-2)},
    ],
    {"W": SQUARE},
)
declare(
    "in-loop",
    """
    net (float[N, 8] x, int64 trips) => (float[] y, int64 n) {
      none = SequenceEmpty()
      first = SequenceInsert(none, x)
      all = Loop (trips, yes, first) <
        body = step (int64 i, bool go, seq(float[N, 8]) s) => (bool keep, seq(float[N, 8]) t) {
          keep = Identity(go) last = SequenceAt(s, i) next = MatMul(last, W) t = SequenceInsert(s, next)
        }
      >
      y = ConcatFromSequence <axis = 0> (all)
      n = SequenceLength(all)
    }
    """,
    trips("x", "trips"),
    {"W": SQUARE, "yes": scalar(1, bool)},
)
declare(
    "map",
    """
    net (seq(float[N, 8]) parts, float[8] b) => (seq(float[N, 8]) y) {
      y = SequenceMap (parts, b) <
        body = each (float[N, 8] s, float[8] t) => (float[N, 8] u) { p = Add(s, t) u = Relu(p) }
      >
    }
    """,
    [{"parts": [noise(2, 8), noise(3, 8, seed=1)], "b": noise(8)}, {"parts": [noise(1, 8)], "b": noise(8, seed=1)}],
)
declare(
    "of-branch",
    """
    net (float[N, 8] x, bool flag) => (float[] y) {
      parts = If (flag) <
        then_branch = yes () => (seq(float[N, 8]) a) { p = Neg(x) a = SequenceConstruct(x, p) },
        else_branch = no () => (seq(float[N, 8]) c) { c = SequenceConstruct(x) }
      >
      y = ConcatFromSequence <axis = 0> (parts)
    }
    """,
    flags("x", "flag"),
)

# Optional values.
declare(
    "optional-input",
    """
    net (optional(float[N, 8]) maybe, float[N, 8] x) => (float[N, 8] y, bool there) {
      there = OptionalHasElement(maybe)
      y = If (there) <
        then_branch = yes () => (a) { v = OptionalGetElement(maybe) a = Add(v, x) },
        else_branch = no () => (c) { c = Neg(x) }
      >
    }
    """,
    [{"maybe": noise(n, 8, seed=n), "x": noise(n, 8, seed=9)} for n in (1, 4)],
    opset=18,
)
declare(
    "optional-output",
    """
    net (float[N, 8] x) => (optional(float[N, 8]) maybe, float[N, 8] y) {
      p = MatMul(x, W)
      maybe = Optional(p)
      q = OptionalGetElement(maybe)
      y = Relu(q)
    }
    """,
    shaped("x", (1, 8), (3, 8)),
    {"W": SQUARE},
    opset=18,
)
declare(
    "optional-sequence",
    """
    net (float[N, 8] x, bool flag) => (bool there, int64 n) {
      maybe = If (flag) <
        then_branch = yes () => (optional(seq(float[N, 8])) a) { s = SequenceConstruct(x, x) a = Optional(s) },
        else_branch = no () => (optional(seq(float[N, 8])) c) { r = SequenceConstruct(x) c = Optional(r) }
      >
      there = OptionalHasElement(maybe)
      parts = OptionalGetElement(maybe)
      n = SequenceLength(parts)
    }
    """,
    flags("x", "flag"),
    opset=18,
)

if __name__ == "__main__":
    sys.exit(main("sequences", sys.argv[1:]))
