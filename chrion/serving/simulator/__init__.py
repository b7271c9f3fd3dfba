"""Simulation of GPU servers that serve more models than their memory holds."""

from chrion.serving.simulator.results import PatternResult
from chrion.serving.simulator.run import simulate
from chrion.serving.simulator.scenario import (
    Scenario,
    ScenarioDescription,
    ScenarioSource,
    find_scenario,
    scenario_descriptions,
)
from chrion.serving.simulator.sweep import SweepPoint, run_sweep

__all__ = [
    "PatternResult",
    "Scenario",
    "ScenarioDescription",
    "ScenarioSource",
    "SweepPoint",
    "find_scenario",
    "run_sweep",
    "scenario_descriptions",
    "simulate",
]
