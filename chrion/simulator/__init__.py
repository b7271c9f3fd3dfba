"""Floor 5: what a cluster of GPU servers does with many models and too little memory."""

from chrion.simulator.results import PatternResult
from chrion.simulator.run import simulate
from chrion.simulator.scenario import Scenario, Source, find_scenario
from chrion.simulator.sweep import Point, run_grid

__all__ = ["PatternResult", "Point", "Scenario", "Source", "find_scenario", "run_grid", "simulate"]
