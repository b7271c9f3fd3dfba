"""Import of torchvision where its compiled operators do not load, as with a torch without CUDA.

The operators are then declared in Python, and the two that detection models call are run in PyTorch. Exporters
translate them by name, so models come out as with the compiled ones.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import torch

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    (
        "roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
        "int sampling_ratio, bool aligned) -> Tensor"
    ),
)
_OPERATORS = torch.library.Library("torchvision", "FRAGMENT")


def _load() -> ModuleType:
    """Import torchvision, with operators in Python if the compiled ones are missing."""
    try:
        return importlib.import_module("torchvision")
    except RuntimeError:  # of an operator that does not exist
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
    for schema in _SCHEMAS:
        _OPERATORS.define(schema)
    module = importlib.import_module("torchvision")
    align = sys.modules["torchvision.ops.roi_align"]
    _OPERATORS.impl("nms", _nms, "CPU")
    _OPERATORS.impl("roi_align", align._roi_align, "CPU")
    align._has_ops = sys.modules["torchvision.extension"]._has_ops = _operators_exist
    return module


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


torchvision = _load()
models = torchvision.models
