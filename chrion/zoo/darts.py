"""DARTS: a network of cells that were found by architecture search.

Liu et al., *DARTS: differentiable architecture search* (2019): the second-order genotype of Figures 4 and 5, in the
ImageNet network of 14 cells and 48 channels. A cell has four nodes. Each is the sum of two operations on the outputs of
the two previous cells or on earlier nodes, and the output of the cell is the concatenation of its nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx

from chrion.zoo.convolutional import ConvNet, Image
from chrion.zoo.network import Spec

#: Two operations for every node, each with the index of its input: 0 and 1 are the previous cells, 2 the first node.
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
class DartsSpec(Spec):
    """Parameters of the network; the defaults are the published ones."""

    batch: int = 1
    #: Height and width of the image.
    resolution: int = 224
    cells: int = 14
    #: The channels of a node in the first third of the cells; they double in each of the other thirds.
    channels: int = 48
    classes: int = 1000


class _Darts(ConvNet):
    def operation(self, kind: str, x: Image, stride: int) -> Image:
        """Add an operation of the search space."""
        if kind == "separable":
            return self.separable(self.separable(x, x.channels, 3, stride=stride), x.channels, 3)
        if kind == "dilated":
            return self.separable(x, x.channels, 3, stride=stride, dilation=2)
        if kind == "pool":
            return self.max_pool(x, 3, stride, 1)
        return x if stride == 1 else self.factorised_reduction(x, x.channels)

    def cell(self, genotype: Sequence[Sequence[tuple[str, int]]], before: Image, x: Image, *, halve: bool) -> Image:
        """Add a cell; with ``halve`` its operations on the previous cells halve the size."""
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
    channels, reduced = spec.channels, True
    for at in range(spec.cells):
        halve = at in {spec.cells // 3, 2 * spec.cells // 3}
        channels *= 2 if halve else 1
        with net.scope(f"cell{at}"):
            left = net.factorised_reduction(before, channels) if reduced else net.relu_conv_bn(before, channels)
            right = net.relu_conv_bn(x, channels)
            before, x = x, net.cell(_REDUCTION if halve else _NORMAL, left, right, halve=halve)
        reduced = halve
    return net.classifier(x, "darts", spec.batch, spec.classes)
