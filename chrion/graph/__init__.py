"""Models as graphs of operators: loading, rewriting, extraction and cutting into segments."""

from chrion.graph.dag import Dag
from chrion.graph.loader import load
from chrion.graph.model import Graph, TensorInfo

__all__ = ["Dag", "Graph", "TensorInfo", "load"]
