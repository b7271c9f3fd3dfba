"""Models as graphs of operators, and how they are cut."""

from chrion.graph.dag import Dag
from chrion.graph.loader import load
from chrion.graph.model import Graph, TensorInfo

__all__ = ["Dag", "Graph", "TensorInfo", "load"]
