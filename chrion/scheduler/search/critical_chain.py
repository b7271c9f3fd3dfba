"""The critical chain of a solution: the operators that determine its latency.

The last segment to end starts when its lane is available or when its last input arrives; so does the segment that it
waits for, and so on back to the request's arrival. To lower the latency, the placement or the order of an operator of
this chain must change: otherwise its segments still wait for each other in the same way.
"""

from __future__ import annotations

from chrion.common.lane_numbers import is_accelerator_lane
from chrion.graph.dag import Dag
from chrion.profiler.costs import Costs
from chrion.scheduler.evaluation.solution import Solution


def critical_operators(dag: Dag, costs: Costs, solution: Solution) -> set[int]:
    """Return the operators of the critical chain.

    Waiting of copies for each other is left out, so with many copies the chain is an approximation.
    """
    segments, finish, lanes = solution.segments, solution.timeline.finish_ms, solution.schedule.lanes
    if not segments:
        return set()
    home = [0] * len(dag)
    before: list[int | None] = []  # the last segment to end before each one on its cores
    latest: dict[int, int] = {}
    for at, segment in enumerate(segments):
        for i in segment:
            home[i] = at
        occupied = solution.schedule.occupied(segment[0])
        earlier = {latest[lane] for lane in occupied if lane in latest}
        before.append(max(earlier, key=lambda e: (finish[segments[e][-1]], e), default=None))
        latest.update(dict.fromkeys(occupied, at))
    ends = [finish[segment[-1]] for segment in segments]
    outputs = (
        (finish[segments[home[i]][-1]] + costs.download.ms(dag.value_bytes[value]), home[i])
        for i, value in dag.request_outputs
        if is_accelerator_lane(lanes[i])
    )
    last: int | None = max([*zip(ends, range(len(ends)), strict=True), *outputs])[1]
    chain: set[int] = set()
    while last is not None and last not in chain:
        chain.add(last)
        blocker = before[last]
        time = 0.0 if blocker is None else ends[blocker]
        for i in segments[last]:
            for m, size in zip(dag.predecessors[i], dag.edge_bytes[i], strict=True):
                if lanes[m] != lanes[i]:
                    arrival = ends[home[m]] + costs.transfer_ms(lanes[m], lanes[i], size)
                    if arrival > time:
                        blocker, time = home[m], arrival
        last = blocker
    return {i for at in chain for i in segments[at]}
