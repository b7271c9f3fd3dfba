"""GoogLeNet and Inception-v3: blocks of parallel branches, with batch norm after every convolution.

Szegedy et al., *Going deeper with convolutions* (2015), Table 1; *Rethinking the Inception architecture* (2016).
Without the classifiers that help training only. Inception-v3 is IOS's 119 operators: 94 convolutions (each with batch
norm and ReLU), 14 pools, 11 concatenations.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx

from chrion.errors import OptionError
from chrion.zoo.convolutional import ConvNet, Image, ScaledSpec
from chrion.zoo.network import check_sizes

#: Channels of a block's branches: 1x1; 1x1 before 3x3; 1x1 before 5x5; 1x1 after the pool. None: a pool between blocks.
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
_LEAST = 75


class GoogLeNetSpec(ScaledSpec):
    """The defaults are the published network."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class InceptionSpec(ScaledSpec):
    """The defaults are the published network."""

    resolution: int = 299

    def __post_init__(self) -> None:
        check_sizes(self)
        if self.resolution < _LEAST:
            raise OptionError(f"resolution: {self.resolution} is below {_LEAST}, and nothing would be left to pool")


class _Inception(ConvNet):
    """A network of which every layer has a share of the published channels."""

    def __init__(self, spec: ScaledSpec) -> None:
        super().__init__(spec.seed)
        self._share = spec.share

    def layer(
        self, x: Image, channels: int, kernel: int | tuple[int, int] = 1, *, stride: int = 1, padded: bool = True
    ) -> Image:
        """Convolution, batch norm, ReLU."""
        pads = None if padded else [0] * 4
        return self.conv_bn_relu(x, self._share(channels), kernel, stride=stride, pads=pads)

    def chain(self, x: Image, *layers: tuple[int, int | tuple[int, int]]) -> Image:
        """Layers of (channels, kernel), one after another."""
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
    return net.classified(x, "googlenet", spec.batch, spec.classes)


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
    return net.classified(x, "inception-v3", spec.batch, spec.classes)


def _block_a(net: _Inception, x: Image, pooled: int) -> list[Image]:
    """Figure 5: 5x5, and two 3x3 in a row."""
    branches = [net.layer(x, 64), net.chain(x, (48, 1), (64, 5)), net.chain(x, (64, 1), (96, 3), (96, 3))]
    return [*branches, net.layer(net.average_pool(x, 3), pooled)]


def _block_b(net: _Inception, x: Image, channels: int) -> list[Image]:
    """Figure 10: half the size."""
    left = net.layer(x, channels, 3, stride=2, padded=False)
    right = net.layer(net.chain(x, (64, 1), (96, 3)), 96, 3, stride=2, padded=False)
    return [left, right, net.max_pool(x, 3, 2)]


def _block_c(net: _Inception, x: Image, c: int) -> list[Image]:
    """Figure 6: 7x7 as 1x7 and 7x1."""
    once = net.chain(x, (c, 1), (c, _ACROSS), (192, _DOWN))
    twice = net.chain(x, (c, 1), (c, _DOWN), (c, _ACROSS), (c, _DOWN), (192, _ACROSS))
    return [net.layer(x, 192), once, twice, net.layer(net.average_pool(x, 3), 192)]


def _block_d(net: _Inception, x: Image, c: int) -> list[Image]:
    """Half the size again."""
    left = net.layer(net.layer(x, c), 320, 3, stride=2, padded=False)
    right = net.layer(net.chain(x, (c, 1), (c, _ACROSS), (c, _DOWN)), c, 3, stride=2, padded=False)
    return [left, right, net.max_pool(x, 3, 2)]


def _block_e(net: _Inception, x: Image, c: int) -> list[Image]:
    """Figure 7: branches that fork again."""
    left, right = net.layer(x, c), net.chain(x, (448, 1), (c, 3))
    forks = [net.layer(branch, c, kernel) for branch in (left, right) for kernel in ((1, 3), (3, 1))]
    return [net.layer(x, 320), *forks, net.layer(net.average_pool(x, 3), 192)]
