"""Models of quantised operators, as pairs around others or fused, and of ai.onnx.ml without an exporter."""

from __future__ import annotations

import sys

import numpy as np
from cases import main
from onnx import TensorProto
from textual import declare, integers, noise, scalar, shaped, tensor, vector

REQUIREMENTS = ["numpy", "onnx>=1.23"]

MICROSOFT = {"com.microsoft": 1}
ROWS = shaped("x", (1, 16), (4, 16), (9, 16))
BIAS = noise(16, seed=4)
SCALE = scalar(0.02, np.float32)
POINT = scalar(128, np.uint8)
ZERO = scalar(0, np.int8)
BYTES = integers(16, 16, low=-127, high=127, seed=5, dtype=np.int8)
declare(
    "dense-qdq",
    """
    net (float[N, 16] x) => (float[N, 16] y) {
      xq = QuantizeLinear(x, s, z) xf = DequantizeLinear(xq, s, z)
      w = DequantizeLinear <axis = 1> (W, ws, wz)
      p = MatMul(xf, w) q = Add(p, b) r = Relu(q)
      rq = QuantizeLinear(r, s2, z) rf = DequantizeLinear(rq, s2, z)
      t = MatMul(rf, w)
      y = Add(t, xf)
    }
    """,
    ROWS,
    {
        "s": SCALE,
        "z": POINT,
        "s2": scalar(0.1, np.float32),
        "W": BYTES,
        "ws": np.full(16, 0.005, np.float32),
        "wz": np.zeros(16, np.int8),
        "b": BIAS,
    },
    rtol=5e-2,
    atol=0.3,
)
declare(
    "convolution-qdq",
    """
    net (float[N, 3, H, W] x) => (float[] y) {
      xq = QuantizeLinear(x, s, z) xf = DequantizeLinear(xq, s, z)
      k = DequantizeLinear <axis = 0> (K, ks, kz)
      b = DequantizeLinear <axis = 0> (B, bs, bz)
      p = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (xf, k, b)
      r = Relu(p)
      rq = QuantizeLinear(r, s, z2) rf = DequantizeLinear(rq, s, z2)
      m = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (rf)
      mq = QuantizeLinear(m, s, z2) mf = DequantizeLinear(mq, s, z2)
      g = GlobalAveragePool(mf)
      gq = QuantizeLinear(g, s, z2)
      y = DequantizeLinear(gq, s, z2)
    }
    """,
    shaped("x", (1, 3, 8, 8), (2, 3, 10, 6)),
    {
        "s": SCALE,
        "z": POINT,
        "z2": scalar(0, np.uint8),
        "K": integers(8, 3, 3, 3, low=-127, high=127, dtype=np.int8),
        "ks": np.linspace(0.001, 0.002, 8, dtype=np.float32),
        "kz": np.zeros(8, np.int8),
        "B": integers(8, low=-900, high=900, dtype=np.int32),
        "bs": np.linspace(0.00002, 0.00004, 8, dtype=np.float32),
        "bz": np.zeros(8, np.int32),
    },
    rtol=5e-2,
    atol=0.1,
)
declare(
    "operators",
    """
    net (float[N, 16] x) => (float[N, 16] y) {
      q = QuantizeLinear(x, s, z)
      m = QLinearMatMul(q, s, z, W, ws, wz, s2, z)
      a = com.microsoft.QLinearAdd(m, s2, z, q, s, z, s2, z)
      r = com.microsoft.QLinearSigmoid(a, s2, z, s3, z3)
      y = DequantizeLinear(r, s3, z3)
    }
    """,
    ROWS,
    {
        "s": SCALE,
        "z": POINT,
        "W": BYTES,
        "ws": scalar(0.005, np.float32),
        "wz": ZERO,
        "s2": scalar(0.05, np.float32),
        "s3": scalar(1 / 256, np.float32),
        "z3": scalar(0, np.uint8),
    },
    domains=MICROSOFT,
    rtol=5e-2,
    atol=5e-2,
)
declare(
    "dynamically",
    """
    net (float[N, 16] x) => (float[N, 16] y) {
      q, s, z = DynamicQuantizeLinear(x)
      m = MatMulInteger(q, W, z, wz)
      f = Cast <to = 1> (m)
      scale = Mul(s, ws)
      g = Mul(f, scale)
      y = Add(g, b)
    }
    """,
    ROWS,
    {"W": BYTES, "ws": scalar(0.005, np.float32), "wz": ZERO, "b": BIAS},
    rtol=2e-2,
    atol=2e-2,
)
declare(
    "dynamically-fused",
    """
    net (float[N, 16] x) => (float[N, 16] y) {
      p = com.microsoft.DynamicQuantizeMatMul(x, W, ws, wz, b)
      q, s, z = DynamicQuantizeLinear(p)
      y = com.microsoft.MatMulIntegerToFloat(q, W, s, ws, z, wz)
    }
    """,
    ROWS,
    {"W": BYTES, "ws": scalar(0.005, np.float32), "wz": ZERO, "b": BIAS},
    domains=MICROSOFT,
    rtol=2e-2,
    atol=5e-2,
)
declare(
    "convolution-integers",
    """
    net (uint8[N, 1, H, W] x) => (int32[] y, uint8[] z) {
      y = ConvInteger <kernel_shape = [3, 3]> (x, K, point)
      z = QLinearConv <kernel_shape = [3, 3], strides = [2, 2]> (x, s, point, K, ws, kz, s, point, B)
    }
    """,
    [{"x": integers(n, 1, h, w, high=255, dtype=np.uint8)} for n, h, w in ((1, 6, 6), (2, 9, 7))],
    {
        "K": integers(4, 1, 3, 3, low=-127, high=127, dtype=np.int8),
        "point": POINT,
        "s": SCALE,
        "ws": scalar(0.002, np.float32),
        "kz": ZERO,
        "B": integers(4, low=-99, high=99, dtype=np.int32),
    },
    atol=1.0,
)
declare(
    "four-bits",
    """
    net (float[B, S, 32] x) => (float[B, S, 16] y) {
      p = com.microsoft.MatMulNBits <K = 32, N = 32, bits = 4, block_size = 16> (x, W, scales)
      q = Sigmoid(p) r = Mul(p, q)
      y = com.microsoft.MatMulNBits <K = 32, N = 16, bits = 4, block_size = 32, accuracy_level = 0>
        (r, V, vscales, vzero)
    }
    """,
    shaped("x", (1, 4, 32), (2, 1, 32), (1, 1, 32)),
    {
        "W": integers(32, 2, 8, high=256, dtype=np.uint8),
        "scales": np.abs(noise(32, 2, scale=0.05)) + 0.01,
        "V": integers(16, 1, 16, high=256, seed=1, dtype=np.uint8),
        "vscales": np.abs(noise(16, scale=0.05)) + 0.01,
        "vzero": integers(16, 1, high=16, seed=2, dtype=np.uint8),
    },
    domains=MICROSOFT,
    rtol=1e-2,
    atol=1e-2,
)
declare(
    "table-of-words",
    """
    net (int64[B, S] ids) => (float[B, S, 32] y) {
      e = com.microsoft.GatherBlockQuantized <gather_axis = 0, quantize_axis = 1, block_size = 16> (table, ids, scales)
      n = LayerNormalization(e, gain)
      y = Tanh(n)
    }
    """,
    [{"ids": integers(b, s, high=20, seed=s)} for b, s in ((1, 5), (3, 2))],
    {
        "table": tensor("table", TensorProto.INT4, (20, 32), integers(20, 32, low=-8, high=8)),
        "scales": np.abs(noise(20, 2, scale=0.1)) + 0.01,
        "gain": (32,),
    },
    opset=21,
    domains=MICROSOFT,
)

