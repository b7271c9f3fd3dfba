"""Run one ONNX model on an accelerator and the CPU cores of a machine at once."""

from chrion.errors import ChrionError
from chrion.graph import Dag, Graph, load
from chrion.profiler import Profile, profile
from chrion.runtime import HybridSession
from chrion.scheduler import Plan, partition

__version__ = "0.1.0"

__all__ = [
    "ChrionError",
    "Dag",
    "Graph",
    "HybridSession",
    "Plan",
    "Profile",
    "__version__",
    "load",
    "partition",
    "profile",
]
