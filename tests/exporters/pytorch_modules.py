"""Small PyTorch modules with the inputs, shapes and operators that large models have one at a time.

The file is not called ``pytorch``, since torchvision imports a package of that name where there is one.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from cases import Feed, main
from torch import nn
from torch.nn import functional
from torch_export import Subject, captured, integers, normal, traced

#: Installed by pip for this family.
REQUIREMENTS = [
    "torch==2.13.0",
    "onnx==1.23.2",
    "onnxscript==0.7.2",
    "onnxruntime==1.31.1",
]

_BATCH = {"x": {0: "batch"}}
_BATCH_AND_LENGTH = {"x": {0: "batch", 1: "length"}}


def _vectors(width: int) -> list[Feed]:
    return [{"x": normal(batch, width)} for batch in (3, 1, 7)]


@traced("perceptron", opset=9)
@captured("perceptron-dynamo", opset=18)
def _perceptron() -> Subject:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.Sigmoid(), nn.Linear(32, 4))
    return Subject(model, _vectors(16), axes=_BATCH)


@traced("normalizations", opset=17)
@captured("normalizations-dynamo", opset=21)
def _normalizations() -> Subject:
    layers = [nn.Conv2d(4, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.GELU(), nn.InstanceNorm2d(8, affine=True)]
    model = nn.Sequential(*layers, nn.LocalResponseNorm(3), nn.LayerNorm(12), nn.SiLU(), nn.LayerNorm([12, 12]))
    feeds = [{"x": normal(batch, 4, 12, 12)} for batch in (2, 1, 5)]
    return Subject(model, feeds, axes=_BATCH)


class Autoencoder(nn.Module):
    """Convolutions down and transposed ones up, with a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.deeper = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.out = nn.ConvTranspose2d(16, 3, 2, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return an image of the same size."""
        first = functional.leaky_relu(self.down(x))
        second = functional.elu(self.deeper(first))
        return self.out(torch.cat([functional.hardswish(self.up(second)), first], dim=1))


@traced("autoencoder", opset=14)
@captured("autoencoder-dynamo", opset=19)
def _autoencoder() -> Subject:
    feeds = [{"x": normal(*size)} for size in ((2, 3, 16, 16), (1, 3, 24, 16), (3, 3, 8, 32))]
    return Subject(Autoencoder(), feeds, axes={"x": {0: "batch", 2: "height", 3: "width"}})


class Resampling(nn.Module):
    """Interpolation, pooling, padding and sampling of images."""

    def forward(self, x: torch.Tensor, grid: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return four images."""
        larger = functional.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False)
        nearest = functional.interpolate(x, size=(5, 7), mode="nearest")
        padded = functional.pad(x, (1, 2, 0, 1), mode="reflect")
        return larger, nearest, functional.avg_pool2d(padded, 3, 1), functional.grid_sample(x, grid, align_corners=True)


@traced("resampling", opset=16)
@captured("resampling-dynamo", opset=20)
def _resampling() -> Subject:
    feeds: list[Feed] = [
        {"x": normal(batch, 2, *size), "grid": np.tanh(normal(batch, 4, 3, 2))}
        for batch, size in ((2, (6, 6)), (1, (9, 5)), (3, (4, 11)))
    ]
    axes = {"x": {0: "batch", 2: "height", 3: "width"}, "grid": {0: "batch"}}
    return Subject(Resampling(), feeds, ["larger", "nearest", "pooled", "sampled"], axes)


class ScaledSum(nn.Module):
    """A sum with a scalar, a count and a vector."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor, count: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a matrix and a scalar."""
        return x * scale + count.to(x.dtype), x.sum() / count


@traced("scalar-inputs", opset=13)
@captured("scalar-inputs-dynamo", opset=18)
def _scalar_inputs() -> Subject:
    feeds: list[Feed] = [
        {"x": normal(rows, 3), "scale": np.array(value, np.float32), "count": np.array(rows)}
        for rows, value in ((2, 0.5), (1, -2.0), (4, 3.0))
    ]
    return Subject(ScaledSum(), feeds, ["matrix", "scalar"], {"x": {0: "rows"}})


