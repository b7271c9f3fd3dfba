"""SqueezeNet with complex bypass: fire modules, each with a path round it.

Iandola et al., *SqueezeNet* (2016), Figure 2, right. IOS's 50 operators: 30 convolutions (each with its ReLU), 4 pools,
8 concatenations, 8 additions.
"""

from __future__ import annotations

import onnx

from chrion.zoo.convolutional import ConvNet, Image, ScaledSpec

#: Channels squeezed to, and each half expanded to; None: a pool between modules.
_FIRES = ((16, 64), (16, 64), (32, 128), None, (32, 128), (48, 192), (48, 192), (64, 256), None, (64, 256))


class SqueezeNetSpec(ScaledSpec):
    """The defaults are the published network."""

    __slots__ = ()


class _SqueezeNet(ConvNet):
    def layer(self, x: Image, channels: int, kernel: int = 1, stride: int = 1) -> Image:
        """Convolution and ReLU; there is no batch norm."""
        return self.relu(self.conv(x, channels, kernel, stride=stride, bias=True))

    def fire(self, x: Image, squeezed: int, expanded: int) -> Image:
        """Squeeze, expand both ways, and add what came in, through a convolution where channels differ."""
        inside = self.layer(x, squeezed)
        made = self.concat([self.layer(inside, expanded), self.layer(inside, expanded, 3)])
        return self.add(made, x if x.channels == made.channels else self.layer(x, made.channels))


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
