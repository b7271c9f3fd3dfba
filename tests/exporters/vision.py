"""Models of torchvision with random weights, on small images."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from cases import main
from torch import nn
from torch_export import Axes, Subject, captured, normal, traced
from torchvision_loader import models, torchvision

#: Installed by pip for this family. torchvision accepts any build of its torch, one without CUDA too.
REQUIREMENTS = [
    "torch==2.13.0",
    "torchvision==0.28.0",
    "onnx==1.23.2",
    "onnxscript==0.7.2",
    "onnxruntime==1.31.1",
]

_BATCH = {0: "batch"}
_BATCH_AND_SIZE = {0: "batch", 2: "height", 3: "width"}


class Values(nn.Module):
    """A model whose dictionary of outputs becomes a tuple."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the model."""
        return tuple(self.model(image).values())


class Detector(nn.Module):
    """A detection model on one image."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the model."""
        return tuple(self.model([image])[0].values())


def narrowed(model: nn.Module, factor: int) -> nn.Module:
    """Return a copy of a convolutional network with fewer channels in every layer."""
    for name, child in model.named_children():
        setattr(model, name, _narrow_layer(child, factor))
    return model


def _narrow_layer(layer: nn.Module, factor: int) -> nn.Module:
    def fewer(channels: int) -> int:
        return channels if channels <= 3 else max(1, channels // factor)

    if isinstance(layer, (nn.Conv2d, nn.Conv3d)):
        names = ("kernel_size", "stride", "padding", "dilation")
        convolution = nn.Conv2d if isinstance(layer, nn.Conv2d) else nn.Conv3d
        return convolution(
            fewer(layer.in_channels),
            fewer(layer.out_channels),
            groups=fewer(layer.groups) if layer.groups > 1 else 1,
            bias=layer.bias is not None,
            **{name: getattr(layer, name) for name in names},
        )
    if isinstance(layer, (nn.BatchNorm2d, nn.BatchNorm3d)):
        return type(layer)(fewer(layer.num_features), eps=layer.eps)
    if isinstance(layer, nn.Linear):
        return nn.Linear(fewer(layer.in_features), fewer(layer.out_features), bias=layer.bias is not None)
    return narrowed(layer, factor)


def randomized(model: nn.Module, example: torch.Tensor) -> nn.Module:
    """Return a model whose outputs depend on its input, which initial weights and statistics often prevent.

    Weights keep the variance of activations, and normalizations get the statistics of an example.
    """
    for name, parameter in model.named_parameters():
        if name.endswith("layer_scale"):
            nn.init.constant_(parameter, 0.5)
        elif parameter.ndim > 1:
            nn.init.kaiming_normal_(parameter, nonlinearity="relu")
        elif name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
        else:
            nn.init.uniform_(parameter, 0.5, 1.5)
    model.eval()
    for layer in model.modules():
        if isinstance(layer, (nn.BatchNorm2d, nn.BatchNorm3d)):
            layer.train()
            layer.momentum = 1.0
    with torch.no_grad():
        model(example)
    return model.eval()


def _images(model: nn.Module, *sizes: Sequence[int], axes: dict[int, str] = _BATCH, outputs: int = 1) -> Subject:
    feeds = [{"image": normal(*size)} for size in sizes]
    names = ["output"] if outputs == 1 else [f"output{at}" for at in range(outputs)]
    return Subject(randomized(model, torch.from_numpy(feeds[0]["image"])), feeds, names, {"image": axes})


def _classifier(model: nn.Module, size: int = 64) -> Subject:
    shapes = [(2, 3, size, size), (1, 3, size + 32, size), (3, 3, size, size + 64)]
    return _images(model, *shapes, axes=_BATCH_AND_SIZE)


def _fixed(model: nn.Module, size: int) -> Subject:
    return _images(model, *((batch, 3, size, size) for batch in (2, 1, 5)))


@traced("resnet18", opset=11)
@captured("resnet18-dynamo")
def _resnet18() -> Subject:
    return _classifier(narrowed(models.resnet18(num_classes=40), 4))


@traced("resnext", opset=17)
def _resnext() -> Subject:
    model = models.ResNet(models.resnet.Bottleneck, [1, 1, 1, 1], 40, groups=8, width_per_group=8)
    return _classifier(narrowed(model, 4))


@traced("mobilenet-v2", opset=9)
def _mobilenet_v2() -> Subject:
    return _classifier(models.mobilenet_v2(num_classes=10, width_mult=0.25))


@traced("mobilenet-v3-small", opset=17)
@captured("mobilenet-v3-small-dynamo")
def _mobilenet_v3() -> Subject:
    return _classifier(models.mobilenet_v3_small(num_classes=10, width_mult=0.5))


@traced("shufflenet", opset=17)
@captured("shufflenet-dynamo")
def _shufflenet() -> Subject:
    return _classifier(models.ShuffleNetV2([1, 2, 1], [24, 24, 48, 96, 128], num_classes=10))


@traced("squeezenet", opset=10)
@captured("squeezenet-dynamo", opset=20)
def _squeezenet() -> Subject:
    return _classifier(narrowed(models.squeezenet1_1(num_classes=40), 4))


@traced("densenet", opset=13)
@captured("densenet-dynamo")
def _densenet() -> Subject:
    return _classifier(models.DenseNet(8, (2, 2, 2, 2), 16, num_classes=10))


@traced("googlenet", opset=12)
@captured("googlenet-dynamo")
def _googlenet() -> Subject:
    model = models.GoogLeNet(num_classes=40, aux_logits=False, init_weights=False, transform_input=True)
    return _classifier(narrowed(model, 4))


@traced("inception", opset=14)
def _inception() -> Subject:
    model = models.Inception3(num_classes=40, aux_logits=False, init_weights=False)
    return _classifier(narrowed(model, 8), size=96)


@captured("efficientnet-dynamo")
@traced("efficientnet", opset=17)
def _efficientnet() -> Subject:
    return _classifier(narrowed(models.efficientnet_b0(num_classes=40), 4))


@traced("mnasnet", opset=17)
def _mnasnet() -> Subject:
    return _classifier(models.MNASNet(0.35, num_classes=10))


@captured("regnet-dynamo", opset=21)
def _regnet() -> Subject:
    parameters = models.regnet.BlockParams.from_init_params(depth=4, w_0=16, w_a=8.0, w_m=2.0, group_width=8)
    return _classifier(models.RegNet(parameters, num_classes=10, stem_width=8))


@traced("vgg11", opset=15)
def _vgg11() -> Subject:
    return _fixed(narrowed(models.vgg11_bn(num_classes=80, init_weights=False), 16), 224)


@captured("alexnet-dynamo", opset=22)
def _alexnet() -> Subject:
    return _fixed(narrowed(models.alexnet(num_classes=80), 8), 96)


@traced("convnext", opset=17)
@captured("convnext-dynamo", opset=23)
def _convnext() -> Subject:
    setting = models.convnext.CNBlockConfig
    return _classifier(models.ConvNeXt([setting(8, 16, 1), setting(16, 32, 1), setting(32, None, 1)], num_classes=10))


@traced("vit", opset=17)
@captured("vit-dynamo")
def _vit() -> Subject:
    return _fixed(models.VisionTransformer(32, 8, 2, 2, 32, 64, num_classes=10), 32)


@traced("swin", opset=17)
@captured("swin-dynamo")
def _swin() -> Subject:
    return _fixed(models.SwinTransformer([4, 4], 16, [2, 2], [2, 4], [4, 4], num_classes=10), 32)


@captured("swin-v2-dynamo")
def _swin_v2() -> Subject:
    parts = models.swin_transformer
    model = models.SwinTransformer(
        [4, 4],
        16,
        [2, 2],
        [2, 4],
        [4, 4],
        num_classes=10,
        block=parts.SwinTransformerBlockV2,
        downsample_layer=parts.PatchMergingV2,
    )
    return _fixed(model, 32)


@traced("maxvit", opset=17)
def _maxvit() -> Subject:
    return _fixed(models.MaxVit((32, 32), 8, 2, [8, 16], [1, 1], 4, stochastic_depth_prob=0.0, num_classes=10), 32)


@traced("fcn", opset=11)
def _fcn() -> Subject:
    return _segmentation(models.segmentation.fcn_resnet50(weights=None, weights_backbone=None, num_classes=80))


@traced("deeplab", opset=17)
@captured("deeplab-dynamo")
def _deeplab() -> Subject:
    build = models.segmentation.deeplabv3_mobilenet_v3_large
    return _segmentation(build(weights=None, weights_backbone=None, num_classes=80, aux_loss=True))


def _segmentation(model: nn.Module) -> Subject:
    outputs = 2 if model.aux_classifier is not None else 1
    shapes = [(2, 3, 64, 64), (1, 3, 96, 64), (1, 3, 64, 128)]
    return _images(Values(narrowed(model, 8)), *shapes, axes=_BATCH_AND_SIZE, outputs=outputs)


@traced("lraspp", opset=16)
def _lraspp() -> Subject:
    model = models.segmentation.lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=40)
    shapes = [(2, 3, 64, 64), (1, 3, 96, 64), (1, 3, 64, 128)]
    return _images(Values(narrowed(model, 4)), *shapes, axes=_BATCH_AND_SIZE)


