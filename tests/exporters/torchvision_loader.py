"""Import of torchvision without its compiled operators, which need CUDA's libraries.

The operators are declared before the import, and the two that detection models call are run in PyTorch. Exporters
translate them by name, so models come out as with the compiled ones.
"""

from __future__ import annotations

import importlib
import sys

import torch

_OPERATORS = torch.library.Library("torchvision", "FRAGMENT")
_OPERATORS.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
_OPERATORS.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
_OPERATORS.define(
    "roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
    "int sampling_ratio, bool aligned) -> Tensor"
)

torchvision = importlib.import_module("torchvision")
extension = importlib.import_module("torchvision.extension")


def _nms(boxes: torch.Tensor, scores: torch.Tensor, threshold: float) -> torch.Tensor:
    """Return indices of boxes that no better one overlaps by more than a threshold."""
    overlaps = torchvision.ops.box_iou(boxes, boxes)
    kept: list[int] = []
    for index in scores.argsort(descending=True, stable=True).tolist():
        if all(overlaps[index, other] <= threshold for other in kept):
            kept.append(index)
    return torch.tensor(kept, dtype=torch.int64)


def _operators_exist() -> bool:
    return True


_OPERATORS.impl("nms", _nms, "CPU")
_OPERATORS.impl("roi_align", sys.modules["torchvision.ops.roi_align"]._roi_align, "CPU")
extension._has_ops = _operators_exist
sys.modules["torchvision.ops.roi_align"]._has_ops = _operators_exist  # type: ignore[attr-defined]

models = torchvision.models
