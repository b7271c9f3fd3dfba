"""One small network for each opset, with operators whose inputs or meaning that opset changed."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from cases import main
from numpy.typing import NDArray
from textual import declare, noise, scalar, shaped, vector

REQUIREMENTS = ["numpy", "onnx>=1.23"]

HEAD = """
net (float[N, 8] x) => (float[] y) {
  hidden = MatMul(x, W)
  biased = Add(hidden, b)
  h = Relu(biased)
"""

#: What follows the first layer, whose activations ``h`` have the shape (N, 8), by opset.
TAILS: dict[int, str] = {
    7: """
  axes = Unsqueeze <axes = [1]> (h)
  twice = Concat <axis = 1> (axes, axes)
  mean = ReduceMean <axes = [1], keepdims = 0> (twice)
  dropped = Dropout <ratio = 0.25> (mean)
  y = Softmax <axis = 1> (dropped)
""",
    8: """
  wide = Expand(h, three)
  total = Sum(wide, h)
  y = ReduceMax <axes = [0], keepdims = 0> (total)
""",
    9: """
  part = Slice <axes = [1], starts = [1], ends = [7]> (h)
  image = Unsqueeze <axes = [0, 1]> (part)
  large = Upsample <mode = "nearest"> (image, scales)
  zero = Greater(large, small)
  found = Where(zero, large, small)
  erf = Erf(found)
  y = Flatten <axis = 2> (erf)
""",
    10: """
  part = Slice(h, starts, ends, last, steps)
  image = Unsqueeze <axes = [0, 1]> (part)
  large = Resize <mode = "linear"> (image, scales)
  flat = Squeeze <axes = [0, 1]> (large)
  values, places = TopK <axis = 1> (flat, two)
  cast = Cast <to = 1> (places)
  y = Add(values, cast)
""",
    11: """
  padded = Pad(h, pads, small)
  clipped = Clip(padded, , one)
  sums = CumSum(clipped, axis)
  rank = Range(zero, five, step)
  gathered = Gather <axis = -1> (sums, rank)
  y = Round(gathered)
""",
    12: """
  pairs = Einsum <equation = "ni,nj->nij"> (h, h)
  best = ArgMax <axis = -1, keepdims = 0, select_last_index = 1> (pairs)
  place = Unsqueeze <axes = [2]> (best)
  taken = GatherND <batch_dims = 2> (pairs, place)
  row = Unsqueeze <axes = [2]> (taken)
  pooled = MaxPool <kernel_shape = [2], ceil_mode = 1, strides = [2]> (pairs)
  least = Min(pooled, row)
  y = Celu <alpha = 0.5> (least)
""",
    13: """
  long = Unsqueeze(h, last)
  short = Squeeze(long, last)
  left, right = Split <axis = 1> (short, halves)
  gate = Sigmoid(left)
  product = Mul(gate, right)
  total = ReduceSum <keepdims = 1> (product, last)
  safe = Add(total, one)
  share = Div(product, safe)
  y = Softmax <axis = -1> (share)
""",
    14: """
  active = HardSwish(h)
  square = Reshape <allowzero = 0> (active, shape)
  lower = Trilu <upper = 0> (square)
  sums = CumSum <reverse = 1> (lower, axis)
  y = Identity(sums)
""",
    15: """
  norm = BatchNormalization <epsilon = 0.001> (h, gain, b, mean, var)
  size = Shape <start = 0, end = 1> (norm)
  full = Concat <axis = 0> (size, shape)
  cut = Reshape(norm, full)
  power = Pow(cut, two)
  y = LeakyRelu <alpha = 0.1> (power)
""",
    16: """
  y0 = PRelu(h, slope)
  image = Reshape(y0, shape)
  turned = GridSample <mode = "bilinear", padding_mode = "border"> (image, grid)
  many = GreaterOrEqual(turned, small)
  kept = Where(many, turned, small)
  y = ScatterND <reduction = "add"> (kept, place, update)
""",
    17: """
  norm = LayerNormalization <axis = -1> (h, gain, b)
  frames = Unsqueeze(norm, last)
  spectrum = DFT <axis = 1, onesided = 1> (frames)
  squares = Mul(spectrum, spectrum)
  power = ReduceSum <keepdims = 0> (squares, last)
  y = Sqrt(power)
""",
    18: """
  mean = ReduceMean <keepdims = 1> (h, last)
  centred = Sub(h, mean)
  a, b1, c = Split <axis = 1, num_outputs = 3> (centred)
  padded = Pad <mode = "edge"> (c, pads, , last)
  ab = Add(a, b1)
  active = Mish(ab)
  joined = Concat <axis = 1> (active, padded)
  most = BitwiseAnd(mask, mask)
  y = ScatterElements <axis = 1, reduction = "max"> (joined, most, update)
""",
    19: """
  image = Reshape(h, shape)
  pooled = AveragePool <kernel_shape = [2, 2], dilations = [1, 1], count_include_pad = 1, pads = [1, 1, 0, 0]> (image)
  large = Resize <mode = "cubic", axes = [2, 3], keep_aspect_ratio_policy = "not_larger"> (pooled, , , sizes)
  same = Equal(large, large)
  cast = Cast <to = 1> (same)
  y = Add(large, cast)
""",
    20: """
  active = Gelu <approximate = "tanh"> (h)
  odd = IsInf <detect_negative = 1> (active)
  cast = Cast <to = 1> (odd)
  sum = Add(active, cast)
  grid = AffineGrid(theta, size)
  mean = ReduceMean <keepdims = 0> (grid)
  y = Mul(sum, mean)
""",
    21: """
  image = Reshape(h, shape)
  norm = GroupNormalization <num_groups = 2> (image, gain, b)
  small = QuantizeLinear <axis = 1, block_size = 0> (norm, scale, point)
  back = DequantizeLinear(small, scale, point)
  flat = Flatten(back)
  size = Size(flat)
  whole = Cast <to = 1> (size)
  y = Div(flat, whole)
""",
    22: """
  image = Reshape(h, shape)
  pooled = GlobalAveragePool(image)
  dropped = Dropout(pooled)
  wave = Sin(dropped)
  hill = ThresholdedRelu <alpha = 0.1> (wave)
  y = Elu(hill)
""",
    23: """
  norm = RMSNormalization <axis = -1> (h, gain)
  heads = Reshape(norm, shape)
  rows = Shape <start = 0, end = 1> (h)
  size = Concat <axis = 0> (rows, angles)
  cosines = Expand(cos, size)
  sines = Expand(sin, size)
  turned = RotaryEmbedding(heads, cosines, sines)
  mixed = Attention <is_causal = 1> (turned, turned, heads)
  y = Transpose <perm = [0, 2, 1, 3]> (mixed)
""",
    24: """
  active = Swish <alpha = 1.5> (h)
  heads = Reshape(active, shape)
  mixed = Attention <softcap = 5.0> (heads, heads, heads)
  y = Flatten(mixed)
""",
    25: """
  active = Tanh(h)
  size = Shape(active)
  flat = Reshape(active, size)
  y = Transpose(flat)
""",
    26: """
  active = Softplus(h)
  sums = CumSum(active, axis)
  y = Identity(sums)
""",
}

#: Initialisers by opset, beyond the first layer's.
EXTRA: dict[int, dict[str, Any]] = {
    8: {"three": vector(3, 1, 8)},
    9: {"scales": vector(1, 1, 2, 2, dtype=np.float32), "small": scalar(0.1, np.float32)},
    10: {
        "starts": vector(-1),
        "ends": vector(-9),
        "last": vector(1),
        "steps": vector(-2),
        "scales": vector(1, 1, 1, 2, dtype=np.float32),
        "two": vector(2),
    },
    11: {
        "pads": vector(0, 1, 0, 2),
        "small": scalar(0.5, np.float32),
        "one": scalar(1, np.float32),
        "axis": scalar(1),
        "zero": scalar(0),
        "five": scalar(10),
        "step": scalar(2),
    },
    13: {"last": vector(-1), "halves": vector(4, 4), "one": scalar(1, np.float32)},
    14: {"shape": vector(0, 2, -1), "axis": scalar(2)},
    15: {
        "gain": (8,),
        "mean": (8,),
        "var": np.abs(noise(8)) + 0.5,
        "shape": vector(2, 4),
        "two": scalar(2, np.int32),
    },
    16: {
        "slope": (8,),
        "shape": vector(1, 1, -1, 8),
        "grid": np.clip(noise(1, 3, 3, 2), -1, 1),
        "small": scalar(0.1, np.float32),
        "place": np.array([[0, 0, 0], [0, 0, 0]]),
        "update": noise(2, 3),
    },
    17: {"gain": (8,), "last": vector(2)},
    18: {
        "last": vector(1),
        "pads": vector(1, 1),
        "mask": np.array([[0, 2, 4]]),
        "update": noise(1, 3),
    },
    19: {"shape": vector(0, 1, 2, 4), "sizes": vector(4, 8)},
    20: {"theta": noise(1, 2, 3), "size": vector(1, 1, 2, 2)},
    21: {
        "shape": vector(0, 8, 1),
        "gain": (8,),
        "scale": scalar(0.05, np.float32),
        "point": scalar(3, np.int8),
    },
    22: {"shape": vector(0, 2, 2, 2)},
    23: {
        "gain": (8,),
        "shape": vector(0, 2, 1, 4),
        "angles": vector(1, 2),
        "cos": noise(1, 1, 2),
        "sin": noise(1, 1, 2, seed=1),
    },
    24: {"shape": vector(0, 2, 2, 2)},
    26: {"axis": scalar(1)},
}


def first_layer() -> dict[str, NDArray[np.float32]]:
    """Draw weights of the layer that all networks share."""
    return {"W": noise(8, 8, seed=7, scale=0.5), "b": noise(8, seed=8)}


for opset, tail in TAILS.items():
    declare(
        f"opset{opset:02}",
        f"{HEAD}{tail}}}",
        shaped("x", (1, 8), (3, 8), (10, 8)),
        {**first_layer(), **EXTRA.get(opset, {})},
        opset=opset,
    )

if __name__ == "__main__":
    sys.exit(main("opsets", sys.argv[1:]))
