"""Numbers and names of lanes.

Lanes 1, 2, ... are CPU cores. Lanes 0, -1, -2, ... are streams of the accelerator: they share one device and its
memory, so nothing is copied between them. A list with one entry a lane (lane 0 first, then the cores, then the
accelerator's further lanes from the last back) can be indexed by these numbers as they are.
"""

from __future__ import annotations

from collections.abc import Iterable

#: The lanes that copy to the accelerator's memory and from it, beside those that compute. No schedule names them.
UPLOAD_LANE = 1 << 20
DOWNLOAD_LANE = UPLOAD_LANE + 1


def is_accelerator_lane(lane: int) -> bool:
    """Which side a lane is on."""
    return lane <= 0


def is_copy_lane(lane: int) -> bool:
    """Whether a lane copies instead of computing."""
    return lane >= UPLOAD_LANE


def lane_name(lane: int) -> str:
    """``gpu0``, ``gpu1``, ... for the accelerator's lanes, ``cpu1``, ... for the cores; ``h2d`` and ``d2h`` copy."""
    if is_copy_lane(lane):
        return "h2d" if lane == UPLOAD_LANE else "d2h"
    return f"gpu{-lane}" if is_accelerator_lane(lane) else f"cpu{lane}"


def all_lanes(cores: int, streams: int = 1) -> list[int]:
    """The numbers of ``streams`` accelerator lanes and ``cores`` CPU lanes, in the order in which people read them."""
    return [*range(0, -streams, -1), *range(1, cores + 1)]


def display_order(lanes: Iterable[int]) -> list[int]:
    """Each lane once: the accelerator's first, gpu0, gpu1, ..., then the cores, then those that copy."""
    return sorted(set(lanes), key=lambda lane: (lane > 0, abs(lane)))
