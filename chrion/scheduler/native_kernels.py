"""The operators of a plan that run on Chrion's native kernels."""

from __future__ import annotations

from chrion.common.lane_numbers import is_accelerator_lane
from chrion.graph.dag import Dag
from chrion.profiler.profiles import Profile
from chrion.scheduler.schedule import Schedule


def native_operators(dag: Dag, profile: Profile, schedule: Schedule) -> tuple[str, ...]:
    """Return the names of the operators on one core whose native kernel was measured to be the faster one."""
    chosen = sorted(profile.native(dag))
    return tuple(dag.names[i] for i in chosen if not is_accelerator_lane(schedule.lanes[i]) and schedule.width(i) == 1)
