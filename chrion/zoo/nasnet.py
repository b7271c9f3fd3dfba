"""NASNet-A: cells of five pairs of branches that were found by architecture search.

Zoph et al., *Learning transferable architectures for scalable image recognition* (2018), Figure 4. The stem and the
connections of cells where the size changes follow the published networks. The large network has the 374 operators of
IOS.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx

from chrion.zoo.convolutional import ConvNet, Image
from chrion.zoo.network import Spec


@dataclass(frozen=True, slots=True)
class NasNetSpec(Spec):
    """Parameters of the network; the defaults are those of the large one, NASNet-A (6 @ 4032).

    The mobile network is NASNet-A (4 @ 1056), with 44 channels and 32 in the stem.
    """

    batch: int = 1
    #: Height and width of the image.
    resolution: int = 331
    #: The number of normal cells in each of the three rows.
    cells: int = 6
    #: The channels of a branch in the first row; they double from row to row. The last cell outputs 24 times as many.
    channels: int = 168
    #: The channels of the first convolution.
    stem: int = 96
    classes: int = 1000


def build_nasnet(spec: NasNetSpec) -> onnx.ModelProto:
    """Build the network: input ``X`` [batch, 3, resolution, resolution], output ``Y`` [batch, classes]."""
    net = _NasNet(spec.seed)
    image = net.image(spec.batch, spec.resolution)
    x = net.batch_norm(net.conv(image, spec.stem, 3, stride=2, pads=[0] * 4))
    quarter, half = max(1, spec.channels // 4), max(2, spec.channels // 2)
    with net.scope("stem0"):
        before = net.reduction_cell(net.relu_conv_bn(x, quarter), x, quarter)
    with net.scope("stem1"):
        x = net.reduction_cell(net.relu_conv_bn(before, half), net.factorised_reduction(x, half), half)
    for row in range(3):
        channels = spec.channels << row
        if row:  # the cell after a reduction reads the earlier input of the reduction
            with net.scope(f"reduction{row}"):
                left, right = net.relu_conv_bn(before, channels), net.relu_conv_bn(x, channels)
                x = net.reduction_cell(right, left, channels)
        for at in range(spec.cells):
            with net.scope(f"cell{row}.{at}"):
                left = net.relu_conv_bn(before, channels) if at else net.factorised_reduction(before, channels)
                before, x = x, net.normal_cell(left, net.relu_conv_bn(x, channels))
    return net.classifier(net.relu(x), "nasnet-a", spec.batch, spec.classes)


class _NasNet(ConvNet):
    def branch(self, x: Image, channels: int, kernel: int, stride: int = 1) -> Image:
        """Add two separable convolutions; the first applies the stride and never increases the number of channels."""
        middle = min(x.channels, channels)
        return self.separable(self.separable(x, middle, kernel, stride=stride), channels, kernel)

    def normal_cell(self, left: Image, right: Image) -> Image:
        """Add a normal cell (Figure 4, left), which keeps the size.

        Args:
            left: The earlier input, of the cell before the previous one; it is also part of the output.
            right: The output of the previous cell.
        """
        channels = right.channels
        pairs = [
            (self.branch(right, channels, 5), self.branch(left, channels, 3)),
            (self.branch(left, channels, 5), self.branch(left, channels, 3)),
            (self.average_pool(right, 3), left),
            (self.average_pool(left, 3), self.average_pool(left, 3)),
            (self.branch(right, channels, 3), right),
        ]
        return self.concat([left, *(self.add(*pair) for pair in pairs)])

    def reduction_cell(self, near: Image, far: Image, channels: int) -> Image:
        """Add a reduction cell (Figure 4, right), which halves the size.

        Args:
            near: The output of the previous cell.
            far: An earlier output, that of the cell before the previous one if there is one.
            channels: The channels of a branch.
        """
        first = self.add(self.branch(near, channels, 5, 2), self.branch(far, channels, 7, 2))
        second = self.add(self.max_pool(near, 3, 2, 1), self.branch(far, channels, 7, 2))
        third = self.add(self.average_pool(near, 3, 2), self.branch(far, channels, 5, 2))
        fourth = self.add(self.average_pool(first, 3), second)
        fifth = self.add(self.branch(first, channels, 3), self.max_pool(near, 3, 2, 1))
        return self.concat([second, third, fourth, fifth])
