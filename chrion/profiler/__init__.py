"""Costs of operators, copies and handoffs, measured on a machine."""

from chrion.profiler.costs import CopyCost, Costs, OperatorMemory, uniform_costs
from chrion.profiler.machine import Machine, this_machine
from chrion.profiler.measure_graph import profile
from chrion.profiler.profiles import OperatorCost, Profile

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