@traced("video-r3d", opset=17)
@captured("video-r3d-dynamo")
def _video() -> Subject:
    shapes = [(1, 3, 4, 32, 32), (2, 3, 6, 32, 32), (1, 3, 5, 48, 32)]
    axes = {0: "batch", 2: "frames", 3: "height", 4: "width"}
    return _images(narrowed(models.video.r3d_18(weights=None, num_classes=80), 8), *shapes, axes=axes)


@traced("faster-rcnn", opset=16)
def _faster_rcnn() -> Subject:
    detection = models.detection
    model = detection.FasterRCNN(
        _backbone(),
        None,
        min_size=96,
        max_size=160,
        rpn_anchor_generator=detection.rpn.AnchorGenerator(((16, 32),), ((0.5, 1.0, 2.0),)),
        box_roi_pool=torchvision.ops.MultiScaleRoIAlign(["0"], 4, 2),
        box_head=detection.faster_rcnn.TwoMLPHead(16 * 4 * 4, 32),
        box_predictor=detection.faster_rcnn.FastRCNNPredictor(32, 5),
        rpn_pre_nms_top_n_test=60,
        rpn_post_nms_top_n_test=20,
        box_score_thresh=0.1,
    )
    return _detection(model, ["boxes", "labels", "scores"])


@traced("retinanet", opset=13)
def _retinanet() -> Subject:
    generator = models.detection.rpn.AnchorGenerator(((16, 32),), ((0.5, 1.0, 2.0),))
    options: dict[str, Any] = {"score_thresh": 0.0, "detections_per_img": 20, "topk_candidates": 50}
    model = models.detection.RetinaNet(
        _backbone(), 5, min_size=96, max_size=160, anchor_generator=generator, norm_layer=nn.BatchNorm2d, **options
    )
    return _detection(model, ["boxes", "scores", "labels"])


def _backbone() -> nn.Module:
    norm = partial(nn.BatchNorm2d, eps=1e-5)
    layers = [torchvision.ops.Conv2dNormActivation(3 if at == 0 else 16, 16, 3, 2, norm_layer=norm) for at in range(3)]
    model = nn.Sequential(*layers)
    model.out_channels = 16
    return model


def _detection(model: nn.Module, outputs: Sequence[str]) -> Subject:
    feeds = [{"image": normal(3, *size)} for size in ((96, 96), (80, 128), (128, 96))]
    axes: Axes = {"image": {1: "height", 2: "width"}} | {name: {0: "detections"} for name in outputs}
    return Subject(randomized(Detector(model), torch.from_numpy(feeds[0]["image"])), feeds, outputs, axes)


if __name__ == "__main__":
    sys.exit(main("vision"))
