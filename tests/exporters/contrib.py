"""Models of fused operators: com.microsoft, as optimisers write them, and ONNX's own attention."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from cases import main
from textual import declare, integers, noise, scalar, shaped, vector

REQUIREMENTS = ["numpy", "onnx>=1.23"]

MICROSOFT = {"com.microsoft": 1}
SQUARE = (16, 16)
ROWS = shaped("x", (1, 16), (4, 16), (9, 16))
TOKENS = shaped("x", (1, 3, 16), (2, 7, 16), (3, 1, 16))


def weights(**given: Any) -> dict[str, Any]:
    """Return the scale and bias of a normalisation, and what else is given."""
    return {"gain": noise(16, seed=3), "b": noise(16, seed=4), **given}


# Fused operators.
declare(
    "fused-activations",
    """
    net (float[N, 16] x) => (float[N, 16] y) {
      p = com.microsoft.Gelu(x)
      q = com.microsoft.FastGelu(p, b)
      r = com.microsoft.BiasGelu(q, b)
      s = com.microsoft.QuickGelu <alpha = 1.7> (r)
      t = com.microsoft.FusedMatMul <alpha = 0.5, transB = 1> (s, W)
      y = com.microsoft.FusedGemm <activation = "Relu"> (t, W, b)
    }
    """,
    ROWS,
    weights(W=SQUARE),
    domains=MICROSOFT,
)
declare(
    "fused-convolution",
    """
    net (float[N, 3, H, W] x) => (float[] y) {
      p = com.microsoft.FusedConv <kernel_shape = [3, 3], pads = [1, 1, 1, 1], activation = "Relu"> (x, K, k)
      q = com.microsoft.FusedConv <kernel_shape = [1, 1], activation = "LeakyRelu", activation_params = [0.1]> (p, L)
      y = GlobalAveragePool(q)
    }
    """,
    shaped("x", (1, 3, 8, 8), (2, 3, 12, 9)),
    {"K": (8, 3, 3, 3), "k": (8,), "L": (4, 8, 1, 1)},
    domains=MICROSOFT,
)
declare(
    "bert-block",
    """
    net (int32[B, S] ids, int32[B, S] segments, int32[B, S] mask) => (float[B, S, 16] y) {
      e, m = com.microsoft.EmbedLayerNormalization <epsilon = 1e-12>
        (ids, segments, words, places, kinds, gain, b, mask)
      a = com.microsoft.Attention <num_heads = 2> (e, QKV, qkv, m)
      o = MatMul(a, W)
      n = com.microsoft.SkipLayerNormalization <epsilon = 1e-12> (o, e, gain, b, b)
      f = MatMul(n, U)
      g = com.microsoft.BiasGelu(f, u)
      d = MatMul(g, D)
      y = com.microsoft.SkipLayerNormalization <epsilon = 1e-12> (d, n, gain, b, b)
    }
    """,
    [
        {
            "ids": integers(batch, length, high=50, seed=length, dtype=np.int32),
            "segments": integers(batch, length, high=2, dtype=np.int32),
            "mask": np.ones((batch, length), np.int32),
        }
        for batch, length in ((1, 5), (3, 8), (2, 1))
    ],
    weights(
        words=(50, 16),
        places=(12, 16),
        kinds=(2, 16),
        QKV=(16, 48),
        qkv=(48,),
        W=SQUARE,
        U=(16, 32),
        u=(32,),
        D=(32, 16),
    ),
    domains=MICROSOFT,
)
declare(
    "multi-head-attention",
    """
    net (float[B, S, 16] x, float[B, T, 16] memory) => (float[B, S, 16] y) {
      q = MatMul(x, Q) k = MatMul(memory, K) v = MatMul(memory, V)
      a = com.microsoft.MultiHeadAttention <num_heads = 4> (q, k, v, bias)
      o = MatMul(a, O)
      y = com.microsoft.SkipLayerNormalization(o, x, gain, b)
    }
    """,
    [{"x": noise(*b), "memory": noise(*m, seed=1)} for b, m in (((1, 3, 16), (1, 5, 16)), ((2, 1, 16), (2, 9, 16)))],
    weights(Q=SQUARE, K=SQUARE, V=SQUARE, O=SQUARE, bias=(48,)),
    domains=MICROSOFT,
)
declare(
    "decoder-step-with-cache",
    """
    net (float[B, S, 64] x, float[B, 2, P, 8] past_key, float[B, 2, P, 8] past_value, int32[B] lengths, int32 total) =>
        (float[B, S, 64] y, float[B, 2, T, 8] present_key, float[B, 2, T, 8] present_value) {
      n = SimplifiedLayerNormalization <axis = -1, epsilon = 1e-5> (x, gain)
      q = MatMul(n, Q) k = MatMul(n, K) v = MatMul(n, V)
      a, present_key, present_value = com.microsoft.GroupQueryAttention
        <num_heads = 16, kv_num_heads = 2, do_rotary = 0> (q, k, v, past_key, past_value, lengths, total)
      o = MatMul(a, O)
      h, , , s = com.microsoft.SkipSimplifiedLayerNormalization <epsilon = 1e-5> (o, x, gain)
      u = MatMul(h, U) w = Sigmoid(u) g = Mul(u, w) d = MatMul(g, D)
      y = Add(d, s)
    }
    """,
    [
        {
            "x": noise(batch, length, 64, seed=past),
            "past_key": noise(batch, 2, past, 8, seed=1),
            "past_value": noise(batch, 2, past, 8, seed=2),
            "lengths": np.full(batch, past + length - 1, np.int32),
            "total": scalar(past + length, np.int32),
        }
        for batch, length, past in ((1, 5, 0), (1, 1, 5), (3, 1, 6))
    ],
    {"gain": (64,), "Q": (64, 128), "K": (64, 16), "V": (64, 16), "O": (128, 64), "U": (64, 96), "D": (96, 64)},
    domains=MICROSOFT,
)
declare(
    "rotary-embedding",
    """
    net (float[B, S, 16] x, int64[B, S] places) => (float[B, S, 16] y) {
      q = MatMul(x, W)
      r = com.microsoft.RotaryEmbedding <num_heads = 4> (q, places, cosines, sines)
      y = Add(r, x)
    }
    """,
    [
        {"x": noise(b, s, 16), "places": np.tile(np.arange(s), (b, 1)) + start}
        for b, s, start in ((1, 4, 0), (1, 1, 4), (2, 6, 1))
    ],
    {"W": SQUARE, "cosines": np.cos(noise(32, 2)), "sines": np.sin(noise(32, 2))},
    domains=MICROSOFT,
)
declare(
    "various",
    """
    net (float[N, 16] x) => (float[] y, float[] z, int64[] places) {
      p = com.microsoft.CDist <metric = "sqeuclidean"> (x, W)
      y = com.microsoft.ExpandDims(p, axis)
      z, places, counts = com.microsoft.Unique(b)
    }
    """,
    ROWS,
    weights(W=SQUARE, axis=scalar(0, np.int32)),
    domains=MICROSOFT,
)

# ONNX's own attention.
ATTENTION = """
    net (float[B, S, 16] x) => (float[B, S, 16] y) {{
      q = MatMul(x, Q) k = MatMul(x, K) v = MatMul(x, V)
      a = Attention <is_causal = {causal}, q_num_heads = 4, kv_num_heads = {heads}> (q, k, v)
      o = MatMul(a, O)
      n = RMSNormalization(o, gain)
      y = Add(n, x)
    }}
