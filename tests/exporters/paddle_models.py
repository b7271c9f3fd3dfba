"""Models of PaddlePaddle, exported by paddle2onnx."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from cases import Feed, case, main
from paddle import nn, vision
from paddle.nn import functional

REQUIREMENTS = [
    "numpy==2.4.6",
    "onnx==1.17.0",
    "onnx-graphsurgeon==0.6.1",  # what the exporter would install itself to fold constants
    "onnxruntime==1.31.1",
    "paddle2onnx==2.1.0",
    "paddlepaddle==3.3.1",
    "polygraphy==0.53.6",
    "sympy==1.14.0",
]

#: Names and shapes of inputs; None is a dynamic axis.
Signature = Mapping[str, tuple[int | None, ...]]

FLAT: Signature = {"x": (None, 16)}
IMAGE: Signature = {"image": (None, 3, 16, 16)}
SERIES: Signature = {"series": (None, 10, 16)}


def draw(signature: Signature, size: int, high: int) -> Feed:
    """Draw a request whose dynamic axes all have one size: whole numbers below ``high``, else normal ones."""
    rng = np.random.default_rng(size)
    feed: dict[str, Any] = {}
    for name, shape in signature.items():
        concrete = [size if axis is None else axis for axis in shape]
        feed[name] = rng.integers(0, high, concrete) if high else rng.standard_normal(concrete).astype(np.float32)
    return feed


def network(name: str, signature: Signature, *, opset: int = 17, high: int = 0) -> Any:
    """Declare a case that exports the layer that the decorated function or class builds.

    Args:
        name: Of the case.
        signature: Inputs.
        opset: Of the exported model.
        high: Whole numbers below this are drawn as inputs, if not 0.
    """

    def register(build: Any) -> Any:
        @case(name, exporter="paddle2onnx", package="paddle2onnx")
        def make(path: Path) -> Sequence[Feed]:
            paddle.seed(0)
            layer = build()
            layer.eval()
            kind = "int64" if high else "float32"
            shapes = {key: [-1 if axis is None else axis for axis in shape] for key, shape in signature.items()}
            specs = [paddle.static.InputSpec(shape, kind, key) for key, shape in shapes.items()]
            try:
                paddle.onnx.export(layer, str(path.with_suffix("")), input_spec=specs, opset_version=opset)
            except SystemExit as error:  # how the exporter reports what it cannot convert
                raise RuntimeError("paddle2onnx left the process") from error
            return [draw(signature, size, high) for size in (1, 2, 5)]

        return build

    return register


@network("linear", FLAT)
def linear() -> nn.Layer:
    """Stack linear layers."""
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.LayerNorm(32), nn.Linear(32, 4), nn.Softmax())


@network("linear-opset11", FLAT, opset=11)
def linear_old() -> nn.Layer:
    """Stack linear layers with various activations."""
    activations = [nn.Sigmoid(), nn.Tanh(), nn.Hardswish(), nn.GELU(), nn.LeakyReLU(), nn.ELU(), nn.Swish(), nn.Mish()]
    return nn.Sequential(*[layer for activation in activations for layer in (nn.Linear(16, 16), activation)])


@network("convolution", IMAGE)
def convolution() -> nn.Layer:
    """Build a small classifier of images."""
    return nn.Sequential(
        nn.Conv2D(3, 8, 3, padding=1),
        nn.BatchNorm2D(8),
        nn.ReLU6(),
        nn.MaxPool2D(2),
        nn.Conv2D(8, 8, 3, groups=8, stride=2),
        nn.Hardsigmoid(),
        nn.AdaptiveAvgPool2D(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )


@network("decoder-of-images", IMAGE, opset=14)
class Decoder(nn.Layer):
    """An encoder and decoder of images with a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2D(3, 4, 3, padding=1)
        self.low = nn.Conv2D(4, 8, 3, stride=2, padding=1)
        self.up = nn.Conv2DTranspose(8, 4, 2, stride=2)
        self.norm = nn.GroupNorm(2, 4)
        self.shuffle = nn.PixelShuffle(2)

    def forward(self, image: Any) -> Any:
        """Return the enlarged image and a shuffled one."""
        skip = functional.relu(self.first(image))
        low = self.low(skip)
        resized = functional.interpolate(low[:, :4], size=[16, 16], mode="bilinear")
        return paddle.concat([self.norm(self.up(low)) + skip, resized], axis=1), self.shuffle(low)


