"""ResNet-50: stages of bottleneck blocks, each with an identity or a projection beside it.

He et al., *Deep residual learning for image recognition* (2016), Table 1: 53 convolutions, each with batch norm, and
one dense layer. The stride of a stage is that of the 3x3 convolution of its first block (version 1.5), as in the
networks that are in use today.
"""

from __future__ import annotations

import onnx

from chrion.zoo.convolutional import ConvNet, Image, ScaledSpec

#: The blocks of each stage, and the channels of their 3x3 convolutions; the output has four times as many.
_STAGES = ((3, 64), (4, 128), (6, 256), (3, 512))
_EXPANSION = 4


class ResNetSpec(ScaledSpec):
    """Parameters of the network; the defaults are the published ones."""

    __slots__ = ()


class _ResNet(ConvNet):
    def bottleneck(self, x: Image, inner: int, outer: int, stride: int) -> Image:
        """Add a block of 1x1, 3x3 and 1x1 convolutions, and the sum with its input or a projection of it."""
        narrow = self.conv_bn_relu(x, inner, 1)
        wide = self.batch_norm(self.conv(self.conv_bn_relu(narrow, inner, 3, stride=stride), outer, 1))
        projected = stride > 1 or x.channels != outer
        beside = self.batch_norm(self.conv(x, outer, 1, stride=stride)) if projected else x
        return self.relu(self.add(wide, beside))


def build_resnet(spec: ResNetSpec) -> onnx.ModelProto:
    """Build the network: input ``X`` [batch, 3, resolution, resolution], output ``Y`` [batch, classes]."""
    net = _ResNet(spec.seed)
    x = net.conv_bn_relu(net.image(spec.batch, spec.resolution), spec.share(64), 7, stride=2)
    x = net.max_pool(x, 3, 2, 1)
    for stage, (blocks, channels) in enumerate(_STAGES):
        for block in range(blocks):
            with net.scope(f"stage{stage}/block{block}"):
                inner = spec.share(channels)
                x = net.bottleneck(x, inner, _EXPANSION * inner, 2 if stage and not block else 1)
    return net.classifier(x, "resnet-50", spec.batch, spec.classes)
