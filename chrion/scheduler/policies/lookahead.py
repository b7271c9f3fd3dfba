"""HEFT with lookahead (Bittencourt, Sakellariou, Madeira, 2010: "DAG scheduling using a lookahead variant of HEFT").

Operators are taken as in HEFT. Each goes to the lane from which the last of its successors could finish first; ties are
broken by its own end. A trial of a lane places the operator, looks for slots of its successors, and removes it again.
So it takes longer than HEFT by the number of lanes times that of successors.
"""

from __future__ import annotations

import math

from chrion.scheduler.policies.list_scheduling import Lanes, ListScheduler, by_rank, upward_ranks
from chrion.scheduler.schedule import Schedule


def place_with_lookahead(lanes: Lanes) -> Schedule:
    """Return the schedule of HEFT with lookahead on the given lanes."""
    scheduler = ListScheduler(lanes)
    for i in by_rank(lanes.dag, upward_ranks(lanes)):
        # One by one: of lanes that are idle at a time, those that have no later operator leave more to the successors.
        slots = [scheduler.slots(i, (lane,))[0] for lane in lanes.numbers]
        ends = [(scheduler.last_end(i, slot), slot.end, slot.start, slot) for slot in slots if slot.end < math.inf]
        scheduler.place(i, min(ends)[-1] if ends else slots[0])
    return scheduler.schedule()