# ai.onnx.ml without an exporter.
declare(
    "features",
    """
    net (float[N, 3] x, int64[N, 1] kinds, string[N, 1] words) => (float[] y, int64[N, 1] ids) {
      filled = ai.onnx.ml.Imputer <imputed_value_floats = [1.0, 2.0, 3.0], replaced_value_float = 0.0> (x)
      scaled = ai.onnx.ml.Scaler <offset = [0.5], scale = [2.0]> (filled)
      hot = ai.onnx.ml.OneHotEncoder <cats_int64s = [0, 1, 2], zeros = 1> (kinds)
      flat = Flatten(hot)
      bits = ai.onnx.ml.Binarizer <threshold = 0.2> (scaled)
      ids = ai.onnx.ml.CategoryMapper <cats_int64s = [4, 5], cats_strings = ["a", "b"], default_int64 = -1> (words)
      joined = Concat <axis = 1> (flat, bits)
      two = ai.onnx.ml.ArrayFeatureExtractor(joined, pick)
      norm = ai.onnx.ml.Normalizer <norm = "L2"> (joined)
      y = Concat <axis = 1> (norm, two)
    }
    """,
    [
        {
            "x": np.round(noise(n, 3, seed=n)),
            "kinds": integers(n, 1, high=4, seed=n),
            "words": np.array(["a", "b", "c"], dtype=object)[integers(n, 1, high=3)],
        }
        for n in (1, 5)
    ],
    {"pick": vector(0, 4)},
    domains={"ai.onnx.ml": 3},
)

if __name__ == "__main__":
    sys.exit(main("quantised", sys.argv[1:]))
