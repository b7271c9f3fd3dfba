"""Building blocks of convolutional networks: convolution, batch normalisation and ReLU as separate operators.

Weights are scaled such that values neither grow nor vanish from layer to layer. Every value has an estimate of its mean
square, and the weights of a convolution make the mean square of its output 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx

from chrion.zoo.network import Network, Spec


@dataclass(frozen=True, slots=True)
class ScaledSpec(Spec):
    """Parameters of a network whose layers have a fraction of the published numbers of channels."""

    batch: int = 1
    #: Height and width of the image.
    resolution: int = 224
    #: The fraction of the published numbers of channels.
    width: float = 1.0
    classes: int = 1000

    def share(self, channels: int) -> int:
        """Return the scaled number of channels of a layer, at least one."""
        return max(1, round(channels * self.width))


@dataclass(frozen=True, slots=True)
class Image:
    """A value of shape [batch, channels, height, width]."""

    name: str
    channels: int
    #: The estimated mean square of its elements.
    power: float = 1.0


class ConvNet(Network):
    """A network on images."""

    def image(self, batch: int, resolution: int) -> Image:
        """Add the input ``X`` [batch, 3, resolution, resolution]."""
        return Image(self.input("X", [batch, 3, resolution, resolution]), 3)

    def conv(  # noqa: PLR0913 - all properties of a convolution
        self,
        x: Image,
        channels: int,
        kernel: int | tuple[int, int],
        *,
        stride: int = 1,
        pads: Sequence[int] | None = None,
        dilation: int = 1,
        groups: int = 1,
        bias: bool = False,
    ) -> Image:
        """Add a convolution; without ``pads`` the padding preserves the size for a stride of 1."""
        height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
        half = [dilation * (height - 1) // 2, dilation * (width - 1) // 2]
        fan_in = x.channels // groups * height * width
        shape = (channels, x.channels // groups, height, width)
        weights = [self.normal("W", *shape, deviation=(fan_in * x.power) ** -0.5)]
        weights += [self.normal("b", channels, deviation=0.1)] if bias else []
        attributes: dict[str, int | list[int]] = {"kernel_shape": [height, width], "pads": [*(pads or half * 2)]}
        attributes |= {"strides": [stride] * 2, "dilations": [dilation] * 2, "group": groups}
        return Image(self.op("Conv", x.name, *weights, **attributes), channels)

    def batch_norm(self, x: Image) -> Image:
        """Add a batch normalisation with a mean close to 0 and a variance close to 1."""
        slots = {"scale": (1.0, 0.05), "B": (0.0, 0.05), "mean": (0.0, 0.05), "var": (1.0, 0.02)}
        weights = []
        for slot, (mean, spread) in slots.items():
            drawn = mean + spread * self.random.uniform(-1, 1, x.channels)
            weights.append(self.constant(self.unique(slot), drawn.astype(np.float32)))
        return replace(x, name=self.op("BatchNormalization", x.name, *weights))

    def relu(self, x: Image) -> Image:
        """Add a ReLU, which halves the mean square of a symmetric value."""
        return Image(self.op("Relu", x.name), x.channels, x.power / 2)

    def conv_bn_relu(
        self,
        x: Image,
        channels: int,
        kernel: int | tuple[int, int],
        *,
        stride: int = 1,
        pads: Sequence[int] | None = None,
    ) -> Image:
        """Add a convolution, a batch normalisation and a ReLU."""
        return self.relu(self.batch_norm(self.conv(x, channels, kernel, stride=stride, pads=pads)))

    def relu_conv_bn(self, x: Image, channels: int) -> Image:
        """Add a ReLU, a pointwise convolution and a batch normalisation."""
        return self.batch_norm(self.conv(self.relu(x), channels, 1))

    def separable(self, x: Image, channels: int, kernel: int, *, stride: int = 1, dilation: int = 1) -> Image:
        """Add a ReLU, a depthwise convolution, a pointwise convolution and a batch normalisation."""
        deep = self.conv(self.relu(x), x.channels, kernel, stride=stride, dilation=dilation, groups=x.channels)
        return self.batch_norm(self.conv(deep, channels, 1))

    def factorised_reduction(self, x: Image, channels: int) -> Image:
        """Add a factorised reduction between a ReLU and a batch normalisation.

        Half of the output channels are computed from the even pixels, the other half from the odd ones.
        """
        x = self.relu(x)
        bounds = (self.integers(1, 1), self.integers(1 << 30, 1 << 30), self.integers(2, 3))
        odd = replace(x, name=self.op("Slice", x.name, *bounds))
        even = self.conv(x, channels // 2, 1, stride=2)
        rest = self.conv(odd, channels - channels // 2, 1, stride=2, pads=[0, 0, 1, 1])
        return self.batch_norm(self.concat([even, rest]))

    def max_pool(self, x: Image, kernel: int, stride: int, pad: int = 0, *, ceil: bool = False) -> Image:
        """Add a max pooling."""
        given = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": [pad] * 4, "ceil_mode": int(ceil)}
        return replace(x, name=self.op("MaxPool", x.name, **given))

    def average_pool(self, x: Image, kernel: int, stride: int = 1) -> Image:
        """Add an average pooling with one row of padding on each side, which it does not count."""
        given = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": [1] * 4, "count_include_pad": 0}
        return replace(x, name=self.op("AveragePool", x.name, **given))

    def concat(self, parts: Sequence[Image]) -> Image:
        """Concatenate values along their channels."""
        channels = sum(p.channels for p in parts)
        power = sum(p.power * p.channels for p in parts) / channels
        return Image(self.op("Concat", *(p.name for p in parts), axis=1), channels, power)

    def add(self, *parts: Image) -> Image:
        """Add up two or more values."""
        total = self.op("Add" if len(parts) == 2 else "Sum", *(p.name for p in parts))
        return Image(total, parts[0].channels, sum(p.power for p in parts))

    def global_pool(self, x: Image) -> Image:
        """Add a global average pooling to [batch, channels, 1, 1]."""
        return replace(x, name=self.op("GlobalAveragePool", x.name))

    def classifier(self, x: Image, name: str, batch: int, classes: int) -> onnx.ModelProto:
        """Add global pooling and a dense layer to the output ``Y`` [batch, classes], and return the model."""
        flat = self.op("Flatten", self.global_pool(x).name)
        weights = self.normal("W", classes, x.channels, deviation=x.channels**-0.5)
        logits = self.op("Gemm", flat, weights, self.normal("b", classes, deviation=0.1), transB=1)
        self.output(logits, "Y", [batch, classes])
        return self.model(name)
