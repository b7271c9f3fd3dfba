"""IOS: inter-operator scheduling in stages (Ding et al., 2021), with stage latencies from the profile.

The search is in :mod:`chrion.scheduler.policies.ios_search`, the second strategy, which merges operators, in
:mod:`chrion.scheduler.policies.ios_merging`.
"""

from __future__ import annotations

from chrion.graph.dag import Dag
from chrion.profiler.costs import Costs
from chrion.scheduler.policies.ios_search import search_stages
from chrion.scheduler.policies.stages import DeviceLanes, schedule_stages
from chrion.scheduler.schedule import Schedule


def ios(dag: Dag, costs: Costs, _alpha: float) -> Schedule:
    """Return IOS's schedule, without merging of operators."""
    device = DeviceLanes(dag, costs)
    return schedule_stages(dag, device, search_stages(dag, device.stage_ms))
