"""Groups of lanes: copies of a program's lanes, each on cores of its own, that serve requests at the same time.

One request occupies the lanes of one group. If there are more cores than a group uses, further groups are opened as
soon as requests are in flight at the same time, and each request leases the least used group. Requests beyond the
number of groups share them: a lane carries out the parts of different requests one after another.

The groups share the segments' sessions, which onnxruntime allows, so that a further group costs little more than its
threads. Its cores are leased as further ones (:mod:`chrion.machine.core_leases`): other sessions rather use those than
the cores of a first group. If sessions have threads of their own, which are pinned to cores, there is one group.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from chrion.common.lane_numbers import is_accelerator_lane, is_copy_lane
from chrion.machine.core_leases import CoreLease, lease_cores
from chrion.machine.cores import physical_cores

#: The logical CPU of each lane; None for a lane without a core of its own.
Cores = Mapping[int, int | None]


class GroupLanes(Protocol):
    """The lanes of one group."""

    @property
    def moved(self) -> bool:
        """Whether a lane may no longer use its core."""

    def close(self, until: float | None = None) -> None:
        """Stop the lanes after the requests that were submitted to them."""


L = TypeVar("L", bound=GroupLanes)


@dataclass(frozen=True, slots=True)
class LaneGroup(Generic[L]):
    """The lanes of one group and their cores, which the lease keeps for them."""

    lanes: L
    cores: Cores
    lease: CoreLease


class LaneGroups(Generic[L]):
    """The groups of one program's lanes.

    Args:
        lanes: The lane numbers.
        open_lanes: Starts the lanes of a group on given cores.
        limit: Maximum number of groups; by default as many as there are cores for.
        further: Whether the lanes are used rarely, so that their cores are leased as further ones.
        lease: The cores of the first group, if they are leased already.

    Attributes:
        capacity: Number of requests that the groups can serve at the same time, at least one.

    Raises:
        RuntimeError: The threads of the first group cannot be started.
    """

    def __init__(
        self,
        lanes: Iterable[int],
        open_lanes: Callable[[Cores], L],
        limit: int | None = None,
        *,
        further: bool = False,
        lease: CoreLease | None = None,
    ) -> None:
        self._lanes = tuple(lanes)
        self._open_lanes = open_lanes
        self.capacity = max(1, len(physical_cores()) // len(self._lanes)) if limit is None else limit
        self._first_further = further
        #: Reentrant, since a signal handler may serve a request while its thread holds the lock.
        self._lock = threading.RLock()
        #: The index of the group that each request in flight uses.
        self._used: dict[object, int] = {}
        self._groups = [self._open(0, lease)]

    def lease(self, token: object) -> LaneGroup[L]:
        """Return the group for a request, which then has to be released even if this method is interrupted.

        Args:
            token: Identifies the request.
        """
        with self._lock:
            index = self._choose() if self._used else 0
            self._used[token] = index
            if self._groups[index].lanes.moved:
                self._reopen(index)
            return self._groups[index]

    def release(self, token: object) -> None:
        """End the lease of a request; a single operation, so that no interrupt occurs in it."""
        self._used.pop(token, None)

    def close(self, until: float | None = None) -> None:
        """Stop the lanes of all groups, which have no requests. May be called repeatedly.

        Args:
            until: Time at which to stop waiting, in seconds of ``time.monotonic``; None waits without limit.
        """
        for group in tuple(self._groups):
            group.lanes.close(until)
            group.lease.release()

    def _choose(self) -> int:
        """Return the index of the least used group; open another one rather than share one."""
        used = Counter(self._used.copy().values())  # a request may end meanwhile
        index = min(range(len(self._groups)), key=used.__getitem__)
        if not used[index] or len(self._groups) >= self.capacity:
            return index
        try:
            self._groups.append(self._open(len(self._groups)))
        except RuntimeError:  # no more threads: the open groups serve all requests
            self.capacity = len(self._groups)
            return index
        return len(self._groups) - 1

    def _reopen(self, index: int) -> None:
        """Replace a group that may no longer use its cores. Its lanes stop when the last request on them has ended."""
        self._groups[index].lease.release()
        try:
            self._groups[index] = self._open(index)
        except RuntimeError:  # no more threads
            return
        self.capacity = max(1, min(self.capacity, len(physical_cores()) // len(self._lanes)))

    def _open(self, index: int, lease: CoreLease | None = None) -> LaneGroup[L]:
        lease = lease or lease_cores(len(self._lanes), further=index > 0 or self._first_further)
        cores = assign_cores(self._lanes, lease.cores)
        return LaneGroup(self._open_lanes(cores), cores, lease)


def assign_cores(lanes: Iterable[int], cores: Iterable[int]) -> dict[int, int | None]:
    """Return the core of each lane. CPU lanes come first; lanes for which no core is left have None."""
    remaining = iter(cores)
    ordered = sorted(lanes, key=lambda lane: (is_accelerator_lane(lane) or is_copy_lane(lane), lane))
    return {lane: next(remaining, None) for lane in ordered}
