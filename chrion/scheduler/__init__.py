"""Planning: from a graph and its costs to a plan, without onnxruntime, threads or the command line."""

from chrion.scheduler.evaluation.evaluate import Timeline, evaluate
from chrion.scheduler.fixed_placement import fixed_plan
from chrion.scheduler.plan import Plan, Prediction
from chrion.scheduler.planner import partition
from chrion.scheduler.policies.policy import SchedulePolicy, SolutionPolicy
from chrion.scheduler.policies.registry import DEFAULT_POLICY, POLICIES, describe_policies, policy_names
from chrion.scheduler.schedule import Schedule, validate

__all__ = [
    "DEFAULT_POLICY",
    "POLICIES",
    "Plan",
    "Prediction",
    "Schedule",
    "SchedulePolicy",
    "SolutionPolicy",
    "Timeline",
    "describe_policies",
    "evaluate",
    "fixed_plan",
    "partition",
    "policy_names",
    "validate",
]
