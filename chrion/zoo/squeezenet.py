"""SqueezeNet with complex bypass: fire modules with residual connections.

Iandola et al., *SqueezeNet* (2016), Figure 2, right. The network has the 50 operators of IOS: 30 convolutions (each
with its ReLU), 4 pools, 8 concatenations and 8 additions.
"""

from __future__ import annotations

import onnx

from chrion.zoo.convolutional import ConvNet, Image, ScaledSpec

#: The channels of the squeeze layer and of each half of the expand layer; None is a pool between modules.
_FIRES = ((16, 64), (16, 64), (32, 128), None, (32, 128), (48, 192), (48, 192), (64, 256), None, (64, 256))


class SqueezeNetSpec(ScaledSpec):
    """Parameters of the network; the defaults are the published ones."""

    __slots__ = ()


class _SqueezeNet(ConvNet):
    def layer(self, x: Image, channels: int, kernel: int = 1, stride: int = 1) -> Image:
        """Add a convolution and a ReLU."""
        return self.relu(self.conv(x, channels, kernel, stride=stride, bias=True))

    def fire(self, x: Image, squeezed: int, expanded: int) -> Image:
        """Add a fire module and its bypass, which has a convolution if the numbers of channels differ."""
        narrow = self.layer(x, squeezed)
        wide = self.concat([self.layer(narrow, expanded), self.layer(narrow, expanded, 3)])
        return self.add(wide, x if x.channels == wide.channels else self.layer(x, wide.channels))


def build_squeezenet(spec: SqueezeNetSpec) -> onnx.ModelProto:
    """Build the network: input ``X`` [batch, 3, resolution, resolution], output ``Y`` [batch, classes]."""
    net = _SqueezeNet(spec.seed)
    x = net.layer(net.image(spec.batch, spec.resolution), spec.share(96), 7, 2)
    x = net.max_pool(x, 3, 2)
    for at, fire in enumerate(_FIRES):
        with net.scope(f"fire{at}"):
            x = net.fire(x, spec.share(fire[0]), spec.share(fire[1])) if fire else net.max_pool(x, 3, 2)
    pooled = net.global_pool(net.layer(x, spec.classes))
    net.output(net.op("Flatten", pooled.name), "Y", [spec.batch, spec.classes])
    return net.model("squeezenet")
