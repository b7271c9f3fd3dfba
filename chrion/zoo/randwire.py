"""Randomly wired networks: stages whose nodes are connected as a small-world graph.

Xie et al., *Exploring randomly wired neural networks for image recognition* (2019), Table 1: Watts-Strogatz graphs
WS(4, 0.75) with all edges from the lower to the higher index. A node computes the weighted sum of its inputs, ReLU, a
separable convolution and batch norm. The regular network has the 120 operators of IOS.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from chrion.common.wrong_values import wrong_value
from chrion.zoo.convolutional import ConvNet, Image
from chrion.zoo.network import Spec


@dataclass(frozen=True, slots=True)
class RandWireSpec(Spec):
    """Parameters of the network; the defaults are those of the regular one.

    The small network has 78 channels and one wired stage less.
    """

    batch: int = 1
    #: Height and width of the image.
    resolution: int = 224
    channels: int = 109
    #: The nodes of a wired stage; the first stage of the regular network has half as many.
    nodes: int = 32
    #: The neighbours of each node in the initial ring.
    neighbours: int = 4
    #: The probability that an edge of the ring is rewired.
    probability: float = 0.75
    small: bool = False
    classes: int = 1000

    def __post_init__(self) -> None:
        Spec.__post_init__(self)
        smallest = self.nodes if self.small else self.nodes // 2
        if self.neighbours >= smallest:
            expected = f"fewer than the {smallest} nodes of the smallest stage"
            raise wrong_value("neighbours", expected, self.neighbours)
        if self.probability > 1:
            raise wrong_value("probability", "at most 1", self.probability)


def wiring(nodes: int, neighbours: int, probability: float, seed: int) -> list[list[int]]:
    """Return the predecessors of each node of a stage; a node without any reads the stage's input."""
    import networkx as nx  # noqa: PLC0415 - takes a tenth of a second to import

    graph = nx.connected_watts_strogatz_graph(nodes, neighbours, probability, tries=200, seed=seed)
    return [sorted(other for other in graph[i] if other < i) for i in range(nodes)]


def build_randwire(spec: RandWireSpec) -> onnx.ModelProto:
    """Build the network: input ``X`` [batch, 3, resolution, resolution], output ``Y`` [batch, classes]."""
    net = _RandWire(spec.seed)
    x = net.conv_bn_relu(net.image(spec.batch, spec.resolution), max(1, spec.channels // 2), 3, stride=2)
    if spec.small:
        x = net.batch_norm(net.conv(x, spec.channels, 3, stride=2))
    sizes = [spec.nodes] * 3 if spec.small else [spec.nodes // 2, *[spec.nodes] * 3]
    for stage, nodes in enumerate(sizes):
        with net.scope(f"stage{stage}"):
            predecessors = wiring(nodes, spec.neighbours, spec.probability, spec.seed + stage)
            x = net.stage(x, spec.channels << stage, predecessors)
    x = net.batch_norm(net.conv(net.relu(x), 1280, 1))
    return net.classifier(x, "randwire", spec.batch, spec.classes)


class _RandWire(ConvNet):
    def stage(self, x: Image, channels: int, predecessors: Sequence[Sequence[int]]) -> Image:
        """Add a stage of wired nodes.

        Nodes without predecessors halve the size of the stage's input; the output is the mean of the nodes without
        successors.
        """
        made: list[Image] = []
        for sources in predecessors:
            total = self.weighted_sum([made[i] for i in sources]) if sources else x
            made.append(self.separable(total, channels, 3, stride=1 if sources else 2))
        with_successors = {i for sources in predecessors for i in sources}
        last = [image for i, image in enumerate(made) if i not in with_successors]
        return Image(self.op("Mean", *(image.name for image in last)), channels, 1 / len(last))

    def weighted_sum(self, parts: Sequence[Image]) -> Image:
        """Add the sum of values, each times a weight between 0 and 1; return a single value unchanged."""
        if len(parts) == 1:
            return parts[0]
        scales = 1 / (1 + np.exp(-self.random.standard_normal(len(parts))))
        scaled = [
            Image(self.op("Mul", part.name, self.number(float(scale))), part.channels, part.power * float(scale) ** 2)
            for part, scale in zip(parts, scales, strict=True)
        ]
        return self.add(*scaled)