class SharedWeights(nn.Module):
    """A layer applied twice, and an embedding that is also the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 12)
        self.layer = nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        hidden = self.layer(torch.tanh(self.layer(self.embedding(x))))
        return hidden @ self.embedding.weight.T


@traced("shared-weights", opset=12)
@captured("shared-weights-dynamo", opset=18)
def _shared_weights() -> Subject:
    feeds = [{"x": integers(20, *shape)} for shape in ((2, 5), (1, 9), (4, 1))]
    return Subject(SharedWeights(), feeds, axes=_BATCH_AND_LENGTH)


class Outputs(nn.Module):
    """Outputs of many types, one of them an input and one a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(6.0).reshape(2, 3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return seven tensors."""
        values, indices = x.topk(2, dim=1)
        return values, indices, x > 0, x.argmax(dim=1).to(torch.int32), x.double().cumsum(1), self.table * 1, x


@traced("many-outputs", opset=14)
@captured("many-outputs-dynamo", opset=18)
def _many_outputs() -> Subject:
    names = ["values", "indices", "positive", "best", "sums", "table", "same"]
    return Subject(Outputs(), _vectors(5), names, _BATCH)


class Einsums(nn.Module):
    """Bilinear attention written as einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 8, 8))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return scores of all pairs, weighted."""
        scores = torch.einsum("bid,hde,bje->bhij", x, self.weight, y)
        return torch.einsum("bhij,bje->bihe", scores.softmax(-1), y)


@traced("einsum", opset=13)
@captured("einsum-dynamo", opset=18)
def _einsum() -> Subject:
    shapes = ((2, 4, 5), (1, 7, 3), (3, 1, 6))
    feeds = [{"x": normal(batch, left, 8), "y": normal(batch, right, 8)} for batch, left, right in shapes]
    return Subject(Einsums(), feeds, axes={"x": {0: "batch", 1: "left"}, "y": {0: "batch", 1: "right"}})


@traced("embedding-bag", opset=11)
def _embedding_bag() -> Subject:
    feeds = [{"x": integers(30, 3, 4, seed=seed)} for seed in range(3)]
    return Subject(nn.EmbeddingBag(30, 8, mode="mean"), feeds)


class EmptyTensors(nn.Module):
    """Concatenation and reduction of tensors that may have no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 6)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all rows and their sum."""
        rows = self.layer(torch.cat([x, y]))
        return rows, rows.sum(dim=0)


@traced("empty-tensors", opset=13)
@captured("empty-tensors-dynamo", opset=18)
def _empty_tensors() -> Subject:
    feeds = [{"x": normal(left, 4), "y": normal(right, 4)} for left, right in ((2, 3), (0, 4), (0, 0), (5, 0))]
    return Subject(EmptyTensors(), feeds, ["rows", "total"], {"x": {0: "left"}, "y": {0: "right"}})


class Indexing(nn.Module):
    """Gather, scatter and slices with indices from inputs."""

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return four tensors."""
        gathered = x.gather(1, index)
        scattered = torch.zeros_like(x).scatter_add(1, index, gathered)
        rolled = torch.roll(x, 1, dims=1)[:, ::2]
        return gathered, scattered, rolled, x[torch.arange(x.shape[0]), index[:, 0]]


@traced("indexing", opset=16)
@captured("indexing-dynamo", opset=18)
def _indexing() -> Subject:
    feeds: list[Feed] = [{"x": normal(rows, 6), "index": integers(6, rows, 3)} for rows in (2, 1, 5)]
    axes = {"x": {0: "rows"}, "index": {0: "rows"}}
    return Subject(Indexing(), feeds, ["gathered", "scattered", "rolled", "picked"], axes)


class Bits(nn.Module):
    """Arithmetic of integers and booleans."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return four tensors of integers or booleans."""
        return x // (y + 1), x % (y + 1), (x > y) ^ (x == 3), torch.where(x > y, x, y).to(torch.uint8)


@traced("integers", opset=18)
@captured("integers-dynamo", opset=18)
def _integers() -> Subject:
    feeds: list[Feed] = [{"x": integers(9, n, 4), "y": integers(9, n, 4, seed=1)} for n in (2, 1, 6)]
    axes = {"x": {0: "rows"}, "y": {0: "rows"}}
    return Subject(Bits(), feeds, ["quotient", "rest", "flags", "larger"], axes)


@traced("half-precision", opset=17, rtol=1e-2, atol=1e-2)
@captured("half-precision-dynamo", opset=18, rtol=1e-2, atol=1e-2)
def _half_precision() -> Subject:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.LayerNorm(32), nn.Linear(32, 4)).half()
    feeds = [{"x": normal(batch, 16).astype(np.float16)} for batch in (3, 1, 7)]
    return Subject(model, feeds, axes=_BATCH)


@traced("double-precision", opset=14)
def _double_precision() -> Subject:
    model = nn.Sequential(nn.Linear(16, 32), nn.Softsign(), nn.Linear(32, 4), nn.LogSoftmax(-1)).double()
    return Subject(model, [{"x": normal(batch, 16).astype(np.float64)} for batch in (3, 1, 7)], axes=_BATCH)


@captured("transformer-encoder-dynamo", opset=23)
def _transformer_encoder() -> Subject:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    feeds = [{"x": normal(*shape)} for shape in ((2, 6, 16), (1, 9, 16), (3, 2, 16))]
    return Subject(model, feeds, axes=_BATCH_AND_LENGTH)


class Attention(nn.Module):
    """Scaled dot-product attention with a boolean mask."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return attended values."""
        heads = x.unflatten(-1, (4, 4)).transpose(1, 2)
        pairs = mask[:, None, None, :].expand(-1, -1, x.shape[1], -1)
        return functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=pairs)


@traced("attention", opset=14)
@captured("attention-dynamo", opset=23)
def _attention() -> Subject:
    feeds: list[Feed] = []
    for batch, length in ((2, 6), (1, 9), (3, 2)):
        mask = np.arange(length) < np.arange(length - batch + 1, length + 1)[:, None]
        feeds.append({"x": normal(batch, length, 16), "mask": mask})
    names = {0: "batch", 1: "length"}
    return Subject(Attention(), feeds, axes={"x": names, "mask": names})


class Chain(nn.Module):
    """Many small independent branches that meet at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product of all branches plus the input."""
        return x + torch.stack([branch(x) for branch in self.branches]).prod(dim=0)


@traced("branches", opset=15)
@captured("branches-dynamo", opset=24)
def _branches() -> Subject:
    return Subject(Chain(), _vectors(8), axes=_BATCH)


class Spectrum(nn.Module):
    """Framing and Fourier transform of a signal."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return log magnitudes."""
        window = torch.hann_window(16)
        spectrum = torch.stft(x, 16, 8, window=window, return_complex=False, center=False)
        return (spectrum.square().sum(-1) + 1e-3).log()


@traced("spectrum", opset=17)
def _spectrum() -> Subject:
    return Subject(Spectrum(), [{"x": normal(batch, 80)} for batch in (2, 1, 3)], axes=_BATCH)


if __name__ == "__main__":
    sys.exit(main("pytorch_modules"))
