"""Schedules: an order and a placement of all operators, and the rules that every schedule keeps."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from chrion.common.lane_numbers import is_accelerator_lane
from chrion.errors import ScheduleError
from chrion.graph.dag import Dag
from chrion.profiler.costs import Costs


@dataclass(frozen=True, slots=True)
class Schedule:
    """An order and a placement; for lane numbers see :mod:`chrion.common.lane_numbers`."""

    #: O: all operators, every predecessor before its successors. Each lane runs its operators in this order.
    order: tuple[int, ...]
    #: S: the lane of each operator, by operator index.
    lanes: tuple[int, ...]
    #: k*: the number of CPU lanes, which determines their speed (W[i, k*]).
    cores: int
    #: Number of accelerator lanes.
    streams: int = 1
    #: The stage of each operator, by operator index; it never decreases along the order. There is a barrier for all
    #: lanes between two stages. Empty: no barriers.
    stages: tuple[int, ...] = ()
    #: The number of cores that each operator runs on, by operator index: that of its lane and those of the next lanes.
    #: A core runs one operator at a time. Empty: one core each. It is 1 on the accelerator.
    widths: tuple[int, ...] = ()

    def width(self, i: int) -> int:
        """Return the number of lanes that operator ``i`` occupies."""
        return self.widths[i] if self.widths else 1

    def occupied(self, i: int) -> range:
        """Return the lanes that operator ``i`` occupies; the thread of the first one runs it."""
        return range(self.lanes[i], self.lanes[i] + self.width(i))

    def moved(self, members: Iterable[int], lane: int, width: int = 1) -> Schedule:
        """Return the schedule with some operators on another lane, each on so many cores."""
        lanes, widths = list(self.lanes), list(self.widths or (1,) * len(self.lanes))
        for i in members:
            lanes[i], widths[i] = lane, width
        return replace(self, lanes=tuple(lanes), widths=tuple(widths) if max(widths, default=1) > 1 else ())


def validate(dag: Dag, costs: Costs, schedule: Schedule) -> None:
    """Check that a schedule is valid: Constraints 6 to 10 of the paper, and the rules of lanes and stages.

    Raises:
        ScheduleError: An operator is missing or repeated, precedes one of its predecessors, is on a lane that does not
            exist, or is not supported on its lane; or the number of lanes or the stages are invalid.
    """
    n = len(dag)
    if not 0 <= schedule.cores <= costs.cores:
        raise ScheduleError(f"schedule: {schedule.cores} cores, but the costs are for 0 to {costs.cores}")
    if schedule.streams < 1:
        raise ScheduleError(f"schedule: {schedule.streams} accelerator lanes, expected 1 or more")
    if sorted(schedule.order) != list(range(n)) or len(schedule.lanes) != n:
        raise ScheduleError(f"schedule: order must contain each of the {n} operators once, and lanes a lane for each")
    along = [schedule.stages[i] for i in schedule.order] if len(schedule.stages) == n else []
    if schedule.stages and (not along or along != sorted(along)):
        raise ScheduleError(
            f"schedule: stages must be given for each of the {n} operators, and not decrease along the order"
        )
    if schedule.widths and len(schedule.widths) != n:
        raise ScheduleError(f"schedule: widths must be given for each of the {n} operators")
    _validate_operators(dag, costs, schedule)


def _validate_operators(dag: Dag, costs: Costs, schedule: Schedule) -> None:
    position = [0] * len(dag)
    for at, i in enumerate(schedule.order):
        position[i] = at
    for i, lane in enumerate(schedule.lanes):
        if not -schedule.streams < lane <= schedule.cores:
            raise ScheduleError(
                f"schedule: operator {dag.names[i]!r} is on lane {lane}, which does not exist: expected 1 to "
                f"{schedule.cores} for CPU cores, 0 to {1 - schedule.streams} for the accelerator"
            )
        _validate_width(dag, costs, schedule, i)
        if not math.isfinite(costs.lane_ms(lane, schedule.cores)[i]):
            raise ScheduleError(f"schedule: operator {dag.names[i]!r} is not supported on the accelerator")
        for m in dag.predecessors[i]:
            if position[m] > position[i]:
                raise ScheduleError(f"schedule: operator {dag.names[i]!r} precedes its predecessor {dag.names[m]!r}")


def _validate_width(dag: Dag, costs: Costs, schedule: Schedule, i: int) -> None:
    width, lane = schedule.width(i), schedule.lanes[i]
    if width == 1:
        return
    where = f"schedule: operator {dag.names[i]!r} on lane {lane}"
    if is_accelerator_lane(lane):
        raise ScheduleError(f"{where} has width {width}, expected 1 on the accelerator")
    if lane + width - 1 > schedule.cores:
        raise ScheduleError(f"{where} has width {width}, which exceeds the {schedule.cores} cores")
    if width not in costs.widths:
        raise ScheduleError(f"{where} has width {width}, but the costs are for {[1, *costs.widths]}")
