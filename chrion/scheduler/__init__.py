"""Floor 3: from a graph and its costs to a plan. Knows nothing of onnxruntime, threads or the command line."""

from chrion.scheduler.placed import placed_plan, random_plan
from chrion.scheduler.plan import Plan, Prediction
from chrion.scheduler.planner import partition
from chrion.scheduler.policies import DEFAULT_POLICY, POLICIES
from chrion.scheduler.schedule import Schedule, validate
from chrion.scheduler.timeline import Timeline, evaluate

__all__ = [
    "DEFAULT_POLICY",
    "POLICIES",
    "Plan",
    "Prediction",
    "Schedule",
    "Timeline",
    "evaluate",
    "partition",
    "placed_plan",
    "random_plan",
    "validate",
]
