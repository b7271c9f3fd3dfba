"""Schedules: who runs what, in which order, and the rules that every one of them keeps."""

from __future__ import annotations

import math
from dataclasses import dataclass

from chrion.errors import ScheduleError
from chrion.graph.dag import Dag
from chrion.profiler.costs import Costs


@dataclass(frozen=True, slots=True)
class Schedule:
    """Who runs what, and in which order; for the lanes' numbers see :mod:`chrion.lane_numbers`."""

    #: O: all operators, every predecessor before its successors. Each lane runs its share in this order.
    order: tuple[int, ...]
    #: S: the lane of each operator, by operator index.
    lanes: tuple[int, ...]
    #: k*: CPU lanes in use, which decides their speed (W[i, k*]).
    cores: int
    #: Accelerator lanes.
    streams: int = 1
    #: The stage of each operator, by operator index; it never falls along the order. All lanes wait for each other
    #: between stages. Empty: there are no such barriers.
    stages: tuple[int, ...] = ()


def validate(dag: Dag, costs: Costs, schedule: Schedule) -> None:
    """Check Constraints 6 to 10 of the paper.

    Raises:
        ScheduleError: An operator is missing or repeated, precedes one it waits for, is on a lane that does not
            exist, or cannot run on its lane.
    """
    n = len(dag)
    if not 0 <= schedule.cores <= costs.cores:
        raise ScheduleError(f"schedule: {schedule.cores} cores asked for, the costs know 0 to {costs.cores}")
    if schedule.streams < 1:
        raise ScheduleError(f"schedule: {schedule.streams} accelerator lanes asked for, there is at least one")
    if sorted(schedule.order) != list(range(n)) or len(schedule.lanes) != n:
        raise ScheduleError(f"schedule: its order and lanes must hold each of the {n} operators once")
    along = [schedule.stages[i] for i in schedule.order] if len(schedule.stages) == n else []
    if schedule.stages and (not along or along != sorted(along)):
        raise ScheduleError(f"schedule: stages must be given for each of the {n} operators, none lower than one before")
    _validate_operators(dag, costs, schedule)


def _validate_operators(dag: Dag, costs: Costs, schedule: Schedule) -> None:
    position = [0] * len(dag)
    for at, i in enumerate(schedule.order):
        position[i] = at
    for i, lane in enumerate(schedule.lanes):
        if not -schedule.streams < lane <= schedule.cores:
            raise ScheduleError(
                f"schedule: operator {dag.names[i]!r} is on lane {lane}, there are {schedule.cores} cores and "
                f"accelerator lanes from 0 to {1 - schedule.streams}"
            )
        if not math.isfinite(costs.lane_ms(lane, schedule.cores)[i]):
            raise ScheduleError(f"schedule: operator {dag.names[i]!r} cannot run on the accelerator")
        for m in dag.predecessors[i]:
            if position[m] > position[i]:
                raise ScheduleError(f"schedule: {dag.names[i]!r} comes before {dag.names[m]!r}, which it waits for")
