"""Policies: which task of which model a lane runs next.

Every policy orders the tasks of a model by a time that is fixed when they arrive, their *due* time, and serves the task
that is due first; ``fair`` chooses the model first. A due time of the arrival plus a constant is ageing: nothing that
arrives later than that can overtake the task, so no task starves.
"""

from __future__ import annotations

from collections.abc import Mapping

from chrion.common.suggestions import did_you_mean
from chrion.errors import OptionError

#: Policies and what they serve first; ``top`` has a dispatcher of its own (:mod:`chrion.serving.multi.top`).
POLICIES = {
    "edf": "the earliest deadline; a task that cannot meet its deadline any more waits behind those that can",
    "priority": "the model of the highest priority",
    "fair": "the model that has run for the shortest time while it had work",
    "fifo": "the task that arrived first, to its end",
    "static": "each model on lanes of its own, by deadlines there",
    "top": "blocks of several models together, in the stages and at the intervals of a plan",
}


def check_policy(name: str) -> str:
    """Return the name of a policy.

    Raises:
        OptionError: There is no such policy.
    """
    if name not in POLICIES:
        raise OptionError(f"unknown policy {name!r}", hint=did_you_mean(str(name), POLICIES))
    return name


def assign_lanes(loads: Mapping[str, float], lanes: int) -> dict[str, tuple[int, ...]]:
    """Divide lanes among models, for ``static``.

    If there are at least as many lanes as models, each model has one, and every further lane goes to the model with the
    most load on each of its lanes. Otherwise several models share a lane: the largest load goes first, to the lane with
    the least (longest processing time first).

    Args:
        loads: The lanes that each model would keep busy.
        lanes: The number of lanes.

    Returns:
        The lanes of each model.
    """
    order = sorted(loads, key=lambda name: -loads[name])
    found: dict[str, tuple[int, ...]] = {}
    if lanes < len(loads):
        sums = [0.0] * lanes
        for name in order:
            lane = min(range(lanes), key=sums.__getitem__)
            sums[lane] += loads[name]
            found[name] = (lane,)
        return found
    counts = dict.fromkeys(order, 1)
    for _ in range(lanes - len(loads)):
        counts[max(order, key=lambda name: loads[name] / counts[name])] += 1
    end = 0
    for name in order:
        found[name] = tuple(range(end, end := end + counts[name]))
    return found
