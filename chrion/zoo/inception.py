"""GoogLeNet and Inception-v3: blocks of parallel branches, with batch norm after every convolution.

Szegedy et al., *Going deeper with convolutions* (2015), Table 1; *Rethinking the Inception architecture* (2016). The
auxiliary classifiers, which are for training only, are left out. Inception-v3 has the 119 operators of IOS: 94
convolutions (each with batch norm and ReLU), 14 pools and 11 concatenations.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx

from chrion.common.wrong_values import wrong_value
from chrion.zoo.convolutional import ConvNet, Image, ScaledSpec
from chrion.zoo.network import Spec

#: The channels of a block's branches: 1x1; 1x1 and 3x3; 1x1 and 5x5; 1x1 after pooling. None is a pool between blocks.
_GOOGLENET = (
    (64, (96, 128), (16, 32), 32),
    (128, (128, 192), (32, 96), 64),
    None,
    (192, (96, 208), (16, 48), 64),
    (160, (112, 224), (24, 64), 64),
    (128, (128, 256), (24, 64), 64),
    (112, (144, 288), (32, 64), 64),
    (256, (160, 320), (32, 128), 128),
    None,
    (256, (160, 320), (32, 128), 128),
    (384, (192, 384), (48, 128), 128),
)
_ACROSS, _DOWN = (1, 7), (7, 1)
#: The resolution below which the network's poolings leave no pixel.
_MIN_RESOLUTION = 75


class GoogLeNetSpec(ScaledSpec):
    """Parameters of GoogLeNet; the defaults are the published ones."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class InceptionSpec(ScaledSpec):
    """Parameters of Inception-v3; the defaults are the published ones."""

    resolution: int = 299

    def __post_init__(self) -> None:
        Spec.__post_init__(self)
        if self.resolution < _MIN_RESOLUTION:
            raise wrong_value("resolution", f"{_MIN_RESOLUTION} or more, for the last pool", self.resolution)


class _Inception(ConvNet):
    """A network whose layers have a fraction of the published numbers of channels."""

    def __init__(self, spec: ScaledSpec) -> None:
        super().__init__(spec.seed)
        self._share = spec.share

    def layer(
        self, x: Image, channels: int, kernel: int | tuple[int, int] = 1, *, stride: int = 1, padded: bool = True
    ) -> Image:
        """Add a convolution, a batch normalisation and a ReLU."""
        pads = None if padded else [0] * 4
        return self.conv_bn_relu(x, self._share(channels), kernel, stride=stride, pads=pads)

    def chain(self, x: Image, *layers: tuple[int, int | tuple[int, int]]) -> Image:
        """Add layers of (channels, kernel) in sequence."""
        for channels, kernel in layers:
            x = self.layer(x, channels, kernel)
        return x


def build_googlenet(spec: GoogLeNetSpec) -> onnx.ModelProto:
    """Build the network: input ``X`` [batch, 3, resolution, resolution], output ``Y`` [batch, classes]."""
    net = _Inception(spec)
    x = net.layer(net.image(spec.batch, spec.resolution), 64, 7, stride=2)
    x = net.max_pool(x, 3, 2, ceil=True)
    x = net.max_pool(net.chain(x, (64, 1), (192, 3)), 3, 2, ceil=True)
    for at, block in enumerate(_GOOGLENET):
        with net.scope(f"block{at}"):
            if block is None:
                x = net.max_pool(x, 3, 2, ceil=True)
                continue
            points, (before3, after3), (before5, after5), pooled = block
            branches = [net.layer(x, points), net.chain(x, (before3, 1), (after3, 3))]
            branches += [net.chain(x, (before5, 1), (after5, 5)), net.layer(net.max_pool(x, 3, 1, 1), pooled)]
            x = net.concat(branches)
    return net.classifier(x, "googlenet", spec.batch, spec.classes)


def build_inception(spec: InceptionSpec) -> onnx.ModelProto:
    """Build Inception-v3: input ``X`` [batch, 3, resolution, resolution], output ``Y`` [batch, classes]."""
    net = _Inception(spec)
    x = net.layer(net.image(spec.batch, spec.resolution), 32, 3, stride=2, padded=False)
    x = net.layer(net.layer(x, 32, 3, padded=False), 64, 3)
    x = net.layer(net.max_pool(x, 3, 2), 80)
    x = net.max_pool(net.layer(x, 192, 3, padded=False), 3, 2)
    for at, (block, channels) in enumerate(
        [
            *((_block_a, c) for c in (32, 64, 64)),
            (_block_b, 384),
            *((_block_c, c) for c in (128, 160, 160, 192)),
            (_block_d, 192),
            (_block_e, 384),
            (_block_e, 384),
        ]
    ):
        with net.scope(f"block{at}"):
            x = net.concat(block(net, x, channels))
    return net.classifier(x, "inception-v3", spec.batch, spec.classes)


def _block_a(net: _Inception, x: Image, pooled: int) -> list[Image]:
    """Return the branches of Figure 5: 1x1, 5x5, 3x3 twice, and pooling."""
    branches = [net.layer(x, 64), net.chain(x, (48, 1), (64, 5)), net.chain(x, (64, 1), (96, 3), (96, 3))]
    return [*branches, net.layer(net.average_pool(x, 3), pooled)]


def _block_b(net: _Inception, x: Image, channels: int) -> list[Image]:
    """Return the branches of Figure 10, which halves the size."""
    left = net.layer(x, channels, 3, stride=2, padded=False)
    right = net.layer(net.chain(x, (64, 1), (96, 3)), 96, 3, stride=2, padded=False)
    return [left, right, net.max_pool(x, 3, 2)]


def _block_c(net: _Inception, x: Image, c: int) -> list[Image]:
    """Return the branches of Figure 6: 7x7 factorised into 1x7 and 7x1."""
    once = net.chain(x, (c, 1), (c, _ACROSS), (192, _DOWN))
    twice = net.chain(x, (c, 1), (c, _DOWN), (c, _ACROSS), (c, _DOWN), (192, _ACROSS))
    return [net.layer(x, 192), once, twice, net.layer(net.average_pool(x, 3), 192)]


def _block_d(net: _Inception, x: Image, c: int) -> list[Image]:
    """Return the branches of the second block that halves the size."""
    left = net.layer(net.layer(x, c), 320, 3, stride=2, padded=False)
    right = net.layer(net.chain(x, (c, 1), (c, _ACROSS), (c, _DOWN)), c, 3, stride=2, padded=False)
    return [left, right, net.max_pool(x, 3, 2)]


def _block_e(net: _Inception, x: Image, c: int) -> list[Image]:
    """Return the branches of Figure 7, two of which fork again."""
    left, right = net.layer(x, c), net.chain(x, (448, 1), (c, 3))
    forks = [net.layer(branch, c, kernel) for branch in (left, right) for kernel in ((1, 3), (3, 1))]
    return [net.layer(x, 320), *forks, net.layer(net.average_pool(x, 3), 192)]
