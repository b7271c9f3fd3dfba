"""A network of searched cells, after DARTS.

Liu et al., *DARTS: differentiable architecture search* (2019): the second-order genotype of Figures 4 and 5, in the
ImageNet network of 14 cells and 48 channels. A cell has four nodes, each the sum of two operations on the outputs of
the two cells before or on earlier nodes; what the cell puts out are all four.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx

from chrion.zoo.convolutional import ConvNet, Image
from chrion.zoo.network import check_sizes

#: For every node two operations, and what each reads: 0 and 1 are the cells before, 2 is the first node.
_NORMAL = (
    (("separable", 0), ("separable", 1)),
    (("separable", 0), ("separable", 1)),
    (("separable", 1), ("skip", 0)),
    (("skip", 0), ("dilated", 2)),
)
_REDUCTION = (
    (("pool", 0), ("pool", 1)),
    (("skip", 2), ("pool", 1)),
    (("pool", 0), ("skip", 2)),
    (("skip", 2), ("pool", 1)),
)


@dataclass(frozen=True, slots=True)
class DartsSpec:
    """The defaults are the published network."""

    batch: int = 1
    #: Height and width of the image.
    resolution: int = 224
    cells: int = 14
    #: Channels of a node in the first third, doubled in each further one.
    channels: int = 48
    classes: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        check_sizes(self)


class _Darts(ConvNet):
    def operation(self, kind: str, x: Image, stride: int) -> Image:
        """One of those that the search chose from."""
        if kind == "separable":
            return self.separable(self.separable(x, x.channels, 3, stride=stride), x.channels, 3)
        if kind == "dilated":
            return self.separable(x, x.channels, 3, stride=stride, dilation=2)
        if kind == "pool":
            return self.max_pool(x, 3, stride, 1)
        return x if stride == 1 else self.halved(x, x.channels)

    def cell(self, genotype: Sequence[Sequence[tuple[str, int]]], before: Image, x: Image, *, halve: bool) -> Image:
        """Four nodes; with ``halve`` what they read of the cells before is halved in size."""
        states = [before, x]
        for node in genotype:
            made = [self.operation(kind, states[at], 2 if halve and at < 2 else 1) for kind, at in node]
            states.append(self.add(*made))
        return self.concat(states[2:])


def build_darts(spec: DartsSpec) -> onnx.ModelProto:
    """Build the network: input ``X`` [batch, 3, resolution, resolution], output ``Y`` [batch, classes]."""
    net = _Darts(spec.seed)
    image = net.image(spec.batch, spec.resolution)
    half = net.conv_bn_relu(image, max(1, spec.channels // 2), 3, stride=2)
    before = net.batch_norm(net.conv(half, spec.channels, 3, stride=2))
    x = net.batch_norm(net.conv(net.relu(before), spec.channels, 3, stride=2))
    channels, halved = spec.channels, True
    for at in range(spec.cells):
        halve = at in {spec.cells // 3, 2 * spec.cells // 3}
        channels *= 2 if halve else 1
        with net.scope(f"cell{at}"):
            left = net.halved(before, channels) if halved else net.relu_conv_bn(before, channels)
            right = net.relu_conv_bn(x, channels)
            before, x = x, net.cell(_REDUCTION if halve else _NORMAL, left, right, halve=halve)
        halved = halve
    return net.classified(x, "darts", spec.batch, spec.classes)