"""
for opset in (23, 24):
    declare(
        f"attention-opset{opset}",
        ATTENTION.format(causal=opset - 23, heads=4),
        TOKENS,
        weights(Q=SQUARE, K=SQUARE, V=SQUARE, O=SQUARE),
        opset=opset,
    )
declare(
    "attention-grouped",
    ATTENTION.format(causal=1, heads=2),
    TOKENS,
    weights(Q=SQUARE, K=(16, 8), V=(16, 8), O=SQUARE),
    opset=23,
)
declare(
    "attention-with-cache",
    """
    net (float[B, 4, S, 8] x, float[B, 4, P, 8] past_key, float[B, 4, P, 8] past_value, bool[S, T] mask) =>
        (float[B, 4, S, 8] y, float[B, 4, T, 8] present_key, float[B, 4, T, 8] present_value) {
      k = MatMul(x, K) v = MatMul(x, V)
      y, present_key, present_value = Attention <scale = 0.3> (x, k, v, mask, past_key, past_value)
    }
    """,
    [
        {
            "x": noise(b, 4, s, 8),
            "past_key": noise(b, 4, p, 8, seed=1),
            "past_value": noise(b, 4, p, 8, seed=2),
            "mask": np.tri(s, s + p, p, dtype=bool),
        }
        for b, s, p in ((1, 5, 0), (2, 1, 5), (1, 3, 2))
    ],
    {"K": (8, 8), "V": (8, 8)},
    opset=23,
)
declare(
    "cache-in-place",
    """
    net (float[1, 2, 12, 4] cache, float[1, 2, S, 4] new, int64[1] at) => (float[1, 2, 12, 4] updated, float[] y) {
      updated = TensorScatter <axis = 2> (cache, new, at)
      y = ReduceSum <keepdims = 0> (updated)
    }
    """,
    [{"cache": noise(1, 2, 12, 4), "new": noise(1, 2, s, 4, seed=s), "at": vector(at)} for s, at in ((5, 0), (1, 5))],
    opset=24,
)

if __name__ == "__main__":
    sys.exit(main("contrib", sys.argv[1:]))
