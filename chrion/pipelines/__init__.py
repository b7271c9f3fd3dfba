"""Classical pipelines (encoders and tree ensembles) as ONNX models: adaptation to new data."""

from chrion.pipelines.finetuning import finetune
from chrion.pipelines.report import FinetuningReport
from chrion.pipelines.translate import translate

__all__ = ["FinetuningReport", "finetune", "translate"]
