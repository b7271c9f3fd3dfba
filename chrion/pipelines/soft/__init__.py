"""Tree ensembles and encoders as differentiable networks: their training, and their export to ONNX."""

from chrion.pipelines.soft.soft_trees import LEVELS, Softness
from chrion.pipelines.soft.tuning import SoftOptions, SoftPipeline, Start, as_soft, tune_soft

__all__ = ["LEVELS", "SoftOptions", "SoftPipeline", "Softness", "Start", "as_soft", "tune_soft"]
