"""Planning: from a graph and its costs to a plan, without onnxruntime, threads or the command line.

The public names are imported on first use: sessions execute plans without a planner.
"""

from typing import TYPE_CHECKING

from chrion.common.lazy_names import import_on_first_use

if TYPE_CHECKING:
    from chrion.scheduler.evaluation.evaluate import Timeline, evaluate
    from chrion.scheduler.fixed_placement import fixed_plan
    from chrion.scheduler.plan import Plan, Prediction
    from chrion.scheduler.plan_options import DEFAULT_POLICY
    from chrion.scheduler.planner import partition
    from chrion.scheduler.policies.policy import SchedulePolicy, SolutionPolicy
    from chrion.scheduler.policies.registry import POLICIES, describe_policies, policy_names
    from chrion.scheduler.schedule import Schedule, validate
else:
    _MODULES = {
        "DEFAULT_POLICY": "plan_options",
        "POLICIES": "policies.registry",
        "Plan": "plan",
        "Prediction": "plan",
        "Schedule": "schedule",
        "SchedulePolicy": "policies.policy",
        "SolutionPolicy": "policies.policy",
        "Timeline": "evaluation.evaluate",
        "describe_policies": "policies.registry",
        "evaluate": "evaluation.evaluate",
        "fixed_plan": "fixed_placement",
        "partition": "planner",
        "policy_names": "policies.registry",
        "validate": "schedule",
    }
    __getattr__ = import_on_first_use(
        __name__, {name: f"{__name__}.{module}" for name, module in _MODULES.items()}, onnxruntime=False
    )

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
