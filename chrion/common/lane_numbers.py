"""Numbers and names of lanes.

Lanes 1, 2, ... are CPU cores. Lanes 0, -1, -2, ... are streams of the accelerator, which share one device and its
memory, so that no copies between them are needed.

A lane number is also an index into a list with one entry per lane, since Python counts negative indices from the end.
Such a list begins with lane 0 and the cores; the other accelerator lanes follow in reverse, so that lane -1 is last.
"""

from __future__ import annotations

from collections.abc import Iterable

#: The lanes of copies to and from the accelerator's memory. They are not part of a schedule.
UPLOAD_LANE = 1 << 20
DOWNLOAD_LANE = UPLOAD_LANE + 1


def is_accelerator_lane(lane: int) -> bool:
    """Return whether a lane is a stream of the accelerator."""
    return lane <= 0


def is_copy_lane(lane: int) -> bool:
    """Return whether a lane copies between memories instead of computing."""
    return lane >= UPLOAD_LANE


def lane_name(lane: int, width: int = 1) -> str:
    """Return ``gpu0``, ``gpu1``, ... for lanes of the accelerator, ``cpu1``, ... for cores, and ``h2d`` or ``d2h``.

    A ``width`` of 2 or more names several cores: ``cpu1-4``.
    """
    if is_copy_lane(lane):
        return "h2d" if lane == UPLOAD_LANE else "d2h"
    if is_accelerator_lane(lane):
        return f"gpu{-lane}"
    return f"cpu{lane}" if width == 1 else f"cpu{lane}-{lane + width - 1}"


def all_lanes(cores: int, streams: int = 1) -> list[int]:
    """Return the numbers of ``streams`` accelerator lanes and ``cores`` CPU lanes, in the order of display."""
    return [*range(0, -streams, -1), *range(1, cores + 1)]


def display_order(lanes: Iterable[int]) -> list[int]:
    """Return each lane once: gpu0, gpu1, ..., then the cores, then the copy lanes."""
    return sorted(set(lanes), key=lambda lane: (lane > 0, abs(lane)))
