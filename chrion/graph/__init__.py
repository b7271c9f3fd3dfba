"""Models as graphs of operators: loading, rewriting, extraction and cutting into segments.

``load`` is imported on first use: it needs onnxruntime, which planning does not.
"""

from typing import TYPE_CHECKING

from chrion.common.lazy_names import import_on_first_use
from chrion.graph.dag import Dag
from chrion.graph.model import Graph, TensorInfo

if TYPE_CHECKING:
    from chrion.graph.loader import load
else:
    __getattr__ = import_on_first_use(__name__, {"load": "chrion.graph.loader"})

__all__ = ["Dag", "Graph", "TensorInfo", "load"]
