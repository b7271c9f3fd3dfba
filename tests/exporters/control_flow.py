"""Models with branches, loops and scans, whose subgraphs capture outer values."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from cases import Feed, case, main
from onnx import save
from textual import declare, flags, noise, parse, scalar, shaped, trips, vector

REQUIREMENTS = ["numpy", "onnx>=1.23"]

SQUARE = (8, 8)
# Branches.
declare(
    "if-captures",
    """
    net (float[N, 8] x, bool flag) => (float[N, 8] y) {
      h = MatMul(x, W)
      y = If (flag) <
        then_branch = yes () => (a) { p = Relu(h) a = Add(p, b) },
        else_branch = no () => (c) { q = Neg(h) r = MatMul(q, W) c = Mul(r, x) }
      >
    }
    """,
    flags("x", "flag"),
    {"W": SQUARE, "b": (8,)},
)
declare(
    "if-shapes-differ",
    """
    net (float[N, 8] x, bool flag) => (float[] y, float[] z) {
      y, z = If (flag) <
        then_branch = yes () => (a, b) { a = ReduceSum <keepdims = 0> (x, one) b = Identity(x) },
        else_branch = no () => (c, d) { c = Concat <axis = 1> (x, x) d = Constant <value = float[1] {3}> () }
      >
    }
    """,
    flags("x", "flag"),
    {"one": vector(1)},
)
declare(
    "if-nested",
    """
    net (float[N, 8] x, bool flag) => (float[N, 8] y) {
      total = ReduceSum <keepdims = 0> (x)
      up = Greater(total, zero)
      h = MatMul(x, W)
      y = If (flag) <
        then_branch = yes () => (a) {
          p = Abs(h)
          a = If (up) <
            then_branch = inner_yes () => (d) { s = Mul(p, x) d = MatMul(s, W) },
            else_branch = inner_no () => (e) { e = If (flag) <
              then_branch = deep_yes () => (f) { f = Sub(p, h) },
              else_branch = deep_no () => (g) { g = Identity(x) }
            > }
          >
        },
        else_branch = no () => (c) { c = Sigmoid(h) }
      >
    }
    """,
    flags("x", "flag"),
    {"W": SQUARE, "zero": scalar(0, np.float32)},
)
declare(
    "if-decided-by-shape",
    """
    net (float[N, 8] x) => (float[] y) {
      n = Shape <start = 0, end = 1> (x)
      first = Squeeze(n)
      many = Greater(first, two)
      y = If (many) <
        then_branch = yes () => (a) { a = ReduceMean <axes = [0], keepdims = 1> (x) },
        else_branch = no () => (c) { c = MatMul(x, W) }
      >
    }
    """,
    shaped("x", (1, 8), (3, 8), (2, 8)),
    {"W": SQUARE, "two": scalar(2)},
)
declare(
    "if-constant",
    """
    net (float[N, 8] x) => (float[N, 8] y, float[N, 8] z) {
      yes = Constant <value = bool {1}> ()
      y = If (yes) <
        then_branch = a () => (p) { p = Relu(x) },
        else_branch = b () => (q) { q = Neg(x) }
      >
      z = If (never) <
        then_branch = c () => (r) { r = Relu(y) },
        else_branch = d () => (s) { s = Tanh(y) }
      >
    }
    """,
    shaped("x", (1, 8), (3, 8)),
    {"never": scalar(0, bool)},
)
declare(
    "if-names-reused",
    """
    net (float[N, 8] x, bool flag) => (float[N, 8] y) {
      [node] h = MatMul(x, W)
      [choice] y = If (flag) <
        then_branch = yes () => (out) { [node] p = Relu(h) [choice] out = Add(p, x) },
        else_branch = no () => (out) { [node] p = Neg(h) [choice] out = Mul(p, x) }
      >
    }
    """,
    flags("x", "flag"),
    {"W": SQUARE},
    names=None,
)

# Loops.
declare(
    "loop-trips",
    """
    net (float[N, 8] x, int64 trips) => (float[N, 8] y, float[T, N, 8] all) {
      y, all = Loop (trips, , x) <
        body = step (int64 i, bool go, float[N, 8] s) => (keep, t, copy) {
          keep = Identity(go) p = MatMul(s, W) t = Tanh(p) copy = Identity(t)
        }
      >
    }
    """,
    trips("x", "trips"),
    {"W": SQUARE},
)
declare(
    "loop-while",
    """
    net (float[N, 8] x) => (float[N, 8] y, int64 count) {
      size = ReduceMax <keepdims = 0> (x)
      start = Less(size, limit)
      y, count = Loop (, start, x, zero) <
        body = step (int64 i, bool go, float[N, 8] s, int64 n) => (keep, t, m) {
          k = Constant <value_float = 1.5> ()
          a = Abs(s) b = Mul(a, k) t = Add(b, small)
          top = ReduceMax <keepdims = 0> (t)
          keep = Less(top, limit)
          m = Add(n, one)
        }
      >
    }
    """,
    [{"x": noise(n, 8, seed=n, scale=scale)} for n, scale in ((1, 1.0), (5, 0.01), (2, 1000.0))],
    {"limit": scalar(50, np.float32), "small": scalar(0.1, np.float32), "zero": scalar(0), "one": scalar(1)},
)
declare(
    "loop-nested",
    """
    net (float[N, 8] x, int64 trips) => (float[N, 8] y) {
      scaled = Mul(x, k)
      y = Loop (trips, yes, x) <
        body = outer (int64 i, bool go, float[N, 8] s) => (keep, t) {
          keep = Identity(go)
          shifted = Add(s, scaled)
          t, sums = Loop (two, , shifted) <
            body = inner (int64 j, bool on, float[N, 8] u) => (still, v, total) {
              still = Identity(on)
              index = Cast <to = 1> (i)
              p = MatMul(u, W) q = Tanh(p) r = Add(q, scaled) w = Mul(r, k) v = Add(w, index)
              total = ReduceSum <keepdims = 0> (v)
            }
          >
        }
      >
    }
    """,
    trips("x", "trips"),
    {"W": SQUARE, "k": scalar(0.5, np.float32), "yes": scalar(1, bool), "two": scalar(2)},
)
declare(
    "loop-with-branch",
    """
    net (float[N, 8] x, int64 trips) => (float[N, 8] y) {
      h = MatMul(x, W)
      y = Loop (trips, , x) <
        body = step (int64 i, bool go, float[N, 8] s) => (keep, t) {
          keep = Identity(go)
          rest = Mod(i, two)
          odd = Cast <to = 9> (rest)
          t = If (odd) <
            then_branch = yes () => (a) { a = Sub(s, h) },
            else_branch = no () => (c) { d = MatMul(s, W) c = Sigmoid(d) }
          >
        }
      >
    }
    """,
    trips("x", "trips"),
    {"W": SQUARE, "two": scalar(2)},
)
declare(
    "loop-grows",
    """
    net (float[N, 8] x, int64 trips) => (float[K, 8] y) {
      y = Loop (trips, , x) <
        body = step (int64 i, bool go, float[M, 8] s) => (keep, t) {
          keep = Identity(go)
          last = Slice(s, minus, end, axis)
          next = MatMul(last, W)
          t = Concat <axis = 0> (s, next)
        }
      >
    }
    """,
    trips("x", "trips"),
    {"W": SQUARE, "minus": vector(-1), "end": vector(2**31), "axis": vector(0)},
)
declare(
    "loop-stops-early",
    """
    net (float[N, 8] x, int64 trips) => (int64[T] counts) {
      flags, counts = Loop (trips, yes, yes) <
        body = step (int64 i, bool go, bool s) => (keep, keep2, copy) {
          keep = Less(i, three) keep2 = Identity(keep) copy = Mul(i, i)
        }
      >
    }
    """,
    trips("x", "trips"),
    {"yes": scalar(1, bool), "three": scalar(3)},
)


@case("loop-large", exporter="onnx.parser", package="onnx", atol=1e-3)
def large_loop(path: Path) -> Sequence[Feed]:
    """Write a loop of 200 trips whose body has 60 nodes."""
    layers = "".join(f"p{i} = MatMul(s{i}, W) q{i} = Tanh(p{i}) s{i + 1} = Add(q{i}, x) " for i in range(20))
    body = f"""
    net (float[N, 8] x) => (float[N, 8] y, float[T] trace) {{
      y, trace = Loop (trips, , x) <
        body = step (int64 i, bool go, float[N, 8] s0) => (keep, t, mean) {{
          keep = Identity(go) {layers} t = Tanh(s20) mean = ReduceMean <keepdims = 0> (t)
        }}
      >
    }}
    """
    save(parse(body, {"W": noise(8, 8, scale=0.1), "trips": scalar(200)}), path)
    return shaped("x", (1, 8), (3, 8))


# Scans.
declare(
    "scan-recurrent",
    """
    net (float[T, N, 4] x, float[N, 8] h0) => (float[N, 8] last, float[T, N, 8] all) {
      last, all = Scan (h0, x) <num_scan_inputs = 1,
        body = step (float[N, 8] h, float[N, 4] e) => (next, out) {
          a = MatMul(e, U) b = MatMul(h, W) c = Add(a, b) next = Tanh(c) out = Identity(next)
        }
      >
    }
    """,
    [{"x": noise(t, n, 4, seed=t), "h0": noise(n, 8)} for t, n in ((1, 1), (6, 2), (11, 3))],
    {"U": (4, 8), "W": SQUARE},
)
declare(
    "scan-directions",
    """
    net (float[N, T] x, float[T, N] z) => (float[N] sum, float[N] product, float[N, T] sums, float[T, N] products) {
      size = Shape <start = 0, end = 1> (x)
      zero = ConstantOfShape (size)
      one = ConstantOfShape <value = float[1] {1}> (size)
      sum, product, sums, products = Scan (zero, one, x, z) <num_scan_inputs = 2, scan_input_axes = [1, 0],
        scan_input_directions = [1, 0], scan_output_axes = [1, 0], scan_output_directions = [0, 1],
        body = step (float[N] s, float[N] p, float[N] a, float[N] b) => (s1, p1, s2, p2) {
          s1 = Add(s, a) t = Tanh(b) u = Add(t, one) p1 = Mul(p, u) s2 = Identity(s1) p2 = Neg(p1)
        }
      >
    }
    """,
    [{"x": noise(n, t, seed=t), "z": noise(t, n, seed=n)} for n, t in ((1, 2), (3, 5))],
)
declare(
    "scan-in-loop",
    """
    net (float[N, 8] x, int64 trips) => (float[N, 8] y) {
      y = Loop (trips, , x) <
        body = step (int64 i, bool go, float[N, 8] s) => (keep, t) {
          keep = Identity(go)
          sum, t = Scan (start, s) <num_scan_inputs = 1,
            body = row (float[8] h, float[8] e) => (next, out) { p = Add(h, e) next = Tanh(p) out = MatMul(next, W) }
          >
        }
      >
    }
    """,
    trips("x", "trips"),
    {"W": SQUARE, "start": (8,)},
)

if __name__ == "__main__":
    sys.exit(main("control_flow", sys.argv[1:]))
