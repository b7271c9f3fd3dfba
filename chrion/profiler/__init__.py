"""Costs of operators, copies and handoffs, measured on a machine.

``profile`` is imported on first use: it needs onnxruntime, which planning does not.
"""

from typing import TYPE_CHECKING

from chrion.common.lazy_names import import_on_first_use
from chrion.profiler.costs import CopyCost, Costs, OperatorMemory, uniform_costs
from chrion.profiler.machine import Machine, this_machine
from chrion.profiler.profiles import OperatorCost, Profile

if TYPE_CHECKING:
    from chrion.profiler.measure_graph import profile
else:
    __getattr__ = import_on_first_use(__name__, {"profile": "chrion.profiler.measure_graph"})

__all__ = [
    "CopyCost",
    "Costs",
    "Machine",
    "OperatorCost",
    "OperatorMemory",
    "Profile",
    "profile",
    "this_machine",
    "uniform_costs",
]