@network("residual-network", {"image": (None, 3, 32, 32)})
def residual() -> nn.Layer:
    """Build two residual blocks."""

    class Block(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Conv2D(3, 3, 3, padding=1), nn.BatchNorm2D(3), nn.ReLU(), nn.Conv2D(3, 3, 1))

        def forward(self, x: Any) -> Any:
            return functional.relu(x + self.body(x))

    return nn.Sequential(Block(), Block(), nn.AdaptiveAvgPool2D(2), nn.Flatten())


@network("shufflenet", {"image": (None, 3, 32, 32)})
def shufflenet() -> nn.Layer:
    """Build a narrow network for small devices."""
    return vision.models.shufflenet_v2_x0_25(num_classes=4)


@network("lstm", SERIES)
class Lstm(nn.Layer):
    """A recurrent classifier of both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(16, 8, num_layers=2, direction="bidirect")
        self.head = nn.Linear(16, 3)

    def forward(self, series: Any) -> Any:
        """Return scores and the last state."""
        steps, (last, _) = self.recurrent(series)
        return self.head(steps[:, -1]), last


@network("gru", SERIES)
class Gru(nn.Layer):
    """A gated recurrent layer that returns all steps."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(16, 8)

    def forward(self, series: Any) -> Any:
        """Return all steps."""
        return self.recurrent(series)[0]


@network("transformer-encoder-layer", SERIES)
def encoder_layer() -> nn.Layer:
    """Build one encoder layer."""
    return nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, activation="gelu")


@network("transformer-encoder", SERIES, opset=16)
def encoder() -> nn.Layer:
    """Build two encoder layers that normalise first."""
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, normalize_before=True), 2)


@network("embedding", {"ids": (None, 7)}, high=40)
class Embedding(nn.Layer):
    """A classifier of token ids."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 12)
        self.head = nn.Linear(12, 2)

    def forward(self, ids: Any) -> Any:
        """Return scores of a mean over the tokens that are not zero."""
        known = (ids > 0).astype("float32").unsqueeze(-1)
        return self.head((self.table(ids) * known).sum(axis=1) / (known.sum(axis=1) + 1e-6))


@network("two-axes-dynamic", {"series": (None, None, 16)})
class Dynamic(nn.Layer):
    """Self-attention over a series of unknown length."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 48)

    def forward(self, series: Any) -> Any:
        """Return the mixed series and its mean."""
        query, key, value = self.project(series).chunk(3, axis=-1)
        scores = functional.softmax(paddle.matmul(query, key, transpose_y=True) / 4.0)
        mixed = paddle.matmul(scores, value)
        return mixed, mixed.mean(axis=1)


@network("several-inputs", {"x": (None, 16), "y": (None, 16)})
class Several(nn.Layer):
    """A network of two inputs and four outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(32, 8)

    def forward(self, x: Any, y: Any) -> Any:
        """Return a mixture, the larger values, and places of the largest."""
        values, places = paddle.topk(x, 3)
        return self.mix(paddle.concat([x, y], axis=-1)), paddle.where(x > y, x, y), places, values


@network("branch", FLAT)
class Branch(nn.Layer):
    """Two layers, of which the sign of the sum chooses one."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(16, 8)
        self.right = nn.Linear(16, 8)

    def forward(self, x: Any) -> Any:
        """Return what one of two layers computes."""
        return paddle.static.nn.cond(x.sum() > 0, lambda: self.left(x), lambda: functional.relu(self.right(x)))


@network("loop", FLAT)
class Loop(nn.Layer):
    """A layer that a loop applies four times."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(16, 16)

    def forward(self, x: Any) -> Any:
        """Return the values of the last iteration."""
        i = paddle.zeros([1], dtype="int64")
        _, x = paddle.static.nn.while_loop(lambda i, _: i < 4, lambda i, x: [i + 1, paddle.tanh(self.step(x))], [i, x])
        return x


if __name__ == "__main__":
    sys.exit(main("paddle", sys.argv[1:]))
